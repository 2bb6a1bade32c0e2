"""What celery5 does for other frameworks, where an application uses them."""
