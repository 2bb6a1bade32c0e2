"""The screen of `celery5 top`: an application in a terminal, and keys that look into it and act on it."""
