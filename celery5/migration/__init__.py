"""Move a Celery project to celery5: read its syntax trees, and say or do what is to be changed (`celery5 migrate`)."""
