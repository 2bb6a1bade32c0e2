"""Sink Delivery: gives Data Sinks the documents of results, each sink by itself.

Each sink has a task of its own here, its own documents in Redis and its own retries, so one that fails or
hangs holds
up no other. A Router has documents for a while, which it renews while they are being written: when it dies, another
takes them. So a sink is given each at least once.
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
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.names import get_class_names
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_error_text
from celery5.results.sinks import SinkOptions
from celery5.services.process.broker_outages import OutageLog

LEASE = 5.0
"""Seconds for which a Router has documents; while they are being written it renews that three times in each."""
POLL = 5.0
"""Seconds between looks at all queues: what was announced while the connection was down, nobody has heard."""
ROOM = 4 * 1024 * 1024
"""Bytes of documents taken at once, unless one alone has more."""
RETRY_DELAY = 0.5
"""Seconds between attempts while AsyncDriver is away."""
SAY_AGAIN = 86400.0
"""Seconds until AsyncDriver is told again which sinks take what, which it remembers for longer."""
STOP_LIMIT = 5.0
"""Seconds that a write may go on, and that is told of, when this stops."""


class SinkDelivery:
    """Gives each of `outlets` its documents, from whatever queue of the application they come; of those in
    `queue_names` it is told at once. `takers` says which take the documents of which tasks, as `all_takers` does."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        sink_options: Sequence[SinkOptions],
        recipients: Mapping[str, str],
        queue_names: Sequence[str],
        message_limit: int,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._takers = recipients
        self._waits = OutageLog(log, "sink:interrupted", "sink:resumed")
        self._queues: dict[str, QueueKeys] = {}
        self._said = -math.inf
        self._waiting: dict[str, int] = {}
        self._channels = (
            {keys.for_queue(name).documents: keys.for_queue(name) for name in queue_names}
            if sink_options
            else {}
        )
        self._flows = [_Outflow(redis, each, message_limit, log) for each in sink_options]

    @property
    def channels(self) -> list[str]:
        """The channels to listen to. Other queues are looked at now and then."""
        return list(self._channels)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """There are new documents."""
        self._look(self._channels[channel.decode()])

    def recheck(self) -> None:
        """The listening connection was made anew: something may have been missed."""
        for keys in self._queues.values():
            self._look(keys)

    def get_counts(self) -> dict[str, tuple[int, int]]:
        """How many documents this process has given to each sink, and how many it has buried."""
        return {flow.name: (flow.written, flow.buried) for flow in self._flows}

    def get_waiting_counts(self) -> dict[str, int]:
        """How many documents each sink had not got yet when all queues were looked at last, whichever Router has them;
        for as long as there was no look, none is told of."""
        return self._waiting

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled; then what is being written is finished, for a moment."""
        task_status.started()
        if not self._flows:
            await trio.sleep_forever()
        try:
            async with trio.open_nursery() as nursery:
                for flow in self._flows:
                    nursery.start_soon(flow.run)
                while True:
                    try:
                        await self._find_queues()
                        await self._count()
                    except BrokerError as error:
                        self._waits.record_error(error)
                        await self._find_some()
                    else:
                        self._waits.record_recovery()
                    self.recheck()
                    await trio.sleep(POLL)
        finally:
            with trio.move_on_after(STOP_LIMIT, shield=True):
                async with trio.open_nursery() as nursery:
                    for flow in self._flows:
                        nursery.start_soon(flow.close)

    async def _find_queues(self) -> None:
        found = await self._redis.perform(queues.list_queues(self._keys))
        if trio.current_time() > self._said + SAY_AGAIN:
            self._queues.clear()
            self._said = trio.current_time()
        new = [self._keys.for_queue(name) for name in found if name not in self._queues]
        if self._takers and new:
            await self._redis.perform_all(
                [events_calls.declare_recipients(keys, self._takers) for keys in new]
            )
        self._queues |= {keys.queue: keys for keys in new}

    async def _find_some(self) -> None:
        """One broker is away: at least the queues that tasks name are found where the others are."""
        for keys in self._channels.values():
            if keys.queue not in self._queues:
                with suppress(BrokerError):
                    await self._redis.perform(events_calls.declare_recipients(keys, self._takers))
                    self._queues[keys.queue] = keys

    async def _count(self) -> None:
        asked = [(flow.name, keys) for flow in self._flows for keys in self._queues.values()]
        found = dict.fromkeys([flow.name for flow in self._flows], 0)
        counts = [events_calls.count_documents(keys, name) for name, keys in asked]
        for (name, _), number in zip(
            asked, await self._redis.perform_all(counts) if counts else [], strict=True
        ):
            found[name] += number
        self._waiting = found

    def _look(self, keys: QueueKeys) -> None:
        for flow in self._flows:
            flow.expect(keys, trio.current_time())


class _Outflow:
    """What goes to one sink."""

    def __init__(self, redis: AsyncDriver, outlet: SinkOptions, message_limit: int, log: Log) -> None:
        self.name = outlet.name
        self.written = self.buried = 0
        self._redis = redis
        self._outlet = outlet
        self._message_limit = message_limit
        self._log = log
        self._waits = OutageLog(log, "sink:interrupted", "sink:resumed", sink=outlet.name)
        self._flow = DeliveryPacing.start(outlet.batch)
        self._due: dict[str, float] = {}
        self._keys: dict[str, QueueKeys] = {}
        self._news = trio.Event()
        self._thread: trio.CapacityLimiter | None = None

    def expect(self, keys: QueueKeys, when: float) -> None:
        """There are documents of that queue to be looked for then."""
        self._keys[keys.queue] = keys
        if when < self._due.get(keys.queue, math.inf):
            self._due[keys.queue] = when
            self._news.set()

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._news.wait()
            self._news = trio.Event()
            for queue, due in list(self._due.items()):
                if due <= trio.current_time():
                    try:
                        await self._take_from(self._keys[queue])
                    except BrokerError as error:
                        # Not retry_until_available: one queue's broker may be unreachable while another's is not.
                        self._waits.record_error(error)
                        self.expect(self._keys[queue], trio.current_time() + RETRY_DELAY)
                        await trio.sleep(RETRY_DELAY)
                    else:
                        self._waits.record_recovery()

    async def close(self) -> None:
        """Close the sink, if it is one that can be closed: it opens again when another Router needs it here."""
        close = getattr(self._outlet.sink, "close", None)
        if not callable(close):
            return
        try:
            if inspect.iscoroutinefunction(close):
                await close()
            else:
                await trio.to_thread.run_sync(close, abandon_on_cancel=True)
        except (Exception, SystemExit) as error:  # the user's code
            self._log.event(
                "sink:close-failed", "warning", sink=self.name, why=describe_error(error, MAX_ERROR_LENGTH)
            )

    async def _take_from(self, keys: QueueKeys) -> None:
        """One batch of one queue."""
        self._due.pop(keys.queue, None)
        call = events_calls.claim_documents(
            keys, self.name, max_documents=self._flow.batch_size, max_bytes=ROOM, lease=LEASE
        )
        found = await self._redis.perform(call)
        if found.retry_in is not None:
            self.expect(keys, trio.current_time() + found.retry_in)
        if found.documents:
            self.expect(keys, trio.current_time())  # there may be more
            batch = await self._readable(keys, found.documents)
            if batch:
                await self._deliver(keys, batch)

    async def _readable(self, keys: QueueKeys, taken: Sequence[ClaimedDocument]) -> "_Batch":
        batch: _Batch = []
        for each in taken:
            try:
                batch.append((each, parse_result_document(keys.queue, each.document, self._message_limit)))
            except Corrupt as error:
                await self._bury(keys, each, error)
        return batch

    async def _deliver(self, keys: QueueKeys, batch: "_Batch") -> None:
        # A stop waits for what is being written, for a moment; else it would be written once more.
        limit, renewing = trio.CancelScope(shield=True), trio.CancelScope(shield=True)
        limit.deadline = trio.current_time() + self._outlet.timeout + 2 * STOP_LIMIT
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hurry, limit)
            nursery.start_soon(self._renew, keys, [each.entry for each, _ in batch], renewing)
            with limit:
                error = await self._write([document for _, document in batch])
                renewing.cancel()
                await self._tell(keys, batch, error)
            renewing.cancel()
            nursery.cancel_scope.cancel()
        if error is None:
            if self._flow.failures:
                self._log.event("sink:recovered", sink=self.name, why="it takes documents again")
            self._flow = self._flow.after_success()
        else:
            self._flow = self._flow.after_failure(len(batch))
            await trio.sleep(self._flow.get_delay(random.random))

    async def _tell(self, keys: QueueKeys, batch: "_Batch", error: Exception | None) -> None:
        """What came of a batch. Should AsyncDriver be away, it is tried again when it is back."""
        try:
            if error is not None:
                await self._after_failure(keys, batch, error)
                return
            entries = [each.entry for each, _ in batch]
            await self._redis.perform(events_calls.acknowledge_documents(keys, self.name, entries))
            self.written += len(entries)
        except BrokerError as away:
            self._log.event(
                "sink:confirm-failed",
                "warning",
                sink=self.name,
                count=len(batch),
                why=str(away),
                hint=_UNTOLD,
            )
            self.expect(keys, trio.current_time() + LEASE)

    async def _write(self, given: list[ResultDocument]) -> Exception | None:
        """Have the sink write; gives what it raised."""
        outlet = self._outlet
        try:
            with trio.fail_after(outlet.timeout):
                if outlet.is_async:
                    await outlet.sink.write(given)
                else:
                    # One thread for each sink: one that hangs for ever takes no more than that.
                    self._thread = self._thread or trio.CapacityLimiter(1)
                    write: Callable[[], Any] = partial(outlet.sink.write, given)
                    # Trio refuses a write that nobody awaits.
                    await trio.to_thread.run_sync(write, abandon_on_cancel=True, limiter=self._thread)
        except trio.TooSlowError:
            return TimeoutError(f"it did not end within {outlet.timeout:g} s")
        except (Exception, SystemExit) as error:  # the user's code
            return error if isinstance(error, Exception) else RuntimeError(f"it wanted to exit: {error}")
        return None

    async def _renew(self, keys: QueueKeys, entries: Sequence[str], scope: trio.CancelScope) -> None:
        """They are being written."""
        with scope:
            while True:
                await trio.sleep(LEASE / 3)
                call = events_calls.defer_documents(keys, self.name, entries, delay=LEASE, tried=False)
                try:
                    await self._redis.perform(call)
                except BrokerError as error:
                    self._log.event("sink:interrupted", "debug", sink=self.name, why=str(error))

    async def _after_failure(self, keys: QueueKeys, batch: "_Batch", error: Exception) -> None:
        one, policy = batch[0][0], self._outlet.retry
        if len(batch) > 1:  # one of them is to blame, or none is
            self._log.event(
                "sink:failed",
                "debug",
                sink=self.name,
                count=len(batch),
                why=describe_error(error, MAX_ERROR_LENGTH),
            )
            entries = [each.entry for each, _ in batch]
            await self._redis.perform(
                events_calls.defer_documents(keys, self.name, entries, delay=0, tried=False)
            )
        elif policy.allows(one.tries + 1) and policy.covers(get_class_names(error)):
            delay = policy.delay(one.tries + 1, random.random)
            self._log.event(
                "sink:failed", "warning", sink=self.name, document=batch[0][1].id, tries=one.tries + 1,
                delay=round(delay, 3), why=describe_error(error, MAX_ERROR_LENGTH),
            )  # fmt: skip
            await self._redis.perform(
                events_calls.defer_documents(keys, self.name, [one.entry], delay=delay, tried=True)
            )
        else:
            await self._bury(keys, one, error)

    async def _bury(self, keys: QueueKeys, one: ClaimedDocument, error: Exception) -> None:
        failure = Failure(
            type=type(error).__name__, message=get_error_text(error, MAX_ERROR_LENGTH), attempt=one.tries + 1
        )
        self._log.event(
            "sink:dead-lettered",
            "error",
            sink=self.name,
            queue=keys.queue,
            why=describe_error(error, MAX_ERROR_LENGTH),
            hint=_BURIED,
        )
        await self._redis.perform(
            events_calls.bury_document(keys, self.name, one.entry, msgspec.json.encode(failure))
        )
        self.buried += 1


_Batch = list[tuple[ClaimedDocument, ResultDocument]]


async def _hurry(limit: trio.CancelScope) -> None:
    """When this stops there is little time left."""
    try:
        await trio.sleep_forever()
    finally:
        limit.deadline = min(limit.deadline, trio.current_time() + STOP_LIMIT)


_UNTOLD = "the sink may have them, and is given them again when AsyncDriver is back"
_BURIED = "it is in the queue's dead-letter queue: celery5 dlq read --sink, and dlq replay when the sink is well again"
