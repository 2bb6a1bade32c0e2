"""Cluster snapshot: the reports of workers, and the state of jobs and workers that is computed from them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from celery5.protocol.limits import DeclaredLimits, LimitOverride, make_admission_rule


class BrokerVisibility(msgspec.Struct, frozen=True):
    """The brokers that are not seen, by name, and until when: infinity while one does not answer."""

    until: Mapping[str, float] = {}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Return their names."""
        return tuple(self.until)


def update_visibility(
    before: BrokerVisibility, unreachable: Collection[str], now: float, *, settle_seconds: float
) -> BrokerVisibility:
    """Return the visibility after a look at the time `now`, at which the `unreachable` brokers gave no answer.

    A broker that answers again counts as seen `settle_seconds` later.
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
    mean: float | None = None  # seconds that one takes; None while none has run
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
    process: str = ""
    incarnations: tuple["ClusterWorker", ...] = ()  # empty with one broker

    @property
    def command_targets(self) -> tuple["ClusterWorker", ...]:
        """Return the recipients of control commands for it: each of its incarnations, or itself."""
        return self.incarnations or (self,)


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs and the live workers at one moment. Nothing is known about those on `unreachable` brokers."""

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
        for each in self.workers:
            for kind, count in each.max_slots.items():
                if (kind in CPU_BOUND_KINDS) is cpu_bound:
                    slots += count
                    taken += min(each.executing.get(kind, 0), count)
        return taken / slots if slots else 0.0

    def slots(self, kind: str) -> int:
        """Return how many jobs of a kind may run at once, in all workers together."""
        return sum(each.slots.get(kind, 0) for each in self.workers)

    def max_slots(self, kind: str) -> int:
        """Return how many jobs of a kind could run at once if each worker had grown to its maximum."""
        return sum(max(each.max_slots.get(kind, 0), each.slots.get(kind, 0)) for each in self.workers)

    def demand(self) -> dict[str, int]:
        """Return how many slots the existing jobs could use, by kind; kinds without any are left out."""
        found: dict[str, int] = {}
        for each in self.task_loads:
            if each.demand:
                found[each.kind] = found.get(each.kind, 0) + each.demand
        return found


def merge_snapshots(snapshots: Iterable[ClusterSnapshot], unreachable: Iterable[str] = ()) -> ClusterSnapshot:
    """Return one snapshot from those of several brokers. The incarnations of a process become one worker."""
    lines: list[TaskLoad] = []
    processes: dict[str, list[ClusterWorker]] = {}
    for part in snapshots:
        lines += part.task_loads
        for each in part.workers:
            processes.setdefault(each.process or each.name, []).append(each)
    members = tuple(_one(lives) for lives in processes.values())
    return ClusterSnapshot(task_loads=tuple(lines), workers=members, unreachable=tuple(sorted(unreachable)))


def _one(lives: list[ClusterWorker]) -> ClusterWorker:
    """Return one worker from its incarnations.

    Each may use all of its slots, and its running jobs are spread over them.
    """
    first = lives[0]
    if len(lives) == 1:
        return first
    kinds = sorted({kind for each in lives for kind in (*each.slots, *each.max_slots, *each.executing)})
    return ClusterWorker(
        name=first.name,
        queues=tuple(dict.fromkeys(queue for each in lives for queue in each.queues)),
        slots={kind: max(each.slots.get(kind, 0) for each in lives) for kind in kinds},
        max_slots={kind: max(each.max_slots.get(kind, 0) for each in lives) for kind in kinds},
        executing={kind: sum(each.executing.get(kind, 0) for each in lives) for kind in kinds},
        prefetch=max(each.prefetch for each in lives),
        process=first.process,
        incarnations=tuple(lives),
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
    means: Mapping[str, float] = {}  # how long jobs took lately, by task, in seconds
    prefetch: float = 1.0  # the factor on how far it reads ahead
    process: str = ""  # '' with one broker


class QueueLoad(msgspec.Struct, frozen=True):
    """The jobs and workers of one queue. Jobs are counted by task name."""

    queue: str
    waiting: int  # in the queue
    in_flight: int = 0  # in workers
    sample: Mapping[str, int] = {}  # of some of the waiting jobs
    workers: tuple[str, ...] = ()  # those that are alive
    upcoming: Mapping[str, int] = {}  # schedules will send them here soon
    waiting_at_limit: Mapping[str, int] = {}  # on waiting lists of limits


class TaskConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """What restricts the tasks and queues of an application at the moment."""

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
    found = {task: rule for task, rule in rules.items() if rule is not None}
    slowed = {task for task, rule in found.items() if rule.rate or rule.keyed or rule.per == "worker"}
    most = {
        task: rule.max_running
        for task, rule in found.items()
        if rule.max_running is not None and task not in slowed
    }
    return TaskConstraints(kinds=kinds, suspended=suspended, limits=most, throttled=slowed, paused=paused)


def make_snapshot(
    queue_loads: Sequence[QueueLoad], reports: Mapping[str, WorkerReport], constraints: TaskConstraints
) -> ClusterSnapshot:
    """Return the snapshot from the reports of live workers, by name. Tasks that nobody declares are left out."""
    waiting: dict[tuple[str, str], int] = {}
    running: dict[tuple[str, str], int] = {}
    upcoming: dict[tuple[str, str], int] = {}
    for each in queue_loads:
        if each.queue not in constraints.paused:
            for task, count in _shared_out(each.waiting, each.sample).items():
                waiting[each.queue, task] = count
            for task, count in each.waiting_at_limit.items():
                if task not in constraints.throttled:
                    waiting[each.queue, task] = waiting.get((each.queue, task), 0) + count
            for task, count in each.upcoming.items():
                upcoming[each.queue, task] = count
        for task, count in _shared_out(each.in_flight, _held(each.queue, reports) or each.sample).items():
            running[each.queue, task] = count
    means = _means(reports.values())
    lines = [
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
        task_loads=tuple(lines), workers=tuple(_member(*each) for each in sorted(reports.items()))
    )


def _held(queue: str, reports: Mapping[str, WorkerReport]) -> dict[str, int]:
    """Return the jobs of a queue that workers reported, by task.

    The reports are seconds old, so only the ratio counts.
    """
    found: dict[str, int] = {}
    for report in reports.values():
        for task, count in report.held.get(queue, {}).items():
            found[task] = found.get(task, 0) + count
    return found


def _shared_out(jobs: int, seen: Mapping[str, int]) -> dict[str, int]:
    """Distribute the jobs over tasks in the ratio of a sample."""
    total = sum(seen.values())
    if not total or not jobs:
        return {}
    return {task: max(1, round(jobs * count / total)) for task, count in seen.items()}


def _means(reports: Collection[WorkerReport]) -> dict[str, float]:
    """Return how long jobs of each task take, on average over the workers that know."""
    found: dict[str, list[float]] = {}
    for each in reports:
        for task, mean in each.means.items():
            found.setdefault(task, []).append(mean)
    return {task: sum(means) / len(means) for task, means in found.items()}


def _member(name: str, report: WorkerReport) -> ClusterWorker:
    return ClusterWorker(
        name=name,
        queues=report.queues,
        slots=report.slots,
        max_slots=report.most,
        executing=report.executing,
        prefetch=report.prefetch,
        process=report.process,
    )
