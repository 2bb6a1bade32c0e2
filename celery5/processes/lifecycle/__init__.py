"""How a process starts, stops, handles signals and restarts its children."""

from celery5.lazy_modules import load_late

load_late(__name__, "fleet")
