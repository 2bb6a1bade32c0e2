"""Take the settings of an application from its own backend, an SQLite table."""
