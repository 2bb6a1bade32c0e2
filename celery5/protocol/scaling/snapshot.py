"""Cluster snapshot: the reports of workers, and the state of jobs and workers that is computed from them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from celery5.protocol.limits import DeclaredLimits, LimitOverride, make_admission_rule
from celery5.protocol.shards import get_queue_of_shard, group_shards, sum_counts


class BrokerVisibility(msgspec.Struct, frozen=True):
    """The brokers whose jobs are not visible, by name, and until when: infinity while one is unreachable."""

    until: Mapping[str, float] = {}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Return the names of brokers that are not visible."""
        return tuple(self.until)


def update_visibility(
    before: BrokerVisibility, unreachable: Collection[str], now: float, *, settle_seconds: float
) -> BrokerVisibility:
    """Return the visibility at the time `now`, when the `unreachable` brokers did not reply.

    A broker that replies again counts as visible `settle_seconds` later.
    """
    until = {
        name: now + settle_seconds if math.isinf(at) else at
        for name, at in before.until.items()
        if name not in unreachable
    }
    until = {name: at for name, at in until.items() if now < at}
    return BrokerVisibility({**until, **dict.fromkeys(unreachable, math.inf)})


CPU_BOUND_KINDS = frozenset({"thread", "boxed"})
"""The kinds of tasks that use a core while they run; the others mostly wait."""


class TaskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one task on one queue."""

    queue: str
    task: str
    kind: str
    waiting: int = 0  # in the queue
    running: int = 0  # in workers
    upcoming: int = 0  # schedules will send them soon
    mean: float | None = None  # mean duration in seconds; None while no job has run
    suspended: bool = False
    limit: int | None = None  # how many of its jobs may run at once anywhere; None: any number

    @property
    def demand(self) -> int:
        """Return how many slots its jobs could use."""
        if self.suspended:
            return self.running
        wanted = self.waiting + self.running + self.upcoming
        return wanted if self.limit is None else min(wanted, max(self.limit, self.running))


class ClusterWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, by the `name` of its inbox. Slots and jobs are counted by kind of task.

    A worker with several brokers has an incarnation on each, with an inbox there. The incarnations of one
    `process` share its slots.
    """

    name: str
    queues: tuple[str, ...] = ()
    slots: Mapping[str, int] = {}  # now
    max_slots: Mapping[str, int] = {}  # the most it may grow to
    executing: Mapping[str, int] = {}
    prefetch: float = 1.0  # the factor on how far it reads ahead
    concurrency: float = 1.0  # the factor on its I/O-bound slots
    process: str = ""
    incarnations: tuple["ClusterWorker", ...] = ()  # empty with one broker

    @property
    def command_targets(self) -> tuple["ClusterWorker", ...]:
        """Return the recipients of control commands for it: each of its incarnations, or itself."""
        return self.incarnations or (self,)


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs and the live workers at one time, without those on `unreachable` brokers."""

    task_loads: tuple[TaskLoad, ...] = ()
    workers: tuple[ClusterWorker, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def cpu_utilization(self) -> float:
        """Return the share of all slots for CPU-bound tasks that is taken, 0 to 1."""
        return self._use(cpu_bound=True)

    @property
    def io_utilization(self) -> float:
        """Return the share of all slots for I/O-bound tasks that is taken, 0 to 1."""
        return self._use(cpu_bound=False)

    def _use(self, *, cpu_bound: bool) -> float:
        taken = slots = 0
        for worker in self.workers:
            for kind, count in worker.max_slots.items():
                if (kind in CPU_BOUND_KINDS) is cpu_bound:
                    slots += count
                    taken += min(worker.executing.get(kind, 0), count)
        return taken / slots if slots else 0.0

    def slots(self, kind: str) -> int:
        """Return how many jobs of a kind may run at once, in all workers together."""
        return sum(worker.slots.get(kind, 0) for worker in self.workers)

    def max_slots(self, kind: str) -> int:
        """Return how many jobs of a kind could run at once if each worker had grown to its maximum."""
        return sum(max(worker.max_slots.get(kind, 0), worker.slots.get(kind, 0)) for worker in self.workers)

    def demand(self) -> dict[str, int]:
        """Return how many slots the existing jobs could use, by kind; kinds without any are left out."""
        found: dict[str, int] = {}
        for load in self.task_loads:
            if load.demand:
                found[load.kind] = found.get(load.kind, 0) + load.demand
        return found


def merge_snapshots(snapshots: Iterable[ClusterSnapshot], unreachable: Iterable[str] = ()) -> ClusterSnapshot:
    """Return one snapshot from those of several brokers. The incarnations of a process become one worker."""
    task_loads: list[TaskLoad] = []
    processes: dict[str, list[ClusterWorker]] = {}
    for part in snapshots:
        task_loads += part.task_loads
        for worker in part.workers:
            processes.setdefault(worker.process or worker.name, []).append(worker)
    members = tuple(_one(incarnations) for incarnations in processes.values())
    return ClusterSnapshot(
        task_loads=tuple(task_loads), workers=members, unreachable=tuple(sorted(unreachable))
    )


def _one(incarnations: list[ClusterWorker]) -> ClusterWorker:
    """Return one worker from its incarnations.

    Each may use all of its slots, and its running jobs are spread over them.
    """
    first = incarnations[0]
    if len(incarnations) == 1:
        return first
    kinds = sorted(
        {
            kind
            for incarnation in incarnations
            for kind in (*incarnation.slots, *incarnation.max_slots, *incarnation.executing)
        }
    )
    return ClusterWorker(
        name=first.name,
        queues=tuple(dict.fromkeys(queue for incarnation in incarnations for queue in incarnation.queues)),
        slots={kind: max(incarnation.slots.get(kind, 0) for incarnation in incarnations) for kind in kinds},
        max_slots={
            kind: max(incarnation.max_slots.get(kind, 0) for incarnation in incarnations) for kind in kinds
        },
        executing={
            kind: sum(incarnation.executing.get(kind, 0) for incarnation in incarnations) for kind in kinds
        },
        prefetch=max(incarnation.prefetch for incarnation in incarnations),
        concurrency=max(incarnation.concurrency for incarnation in incarnations),
        process=first.process,
        incarnations=tuple(incarnations),
    )


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one worker, as it reports it. Slots and running jobs are counted by kind of task.

    The incarnations of one process on several brokers share its slots, and report the same `process`.
    """

    queues: tuple[str, ...] = ()
    slots: Mapping[str, int] = {}
    most: Mapping[str, int] = {}  # slots that it may grow to
    executing: Mapping[str, int] = {}
    held: Mapping[str, Mapping[str, int]] = {}  # its jobs, by queue and task
    means: Mapping[str, float] = {}  # recent mean duration of jobs in seconds, by task
    prefetch: float = 1.0  # the factor on how far it reads ahead
    concurrency: float = 1.0  # the factor on its I/O-bound slots
    process: str = ""  # '' with one broker


