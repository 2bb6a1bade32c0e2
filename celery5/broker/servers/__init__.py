"""Servers that celery5 starts itself: one for a test or a demo, and one that a cluster keeps."""
