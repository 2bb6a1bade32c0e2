"""How a process starts, stops, handles signals and restarts its children."""

from celery5.lazy_modules import load_lazily

load_lazily(__name__, "fleet")
