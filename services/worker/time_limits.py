"""End jobs that run for longer than their time limit, and raise an error in those that pass the soft one.

One timer for all jobs is set to the next limit; a job without limits costs nothing.
"""

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import msgspec
import trio

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.job.job import to_seconds
from celery5.protocol.job.messages import Command
from celery5.runners.running_job import RunningJob, TimeLimits
from celery5.services.process.lease import now
from celery5.tasks.task import Task


class Deadlines:
    """The time limits of running jobs: those of the message, else of the task, else of the settings."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        time_limit: float | None,
        soft_time_limit: float | None,
    ) -> None:
        self._tasks = tasks
        self._default = TimeLimits(time_limit, soft_time_limit)
        self._task_limits: dict[str, TimeLimits | None] = {}
        self._due: dict[RunningJob, _Due] = {}
        self._next = math.inf
        self._changed = trio.Event()

    def get_limits(self, command: Command) -> TimeLimits | None:
        """Return how long an attempt of a job may run; None when it may run for ever."""
        name = command.task
        try:
            task_limits = self._task_limits[name]
        except KeyError:
            task_limits = self._task_limits[name] = self._find_task_limits(name)
        if command.time_limit is None and command.soft_time_limit is None:
            return task_limits
        hard, soft = (None, None) if task_limits is None else (task_limits.hard, task_limits.soft)
        return TimeLimits(command.time_limit or hard, command.soft_time_limit or soft)

    def _find_task_limits(self, name: str) -> TimeLimits | None:
        options = self._tasks[name].send_options
        hard, soft = to_seconds(options.time_limit), to_seconds(options.soft_time_limit)
        limits = TimeLimits(hard or self._default.hard, soft or self._default.soft)
        return None if limits == _NO_LIMITS else limits

    def start(self, running_job: RunningJob, limits: TimeLimits) -> None:
        """Start the time limits of a running job."""
        running_job.set_limits(limits)
        if running_job.slot is not None and limits.hard is not None:
            running_job.slot.set_deadline(now() + limits.hard)
        began = trio.current_time()
        self._expect(running_job, _Due(began, limits.soft))
        if limits.soft is None or (limits.hard is not None and limits.hard <= limits.soft):
            self._expect(running_job, _Due(began, limits.hard, hard=True))

    def stop(self, running_job: RunningJob) -> None:
        """Drop the time limits of a job that has ended."""
        self._due.pop(running_job, None)
        running_job.set_limits(None)
        if running_job.slot is not None:
            running_job.slot.set_deadline(0.0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Enforce the time limits until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_at(self._next):
                await self._changed.wait()
            self._changed = trio.Event()
            time = trio.current_time()
            for running_job, due in [item for item in self._due.items() if item[1].when <= time]:
                self._enforce(running_job, due)
            self._next = min((due_limit.when for due_limit in self._due.values()), default=math.inf)

    def _enforce(self, running_job: RunningJob, due: "_Due") -> None:
        del self._due[running_job]
        if delay := running_job.take_delay():  # it has waited for its thread
            self._expect(running_job, _Due(due.began + delay, due.after, due.hard))
            return
        if due.hard:
            running_job.end_by_time_limit(
                TimeLimitExceeded(f"ran for longer than its time_limit of {due.after:g} s")
            )
            return
        if running_job.limits is not None:
            self._expect(running_job, _Due(due.began, running_job.limits.hard, hard=True))
        if running_job.raise_soft_limit is not None:
            running_job.raise_soft_limit(
                SoftTimeLimitExceeded(f"ran for longer than its soft_time_limit of {due.after:g} s")
            )

    def _expect(self, running_job: RunningJob, due: "_Due") -> None:
        if due.after is None:
            return
        self._due[running_job] = due
        if due.when < self._next:
            self._next = due.when
            self._changed.set()


class _Due(msgspec.Struct, frozen=True):
    """One time limit of a job that started at `began`."""

    began: float
    after: float | None
    hard: bool = False

    @property
    def when(self) -> float:
        return math.inf if self.after is None else self.began + self.after


_NO_LIMITS = TimeLimits()


MAX_TIMEOUT = 1.0
"""Seconds: for a longer wait a millisecond does not matter."""
MIN_LATENESS = 0.0001
"""Seconds that epoll must be late for the timer to be used. For whole milliseconds it is not late at all."""
_NANOSECONDS = 1_000_000_000


class _Span(ctypes.Structure):
    """struct itimerspec: the interval, which is 0 for a timer that fires once, and the delay until it fires."""

    _fields_ = (
        ("again_seconds", ctypes.c_long),
        ("again_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class FineTimer(trio.abc.Instrument):
    """Wakes the loop in time for short waits, which epoll rounds up to milliseconds.

    It sets a timerfd each time that the loop is about to wait. Outside Linux there is none, and it does nothing.
    """

    def __init__(self) -> None:
        self._span = _Span()
        self._set: Callable[..., int] | None = None
        self._timer = -1

    def before_io_wait(self, timeout: float) -> None:
        """Set the timer: the loop is about to wait for `timeout` seconds (called by Trio)."""
        if (
            0 < timeout < MAX_TIMEOUT
            and ceil(timeout * 1000) / 1000 - timeout > MIN_LATENESS
            and self._set is not None
        ):
            # Never 0, which would stop the timer; rounded up, since an early timer would make the loop wait once more.
            self._span.nanoseconds = min(ceil(timeout * _NANOSECONDS), _NANOSECONDS - 1)
            self._set(self._timer, 0, ctypes.byref(self._span), None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the timer until cancelled."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "timerfd_create"):
            task_status.started()
            await trio.sleep_forever()
        self._timer = libc.timerfd_create(
            ctypes.c_int(_MONOTONIC), ctypes.c_int(os.O_NONBLOCK | os.O_CLOEXEC)
        )
        if self._timer < 0:  # no file descriptor is left, or a sandbox forbids it
            task_status.started()
            await trio.sleep_forever()
        self._set = libc.timerfd_settime
        trio.lowlevel.add_instrument(self)
        try:
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(self._timer)
                os.read(self._timer, 8)
        finally:
            trio.lowlevel.remove_instrument(self)
            trio.lowlevel.notify_closing(self._timer)
            os.close(self._timer)
            self._set = None


_MONOTONIC = 1
