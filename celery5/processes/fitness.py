"""Fitness: whether an application can be served at all, by every kind of process that it needs.

Floor: processes. Reads: what the application declares. Writes: nothing.
"""

from celery5.app import App
from celery5.processes import router, scheduler, worker


def check(app: App) -> None:
    """Raises Misconfigured with what the first process that could not begin would say."""
    worker.check(app)
    for kind in (router, scheduler):
        if kind.needed(app):
            kind.check(app)
