"""Decisions and formats for a cluster: its description, its members and its leader."""
