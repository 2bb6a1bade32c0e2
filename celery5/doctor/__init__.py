"""Check an application, its broker and the host that it runs on: `celery5 doctor`."""
