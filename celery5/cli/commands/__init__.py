"""The commands of `celery5`, one noun a module."""