class QueueLoad(msgspec.Struct, frozen=True):
    """The jobs and workers of one queue. Jobs are counted by task name."""

    queue: str
    waiting: int  # in the queue
    in_flight: int = 0  # in workers
    sample: Mapping[str, int] = {}  # of some of the waiting jobs
    workers: tuple[str, ...] = ()  # those that are alive
    upcoming: Mapping[str, int] = {}  # schedules will send them to the queue soon
    waiting_at_limit: Mapping[str, int] = {}  # on waiting lists of limits


class TaskConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """The current restrictions on the tasks and queues of an application."""

    kinds: Mapping[str, str]  # of each task
    suspended: Collection[str] = ()
    limits: Mapping[str, int] = {}  # how many jobs may run at once, by task
    throttled: Collection[str] = ()  # jobs wait for more than a slot, such as a rate limit
    paused: Collection[str] = ()


def make_task_constraints(
    kinds: Mapping[str, str],
    declared_limits: Mapping[str, DeclaredLimits],
    *,
    limits: Mapping[str, LimitOverride],
    suspended: Collection[str],
    paused: Collection[str],
) -> TaskConstraints:
    """Return the constraints of the tasks: declared limits, and limits and suspensions set at run time.

    A limit per worker, or per key, does not restrict how many jobs run in all.
    """
    rules = {
        task: make_admission_rule(
            task,
            declared_limits.get(task),
            computed=None,
            override=limits.get(task),
            suspended=task in suspended,
        )
        for task in {*declared_limits, *limits}
    }
    active_rules = {task: rule for task, rule in rules.items() if rule is not None}
    slowed = {task for task, rule in active_rules.items() if rule.slack or rule.keyed or rule.per == "worker"}
    max_running = {
        task: rule.max_running
        for task, rule in active_rules.items()
        if rule.max_running is not None and task not in slowed
    }
    return TaskConstraints(
        kinds=kinds, suspended=suspended, limits=max_running, throttled=slowed, paused=paused
    )


