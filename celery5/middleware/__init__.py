"""What an application runs around its jobs; `celery5.observability` exports the names."""
