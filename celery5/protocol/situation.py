"""Situation: what is known of the jobs that wait and of the workers there are, when priorities and scale are decided.

Floor: protocol. Reads: nothing. Writes: nothing.

It is a picture, not the truth: how many jobs of each task wait on a queue is told from a sample, and workers tell how
they are only every few seconds.
"""

from collections.abc import Iterable, Mapping

import msgspec

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
