"""Tell the middleware of an application when a process is ready, and when it has ended."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

import trio

from celery5.app import App
from celery5.logs.log import Log
from celery5.middleware.django_connections import guard_event_loop
from celery5.runners.context import LOG_EVENT
from celery5.runners.operations import OPERATION_SURROUND
from celery5.runners.surrounding import CALL_SURROUND


@contextmanager
def noting_process(
    app: App, kind: str, name: str, log: Log, task_status: trio.TaskStatus[None]
) -> Generator[trio.TaskStatus[None], None, None]:
    """Surround the run of a process; yield what it reports its readiness to.

    Args:
        app: The application.
        kind: worker, router, scheduler, controller or publisher.
        name: Its name; "": host and process id.
        log: Where failures of middleware are logged.
        task_status: What the process would report its readiness to without middleware.
    """
    if not app.middleware:
        yield task_status
        return
    LOG_EVENT.set(log.event)
    CALL_SURROUND.set(app.middleware.make_surround())
    OPERATION_SURROUND.set(app.middleware.operating if app.middleware.operates else None)
    guard_event_loop(app.middleware)
    noted = _NotedStart(app, kind, name or f"{socket.gethostname()}:{os.getpid()}", task_status)
    try:
        yield noted
    finally:
        noted.end()


class _NotedStart(trio.TaskStatus[None]):
    """Passes on that a process is ready."""

    def __init__(self, app: App, kind: str, name: str, status: trio.TaskStatus[None]) -> None:
        self._middleware = app.middleware
        self._words = kind, name
        self._status = status
        self._is_started = False

    def started(self, value: None = None) -> None:
        self._is_started = True
        self._middleware.notify("process_started", *self._words)
        self._status.started()

    def end(self) -> None:
        if self._is_started:
            self._middleware.notify("process_stopped", *self._words)
