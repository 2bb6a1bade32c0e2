"""Keep the status of this process: whether it is alive, whether it is ready for work, and its metrics.

There is one `ProcessStatus` for all incarnations of a worker: while Redis is unreachable a worker may restart, and is
still alive. `StatusPhase` is a service of one incarnation, the last one to start: while it runs, the process is up.
Sources are read only when a probe needs them.
"""

import math
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import msgspec
import trio

from celery5.health.event_loop import LoopBlocks
from celery5.health.machine import used_memory
from celery5.logs.fence import FENCE
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.health.worker_status import Attempts, format_worker_status
from celery5.protocol.observability.ended_jobs import EndedJobs
from celery5.protocol.observability.families import Merge, MetricFamily, make_counter, make_gauge
from celery5.protocol.observability.job_tally import JobTally
from celery5.protocol.observability.queue_depth import QueueDepth, list_gauges
from celery5.protocol.observability.report import ReportMaker, ReportOrigin
from celery5.protocol.observability.rollup import FAILED_STATES
from celery5.protocol.observability.storage import make_memory_metrics
from celery5.protocol.scheduling.timers import TimerCounts

MEASURED_ONCE: Merge = ""
"""How queues are merged in a cluster: whoever rolls reports up measures all of them itself."""
MAX_BLOCKED_SECONDS = 5.0
"""Seconds for which the event loop may be blocked before the process counts as dead."""


class StatusSource(Protocol):
    """A part of this process that reports its status. It never waits."""

    def conditions(self) -> Mapping[str, str]:
        """Return what must hold for the process to be ready, by name: '' if it does, else why not."""
        ...

    def metric_families(self) -> Iterable[MetricFamily]:
        """Return its metrics."""
        ...


class ProbeReport(msgspec.Struct, frozen=True):
    """The answer to one probe."""

    ok: bool
    worker: str
    phase: str
    # Each condition by name: '' if it holds, else why not.
    conditions: Mapping[str, str]
    # Its status in one line, as systemd shows it; "" on the path that does not have it.
    status: str = ""


