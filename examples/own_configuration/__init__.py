"""Own configuration: an application whose settings come from a backend of its own, an SQLite table.

Floor: on top of everything, as an application is. Reads: nothing. Writes: nothing.
"""
