"""How far behind a queue is: the one definition of its backlog, and of its metrics."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from celery5.protocol.observability.queue_flow import QueueFlow, merge_flows
from celery5.protocol.shards import get_largest, get_smallest, group_shards, sum_counts

AT_LIMITS = "at limits"
"""What `held` of a queue is called where people read it: not all jobs in the state `HELD` wait at limits."""


class QueueDepth(msgspec.Struct, frozen=True):
    """How far behind a queue is.

    The *backlog* is what could run if workers and limits let it: jobs that wait, that are held by limits, and scheduled
    ones that are overdue. The script that counts it (`lane.lua`) defines it; `oldest` is the age of its oldest job.
    """

    # Jobs on the streams that no worker has, and jobs that wait for nothing but a worker with a slot.
    waiting: int
    # Seconds for which the oldest job of the backlog has waited; None when there is none.
    oldest: float | None
    # Jobs in the dead-letter queue.
    dead: int
    # Jobs that wait at a limit.
    held: int = 0
    # Jobs that wait for their time, and those that are overdue.
    scheduled: int = 0
    # Runs of workflows that live on the queue.
    runs: int = 0
    # Scheduled jobs whose time has come and that nobody has moved to a stream: no worker reads the queue.
    overdue: int = 0
    # Jobs that no worker has and whose time has come: those that wait, are held, or are overdue.
    backlog: int = 0
    # Jobs that wait at a limit, by task.
    held_tasks: Mapping[str, int] = {}
    # Workers that read the queue, and live.
    workers: int = 0
    # How many workers died with jobs of each task, how many jobs were given up for it, and when it was last, in
    # seconds since 1970.
    deaths: Mapping[str, int] = {}
    poisoned: Mapping[str, int] = {}
    # How fast jobs come and leave; None while there was no earlier look.
    flow: QueueFlow | None = None
    # Seconds since an attempt ended; None when none did within a day.
    idle: float | None = None
    last_deaths: Mapping[str, float] = {}
    # Workers that were lost in the last hour, and of the last of them when, in seconds since 1970.
    lost: int = 0
    lost_workers: Mapping[str, float] = {}
    # Live workers whose event loop does not renew their lease, and for how many seconds.
    silent_workers: Mapping[str, float] = {}
    # Jobs that workers have.
    running: int = 0

    @property
    def unfinished(self) -> int:
        """Return how many jobs have not ended."""
        return self.waiting + self.running + self.held + self.scheduled


def merge_depths(depths: Mapping[str, QueueDepth]) -> dict[str, QueueDepth]:
    """Return how far behind queues are, by name, with the shards of a queue merged."""
    groups = group_shards(depths)
    return {queue: parts[0] if len(parts) == 1 else _merge(parts) for queue, parts in groups.items()}


def _merge(parts: Sequence[QueueDepth]) -> QueueDepth:
    """Return how far behind all shards of a queue are together. Each of its workers reads all of them."""
    return QueueDepth(
        waiting=sum(part.waiting for part in parts),
        oldest=get_largest(part.oldest for part in parts),
        dead=sum(part.dead for part in parts),
        held=sum(part.held for part in parts),
        scheduled=sum(part.scheduled for part in parts),
        runs=sum(part.runs for part in parts),
        overdue=sum(part.overdue for part in parts),
        backlog=sum(part.backlog for part in parts),
        held_tasks=sum_counts(part.held_tasks for part in parts),
        workers=max(part.workers for part in parts),
        deaths=sum_counts(part.deaths for part in parts),
        poisoned=sum_counts(part.poisoned for part in parts),
        flow=merge_flows(part.flow for part in parts),
        idle=get_smallest(part.idle for part in parts),
        last_deaths=merge_latest(part.last_deaths for part in parts),
        lost=max(part.lost for part in parts),
        lost_workers=merge_latest(part.lost_workers for part in parts),
        silent_workers=merge_latest(part.silent_workers for part in parts),
        running=sum(part.running for part in parts),
    )


def merge_latest(times: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest number of each name."""
    latest: dict[str, float] = {}
    for part in times:
        for name, time in part.items():
            latest[name] = max(time, latest.get(name, time))
    return latest


