"""Take the settings of an application from a backend of its own, an SQLite table."""
