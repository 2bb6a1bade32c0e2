"""Deliver the documents of results to Data Sinks, independently of each other.

Each sink has its own Trio task, its own documents in Redis and its own retries, so one that fails or hangs does not
delay the others. A Router leases documents, and renews the leases while it writes: when it dies, another one delivers
them. So a sink gets each document at least once.
"""

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio

from celery5.broker.calls import events as events_calls
from celery5.broker.calls import queues
from celery5.broker.calls.events import ClaimedDocument
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerError, Corrupt
from celery5.logs.log import Log
from celery5.protocol.events.documents import DeliveryPacing, ResultDocument, parse_result_document
from celery5.protocol.events.sinks import SinkOptions
from celery5.protocol.job.messages import Failure
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_error_text, get_type_name
from celery5.protocol.names import get_class_names
from celery5.protocol.task_kinds import EventLoop, FunctionKind
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.operations import operating
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import call_in_thread, call_user_code, reraise_cancellation
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog

LEASE = 5.0
"""Seconds of the lease of documents; it is renewed three times in each while they are written."""
POLL_INTERVAL = 5.0
"""Seconds between reads of all queues: messages are missed while the connection is down."""
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""The most bytes of documents in one batch, unless one alone has more."""
REDECLARE_INTERVAL = 86400.0
"""Seconds until it is declared again which sinks get which documents; Redis keeps that for longer."""
STOP_LIMIT = 5.0
"""Seconds that a write may take, and then its confirmation, when this stops."""


class SinkDelivery:
    """Delivers the documents of all queues of an application.

    Args:
        broker_router: Reaches the broker of each queue.
        sink_options: The sinks.
        recipients: Which sinks get the documents, by final state.
        queue_names: The queues whose new documents are announced by messages; the others are polled.
        asyncio_runner: Runs sinks on asyncio.
        default_loop: The event loop of sinks that name none.
    """

    def __init__(
        self,
        *,
        broker_router: AsyncDriver,
        keys: Keys,
        sink_options: Sequence[SinkOptions],
        recipients: Mapping[str, str],
        queue_names: Sequence[str],
        message_limit: int,
        log: Log,
        asyncio_runner: AsyncioRunner,
        default_loop: EventLoop,
    ) -> None:
        self._redis = broker_router
        self._keys = keys
        self._recipients = recipients
        self._outages = OutageLog(log, "sink:interrupted", "sink:resumed")
        self._queues: dict[str, QueueKeys] = {}
        self._declared_at = -math.inf
        self._waiting: dict[str, int] = {}
        self._channels = (
            {keys.for_queue(name).documents: keys.for_queue(name) for name in queue_names}
            if sink_options
            else {}
        )
        self._deliveries = [
            _OneSinkDelivery(
                broker_router, options, message_limit, log, asyncio_runner, options.kind or default_loop
            )
            for options in sink_options
        ]

    @property
    def channels(self) -> list[str]:
        """Return the channels to listen to. Other queues are polled."""
        return list(self._channels)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """Deliver the new documents of a queue."""
        self._expect_documents(self._channels[channel.decode()])

    def recheck(self) -> None:
        """Read all queues: a message may have been missed while the connection was down."""
        for keys in self._queues.values():
            self._expect_documents(keys)

    def get_counts(self) -> dict[str, tuple[int, int]]:
        """Return how many documents this process has delivered to each sink, and how many it has dead-lettered."""
        return {delivery.name: (delivery.written, delivery.dead_lettered) for delivery in self._deliveries}

    def get_waiting_counts(self) -> dict[str, int]:
        """Return how many documents waited for each sink, in all Routers, when that was last counted; empty before."""
        return self._waiting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled; then finish the current writes, for a moment."""
        task_status.started()
        if not self._deliveries:
            await trio.sleep_forever()
        try:
            async with trio.open_nursery() as nursery:
                for delivery in self._deliveries:
                    nursery.start_soon(delivery.run)
                while True:
                    try:
                        await self._find_queues()
                        await self._count_waiting()
                    except BrokerError as error:
                        self._outages.record_error(error)
                        await self._find_reachable_queues()
                    else:
                        self._outages.record_recovery()
                    self.recheck()
                    await trio.sleep(POLL_INTERVAL)
        finally:
            with trio.move_on_after(STOP_LIMIT, shield=True):
                async with trio.open_nursery() as nursery:
                    for delivery in self._deliveries:
                        nursery.start_soon(delivery.close)

    async def _find_queues(self) -> None:
        names = await self._redis.perform(queues.list_queues(self._keys))
        if trio.current_time() > self._declared_at + REDECLARE_INTERVAL:
            self._queues.clear()
            self._declared_at = trio.current_time()
        new = [self._keys.for_queue(name) for name in names if name not in self._queues]
        if self._recipients and new:
            await self._redis.perform_all(
                [events_calls.declare_recipients(keys, self._recipients) for keys in new]
            )
        self._queues |= {keys.queue: keys for keys in new}

    async def _find_reachable_queues(self) -> None:
        """Add the queues of `queue_names` whose brokers are reachable, while another broker is not."""
        for keys in self._channels.values():
            if keys.queue not in self._queues:
                with suppress(BrokerError):
                    await self._redis.perform(events_calls.declare_recipients(keys, self._recipients))
                    self._queues[keys.queue] = keys

    async def _count_waiting(self) -> None:
        queue_keys = list(self._queues.values())
        names = [delivery.name for delivery in self._deliveries for _ in queue_keys]
        calls = [
            events_calls.count_documents(keys, delivery.name)
            for delivery in self._deliveries
            for keys in queue_keys
        ]
        counts = await self._redis.perform_all(calls) if calls else []
        waiting = {delivery.name: 0 for delivery in self._deliveries}
        for name, count in zip(names, counts, strict=True):
            waiting[name] += count
        self._waiting = waiting

    def _expect_documents(self, keys: QueueKeys) -> None:
        for delivery in self._deliveries:
            delivery.expect(keys, trio.current_time())


