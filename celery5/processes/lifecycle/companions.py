"""Companions: what runs beside the work of a process, and whose failure must not end it."""

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from os import getpid
from typing import Any, cast

import trio

from celery5.app import App
from celery5.logs.log import Log, LogWriter
from celery5.processes.lifecycle.incarnations import ProcessKind, new_incarnation_name
from celery5.processes.options import ProcessOptions
from celery5.protocol.masking import describe_error
from celery5.services.process.reloader import ReloadSignal

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds until a companion that has failed begins again; twice as long each time."""
STABLE_AFTER = 60.0
"""Seconds after which a companion has run well: the next pause is the first one again."""


async def keep_running(
    run: Callable[..., Awaitable[None]],
    *,
    on_failure: Callable[[Exception, float], object],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run something until it returns or is cancelled; when it fails, run it again after a pause.

    Args:
        run: Called with a `task_status`.
        on_failure: Called with each error, and the seconds until the next try.
        task_status: Told when it first runs, or has failed: whatever waits for it goes on.
    """
    first_start, pause = _FirstStart(task_status), FIRST_PAUSE
    while True:
        began = trio.current_time()
        try:
            await run(task_status=first_start)
            return
        except Exception as error:
            if trio.current_time() >= began + STABLE_AFTER:
                pause = FIRST_PAUSE
            on_failure(_get_first(error), pause)
        first_start.started()
        await trio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


class _FirstStart(trio.TaskStatus[None]):
    """Passes on the first start only."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status
        self._started = False

    def started(self, value: None = None) -> None:
        if not self._started:
            self._started = True
            self._task_status.started()


def _get_first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = cast("ExceptionGroup[Exception]", error).exceptions[0]
    return error


def log_failure(log: Log, name: str) -> Callable[[Exception, float], None]:
    """Return what logs that the companion of this name has failed."""

    def write(error: Exception, pause: float) -> None:
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
