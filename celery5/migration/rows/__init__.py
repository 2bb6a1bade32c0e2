"""Move the rows of django-celery-beat and django-celery-results."""
