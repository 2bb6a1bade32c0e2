"""Deadlines: ends what runs for longer than its time limit, and tells what runs for longer than its soft one.

One timer for all jobs, which is set to the first time that anything falls due; a job without limits costs nothing.
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
from celery5.protocol.job.envelope import Envelope
from celery5.protocol.job.job import to_seconds
from celery5.runners.running_job import RunningJob, TimeLimits
from celery5.tasks.task import Task


class Deadlines:
    """The limits in time of the jobs that run. A message says its own; else its task's hold, else the settings'."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        time_limit: float | None,
        soft_time_limit: float | None,
    ) -> None:
        self._tasks = tasks
        self._default = TimeLimits(time_limit, soft_time_limit)
        self._of: dict[str, TimeLimits | None] = {}
        self._due: dict[RunningJob, _Due] = {}
        self._next = math.inf
        self._news = trio.Event()

    def get_limits(self, envelope: Envelope) -> TimeLimits | None:
        """How long an attempt of this job may run; None when it may run for ever."""
        name = envelope.task
        try:
            usual = self._of[name]
        except KeyError:
            usual = self._of[name] = self._usual(name)
        if envelope.time_limit is None and envelope.soft_time_limit is None:
            return usual
        hard, soft = (None, None) if usual is None else (usual.hard, usual.soft)
        return TimeLimits(envelope.time_limit or hard, envelope.soft_time_limit or soft)

    def _usual(self, name: str) -> TimeLimits | None:
        options = self._tasks[name].send_options
        hard, soft = to_seconds(options.time_limit), to_seconds(options.soft_time_limit)
        limits = TimeLimits(hard or self._default.hard, soft or self._default.soft)
        return None if limits == _NONE else limits

    def start(self, running_job: RunningJob, limits: TimeLimits) -> None:
        """The job in `hand` begins now."""
        running_job.limits = limits
        began = trio.current_time()
        self._expect(running_job, _Due(began, limits.soft))
        if limits.soft is None or (limits.hard is not None and limits.hard <= limits.soft):
            self._expect(running_job, _Due(began, limits.hard, hard=True))

    def stop(self, running_job: RunningJob) -> None:
        """The job in `hand` has ended."""
        self._due.pop(running_job, None)
        running_job.limits = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell and end jobs when their time has come, until cancelled."""
        task_status.started()
        while True:
            with trio.move_on_at(self._next):
                await self._news.wait()
            self._news = trio.Event()
            now = trio.current_time()
            for hand, due in [item for item in self._due.items() if item[1].when <= now]:
                self._fire(hand, due)
            self._next = min((each.when for each in self._due.values()), default=math.inf)

    def _fire(self, hand: RunningJob, due: "_Due") -> None:
        del self._due[hand]
        if due.hard:
            hand.end_by_time_limit(
                TimeLimitExceeded(f"ran for longer than its time_limit of {due.after:g} s")
            )
            return
        if hand.limits is not None:
            self._expect(hand, _Due(due.began, hand.limits.hard, hard=True))
        if hand.raise_soft_limit is not None:
            hand.raise_soft_limit(
                SoftTimeLimitExceeded(f"ran for longer than its soft_time_limit of {due.after:g} s")
            )

    def _expect(self, hand: RunningJob, due: "_Due") -> None:
        if due.after is None:
            return
        self._due[hand] = due
        if due.when < self._next:
            self._next = due.when
            self._news.set()


class _Due(msgspec.Struct, frozen=True):
    """One limit of one job that began then."""

    began: float
    after: float | None
    hard: bool = False

    @property
    def when(self) -> float:
        return math.inf if self.after is None else self.began + self.after


_NONE = TimeLimits()


MAX_TIMEOUT = 1.0
"""Seconds: for what is further away a millisecond is nothing."""
MIN_LATENESS = 0.0001
"""Seconds that epoll must be late to be anticipated. Told to wait for whole milliseconds it is not late at all."""
_NANOSECONDS = 1_000_000_000


class _Span(ctypes.Structure):
    """struct itimerspec: how often after the first time, which is never, and when first, counted from now."""

    _fields_ = (
        ("again_seconds", ctypes.c_long),
        ("again_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class FineTimer(trio.abc.Instrument):
    """Sets the timer each time that the loop is about to wait. Where there is no timerfd (outside Linux) it does
    nothing, and the loop wakes as it always does."""

    def __init__(self) -> None:
        self._span = _Span()
        self._set: Callable[..., int] | None = None
        self._timer = -1

    def before_io_wait(self, timeout: float) -> None:
        """The loop is about to wait for so many seconds (Trio's instrument)."""
        if (
            0 < timeout < MAX_TIMEOUT
            and ceil(timeout * 1000) / 1000 - timeout > MIN_LATENESS
            and self._set is not None
        ):
            # Never 0, which would stop the timer; a timer that rings a little early would have the loop wait once more.
            self._span.nanoseconds = min(ceil(timeout * _NANOSECONDS), _NANOSECONDS - 1)
            self._set(self._timer, 0, ctypes.byref(self._span), None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled."""
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
