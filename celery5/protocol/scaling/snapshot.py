"""Report: what a worker tells of itself to whoever decides for all, and the situation that is made of such reports."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from celery5.protocol.limits import DeclaredLimits, LimitOverride, make_admission_rule


class BrokerVisibility(msgspec.Struct, frozen=True):
    """The brokers that are not seen, by name, and until when: infinity while one does not answer."""

    until: Mapping[str, float] = {}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.until)


def update_visibility(
    before: BrokerVisibility, unreachable: Collection[str], now: float, *, settle_seconds: float
) -> BrokerVisibility:
    """One look, at the time `now`, at which those that are `away` gave no answer. Who answers again is seen `settles`
    seconds later."""
    until = {
        name: now + settle_seconds if math.isinf(at) else at
        for name, at in before.until.items()
        if name not in unreachable
    }
    until = {name: at for name, at in until.items() if now < at}
    return BrokerVisibility({**until, **dict.fromkeys(unreachable, math.inf)})


CPU_BOUND_KINDS = frozenset({"thread", "boxed"})
"""The kinds of tasks that use a core while they run; the others wait for something most of the time."""


class TaskLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one `task`, which is of a `kind`, on one `queue`.

    Those that nobody has yet (`waiting`), those in workers' hands (`running`), and those that schedules will send
    before long (`upcoming`). How long one takes (`mean`, seconds; None while none has run). Whether the task is
    `suspended`, and its `limit`: how many of its jobs may run at once anywhere; None for any number.
    """

    queue: str
    task: str
    kind: str
    waiting: int = 0
    running: int = 0
    upcoming: int = 0
    mean: float | None = None
    suspended: bool = False
    limit: int | None = None

    @property
    def demand(self) -> int:
        """How many slots its jobs could use."""
        if self.suspended:
            return self.running
        wanted = self.waiting + self.running + self.upcoming
        return wanted if self.limit is None else min(wanted, max(self.limit, self.running))


class ClusterWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, by the `name` of its inbox: the `queues` it reads, and of each kind of task it has the
    `slots` now, the `most` there may be, and the jobs `executing`. `prefetch` is the factor on how far it reads ahead.

    One that works for several brokers has a life on each, and an inbox there: its `lives`, each as it would be by
    itself; with one there are none. Lives of one `process` share its slots.
    """

    name: str
    queues: tuple[str, ...] = ()
    slots: Mapping[str, int] = {}
    max_slots: Mapping[str, int] = {}
    executing: Mapping[str, int] = {}
    prefetch: float = 1.0
    process: str = ""
    incarnations: tuple["ClusterWorker", ...] = ()

    @property
    def command_targets(self) -> tuple["ClusterWorker", ...]:
        """Whom to tell what it is to do: each of its lives."""
        return self.incarnations or (self,)


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one moment: the `lines` of jobs, and the `members`, the workers that live. Of what is on the
    brokers that are `unseen`, by their names, nothing is known: there may be more of both."""

    task_loads: tuple[TaskLoad, ...] = ()
    workers: tuple[ClusterWorker, ...] = ()
    unreachable: tuple[str, ...] = ()

    @property
    def cpu_utilization(self) -> float:
        """The share of all slots for CPU-bound tasks that is taken, 0 to 1."""
        return self._use(cpu_bound=True)

    @property
    def io_utilization(self) -> float:
        """The share of all slots for I/O-bound tasks that is taken, 0 to 1."""
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
        """How many jobs of a kind may run at once, all workers together."""
        return sum(each.slots.get(kind, 0) for each in self.workers)

    def max_slots(self, kind: str) -> int:
        """How many there may be, when each worker has grown as far as it may."""
        return sum(max(each.max_slots.get(kind, 0), each.slots.get(kind, 0)) for each in self.workers)

    def demand(self) -> dict[str, int]:
        """How many slots the jobs that there are could use, by kind; kinds without any are left out."""
        found: dict[str, int] = {}
        for each in self.task_loads:
            if each.demand:
                found[each.kind] = found.get(each.kind, 0) + each.demand
        return found


