"""Run what must not end its process when it fails: companions, and services that only observe."""

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from celery5.logs.fence import FENCE
from celery5.protocol.job.verdict import iterate_leaves
from celery5.runners.user_errors import reraise_cancellation

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds until what has failed begins again; twice as long each time."""
STABLE_AFTER = 60.0
"""Seconds after which it has run well: the next pause is the first one again."""


class ObservingService(Protocol):
    """What is run: it goes on until it is cancelled, and reports when it is up."""

    def run(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


async def run_fenced(
    observer: str,
    service: ObservingService,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep a service running that only observes, behind the fence of all observers.

    Args:
        observer: Its name, in the log and in the metric of failures.
        service: The service.
        task_status: Started when the service is up, or has failed.
    """

    def note(error: BaseException, _pause: float) -> None:
        FENCE.note(observer, error)

    await keep_running(service.run, on_failure=note, task_status=task_status)


async def keep_running(
    run: Callable[..., Awaitable[None]],
    *,
    on_failure: Callable[[BaseException, float], object],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run something until it returns or is cancelled; when it fails, whatever it raises, run it again after a pause.

    Args:
        run: Called with a `task_status`.
        on_failure: Called with each error, the first one of a group, and the seconds until the next try.
        task_status: Started when it first runs, or has failed: whatever waits for it goes on.
    """
    first_start, pause = _FirstStart(task_status), FIRST_PAUSE
    while True:
        began = trio.current_time()
        try:
            await run(task_status=first_start)
            return
        except BaseException as error:
            reraise_cancellation(error)
            if trio.current_time() >= began + STABLE_AFTER:
                pause = FIRST_PAUSE
            on_failure(next(iterate_leaves(error)), pause)
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
