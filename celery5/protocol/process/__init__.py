"""Decisions about one process: whether it is alive, when it restarts, what follows a failure."""