class ProcessStatus:
    """The status of one process.

    Its `phase` is `stopping` after a request to stop, and `ended` when a step has ended that must run.
    """

    def __init__(self, *, app: str = "") -> None:
        self.app = app
        self.worker = ""
        self.phase: Literal["starting", "up", "stopping", "ended"] = "starting"
        self.jobs = JobTally()
        process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.report_maker = ReportMaker(process)
        self.ended_jobs = EndedJobs(process, random.random)
        self.lag = 0.0
        self.loop = LoopBlocks()
        self.depths: dict[str, QueueDepth] = {}
        self.memory: dict[str, ServerMemory] = {}
        self.timers: dict[str, TimerCounts] = {}
        self._get_refusals: Callable[[], Mapping[str, str]] = dict
        self._waits_for = ""
        self._recycling = self._successor = ""
        self._sources: Sequence[StatusSource] = ()
        self._started_at = time.time()
        self._code = ""
        self._incarnations: dict[str, ProcessStatus] = {}
        self._observer_failures: Counter[str] = Counter()

    def add_incarnation(self, name: str) -> "ProcessStatus":
        """Return the status of a further incarnation of this process, on the broker of that name.

        Its jobs are counted with the others, and its conditions must hold for the process.
        """
        status = self._incarnations[name] = ProcessStatus(app=self.app)
        status.jobs, status.depths, status.loop = self.jobs, self.depths, self.loop
        status.ended_jobs = self.ended_jobs
        return status

    def set_lag(self, seconds: float) -> None:
        """Set by how much the event loop woke up late recently."""
        self.lag = seconds

    def replace_depths(self, before: Iterable[str], depths: Mapping[str, QueueDepth]) -> None:
        """Replace the depths of the queues `before` by these."""
        for queue in before:
            self.depths.pop(queue, None)
        self.depths.update(depths)

    def mark_starting(self, worker: str) -> None:
        """Note that another incarnation starts."""
        self.worker, self.phase, self._waits_for = worker, "starting", ""
        self._recycling = self._successor = ""

    def mark_waiting(self, why: str) -> None:
        """Note why the next incarnation does not start yet."""
        self._waits_for = why

    def mark_recycling(self, why: str) -> None:
        """Record why the process is being recycled: it takes no more jobs, and will be started again."""
        self._recycling = why

    def mark_awaiting_successor(self, why: str) -> None:
        """Record why the process is to be recycled, once another one has taken its place."""
        self._successor = why

    def set_code(self, version: str) -> None:
        """Set the version of the code that this process runs."""
        self._code = version

    def set_memory(self, broker: str, memory: ServerMemory | None) -> None:
        """Set how full the memory of a broker's server is; None: not known."""
        if memory is None:
            self.memory.pop(broker, None)
        else:
            self.memory[broker] = memory

    def follow_refusals(self, get_refusals: Callable[[], Mapping[str, str]]) -> None:
        """Set what returns why servers refuse writes of this process, by their address."""
        self._get_refusals = get_refusals

    def mark_up(self, sources: Sequence[StatusSource]) -> None:
        """Note that this incarnation is up; `sources` report its status."""
        self._sources, self.phase = sources, "up"

    def mark_stopping(self) -> None:
        """Note that the process was requested to stop."""
        self.phase = "stopping"

    def mark_down(self, *, is_restarting: bool) -> None:
        """Note that this incarnation has ended, and whether another one follows."""
        self._sources = ()
        if self.phase == "up":
            self.phase = "starting" if is_restarting else "ended"

    def get_liveness(self) -> ProbeReport:
        """Return whether the process is alive: no step that must run has ended, and the event loop does not hang.

        An unreachable Redis does not count: a restart of the process would not help.
        """
        ended = "a step that must run has ended" if self.phase == "ended" else ""
        block = self.loop.current
        hangs = {"loop": block.why} if block is not None and block.seconds >= MAX_BLOCKED_SECONDS else {}
        return ProbeReport(not ended and not hangs, self.worker, self.phase, {"boot": ended, **hangs})

    def get_readiness(self, *, blocked: bool = False) -> ProbeReport:
        """Return whether the process is up and can settle jobs. It cannot while a server refuses writes, being full.

        While the event loop is `blocked`, another thread calls this; then nothing that belongs to the loop is read.
        """
        waits_for = f": {self._waits_for}" if self._waits_for else ""
        conditions = {"boot": "" if self.phase == "up" else f"{_NOT_UP[self.phase]}{waits_for}"}
        for broker, memory in self.memory.copy().items():
            if memory.is_full:
                conditions[f"memory of {broker}"] = memory.describe()
        if len(conditions) == 1:
            for where, why in self._get_refusals().items():
                # Its first part says how full the server is, the others what to do.
                conditions[f"memory of {where}"] = why.partition(";")[0]
        if blocked:
            block = self.loop.current
            conditions |= {"loop": "" if block is None else block.why}
        elif self.phase == "up":
            for source in self._sources:
                conditions.update(source.conditions())
        for broker, incarnation in self._incarnations.items():
            report = incarnation.get_readiness(blocked=blocked)
            conditions |= {f"{broker}:{name}": why for name, why in report.conditions.items()}
        return ProbeReport(not any(conditions.values()), self.worker, self.phase, conditions)

    def metric_families(self, *, blocked: bool = False) -> list[MetricFamily]:
        """Return all metrics; while the event loop is `blocked`, those that do not belong to it."""
        families = [
            make_gauge(
                "celery5_worker_info",
                "Always 1; its labels name the application, the process and its pid.",
                (1, {"app": self.app, "worker": self.worker, "pid": str(os.getpid())}),
                merge="",
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
                merge="max",
            ),
            self._count_observer_failures(),
            *_make_loop_metrics(self.loop),
            *_make_queue_metrics(self.depths),
            *make_memory_metrics(self.memory.copy().values()),
            *_make_process_metrics(self._started_at),
        ]
        for source in () if blocked else self._sources:
            families.extend(source.metric_families())
        return families

    def _count_observer_failures(self) -> MetricFamily:
        # Several processes may share an operating system process: each failure is counted by the first that asks.
        self._observer_failures.update(FENCE.take_counts())
        return make_counter(
            "celery5_observer_failures_total",
            "Errors of what only observes: history, metrics, progress, alerts, audit, traces, middleware and logs.",
            *[(float(count), {"observer": name}) for name, count in sorted(self._observer_failures.items())],
        )

    def get_origin(self) -> ReportOrigin:
        """Return what reports on metrics say of this process."""
        return ReportOrigin(
            self.worker, self._started_at, sum(self.jobs.count_by_state().values()), self._code
        )

    def count_failures(self) -> int:
        """Return how many attempts have failed in this process: those that are retried, and those that are dead."""
        counts = self.jobs.count_by_state()
        return sum(counts.get(state, 0) for state in FAILED_STATES)

    def format_summary(self) -> str:
        """Return the status in one line, for `systemctl status`."""
        counts = self.jobs.count_by_state()
        problems = "; ".join(f"{name}: {why}" for name, why in self.get_readiness().conditions.items() if why)
        attempts = Attempts(counts.get("SUCCESS", 0), self.count_failures())
        return format_worker_status(
            problems,
            sum(counts.values()),
            attempts,
            counts.get("DEAD", 0),
            recycling=self._recycling,
            successor=self._successor,
        )


