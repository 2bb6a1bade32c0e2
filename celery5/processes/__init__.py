"""Processes: one wiring page for each process, where all of it can be read."""
