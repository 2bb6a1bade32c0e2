"""Processes: one wiring page for each process, where all of it can be read.

Floor: processes. Reads: nothing. Writes: nothing.
"""
