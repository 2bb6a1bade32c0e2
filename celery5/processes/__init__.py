"""Processes: one wiring page for each process, where all of it can be read."""

from celery5.lazy_modules import load_lazily

load_lazily(__name__, "controller", "dashboard", "development", "publisher", "router", "scheduler")
