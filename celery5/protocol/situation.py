"""Situation: what is known of the jobs that wait and of the workers there are, when priorities and scale are decided.

Floor: protocol. Reads: nothing. Writes: nothing.

It is a picture, not the truth: how many jobs of each task wait on a queue is told from a sample, and workers tell how
they are only every few seconds.
"""

from collections.abc import Mapping

import msgspec

CPU_BOUND = frozenset({"thread", "boxed"})
"""The kinds of tasks that use a core while they run; the others wait for something most of the time."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
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


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process, by the `name` of its inbox: the `queues` it reads, and of each kind of task it has the
    `slots` now, the `most` there may be, and the jobs `executing`. `prefetch` is the factor on how far it reads ahead.
    """

    name: str
    queues: tuple[str, ...] = ()
    slots: Mapping[str, int] = {}
    most: Mapping[str, int] = {}
    executing: Mapping[str, int] = {}
    prefetch: float = 1.0


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one moment: the `lines` of jobs, and the `members`, the workers that live."""

    lines: tuple[Line, ...] = ()
    members: tuple[Member, ...] = ()

    @property
    def cpu_use(self) -> float:
        """The share of all slots for CPU-bound tasks that is taken, 0 to 1."""
        return self._use(cpu_bound=True)

    @property
    def io_use(self) -> float:
        """The share of all slots for I/O-bound tasks that is taken, 0 to 1."""
        return self._use(cpu_bound=False)

    def _use(self, *, cpu_bound: bool) -> float:
        taken = slots = 0
        for each in self.members:
            for kind, count in each.most.items():
                if (kind in CPU_BOUND) is cpu_bound:
                    slots += count
                    taken += min(each.executing.get(kind, 0), count)
        return taken / slots if slots else 0.0

    def slots(self, kind: str) -> int:
        """How many jobs of a kind may run at once, all workers together."""
        return sum(each.slots.get(kind, 0) for each in self.members)

    def most(self, kind: str) -> int:
        """How many there may be, when each worker has grown as far as it may."""
        return sum(max(each.most.get(kind, 0), each.slots.get(kind, 0)) for each in self.members)

    def demand(self) -> dict[str, int]:
        """How many slots the jobs that there are could use, by kind; kinds without any are left out."""
        found: dict[str, int] = {}
        for each in self.lines:
            if each.demand:
                found[each.kind] = found.get(each.kind, 0) + each.demand
        return found
