"""Deadlines: ends what runs for longer than its time limit, and tells what runs for longer than its soft one.

Floor: services. Reads: the clock. Writes: nothing.

One timer for all jobs, which is set to the first time that anything falls due; a job without limits costs nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.envelope import Envelope
from celery5.protocol.job import to_seconds
from celery5.runners.hand import RunningJob, TimeLimits
from celery5.task import Task


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
