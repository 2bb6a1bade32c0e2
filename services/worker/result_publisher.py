"""Settle the outcomes of jobs in Redis, many in one call.

Outcomes that arrive during one call go with the next: at low load a batch is one outcome and nothing waits, at high
load it is hundreds. An outcome is kept until Redis has it, however long that takes.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast, get_args

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs, limits, workflows
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.broker.transient_errors import is_transient
from celery5.errors import BrokerDenied, BrokerError, BrokerReplied, BrokerUnavailable
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
from celery5.protocol.job.messages import read_command
from celery5.protocol.job.retry_policy import (
    UnpublishableChoice,
    UnpublishableFallback,
    UnpublishableRetry,
)
from celery5.protocol.job.states import ADMITTED
from celery5.protocol.job.verdict import FailForGood, Reason, Release
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.user_errors import reraise_cancellation
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RecentJobs
from celery5.services.job.internal_queues import InternalResultsQueue, InternalTasksQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL
from celery5.services.process.lease import Lease
from celery5.services.worker.admission_control import AdmissionControl
from celery5.services.workflows.run_progress import RunProgress, log_advance

DeliverySettlement = tuple[Delivery, Settlement]
"""A delivery and what becomes of it in Redis."""


CHOICES = frozenset(get_args(UnpublishableChoice))


class UnpublishableRetries:
    """Retries under the setting `when_unpublishable`, while Redis is unreachable.

    A function in its place is called once for each retry in an outage.
    """

    def __init__(
        self,
        *,
        when_unpublishable: UnpublishableChoice | UnpublishableFallback,
        queues: Mapping[str, InternalTasksQueue],
        results: InternalResultsQueue,
        log: Log,
        worker: str,
        results_ttl: float,
    ) -> None:
        self._policy: UnpublishableChoice | UnpublishableFallback = when_unpublishable
        self._choices: dict[Delivery, str] = {}
        self._has_warned = False
        self._queues = queues
        self._results = results
        self._log = log
        self._worker = worker
        self._ttl = results_ttl
        self._pending_retries: dict[Delivery, tuple[float, Settlement]] = {}

    def filter_outcomes(
        self, outcomes: Sequence[DeliverySettlement], *, sent: bool
    ) -> list[DeliverySettlement]:
        """Return the outcomes that are to be settled when Redis is reachable again.

        Args:
            sent: They were sent and may have arrived: then no attempt is started in this worker.
        """
        if self._policy == "backlog" or (sent and self._policy == "local"):
            return list(outcomes)
        local: list[DeliverySettlement] = []
        abandoned: list[DeliverySettlement] = []
        remaining: list[DeliverySettlement] = []
        now = trio.current_time()
        for outcome in outcomes:
            delivery, settlement = outcome
            choice = self._choose(*outcome) if is_next_attempt(settlement, delivery) else "backlog"
            if choice == "abandon":
                abandoned.append(outcome)
                remaining.append(self._abandon(*outcome))
            elif choice == "local" and not sent:
                local.append(outcome)
                self._pending_retries[delivery] = (now + settlement.delay, settlement)
            else:
                remaining.append(outcome)
        if local:
            self._log.event("results:retried-locally", "warning", count=len(local), jobs=_list_ids(local))
        if abandoned:
            self._log.event("results:abandoned", "warning", count=len(abandoned), jobs=_list_ids(abandoned))
        return remaining

    def _choose(self, delivery: Delivery, settlement: Settlement) -> str:
        """Return what becomes of a retry: by the setting, or by the user's function, which is called once for it."""
        policy = self._policy
        if not callable(policy):
            return policy
        choice = self._choices.get(delivery)
        if choice is None:
            choice = self._choices[delivery] = self._call_fallback(policy, delivery, settlement)
        return choice

    def _call_fallback(
        self, fallback: UnpublishableFallback, delivery: Delivery, settlement: Settlement
    ) -> str:
        command = read_command(settlement.payload)
        failure = command.failures[-1]
        retry = UnpublishableRetry(
            id=command.id,
            task=command.task,
            queue=delivery.queue,
            attempt=command.attempt - 1,
            delay=settlement.delay,
            error_type=failure.type,
            error_message=failure.message,
        )
        try:
            choice: object = fallback(retry)
            why = (
                ""
                if choice in CHOICES
                else f"it returned {choice!r}, not one of {', '.join(sorted(CHOICES))}"
            )
        except BaseException as error:  # user code
            reraise_cancellation(error)
            choice, why = None, describe_error(error, MAX_ERROR_LENGTH)
        if not why:
            return str(choice)
        if not self._has_warned:
            self._has_warned = True
            self._log.event("results:fallback-failed", "warning", job=command.id, task=command.task, why=why)
        return "backlog"

    def run_due_attempts(self) -> None:
        """Filter the outcomes that have come, and start the attempts that are due."""
        if self._policy == "backlog":
            return
        self._results.items.extend(self.filter_outcomes(self._results.drain(), sent=False))
        now = trio.current_time()
        for delivery, (due, settlement) in list(self._pending_retries.items()):
            if due <= now:
                del self._pending_retries[delivery]
                self._choices.pop(delivery, None)  # should this attempt fail, too, that is another retry
                delivery.begin_attempt(settlement.payload, time.time())
                self._queues[delivery.kind].put(delivery)

    def release_retries(self) -> None:
        """Settle the retries that have not started here as usual, with what is left of their delays."""
        now = trio.current_time()
        for delivery, (due, settlement) in self._pending_retries.items():
            left = max(0, int((due - now) * 1000))
            self._results.put((delivery, settlement._replace(terms=left)))
        self._pending_retries.clear()
        self._choices.clear()

    def close(self) -> None:
        """Start no more attempts, and release the jobs that wait: this worker stops."""
        self._policy = "backlog"
        self.release_retries()
        for queue in self._queues.values():
            for delivery in queue.drain():
                settlement = make_settlement(Release(), delivery, worker=self._worker, ttl=self._ttl)
                self._results.put((delivery, settlement))

    def _abandon(self, delivery: Delivery, settlement: Settlement) -> DeliverySettlement:
        failure = read_command(settlement.payload).failures[-1]
        verdict = FailForGood(Reason.ABANDONED, failure)
        return delivery, make_settlement(verdict, delivery, worker=self._worker, ttl=self._ttl)


