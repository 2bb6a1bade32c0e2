"""Send control commands to workers, and declare own ones."""
