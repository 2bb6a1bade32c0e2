"""Companions: what runs beside the work of a process, and whose failure must not end it."""

import socket
from collections.abc import Callable
from functools import partial
from os import getpid
from typing import Any

import trio

from celery5.app import App
from celery5.logs.log import Log, LogWriter
from celery5.processes.lifecycle.incarnations import ProcessKind, new_incarnation_name
from celery5.processes.options import ProcessOptions
from celery5.protocol.masking import describe_error
from celery5.services.process.fenced import keep_running
from celery5.services.process.reloader import ReloadSignal


def log_failure(log: Log, name: str) -> Callable[[BaseException, float], None]:
    """Return what logs that the companion of this name has failed."""

    def write(error: BaseException, pause: float) -> None:
        log.event(
            "companion:failed",
            "error",
            companion=name,
            error=describe_error(error),
            retry_after=pause,
            hint="the process beside it runs on",
        )

    return write


async def run_companion(
    kind: ProcessKind,
    app: App,
    journal: LogWriter | None,
    on_stuck: Callable[[], None],
    *,
    reload_signal: ReloadSignal | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a process of this kind until cancelled, in the operating system's process of another.

    When it fails, this is logged, and it begins again: the other one runs on.
    """
    name = f"{socket.gethostname()}:{getpid()}:{kind.name}"
    run = partial(_run_once, kind, app, journal, on_stuck, name, reload_signal or ReloadSignal())
    log = Log(worker=name, app=app.name, writer=journal, kind=kind.name)
    try:
        await keep_running(run, on_failure=log_failure(log, kind.name), task_status=task_status)
    finally:
        log.finish()


async def _run_once(
    kind: ProcessKind,
    app: App,
    journal: LogWriter | None,
    on_stuck: Callable[[], None],
    name: str,
    reload_signal: ReloadSignal,
    *,
    task_status: trio.TaskStatus[Any],
) -> None:
    incarnation = new_incarnation_name(name)
    options = ProcessOptions(
        incarnation=incarnation,
        log_writer=journal,
        on_stuck=on_stuck,
        shares_process=True,
        reload_signal=reload_signal,
    )
    log = Log(worker=incarnation, app=app.name, writer=journal, kind=kind.name)
    try:
        await kind.run(app, options, log=log, done=trio.Event(), task_status=task_status)
    finally:
        log.finish()
