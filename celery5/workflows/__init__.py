"""Workflows: compose calls of tasks, start runs of them, and look after these runs."""
