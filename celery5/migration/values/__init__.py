"""Translate values of Celery, without a look at the project."""
