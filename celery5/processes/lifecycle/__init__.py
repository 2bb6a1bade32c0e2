"""How a process starts, stops, handles signals and restarts its children."""
