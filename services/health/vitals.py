"""Vitals: how this process does: whether it lives, whether it is ready for work, and its numbers.

`Vitals` is the process' own and outlives a worker's incarnations: while Redis is away a worker may begin anew, and
still lives. `StatusPhase` is a service of one incarnation, the last to come up: while it runs, the process is up.
Nobody
is asked for anything before somebody wants to know.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import trio

from celery5.broker.calls.jobs import QueueDepth
from celery5.health.event_loop import LoopBlocks
from celery5.health.machine import used_memory
from celery5.protocol.health.metrics import JobTally, MetricFamily, make_counter, make_gauge

HANGS = 5.0
"""Seconds for which the event loop may be blocked before the process counts as dead."""


class StatusSource(Protocol):
    """Something that knows how a part of this process does. Never waits."""

    def conditions(self) -> Mapping[str, str]:
        """What must hold for the process to be ready, by name: '' if it does, else why not."""
        ...

    def metric_families(self) -> Iterable[MetricFamily]:
        """Its numbers."""
        ...


class ProbeReport(msgspec.Struct, frozen=True):
    """The answer to one question: whether it is `ok`, who says so, and each condition: '' if it holds, else why not."""

    ok: bool
    worker: str
    phase: str
    conditions: Mapping[str, str]


class ProcessStatus:
    """How one process does. Its `phase`: it is `starting`, `up`, or `stopping` since it was asked to; `ended` when a
    step has ended that must not."""

    def __init__(self, *, app: str = "") -> None:
        self.app = app
        self.worker = ""
        self.phase: Literal["starting", "up", "stopping", "ended"] = "starting"
        self.jobs = JobTally()
        self.lag = 0.0
        self.loop = LoopBlocks()
        self.depths: dict[str, QueueDepth] = {}
        self._sources: Sequence[StatusSource] = ()
        self._born = time.time()
        self._beside: dict[str, ProcessStatus] = {}

    def add_incarnation(self, name: str) -> "ProcessStatus":
        """How a further life of this process does, on the broker of that name: its jobs are counted with the others,
        and what must hold for it must for the process."""
        own = self._beside[name] = ProcessStatus(app=self.app)
        own.jobs, own.depths, own.loop = self.jobs, self.depths, self.loop
        return own

    def mark_starting(self, worker: str) -> None:
        """Another incarnation begins."""
        self.worker, self.phase = worker, "starting"

    def mark_up(self, sources: Sequence[StatusSource]) -> None:
        """This incarnation works, and these know how it does."""
        self._sources, self.phase = sources, "up"

    def mark_stopping(self) -> None:
        """The process was asked to stop."""
        self.phase = "stopping"

    def mark_down(self, *, is_restarting: bool) -> None:
        """This incarnation works no more; `another` one follows, or nobody knows why it ended."""
        self._sources = ()
        if self.phase == "up":
            self.phase = "starting" if is_restarting else "ended"

    def get_liveness(self) -> ProbeReport:
        """Whether the process lives: whoever can answer does, unless a step that must run has ended for good. Redis has
        no say in it: starting the process anew would not bring that back."""
        ended = "a step that must run has ended" if self.phase == "ended" else ""
        block = self.loop.current
        hangs = {"loop": block.why} if block is not None and block.seconds >= HANGS else {}
        return ProbeReport(not ended and not hangs, self.worker, self.phase, {"boot": ended, **hangs})

    def get_readiness(self, *, blocked: bool = False) -> ProbeReport:
        """Whether the process works and can settle what it does. While the loop is `blocked` another thread asks: what
        belongs to the loop is left alone."""
        found = {"boot": "" if self.phase == "up" else _NOT_UP[self.phase]}
        if blocked:
            block = self.loop.current
            found |= {"loop": "" if block is None else block.why}
        elif self.phase == "up":
            for each in self._sources:
                found.update(each.conditions())
        for name, beside in self._beside.items():
            conditions = beside.get_readiness(blocked=blocked).conditions
            found |= {f"{name}:{what}": why for what, why in conditions.items()}
        return ProbeReport(not any(found.values()), self.worker, self.phase, found)

    def metric_families(self, *, blocked: bool = False) -> list[MetricFamily]:
        """All numbers of the process; while its loop is `blocked`, those that do not belong to the loop."""
        found = [
            make_gauge(
                "celery5_worker_info",
                "Always 1; its labels name the application, the process and its pid.",
                (1, {"app": self.app, "worker": self.worker, "pid": str(os.getpid())}),
            ),
            make_gauge("celery5_process_alive", "1 if the process is alive.", float(self.get_liveness().ok)),
            make_gauge(
                "celery5_process_ready",
                "1 if the process is ready for work.",
                float(self.get_readiness(blocked=blocked).ok),
            ),
            *self.jobs.metric_families(),
            make_gauge(
                "celery5_loop_lag_seconds",
                "Seconds by which the event loop woke up late, at worst within the last ten seconds.",
                self.lag,
            ),
            *_of_the_loop(self.loop),
            *_of_queues(self.depths),
            *_of_the_process(self._born),
        ]
        for each in () if blocked else self._sources:
            found.extend(each.metric_families())
        return found

    def format_summary(self) -> str:
        """In one line, for `systemctl status`."""
        counts = self.jobs.count_jobs()
        dead = sum(count for (_, state), count in counts.items() if state == "DEAD")
        wrong = "; ".join(f"{name}: {why}" for name, why in self.get_readiness().conditions.items() if why)
        return f"{wrong or 'ready'}; {sum(counts.values())} attempts ended, {dead} jobs dead"


class StatusPhase:
    """Says that this incarnation is up for as long as it runs; `another()` says whether one follows it."""

    def __init__(
        self,
        *,
        process_status: ProcessStatus,
        sources: Sequence[StatusSource],
        is_restarting: Callable[[], bool],
    ) -> None:
        self._vitals = process_status
        self._sources = sources
        self._another = is_restarting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Up, until cancelled."""
        self._vitals.mark_up(self._sources)
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            self._vitals.mark_down(is_restarting=self._another())


