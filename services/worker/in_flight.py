"""Ledger: the jobs that this worker holds, from the read to the settlement.

It is what bounds everything in a worker: the Consumer reads no more than the ledger has room for.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import trio

from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.envelope import Envelope
from celery5.runners.running_job import RunningJob
from celery5.services.worker.internal_queues import TasksQueue


class InFlightJobs:
    """What is held, by queue and stream entry; how many were settled in `total`. One task may wait for it to change."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, bytes], Delivery] = {}
        self._kinds: defaultdict[str, int] = defaultdict(int)
        self._changed = trio.Event()
        self._watching: list[Callable[[], None]] = []
        self.settled_count = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, place: tuple[str, bytes]) -> bool:
        return place in self._held

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._held.values()))

    def find(self, place: tuple[str, bytes]) -> Delivery | None:
        """What is held of this queue and stream entry."""
        return self._held.get(place)

    def get_oldest(self) -> Delivery | None:
        """What has been held for longest."""
        return next(iter(self._held.values()), None)

    def count(self, kind: str) -> int:
        """How many jobs of one kind are held."""
        return self._kinds.get(kind, 0)

    def add(self, delivery: Delivery) -> None:
        """This worker holds `delivery` now."""
        self._held[delivery.queue, delivery.entry] = delivery
        self._kinds[delivery.kind] += 1

    def change_kind(self, delivery: Delivery, kind: str) -> None:
        """`delivery`, which is held, counts for another kind from now on."""
        self._kinds[delivery.kind] -= 1
        self._kinds[kind] += 1
        delivery.set_kind(kind)

    def remove(self, deliveries: Iterable[Delivery]) -> None:
        """These are settled: there is room for others."""
        before = len(self._held)
        for delivery in deliveries:
            if self._held.pop((delivery.queue, delivery.entry), None) is not None:
                self._kinds[delivery.kind] -= 1
        self.settled_count += before - len(self._held)
        self._changed.set()
        for each in self._watching:
            each()

    def add_listener(self, look: Callable[[], None]) -> None:
        """Call `look` whenever something was settled."""
        self._watching.append(look)

    def notify(self) -> None:
        """Nothing was settled, but there may be room for others all the same."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Wait until something was settled since this was last waited for."""
        await self._changed.wait()
        self._changed = trio.Event()


MessageKey = tuple[str, str, int, int]


class RecentJobs:
    """At least the last `recent_jobs` messages of one incarnation of a worker, and at most twice as many; none with 0.

    Two generations, of which the older one goes as a whole: that costs a third of removing the oldest each time.
    """

    def __init__(self, *, recent_jobs: int) -> None:
        self._limit = recent_jobs
        self._new: set[MessageKey] = set()
        self._old: set[MessageKey] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def check_and_add(self, delivery: Delivery, envelope: Envelope) -> bool:
        """Whether this message came before; it has now. One that was recovered from a dead worker always counts as
        new: its first run did not finish."""
        mark = (delivery.queue, envelope.id, envelope.attempt, envelope.replays)
        if mark in self._new or mark in self._old:
            return not delivery.deliveries
        if self._limit:
            self._new.add(mark)
            if len(self._new) >= self._limit:
                self._old, self._new = self._new, set()
        return False

    def forget(self, delivery: Delivery) -> None:
        """The message goes back to its queue as it is: when it comes again, it is to be run."""
        envelope = delivery.envelope
        if envelope is not None:
            mark = (delivery.queue, envelope.id, envelope.attempt, envelope.replays)
            self._new.discard(mark)
            self._old.discard(mark)


class RunningJobs(dict[Delivery, RunningJob]):
    """The jobs that executors run now. Only TaskExecution changes it; a dictionary, because each job does so twice."""

    def __init__(self) -> None:  # without parameters, for the injector
        super().__init__()

    def count(self, kind: str) -> int:
        """Return how many jobs of one kind run now."""
        return sum(delivery.kind == kind for delivery in self)


SUSPECT_DEATHS = 2
"""Workers that went down with a job before it is a suspect; fewer where fewer are enough to bury it."""


class IsolatedJobs:
    """A lane for one."""

    def __init__(
        self, *, queues: Mapping[str, TasksQueue], in_flight: InFlightJobs, max_deliveries: int
    ) -> None:
        self.min_deaths = min(SUSPECT_DEATHS, max_deliveries)
        self._queues = queues
        self._ledger = in_flight
        self._waiting: deque[Delivery] = deque()
        self._out: Delivery | None = None
        in_flight.add_listener(self._look)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: Delivery) -> None:
        """Let `delivery`, which the ledger has, run when it is its turn."""
        self._waiting.append(delivery)
        self._look()

    def remove(self, delivery: Delivery) -> bool:
        """Take one out that waits. False when it is not here."""
        if delivery not in self._waiting:
            return False
        self._waiting.remove(delivery)
        return True

    def drain(self, *, read_before: float) -> list[Delivery]:
        """Take out all that wait, if the first of them was read before that time (seconds since 1970)."""
        if not self._waiting or self._waiting[0].read >= read_before:
            return []
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _look(self) -> None:
        """Let the next one out, if the one before it is settled."""
        if self._out is not None and (self._out.queue, self._out.entry) not in self._ledger:
            self._out = None
        if self._out is None and self._waiting:
            self._out = self._waiting.popleft()
            self._queues[self._out.kind].put(self._out)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJobs:
    """The jobs of one worker, each view of them with its owner."""

    # From the read to the settlement.
    in_flight: InFlightJobs
    # Messages that came not long ago, so that a duplicate is noticed.
    recent: RecentJobs
    # Those that run alone, because workers have died with them.
    isolated_jobs: IsolatedJobs
    # Those that executors run now.
    running_jobs: RunningJobs