def _list_ids(retries: Sequence[DeliverySettlement]) -> list[str]:
    """Return the ids of the first jobs, for the log."""
    return [settlement.job_id for _, settlement in retries[:20]]


BATCH = 256
"""The most outcomes in one call: a script blocks the server while it runs."""
LIMITED_BATCH = 32
"""The most outcomes in one call where jobs have slots: for each of them another job may be admitted."""
BATCH_BYTES = 4 * 1024 * 1024
"""The most bytes in one call, unless one outcome has more: a call must be sent and answered within its timeout."""
FLUSH_TIMEOUT = 10.0
"""Seconds that a stopping worker has to settle the last outcomes."""

T = TypeVar("T")
SettlementBatch = Sequence[DeliverySettlement]
Lane = tuple[str, str]
"""The name of a queue, and the letter of its lane."""


class ResultPublisher:
    """Settles the outcomes in the results queue."""

    def __init__(
        self,
        *,
        worker: str,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        redis: TrioRedis,
        results: InternalResultsQueue,
        in_flight: InFlightJobs,
        recent: RecentJobs,
        isolated_jobs: IsolatedJobs,
        unpublishable_retries: UnpublishableRetries,
        admission: AdmissionState,
        admission_control: AdmissionControl,
        run_progress: RunProgress,
        job_middleware: JobMiddleware,
        log: Log,
    ) -> None:
        self._redis = redis
        self._run_progress = run_progress
        self._queues = {keys.queue: keys for keys in consumed}
        self._results = results
        self._begun: tuple[Call[int], PendingRequest] | None = None
        self._in_flight = in_flight
        self._isolated_jobs = isolated_jobs
        self._recent = recent
        self._unpublishable_retries = unpublishable_retries
        self._job_middleware = job_middleware
        self._admission = admission
        self._admission_control = admission_control
        self._receive_admitted: Callable[[], None] | None = None
        self._lease = lease
        self._log = log
        self._worker = worker
        self._unsettled: SettlementBatch = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Settle until cancelled, then settle what is left.

        Raises:
            LeaseLost: This worker counts as dead.
        """
        task_status.started()
        try:
            while True:
                first = await self._results.take_first(self._begin)
                self._unsettled = [first, *(() if self._begun else self._results.drain(BATCH - 1))]
                await self.settle(self._unsettled)
                self._unsettled = ()
        finally:
            self._unpublishable_retries.close()
            if not self._lease.is_lost:
                with trio.move_on_after(FLUSH_TIMEOUT, shield=True):
                    await self._flush()
            self._log_dropped()

    def _begin(self, delivery: Delivery, settlement: Settlement) -> None:
        """Send the outcome of the worker's only job at once, and not in the next turn of the loop.

        With so little load a caller probably waits for it.
        """
        plain = settlement.verb == "complete" and delivery.recipients is None and delivery.rule is None
        if plain and delivery.lane != ADMITTED and len(self._in_flight) == 1:
            keys = self._queues[delivery.queue].on_lane(delivery.lane)
            settle = jobs.settle(keys, self._worker, [settlement])
            if request := self._redis.begin(settle):
                self._begun = settle, request

    async def settle(self, outcomes: SettlementBatch) -> None:
        """Settle outcomes of any queues, each lane in one call, or in several where they are large."""
        by_lane: dict[Lane, list[DeliverySettlement]] = defaultdict(list)
        for outcome in outcomes:
            delivery, settlement = outcome
            by_lane[delivery.queue, delivery.lane].append(outcome)
            if settlement.verb != "complete" and is_requeue(settlement, delivery):
                # Before the call, not after: its reply and the next delivery come by different connections.
                self._recent.forget(delivery)
        replies = await self._settle_together(by_lane) if len(by_lane) > 1 else {}
        for (queue, lane), batch in by_lane.items():
            holds_slots = self._admission.is_used and any(map(_holds_slot, batch))
            for part in _split(batch, LIMITED_BATCH if holds_slots else BATCH):
                keys = self._queues[queue].on_lane(lane)
                if self._job_middleware.settles:
                    with self._job_middleware.settling(queue, [delivery for delivery, _ in part]):
                        settled = await self._settle(keys, part)
                else:
                    settled = await self._settle(keys, part, replies.pop((queue, lane), None))
                done = [delivery for delivery, _ in settled]
                if self._admission.is_used:
                    self._admission.on_settled(done)
                self._in_flight.remove(done)
                self._isolated_jobs.start_next()
                self._admission_control.on_capacity()
                if self._receive_admitted is not None:
                    self._receive_admitted()
                    self._receive_admitted = None

    async def _settle_together(self, by_lane: Mapping[Lane, SettlementBatch]) -> dict[Lane, int]:
        """Settle in one trip the lanes whose jobs all completed, and for which nothing else is to be done.

        Returns:
            The replies. After an error there are none: the calls are made again, each by itself.
        """
        calls = {
            (queue, lane): self._make_call(self._queues[queue].on_lane(lane), batch)
            for (queue, lane), batch in by_lane.items()
            if all(map(_is_plain, batch))
        }
        size = sum(settlement.size for batch in by_lane.values() for _, settlement in batch)
        if len(calls) > 1 and size <= BATCH_BYTES and not self._job_middleware.settles:
            with suppress(BrokerError):
                replies = await self._redis.perform_all(list(calls.values()))
                return dict(zip(calls, replies, strict=True))
        return {}

    async def _settle(
        self, keys: QueueKeys, batch: SettlementBatch, owned: int | None = None
    ) -> SettlementBatch:
        """Settle outcomes of one lane, however long that takes. `owned` is the reply if the call was made already.

        Returns:
            Those that were settled: while Redis is unreachable, others may have been retried here or abandoned.
        """
        waited = sent = False
        while owned is None:
            try:
                owned = await self._call_settle(keys, batch)
            except BrokerUnavailable as error:
                if not waited:
                    self._log.event(
                        "results:interrupted",
                        "debug" if self._log.lost_connections.explains(error) else "warning",
                        count=len(batch),
                        why=str(error),
                    )
                waited, sent = True, sent or error.maybe_done
                batch = self._filter_unsettled(batch, sent)
                await trio.sleep(SHORT_RETRY_INTERVAL)
                self._unpublishable_retries.run_due_attempts()
            except (BrokerDenied, BrokerReplied) as error:
                if not is_transient(error):
                    raise
                if not waited:
                    self._log.event(
                        "results:refused",
                        "debug" if self._log.lost_connections.explains(error) else "error",
                        count=len(batch),
                        why=str(error),
                    )
                waited, sent = True, sent or error.maybe_done
                await trio.sleep(10 * SHORT_RETRY_INTERVAL)
        if owned < 0:
            raise self._lease.mark_lost(f"{self._worker} was taken for dead; its jobs were given to others")
        if owned < len(batch) and not waited:
            # A lost connection sends its calls again, so this is expected.
            self._log.event("results:already-settled", "debug", count=len(batch) - owned)
        self._unpublishable_retries.release_retries()
        return batch

    async def _call_settle(self, keys: QueueKeys, batch: SettlementBatch) -> int:
        """Make one call, unless it was sent already. It may admit other jobs for the slots that these free."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return await self._redis.finish(*begun)
        settle = self._make_call(keys, batch)
        may_admit = self._admission.is_used or keys.lane == ADMITTED
        all_have_slots = keys.lane == ADMITTED  # these have slots, even if they could not be decoded
        slot_holders = (
            [delivery for delivery, _ in batch if all_have_slots or delivery.rule is not None]
            if may_admit
            else []
        )
        is_of_runs = any("~" in settlement.job_id for _, settlement in batch)
        if not slot_holders:
            return await self._perform_settle(keys, settle, is_of_runs=is_of_runs)
        rules = self._admission_control.plan_settlement(keys.queue, slot_holders)
        requested_at = time.time()
        with self._admission.reserving_slots(rules):
            settle_limited = limits.settle_limited(keys, settle, slot_holders, rules)
            reply = await self._perform_settle(keys, settle_limited, is_of_runs=is_of_runs)
        self._receive_admitted = partial(
            self._admission_control.receive_settled, keys.queue, rules, reply, requested_at
        )
        return reply.owned

    def _make_call(self, keys: QueueKeys, batch: SettlementBatch) -> Call[int]:
        settlements = [settlement for _, settlement in batch]
        return jobs.settle(keys, self._worker, settlements, _make_documents(batch))

    async def _perform_settle(self, keys: QueueKeys, settle: Call[T], *, is_of_runs: bool) -> T:
        """Perform the call that settles; when members of runs are among its jobs, move the runs on in the same trip."""
        if not is_of_runs:
            return await self._redis.perform(settle)
        advance = self._run_progress.make_advance(keys)
        reply, advanced = await self._redis.perform_all(
            [cast("Call[Any]", settle), cast("Call[Any]", advance)]
        )
        progress = cast("workflows.Advance", advanced)
        log_advance(self._log, keys.queue, progress)
        self._run_progress.note_advance(keys.queue, progress)
        return cast("T", reply)

    def _filter_unsettled(self, batch: SettlementBatch, sent: bool) -> SettlementBatch:
        """Return the outcomes of `batch` that are still to be settled, and note them as unsettled."""
        remaining = self._unpublishable_retries.filter_outcomes(batch, sent=sent)
        if remaining != batch:
            batch_deliveries = {delivery for delivery, _ in batch}
            self._unsettled = [
                *remaining,
                *(
                    (delivery, settlement)
                    for delivery, settlement in self._unsettled
                    if delivery not in batch_deliveries
                ),
            ]
        return remaining

    async def _flush(self) -> None:
        await self.settle(self._unsettled)
        while self._results:
            self._unsettled = self._results.drain(BATCH)
            await self.settle(self._unsettled)
        self._unsettled = ()

    def _log_dropped(self) -> None:
        """Log the outcomes that could not be settled: other workers run these jobs again."""
        dropped = [*self._unsettled, *self._results.drain()]
        if dropped:
            why = (
                "this worker lost its lease" if self._lease.is_lost else "Redis could not be reached in time"
            )
            self._log.event(
                "results:dropped", "error",
                count=len(dropped), jobs=_list_job_ids(dropped), worker=self._worker, why=why,
            )  # fmt: skip


