"""Result Publisher: settles outcomes, many in one trip (C56).

Whatever finished while one trip was under way goes with the next: at low load a batch is one outcome and nothing
waits, at high load it is hundreds. An outcome is kept until Redis has it, however long that takes (I2).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs, limits
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.events.documents import make_sink_argument
from celery5.protocol.job.delivery import (
    Delivery,
    Settlement,
    SinkDocument,
    is_next_attempt,
    is_requeue,
    make_settlement,
)
from celery5.protocol.job.envelope import read_envelope
from celery5.protocol.job.states import ADMITTED
from celery5.protocol.job.verdict import Bury, Reason, Release
from celery5.services.limits.admission_control import AdmissionControl
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import is_recoverable
from celery5.services.worker.in_flight import HeldJobs
from celery5.services.worker.internal_queues import ResultsQueue, TasksQueue
from celery5.services.worker.lease import WorkerIdentity

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
        self._log.event(name, "warning", count=len(retries), jobs=[words.job_id for _, words in retries[:20]])
        if self._how == "abandon":
            return [self._buried(*each) if is_next_attempt(each[1], each[0]) else each for each in outcomes]
        now = trio.current_time()
        self._asleep |= {delivery: (now + words.number / 1000, words) for delivery, words in retries}
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
                delivery.begin_attempt(words.payload, time.time())
                self._queues[delivery.kind].put(delivery)

    def release_retries(self) -> None:
        """Redis is back: what has not begun here is a retry like any other, after what is left of its delay."""
        now = trio.current_time()
        for delivery, (due, words) in self._asleep.items():
            left = max(0, int((due - now) * 1000))
            self._results.put((delivery, words._replace(number=left)))
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
        failure = read_envelope(words.payload).failures[-1]
        verdict = Bury(Reason.ABANDONED, failure)
        return delivery, make_settlement(verdict, delivery, worker=self._worker, ttl=self._ttl)


BATCH = 256
"""The most outcomes in one trip: a script holds the server up while it runs."""
LIMITED_BATCH = 32
"""Outcomes in one trip where jobs have slots: for each of them another may be handed over."""
BATCH_BYTES = 4 * 1024 * 1024
"""Bytes in one trip, unless one outcome alone has more: a trip must be sent and answered within the time-out."""
RETRY_INTERVAL = 0.1
"""Seconds between attempts while Redis is away."""
FLUSH_TIMEOUT = 10.0
"""Seconds that a stopping worker gives the last outcomes."""

T = TypeVar("T")
Outcomes = Sequence[tuple[Delivery, Settlement]]


class ResultPublisher:
    """Settles what the executors and the Consumer put into the results queue."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        redis: TrioRedis,
        results: ResultsQueue,
        held: HeldJobs,
        unpublishable_retries: UnpublishableRetries,
        admission: AdmissionState,
        admission_control: AdmissionControl,
        log: Log,
    ) -> None:
        self._redis = redis
        self._queues = {keys.queue: keys for keys in identity.consumed}
        self._results = results
        self._begun: tuple[Call[int], PendingRequest] | None = None
        self._ledger = held.in_flight
        self._recent = held.recent
        self._unpublishable = unpublishable_retries
        self._turnstile = admission
        self._admission_control = admission_control
        self._handed: Callable[[], None] | None = None
        self._lease = identity.lease
        self._log = log
        self._worker = identity.worker
        self._unsettled: Outcomes = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Settle until cancelled, then settle what is left. Raises LeaseLost when this worker counts as dead."""
        task_status.started()
        try:
            while True:
                first = await self._results.take_first(self._begin)
                self._unsettled = [first, *(() if self._begun else self._results.drain(BATCH - 1))]
                await self.settle(self._unsettled)
                self._unsettled = ()
        finally:
            self._unpublishable.close()
            if not self._lease.is_lost:
                with trio.move_on_after(FLUSH_TIMEOUT, shield=True):
                    await self._flush()
            self._tell_dropped()

    def _begin(self, delivery: Delivery, words: Settlement) -> None:
        """The only job that this worker has is done: send its outcome now, and not in our next turn. Somebody probably
        waits for it."""
        plain = words.verb == "complete" and delivery.recipients is None and delivery.rule is None
        if plain and delivery.lane != ADMITTED and len(self._ledger) == 1:
            keys = self._queues[delivery.queue].on_lane(delivery.lane)
            settle = jobs.settle(keys, self._worker, [words])
            if ticket := self._redis.begin(settle):
                self._begun = settle, ticket

    async def settle(self, outcomes: Outcomes) -> None:
        """Settle outcomes of any queues, each lane of one in one trip, or in several where they are large."""
        by_lane: dict[tuple[str, str], list[tuple[Delivery, Settlement]]] = defaultdict(list)
        for outcome in outcomes:
            delivery, words = outcome
            by_lane[delivery.queue, delivery.lane].append(outcome)
            if words.verb != "complete" and is_requeue(words, delivery):
                # Before the trip, not after: the answer and the next delivery come by different connections.
                self._recent.forget(delivery)
        for (queue, lane), batch in by_lane.items():
            for part in _portions(batch, LIMITED_BATCH if self._turnstile.is_used else BATCH):
                settled = await self._settle(self._queues[queue].on_lane(lane), part)
                done = [delivery for delivery, _ in settled]
                if self._turnstile.is_used:
                    self._turnstile.on_settled(done)
                self._ledger.remove(done)
                if self._handed is not None:
                    self._handed()
                    self._handed = None

    async def _settle(self, keys: QueueKeys, batch: Outcomes) -> Outcomes:
        """Settle outcomes of one lane, however long that takes. Gives those that were: while Redis is away, others may
        have become something else."""
        waited = sent = False
        while True:
            try:
                owned = await self._perform(keys, batch)
            except BrokerUnavailable as error:
                if not waited:
                    self._log.event("results:interrupted", "warning", count=len(batch), why=str(error))
                waited, sent = True, sent or error.maybe_done
                batch = self._instead(batch, sent)
                await trio.sleep(RETRY_INTERVAL)
                self._unpublishable.run_due_attempts()
            except BrokerReplied as error:
                if not is_recoverable(error):
                    raise
                if not waited:
                    self._log.event("results:refused", "error", count=len(batch), why=str(error))
                waited, sent = True, sent or error.maybe_done
                await trio.sleep(10 * RETRY_INTERVAL)
            else:
                break
        if owned < 0:
            raise self._lease.mark_lost(f"{self._worker} was taken for dead; its jobs were given to others")
        if owned < len(batch) and not waited:
            # A connection that was lost sends again by itself, so this is no cause for alarm.
            self._log.event("results:already-settled", "debug", count=len(batch) - owned)
        self._unpublishable.release_retries()
        return batch

    async def _perform(self, keys: QueueKeys, batch: Outcomes) -> int:
        """One trip, unless it has begun. Where jobs in it have slots at gates, others may be handed over for them."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return await self._redis.finish(*begun)
        settle = jobs.settle(keys, self._worker, [words for _, words in batch], _documents(batch))
        used = self._turnstile.is_used or keys.lane == ADMITTED
        every = keys.lane == ADMITTED  # these have slots, also those that could not be taken in
        leaving = [delivery for delivery, _ in batch if every or delivery.rule is not None] if used else []
        if not leaving:
            return await self._redis.perform(settle)
        tasks = {each.envelope.task for each in leaving if each.envelope}
        rules, asked = self._turnstile.plan_requests(keys.queue, tasks, settled=leaving), time.time()
        with self._turnstile.reserving_slots(rules):
            handed = await self._redis.perform(limits.settle_limited(keys, settle, leaving, rules))
        told = [rule for rule, _ in rules]
        self._handed = partial(self._admission_control.receive_jobs, keys.queue, told, handed, asked)
        return handed.owned

    def _instead(self, batch: Outcomes, sent: bool) -> Outcomes:
        """What is left to be settled of `batch`, and to be told of as dropped, should it come to that."""
        left = self._unpublishable.filter_outcomes(batch, sent=sent)
        if left != batch:
            gone = {delivery for delivery, _ in batch}
            self._unsettled = [*left, *(each for each in self._unsettled if each[0] not in gone)]
        return left

    async def _flush(self) -> None:
        await self.settle(self._unsettled)
        while self._results:
            self._unsettled = self._results.drain(BATCH)
            await self.settle(self._unsettled)
        self._unsettled = ()

    def _tell_dropped(self) -> None:
        """What could not be settled is run again by others."""
        dropped = [*self._unsettled, *self._results.drain()]
        if dropped:
            why = (
                "this worker lost its lease" if self._lease.is_lost else "Redis could not be reached in time"
            )
            self._log.event(
                "results:dropped",
                "error",
                count=len(dropped),
                jobs=_ids(dropped),
                worker=self._worker,
                why=why,
            )


def _portions(batch: Outcomes, most: int) -> Iterator[Outcomes]:
    """Yield the outcomes in their order, as many at a time as go in one trip, and at most so many."""
    sizes = [settlement.size for _, settlement in batch]
    if sum(sizes) <= BATCH_BYTES and len(batch) <= most:
        yield batch
        return
    first, total = 0, 0
    for at, size in enumerate(sizes):
        if at > first and (total + size > BATCH_BYTES or at - first == most):
            yield batch[first:at]
            first, total = at, 0
        total += size
    yield batch[first:]


def _documents(batch: Outcomes) -> list[SinkDocument]:
    """What Data Sinks are given of these."""
    taken = [outcome for outcome in batch if outcome[0].recipients is not None]
    return [one for outcome in taken if (one := make_sink_argument(*outcome))]


def _ids(batch: Outcomes) -> list[str]:
    return [words.job_id for _, words in batch[:20]]
