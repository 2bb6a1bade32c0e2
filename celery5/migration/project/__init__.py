"""Know the project that is read: what its names mean, and what becomes of each file."""
