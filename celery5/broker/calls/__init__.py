"""Calls: the commands and scripts that celery5 sends to Redis, as values, by subject."""