def merge_snapshots(snapshots: Iterable[ClusterSnapshot], unreachable: Iterable[str] = ()) -> ClusterSnapshot:
    """The situation on several brokers, from that on each of them: a worker process that has a life on some of them is
    one member, with the slots it has once."""
    lines: list[TaskLoad] = []
    processes: dict[str, list[ClusterWorker]] = {}
    for part in snapshots:
        lines += part.task_loads
        for each in part.workers:
            processes.setdefault(each.process or each.name, []).append(each)
    members = tuple(_one(lives) for lives in processes.values())
    return ClusterSnapshot(task_loads=tuple(lines), workers=members, unreachable=tuple(sorted(unreachable)))


def _one(lives: list[ClusterWorker]) -> ClusterWorker:
    """A process, of its lives. Each may use all of its slots, and the jobs that take them are spread over its lives."""
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
    """How one worker does: the `queues` it reads; of each kind of its tasks the slots it has now, the `most` there may
    be, and the jobs `executing`; the jobs it has, by queue and task (`held`); how long jobs took lately, by task, in
    seconds (`means`); the factor on how far it reads ahead (`prefetch`). Lives of one `process` on several brokers,
    which share its slots, tell the same name for it; '' of one that has no other."""

    queues: tuple[str, ...] = ()
    slots: Mapping[str, int] = {}
    most: Mapping[str, int] = {}
    executing: Mapping[str, int] = {}
    held: Mapping[str, Mapping[str, int]] = {}
    means: Mapping[str, float] = {}
    prefetch: float = 1.0
    process: str = ""


class QueueLoad(msgspec.Struct, frozen=True):
    """What one queue has: jobs that nobody has yet (`waiting`), and jobs that workers have (`held`); of which tasks
    some of those that wait are (`sample`, by name), the workers that live, the tasks of which schedules will send a
    job here soon (`upcoming`), and those of which jobs wait at gates (`gated`), by name."""

    queue: str
    waiting: int
    in_flight: int = 0
    sample: Mapping[str, int] = {}
    workers: tuple[str, ...] = ()
    upcoming: Mapping[str, int] = {}
    waiting_at_limit: Mapping[str, int] = {}


class TaskConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of an application's tasks: the kind of each; which are `suspended`; the `limits` on how many run at
    once; which are `slowed`, so that their jobs wait at a gate for something else than a slot. And the queues that are
    `paused`."""

    kinds: Mapping[str, str]
    suspended: Collection[str] = ()
    limits: Mapping[str, int] = {}
    throttled: Collection[str] = ()
    paused: Collection[str] = ()


def make_task_constraints(
    kinds: Mapping[str, str],
    declared_limits: Mapping[str, DeclaredLimits],
    *,
    limits: Mapping[str, LimitOverride],
    suspended: Collection[str],
    paused: Collection[str],
) -> TaskConstraints:
    """What is said of the tasks now: by their own gates, and by `limits` and suspensions from outside. A limit for each
    worker, or for each key, says nothing of how many run in all."""
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
    """The situation, from the reports of the workers that live, by name. A task that nobody declares is left out."""
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
    """Which jobs of a queue workers had when they reported, by task: some seconds ago, so only the shares count."""
    found: dict[str, int] = {}
    for report in reports.values():
        for task, count in report.held.get(queue, {}).items():
            found[task] = found.get(task, 0) + count
    return found


def _shared_out(jobs: int, seen: Mapping[str, int]) -> dict[str, int]:
    """How many of these jobs probably are of each task, when some that were seen are so many of each."""
    total = sum(seen.values())
    if not total or not jobs:
        return {}
    return {task: max(1, round(jobs * count / total)) for task, count in seen.items()}


def _means(reports: Collection[WorkerReport]) -> dict[str, float]:
    """How long jobs of each task take, in the mean of the workers that know."""
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