def make_snapshot(
    queue_loads: Sequence[QueueLoad], reports: Mapping[str, WorkerReport], constraints: TaskConstraints
) -> ClusterSnapshot:
    """Return the snapshot from the reports of live workers, by name. Undeclared tasks are left out.

    Shards count for the queue that they belong to.
    """
    queue_loads = [
        _merge_loads(parts) for parts in group_shards({load.queue: load for load in queue_loads}).values()
    ]
    waiting: dict[tuple[str, str], int] = {}
    running: dict[tuple[str, str], int] = {}
    upcoming: dict[tuple[str, str], int] = {}
    for load in queue_loads:
        if load.queue not in constraints.paused:
            for task, count in _distribute_by_sample(load.waiting, load.sample).items():
                waiting[load.queue, task] = count
            for task, count in load.waiting_at_limit.items():
                if task not in constraints.throttled:
                    waiting[load.queue, task] = waiting.get((load.queue, task), 0) + count
            for task, count in load.upcoming.items():
                upcoming[load.queue, task] = count
        for task, count in _distribute_by_sample(
            load.in_flight, _held(load.queue, reports) or load.sample
        ).items():
            running[load.queue, task] = count
    means = _means(reports.values())
    task_loads = [
        TaskLoad(
            queue=queue,
            task=task,
            kind=constraints.kinds[task],
            waiting=waiting.get((queue, task), 0),
            running=running.get((queue, task), 0),
            upcoming=upcoming.get((queue, task), 0),
            mean=means.get(task),
            suspended=task in constraints.suspended,
            limit=constraints.limits.get(task),
        )
        for queue, task in sorted(waiting.keys() | running.keys() | upcoming.keys())
        if task in constraints.kinds
    ]
    return ClusterSnapshot(
        task_loads=tuple(task_loads), workers=tuple(_member(*item) for item in sorted(reports.items()))
    )


def _merge_loads(parts: Sequence[QueueLoad]) -> QueueLoad:
    """Return the jobs and workers of all shards of a queue together."""
    if len(parts) == 1 and parts[0].queue == get_queue_of_shard(parts[0].queue):
        return parts[0]
    return QueueLoad(
        queue=get_queue_of_shard(parts[0].queue),
        waiting=sum(part.waiting for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        sample=sum_counts(part.sample for part in parts),
        workers=tuple(sorted({worker for part in parts for worker in part.workers})),
        upcoming=sum_counts(part.upcoming for part in parts),
        waiting_at_limit=sum_counts(part.waiting_at_limit for part in parts),
    )


def _held(queue: str, reports: Mapping[str, WorkerReport]) -> dict[str, int]:
    """Return the jobs of a queue that workers reported, by task.

    The reports are some seconds old, so use only the ratio of the counts.
    """
    jobs_by_task: dict[str, int] = {}
    for report in reports.values():
        for task, count in report.held.get(queue, {}).items():
            jobs_by_task[task] = jobs_by_task.get(task, 0) + count
    return jobs_by_task


def _distribute_by_sample(jobs: int, sample: Mapping[str, int]) -> dict[str, int]:
    """Distribute the jobs over tasks in the ratio of a sample."""
    total = sum(sample.values())
    if not total or not jobs:
        return {}
    return {task: max(1, round(jobs * count / total)) for task, count in sample.items()}


def _means(reports: Collection[WorkerReport]) -> dict[str, float]:
    """Return the mean duration of jobs of each task, over the workers that report one."""
    durations: dict[str, list[float]] = {}
    for report in reports:
        for task, mean in report.means.items():
            durations.setdefault(task, []).append(mean)
    return {task: sum(means) / len(means) for task, means in durations.items()}


def _member(name: str, report: WorkerReport) -> ClusterWorker:
    return ClusterWorker(
        name=name,
        queues=report.queues,
        slots=report.slots,
        max_slots=report.most,
        executing=report.executing,
        prefetch=report.prefetch,
        concurrency=report.concurrency,
        process=report.process,
    )
