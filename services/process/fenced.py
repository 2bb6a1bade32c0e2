"""Run a service that only observes behind the fence: it never ends its process."""

import itertools
import random
from collections.abc import Awaitable
from typing import Protocol

import trio

from celery5.logs.fence import FENCE
from celery5.protocol.job.retry_policy import full_jitter
from celery5.runners.user_errors import reraise_cancellation

FIRST_DELAY, MAX_DELAY = 1.0, 60.0
"""Seconds until a service that has failed begins again, at most: after the first failure, and after many."""


class ObservingService(Protocol):
    """What is run: it goes on until it is cancelled, and reports when it is up."""

    def run(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]: ...


async def run_fenced(
    observer: str,
    service: ObservingService,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a service until cancelled, or until it ends without an error; begin again after each failure.

    What has failed counts as up: nothing waits for an observer.

    Args:
        observer: Its name, in the log and in the metric of failures.
        service: The service.
        task_status: Started when the service is up.
    """
    up = _StartedOnce(task_status)
    for attempt in itertools.count():
        try:
            await service.run(task_status=up)
            return
        except BaseException as error:
            reraise_cancellation(error)
            FENCE.note(observer, error)
        up.started()
        await trio.sleep(full_jitter(attempt, start=FIRST_DELAY, cap=MAX_DELAY, random=random.random))


class _StartedOnce(trio.TaskStatus[None]):
    """Passes on that the service is up, the first time."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status
        self._is_started = False

    def started(self, value: None = None) -> None:
        if not self._is_started:
            self._is_started = True
            self._task_status.started()
