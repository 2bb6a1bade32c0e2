"""Values and decisions of streams of records."""