class _OneSinkDelivery:
    """Delivers documents to one sink."""

    def __init__(
        self,
        redis: AsyncDriver,
        options: SinkOptions,
        message_limit: int,
        log: Log,
        asyncio_runner: AsyncioRunner,
        kind: FunctionKind,
    ) -> None:
        self._asyncio_runner = asyncio_runner
        self._kind = kind
        self.name = options.name
        self.written = self.dead_lettered = 0
        self._redis = redis
        self._options = options
        self._message_limit = message_limit
        self._log = log
        self._outages = OutageLog(log, "sink:interrupted", "sink:resumed", sink=options.name)
        self._pacing = DeliveryPacing.start(options.batch)
        self._due: dict[str, float] = {}
        self._keys: dict[str, QueueKeys] = {}
        self._due_changed = trio.Event()
        self._thread: trio.CapacityLimiter | None = None

    def expect(self, keys: QueueKeys, when: float) -> None:
        """Look for documents of a queue at the time `when`."""
        self._keys[keys.queue] = keys
        if when < self._due.get(keys.queue, math.inf):
            self._due[keys.queue] = when
            self._due_changed.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._due_changed.wait()
            self._due_changed = trio.Event()
            for queue, due in list(self._due.items()):
                if due <= trio.current_time():
                    try:
                        await self._deliver_from(self._keys[queue])
                    except BrokerError as error:
                        self._outages.record_error(error)
                        self.expect(self._keys[queue], trio.current_time() + RETRY_INTERVAL)
                        await trio.sleep(RETRY_INTERVAL)
                    else:
                        self._outages.record_recovery()

    async def close(self) -> None:
        """Close the sink, if it can be closed: it opens again when another Router in this process needs it."""
        try:
            close = getattr(self._options.sink, "close", None)
            if not callable(close):
                return
            if self._kind == "asyncio" and inspect.iscoroutinefunction(close):
                await self._asyncio_runner.call(close)
            elif inspect.iscoroutinefunction(close):
                await call_user_code(close)
            else:
                await call_in_thread(close)
        except BaseException as error:  # the user's code
            reraise_cancellation(error)
            self._log.event(
                "sink:close-failed", "warning", sink=self.name, why=describe_error(error, MAX_ERROR_LENGTH)
            )

    async def _deliver_from(self, keys: QueueKeys) -> None:
        """Deliver one batch of one queue."""
        self._due.pop(keys.queue, None)
        call = events_calls.claim_documents(
            keys, self.name, max_documents=self._pacing.batch_size, max_bytes=MAX_BATCH_BYTES, lease=LEASE
        )
        claim = await self._redis.perform(call)
        if claim.retry_in is not None:
            self.expect(keys, trio.current_time() + claim.retry_in)
        if claim.documents:
            self.expect(keys, trio.current_time())  # there may be more
            batch = await self._parse(keys, claim.documents)
            if batch:
                await self._deliver(keys, batch)

    async def _parse(self, keys: QueueKeys, claimed: Sequence[ClaimedDocument]) -> "_Batch":
        """Return the documents that can be read; dead-letter the others."""
        batch: _Batch = []
        for document in claimed:
            try:
                batch.append(
                    (document, parse_result_document(keys.queue, document.document, self._message_limit))
                )
            except Corrupt as error:
                await self._dead_letter(keys, document, error)
        return batch

    async def _deliver(self, keys: QueueKeys, batch: "_Batch") -> None:
        # A stop waits for the write, for a moment; otherwise the documents would be delivered again.
        limit, renewing = trio.CancelScope(shield=True), trio.CancelScope(shield=True)
        limit.deadline = trio.current_time() + self._options.timeout + 2 * STOP_LIMIT
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_shorten_on_stop, limit)
            nursery.start_soon(self._renew, keys, [claimed.entry for claimed, _ in batch], renewing)
            with limit:
                with operating("deliver", "sink", self.name, len(batch)) as operation:
                    error = operation.error = await self._write([document for _, document in batch])
                renewing.cancel()
                await self._confirm(keys, batch, error)
            renewing.cancel()
            nursery.cancel_scope.cancel()
        if error is None:
            if self._pacing.failures:
                self._log.event("sink:recovered", sink=self.name, why="it takes documents again")
            self._pacing = self._pacing.after_success()
        else:
            self._pacing = self._pacing.after_failure(len(batch))
            await trio.sleep(self._pacing.get_delay(random.random))

    async def _confirm(self, keys: QueueKeys, batch: "_Batch", error: Exception | None) -> None:
        """Store in Redis what became of a batch. If Redis is unreachable, the batch is delivered again later."""
        try:
            if error is not None:
                await self._handle_failure(keys, batch, error)
                return
            entries = [claimed.entry for claimed, _ in batch]
            await self._redis.perform(events_calls.acknowledge_documents(keys, self.name, entries))
            self.written += len(entries)
        except BrokerError as outage:
            self._log.event(
                "sink:confirm-failed",
                "warning",
                sink=self.name,
                count=len(batch),
                why=str(outage),
                hint=_UNCONFIRMED,
            )
            self.expect(keys, trio.current_time() + LEASE)

    async def _write(self, documents: list[ResultDocument]) -> Exception | None:
        """Write documents to the sink; return what it raised."""
        options = self._options
        try:
            with trio.fail_after(options.timeout):
                if self._kind == "asyncio":
                    await self._asyncio_runner.call(partial(options.sink.write, documents))
                elif self._kind == "trio":
                    await call_user_code(options.sink.write, documents)
                else:
                    # One thread for each sink: one that hangs for ever blocks no other thread.
                    self._thread = self._thread or trio.CapacityLimiter(1)
                    write: Callable[[], Any] = surround_call(partial(options.sink.write, documents), "thread")
                    # Trio raises an error if `write` returns a coroutine.
                    await call_in_thread(write, limiter=self._thread)
        except trio.TooSlowError:
            return TimeoutError(f"it did not end within {options.timeout:g} s")
        except BaseException as error:  # the user's code
            reraise_cancellation(error)
            return error if isinstance(error, Exception) else RuntimeError(describe_error(error))
        return None

    async def _renew(self, keys: QueueKeys, entries: Sequence[str], scope: trio.CancelScope) -> None:
        """Renew the lease of documents while they are written."""
        with scope:
            while True:
                await trio.sleep(LEASE / 3)
                call = events_calls.defer_documents(keys, self.name, entries, delay=LEASE, tried=False)
                try:
                    await self._redis.perform(call)
                except BrokerError as error:
                    self._log.event("sink:interrupted", "debug", sink=self.name, why=str(error))

    async def _handle_failure(self, keys: QueueKeys, batch: "_Batch", error: Exception) -> None:
        (claimed_document, document), policy = batch[0], self._options.retry
        if len(batch) > 1:  # any one of them may be the cause: smaller batches find it
            self._log.event(
                "sink:failed",
                "debug",
                sink=self.name,
                count=len(batch),
                why=describe_error(error, MAX_ERROR_LENGTH),
            )
            entries = [claimed.entry for claimed, _ in batch]
            await self._redis.perform(
                events_calls.defer_documents(keys, self.name, entries, delay=0, tried=False)
            )
        elif policy.allows(claimed_document.tries + 1) and policy.covers(get_class_names(error)):
            delay = policy.delay(claimed_document.tries + 1, random.random)
            self._log.event(
                "sink:failed", "warning", sink=self.name, document=document.id, tries=claimed_document.tries + 1,
                delay=round(delay, 3), why=describe_error(error, MAX_ERROR_LENGTH),
            )  # fmt: skip
            await self._redis.perform(
                events_calls.defer_documents(
                    keys, self.name, [claimed_document.entry], delay=delay, tried=True
                )
            )
        else:
            await self._dead_letter(keys, claimed_document, error)

    async def _dead_letter(self, keys: QueueKeys, document: ClaimedDocument, error: Exception) -> None:
        failure = Failure(
            type=get_type_name(error),
            message=get_error_text(error, MAX_ERROR_LENGTH),
            attempt=document.tries + 1,
        )
        self._log.event(
            "sink:dead-lettered",
            "error",
            sink=self.name,
            queue=keys.queue,
            why=describe_error(error, MAX_ERROR_LENGTH),
            hint=_HINT,
        )
        await self._redis.perform(
            events_calls.dead_letter_document(keys, self.name, document.entry, msgspec.json.encode(failure))
        )
        self.dead_lettered += 1


_Batch = list[tuple[ClaimedDocument, ResultDocument]]


async def _shorten_on_stop(limit: trio.CancelScope) -> None:
    """Shorten the time limit of a write when the Router stops."""
    try:
        await trio.sleep_forever()
    finally:
        limit.deadline = min(limit.deadline, trio.current_time() + STOP_LIMIT)


_UNCONFIRMED = "the sink may have them, and gets them again when Redis is reachable"
_HINT = "it is in the queue's dead-letter queue: celery5 dlq read --sink, and dlq replay when the sink is well again"
