"""Suspects: lets the jobs that have taken workers down run one at a time in this worker (I5).

Floor: services. Reads: nothing. Writes: the Internal Tasks Queues.

When a worker dies, all jobs that ran in it are counted, for nobody knows which one it was. Were they to run beside each
other again, the innocent would be buried with the poisonous one. So a job that has been counted twice waits here,
unstarted and therefore not counted, until the one before it is settled.
"""

from collections import deque
from collections.abc import Mapping

from celery5.protocol.delivery import Delivery
from celery5.services.internal_queues import TasksQueue
from celery5.services.ledger import InFlightJobs

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
