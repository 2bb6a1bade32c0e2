"""Recent: what this worker has been given lately, so that the very same message is not run twice (C47).

Floor: services. Reads: nothing. Writes: nothing.

A message is the same when its queue, id, attempt and replays are. What a worker holds and what it has finished is
remembered; what it gives back is not, for that must be run, here or elsewhere.
"""

from celery5.protocol.delivery import Delivery
from celery5.protocol.envelope import Envelope

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
