"""The command `manage.py celery5`."""