class CountedDeaths(Protocol):
    """What is counted on a queue of workers that died with jobs: see QueueDepth."""

    @property
    def deaths(self) -> Mapping[str, int]: ...
    @property
    def poisoned(self) -> Mapping[str, int]: ...
    @property
    def last_deaths(self) -> Mapping[str, float]: ...


class TaskDeaths(NamedTuple):
    """How many workers died with jobs of a task, how many jobs were given up for it, and when it was last."""

    workers: int = 0
    poisoned: int = 0
    # In seconds since 1970; 0 when it is not known.
    last: float = 0.0
    queues: tuple[str, ...] = ()


def sum_deaths(queues: Mapping[str, CountedDeaths]) -> dict[str, TaskDeaths]:
    """Return what is counted on these queues, by task."""
    total: dict[str, TaskDeaths] = {}
    for name, queue in queues.items():
        for task, count in queue.deaths.items():
            before = total.get(task, TaskDeaths())
            total[task] = TaskDeaths(
                before.workers + count,
                before.poisoned + queue.poisoned.get(task, 0),
                max(before.last, queue.last_deaths.get(task, 0.0)),
                (*before.queues, name),
            )
    return total


class QueueGauge(NamedTuple):
    """A metric of a queue."""

    name: str
    help: str
    value: float
    # Besides that of the queue.
    labels: Mapping[str, str] = {}


def list_gauges(depth: QueueDepth) -> list[QueueGauge]:
    """Return the metrics of a queue: those of a process and those of the cluster are the same."""
    return [
        QueueGauge(
            "celery5_queue_depth",
            "Backlog: jobs that no worker has and whose time has come, those that limits hold included.",
            depth.backlog,
        ),
        QueueGauge(
            "celery5_queue_oldest_seconds",
            "Age in seconds of the oldest job of the backlog; 0 when there is none.",
            depth.oldest or 0.0,
        ),
        QueueGauge("celery5_queue_dead", "Jobs in the queue's dead-letter queue.", depth.dead),
        QueueGauge("celery5_queue_held", "Jobs of the backlog that wait at a limit.", depth.held),
        QueueGauge(
            "celery5_queue_overdue",
            "Jobs of the backlog whose scheduled time has come, and that no worker has put on the queue.",
            depth.overdue,
        ),
        QueueGauge("celery5_queue_scheduled", "Jobs of the queue that wait for their time.", depth.scheduled),
        QueueGauge("celery5_queue_workers", "Live workers that read the queue.", depth.workers),
        QueueGauge(
            "celery5_queue_workers_silent",
            "Live workers of the queue whose event loop is blocked, or cut off: their sidecar renews their lease.",
            len(depth.silent_workers),
        ),
        QueueGauge(
            "celery5_queue_workers_lost", "Workers of the queue that were lost in the last hour.", depth.lost
        ),
        QueueGauge("celery5_queue_runs", "Live runs of workflows whose home is the queue.", depth.runs),
        *_list_flow_gauges(depth),
        *[
            QueueGauge(
                "celery5_worker_deaths",
                "Workers that died with jobs of the task.",
                count,
                {"task": task},
            )
            for task, count in sorted(depth.deaths.items())
        ],
        *[
            QueueGauge(
                "celery5_jobs_poisoned",
                "Jobs of the task that were given up, since too many workers died with each.",
                count,
                {"task": task},
            )
            for task, count in sorted(depth.poisoned.items())
        ],
    ]


def _list_flow_gauges(depth: QueueDepth) -> list[QueueGauge]:
    """Return how fast jobs come and leave, as far as it is known."""
    gauges: list[QueueGauge] = []
    if depth.flow is not None:
        gauges = [
            QueueGauge(
                "celery5_queue_incoming_per_second",
                "Jobs per second that came to the queue or became due, over `celery5_queue_flow_seconds`.",
                depth.flow.incoming,
            ),
            QueueGauge(
                "celery5_queue_outgoing_per_second",
                "Attempts per second that ended, over `celery5_queue_flow_seconds`.",
                depth.flow.outgoing,
            ),
            QueueGauge(
                "celery5_queue_flow_seconds",
                "Seconds, up to the measurement, over which the rates of the queue were measured.",
                depth.flow.seconds,
            ),
        ]
    if depth.idle is not None:
        gauges.append(
            QueueGauge(
                "celery5_queue_idle_seconds",
                "Seconds since an attempt at a job of the queue ended.",
                depth.idle,
            )
        )
    return gauges
