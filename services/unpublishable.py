"""Unpublishable: what becomes of retries that cannot be published, because Redis is away (C26).

Floor: services. Reads: nothing. Writes: the Internal Tasks Queues, the Internal Results Queue.

`backlog`: they are kept, as every outcome is. `local`: the next attempt runs here, after its delay; the job stays where
it is on the stream, in this worker's hands, and only its end is settled. An executor begins no attempt without a lease
that lasts, so a worker that is cut off alone stops before others may have its jobs. `abandon`: the job is buried.
"""

import time
from collections.abc import Mapping, Sequence

import trio

from celery5.log import Log
from celery5.protocol.delivery import Delivery, Settlement, is_next_attempt, make_settlement
from celery5.protocol.envelope import read_envelope
from celery5.protocol.verdict import Bury, Reason, Release
from celery5.services.internal_queues import ResultsQueue, TasksQueue

Outcome = tuple[Delivery, Settlement]


class UnpublishableRetries:
    """The setting `when_unpublishable`, at work while Redis is away."""

    def __init__(
        self,
        *,
        when_unpublishable: str,
        queues: Mapping[str, TasksQueue],
        results: ResultsQueue,
        log: Log,
        worker: str,
        results_ttl: float,
    ) -> None:
        self._how = when_unpublishable
        self._queues = queues
        self._results = results
        self._log = log
        self._worker = worker
        self._ttl = results_ttl
        self._asleep: dict[Delivery, tuple[float, Settlement]] = {}

    def filter_outcomes(self, outcomes: Sequence[Outcome], *, sent: bool) -> list[Outcome]:
        """What of these outcomes is to be settled when Redis is back.

        `sent` says that they were sent, and nobody knows whether they have arrived: then no attempt is begun here.
        """
        if self._how == "backlog" or (sent and self._how == "local"):
            return list(outcomes)
        retries = [outcome for outcome in outcomes if is_next_attempt(outcome[1], outcome[0])]
        if not retries:
            return list(outcomes)
        name = "results:retried-locally" if self._how == "local" else "results:abandoned"
        self._log.event(name, "warning", count=len(retries), jobs=[words[2] for _, words in retries[:20]])
        if self._how == "abandon":
            return [self._buried(*each) if is_next_attempt(each[1], each[0]) else each for each in outcomes]
        now = trio.current_time()
        self._asleep |= {delivery: (now + words[4] / 1000, words) for delivery, words in retries}
        return [outcome for outcome in outcomes if outcome[0] not in self._asleep]

    def run_due_attempts(self) -> None:
        """Redis is still away: look at outcomes that have come since, and begin the attempts whose time has come."""
        if self._how == "backlog":
            return
        self._results.items.extend(self.filter_outcomes(self._results.drain(), sent=False))
        now = trio.current_time()
        for delivery, (due, words) in list(self._asleep.items()):
            if due <= now:
                del self._asleep[delivery]
                delivery.message, delivery.envelope = words[3], read_envelope(words[3])
                delivery.read = time.time()
                self._queues[delivery.kind].put(delivery)

    def release_retries(self) -> None:
        """Redis is back: what has not begun here is a retry like any other, after what is left of its delay."""
        now = trio.current_time()
        for delivery, (due, words) in self._asleep.items():
            left = max(0, int((due - now) * 1000))
            self._results.put((delivery, (*words[:4], left, words[5])))
        self._asleep.clear()

    def close(self) -> None:
        """This worker stops: nothing begins here any more."""
        self._how = "backlog"
        self.release_retries()
        for queue in self._queues.values():
            for delivery in queue.drain():
                words = make_settlement(Release(), delivery, worker=self._worker, ttl=self._ttl)
                self._results.put((delivery, words))

    def _buried(self, delivery: Delivery, words: Settlement) -> Outcome:
        failure = read_envelope(words[3]).failures[-1]
        verdict = Bury(Reason.ABANDONED, failure)
        return delivery, make_settlement(verdict, delivery, worker=self._worker, ttl=self._ttl)