class StatusPhase:
    """Marks this incarnation as up while it runs. `is_restarting()` returns whether another one follows."""

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        process_status: ProcessStatus,
        sources: Sequence[StatusSource],
        is_restarting: Callable[[], bool],
    ) -> None:
        self._process_status = process_status
        self._sources = sources
        self._is_restarting = is_restarting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Mark the incarnation as up until cancelled."""
        self._process_status.mark_up(self._sources)
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            self._process_status.mark_down(is_restarting=self._is_restarting())


_NOT_UP: Mapping[str, str] = {
    "starting": "the worker is starting",
    "stopping": "the worker is stopping",
    "ended": "a step that must run has ended",
}


def _make_loop_metrics(loop: LoopBlocks) -> list[MetricFamily]:
    """Return how long the event loop was blocked, and by which tasks."""
    now, totals = loop.current, sorted(loop.totals.items())
    return [
        make_gauge(
            "celery5_loop_blocked_seconds",
            "Seconds for which the event loop has been blocked now; 0 when it is not.",
            0.0 if now is None else now.seconds,
            merge="max",
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


def _make_queue_metrics(depths: Mapping[str, QueueDepth]) -> list[MetricFamily]:
    """Return the depths of queues; nothing where none is measured."""
    if not depths:
        return []
    samples: dict[tuple[str, str], list[tuple[float, Mapping[str, str]]]] = {}
    for queue, depth in sorted(depths.items()):
        for gauge in list_gauges(depth):
            samples.setdefault((gauge.name, gauge.help), []).append(
                (gauge.value, {"queue": queue, **gauge.labels})
            )
    return [make_gauge(name, text, *found, merge=MEASURED_ONCE) for (name, text), found in samples.items()]


def _make_process_metrics(started_at: float) -> list[MetricFamily]:
    """Return the metrics that Prometheus' own clients have for every process, under the same names."""
    families = [
        make_gauge(
            "process_start_time_seconds",
            "When the process started, in seconds since 1970.",
            started_at,
            merge="",
        ),
        make_counter(
            "process_cpu_seconds_total",
            "CPU time, in seconds.",
            math.floor(time.process_time() * 1000) / 1000,
        ),
    ]
    resident = used_memory()
    if resident:
        families.append(make_gauge("process_resident_memory_bytes", "Memory in use, in bytes.", resident))
    return families