def _split(batch: SettlementBatch, max_count: int) -> Iterator[SettlementBatch]:
    """Yield the outcomes in order, in parts that fit in one call, of at most `max_count` outcomes."""
    sizes = [settlement.size for _, settlement in batch]
    if sum(sizes) <= BATCH_BYTES and len(batch) <= max_count:
        yield batch
        return
    first, size_sum = 0, 0
    for index, size in enumerate(sizes):
        if index > first and (size_sum + size > BATCH_BYTES or index - first == max_count):
            yield batch[first:index]
            first, size_sum = index, 0
        size_sum += size
    yield batch[first:]


def _is_plain(outcome: DeliverySettlement) -> bool:
    """Return whether a job has completed, and has neither a slot of a limit nor a run."""
    _, settlement = outcome
    return settlement.verb == "complete" and "~" not in settlement.job_id and not _holds_slot(outcome)


def _holds_slot(outcome: DeliverySettlement) -> bool:
    """Return whether a job holds a slot of a limit."""
    delivery, _ = outcome
    return delivery.rule is not None or delivery.lane == ADMITTED


def _make_documents(batch: SettlementBatch) -> list[SinkDocument]:
    """Return the documents of these outcomes for data sinks."""
    return [
        document
        for delivery, settlement in batch
        if delivery.recipients is not None and (document := make_sink_argument(delivery, settlement))
    ]


def _list_job_ids(batch: SettlementBatch) -> list[str]:
    return [settlement.job_id for _, settlement in batch[:20]]