_NOT_UP: Mapping[str, str] = {
    "starting": "the worker is starting",
    "stopping": "the worker is stopping",
    "ended": "a step that must run has ended",
}


def _of_the_loop(loop: LoopBlocks) -> list[MetricFamily]:
    """Return what has blocked the event loop."""
    now, totals = loop.current, sorted(loop.totals.items())
    return [
        make_gauge(
            "celery5_loop_blocked_seconds",
            "Seconds for which the event loop has been blocked now; 0 when it is not.",
            0.0 if now is None else now.seconds,
        ),
        make_counter(
            "celery5_loop_blocked_total",
            "How often a job of the task has blocked the event loop.",
            *[(float(count), {"task": task}) for task, (count, _) in totals],
        ),
        make_counter(
            "celery5_loop_blocked_seconds_total",
            "Seconds for which jobs of the task have blocked the event loop, in total.",
            *[(seconds, {"task": task}) for task, (_, seconds) in totals],
        ),
    ]


def _of_queues(depths: Mapping[str, QueueDepth]) -> list[MetricFamily]:
    """Return how far behind the queues are; nothing where nobody measures them."""
    if not depths:
        return []
    known = sorted(depths.items())
    return [
        make_gauge(
            "celery5_queue_depth",
            "Jobs that wait on the queue and that no worker has.",
            *[(each.waiting, {"queue": queue}) for queue, each in known],
        ),
        make_gauge(
            "celery5_queue_oldest_seconds",
            "Age in seconds of the oldest job that waits on the queue; 0 when none waits.",
            *[(each.oldest or 0.0, {"queue": queue}) for queue, each in known],
        ),
        make_gauge(
            "celery5_queue_dead",
            "Jobs in the queue's dead-letter queue.",
            *[(each.dead, {"queue": queue}) for queue, each in known],
        ),
        make_gauge(
            "celery5_queue_held",
            "Jobs of the queue that wait at a limit.",
            *[(each.held, {"queue": queue}) for queue, each in known],
        ),
    ]


def _of_the_process(born: float) -> list[MetricFamily]:
    """What Prometheus' own clients say of every process, under the same names."""
    found = [
        make_gauge("process_start_time_seconds", "When the process started, in seconds since 1970.", born),
        make_counter(
            "process_cpu_seconds_total",
            "CPU time, in seconds.",
            math.floor(time.process_time() * 1000) / 1000,
        ),
    ]
    resident = used_memory()
    if resident:
        found.append(make_gauge("process_resident_memory_bytes", "Memory in use, in bytes.", resident))
    return found
