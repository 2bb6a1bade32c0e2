"""Own configuration: an application whose settings come from a backend of its own, an SQLite table."""
