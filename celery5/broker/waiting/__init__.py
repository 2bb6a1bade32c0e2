"""Wait for the documents of results."""
