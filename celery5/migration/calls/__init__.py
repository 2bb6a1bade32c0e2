"""Change what is called and read of Celery's objects, and find what to check there."""
