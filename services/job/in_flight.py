"""The jobs that this worker holds: in flight from the read to the settlement, running, recent and isolated.

Their number bounds everything in a worker: the Consumer reads only as many as there is capacity for.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

import trio

from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command
from celery5.runners.running_job import RunningJob
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.process.suspect_turn import SuspectTurn


class InFlightJobs:
    """The jobs in flight, by queue and stream entry, and how many were settled. One task may wait for a change."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, bytes], Delivery] = {}
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._changed = trio.Event()
        self.settled_count = 0
        self._awaited_count = math.inf
        self._enough_settled = trio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, place: tuple[str, bytes]) -> bool:
        return place in self._held

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._held.values()))

    def find(self, place: tuple[str, bytes]) -> Delivery | None:
        """Return the job of a queue and stream entry; None when it is not held."""
        return self._held.get(place)

    def get_oldest(self) -> Delivery | None:
        """Return the job that has been held for longest."""
        return next(iter(self._held.values()), None)

    def count(self, kind: str) -> int:
        """Return how many jobs of one kind are held."""
        return self._counts.get(kind, 0)

    def add(self, delivery: Delivery) -> None:
        """Hold a job."""
        self._held[delivery.queue, delivery.entry] = delivery
        self._counts[delivery.kind] += 1

    def change_kind(self, delivery: Delivery, kind: str) -> None:
        """Count a held job for another kind."""
        self._counts[delivery.kind] -= 1
        self._counts[kind] += 1
        delivery.set_kind(kind)

    def remove(self, deliveries: Iterable[Delivery]) -> None:
        """Remove jobs that were settled: there is capacity for others."""
        before = len(self._held)
        for delivery in deliveries:
            if self._held.pop((delivery.queue, delivery.entry), None) is not None:
                self._counts[delivery.kind] -= 1
        self.settled_count += before - len(self._held)
        self._changed.set()
        if self.settled_count >= self._awaited_count:
            self._enough_settled.set()

    async def wait_settled(self, count: int) -> None:
        """Wait until `count` jobs were settled in all. Only one task may wait for that."""
        self._awaited_count, self._enough_settled = count, trio.Event()
        try:
            if self.settled_count < count:
                await self._enough_settled.wait()
        finally:
            self._awaited_count = math.inf

    def notify(self) -> None:
        """Wake the waiting task though no job was settled: there may be capacity for other reasons."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Wait until jobs were settled since the last call."""
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

    def check_and_add(self, delivery: Delivery, command: Command) -> bool:
        """Remember a message, and return whether it came before.

        One that was recovered from a dead worker always counts as new: its first run did not finish.
        """
        key = (delivery.queue, command.id, command.attempt, command.replays)
        if key in self._new or key in self._old:
            return not delivery.deliveries
        if self._limit:
            self._new.add(key)
            if len(self._new) >= self._limit:
                self._old, self._new = self._new, set()
        return False

    def forget(self, delivery: Delivery) -> None:
        """Forget a message that goes back to its queue unchanged: when it comes again, it is to be run."""
        command = delivery.command
        if command is not None:
            key = (delivery.queue, command.id, command.attempt, command.replays)
            self._new.discard(key)
            self._old.discard(key)


class RunningJobs(dict[Delivery, RunningJob]):
    """The jobs that executors run now. Only TaskExecution changes it; a dictionary, because each job does so twice."""

    def __init__(self) -> None:  # without parameters, for the injector
        super().__init__()

    def count(self, kind: str) -> int:
        """Return how many jobs of one kind run now."""
        return sum(delivery.kind == kind and delivery.started > 0 for delivery in self)


SUSPECT_DEATHS = 2
"""Workers that died with a job before it is isolated; fewer where fewer are enough to dead-letter it."""


class IsolatedJobs:
    """Runs the jobs that may kill workers one at a time, and not while a record is on trial (`SuspectTurn`)."""

    def __init__(
        self,
        *,
        queues: Mapping[str, InternalTasksQueue],
        in_flight: InFlightJobs,
        max_deliveries: int,
        suspect_turn: SuspectTurn | None = None,
    ) -> None:
        self._turn = suspect_turn or SuspectTurn()
        self.min_deaths = min(SUSPECT_DEATHS, max_deliveries)
        self._queues = queues
        self._in_flight = in_flight
        self._waiting: deque[Delivery] = deque()
        self._current: Delivery | None = None
        self._awaits_turn = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, delivery: Delivery) -> None:
        """Run a job in flight when it is its turn."""
        self._waiting.append(delivery)
        self.start_next()

    def remove(self, delivery: Delivery) -> bool:
        """Remove a waiting job. Return False when there is none."""
        if delivery not in self._waiting:
            return False
        self._waiting.remove(delivery)
        return True

    def drain(self, *, read_before: float) -> list[Delivery]:
        """Take all waiting jobs, if the first of them was read before that time (seconds since 1970)."""
        if not self._waiting or self._waiting[0].read >= read_before:
            return []
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def start_next(self) -> None:
        """Queue the next job for an executor, if the one before it is settled, when it is its turn."""
        if self._current is not None and (self._current.queue, self._current.entry) not in self._in_flight:
            self._current = None
            self._turn.release()
        if self._current is None and self._waiting and not self._awaits_turn:
            self._awaits_turn = True
            if self._turn.take(self._start):
                self._start()

    def _start(self) -> None:
        self._awaits_turn = False
        if not self._waiting:  # they were taken away in the meantime
            self._turn.release()
            return
        self._current = self._waiting.popleft()
        self._queues[self._current.kind].put(self._current)
