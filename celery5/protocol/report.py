"""Report: what a worker tells of itself to whoever decides for all, and the situation that is made of such reports.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from celery5.protocol.limits import DeclaredLimits, LimitOverride, make_admission_rule
from celery5.protocol.situation import ClusterSnapshot, ClusterWorker, TaskLoad


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
