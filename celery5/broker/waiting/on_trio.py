"""Wait for result documents on Trio: one connection listens for all tasks, and the driver reads."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import TypeVar

import trio

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError, pack_commands
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import StopCondition
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_push
from celery5.broker.timing import Outage, Timing
from celery5.broker.translate import translate_reply
from celery5.broker.waiting.result_waits import (
    READ_AT_ONCE,
    SUBSCRIBE_AT_ONCE,
    ResultWait,
    ResultWaits,
    get_reread_interval,
    read_documents,
)
from celery5.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")
Key = TypeVar("Key", str, bytes)
P = TypeVar("P", bound=PushRedis)

# Seconds. Channels are unsubscribed late and many at a time, which costs nothing when a task waits for one result after
# the previous one.
UNSUBSCRIBE_DELAY = 0.05


class _PushConnection(PushRedis):
    """A listening connection that also reads, which RESP3 allows a subscriber."""

    async def subscribe_and_read(
        self, channels: Sequence[bytes], keys: Sequence[bytes]
    ) -> list[bytes | None]:
        """Subscribe and then read, in one write, which takes half the time of two.

        Only for a user whose permission for both commands is known: SUBSCRIBE has no reply in RESP3, so an error
        from it is an extra reply, which would be taken for the reply to MGET.
        """
        commands: list[tuple[Word, ...]] = [("SUBSCRIBE", *channels), ("MGET", *keys)]
        request = PendingRequest(pack_commands(commands), self._link.deadline(), repeatable=False)
        request.allow_error_replies()
        try:
            await self._link.perform(request)
        except BrokerUnavailable:
            self._channels.update(channels)
            raise
        documents: list[bytes | None] = []
        for reply in request.replies or ():
            if type(reply) is ReplyError:
                raise translate_reply(str(reply), where=self._where)
            documents = reply
        self._channels.update(channels)
        return documents


class TrioResultWaiter:
    """Waits for documents in one Trio run, as long as `run` runs.

    Args:
        redis: The driver that reads documents. The listening connection is to its broker.
    """

    def __init__(
        self,
        redis: TrioRedis,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
    ) -> None:
        self.redis = redis
        self._timing = timing
        self._where = redis.endpoint.masked_url
        # A node of a cluster does not have the documents of all slots: there the driver reads them.
        is_cluster = redis.endpoint.topology == "cluster"
        self._reader = None if is_cluster else self._open(partial(_PushConnection, endpoint=redis.endpoint))
        self._push = self._reader or self._open(partial(open_push, control=redis))
        self._waiting = ResultWaits()
        self._wake_events: dict[ResultWait, trio.Event] = {}
        self._subscribed: set[bytes] = set()
        self._allowed = False
        self._stale: dict[bytes, None] = {}
        self._cleanup_due = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Raises like `PushRedis.run`, after all waits have failed."""
        failure: BrokerError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._unsubscribe_stale)
                try:
                    await self._push.run(task_status=task_status)
                except BrokerError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            error_for_waits = failure or BrokerUnavailable(f"waiting on broker {self._where} was closed")
            self._waiting.fail(error_for_waits)
        if failure is not None:
            raise failure

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `BlockingResultWaiter.wait`."""
        wait = ResultWait(keys, enough=enough, wake=lambda: self._wake_events[wait].set())
        if wait.finished:
            return wait.found
        if timeout is not None and timeout <= 0:
            return await self._read_once_for(list(wait.missing.values()))
        outage = Outage(self._timing)
        self._wake_events[wait] = trio.Event()
        self._waiting.add(wait)
        try:
            with trio.move_on_after(inf if timeout is None else timeout):
                await self._until_finished(wait, outage)
        finally:
            self._mark_stale(self._waiting.remove(wait))
            del self._wake_events[wait]
        return wait.get_documents(outage.error or self._make_unavailable())

    def _open(self, make: Callable[..., P]) -> P:
        return make(
            on_message=self._add_document,
            on_connected=self._wake_all,
            timing=self._timing,
            name="celery5-results",
        )

    async def _until_finished(self, wait: ResultWait, outage: Outage) -> None:
        while not wait.finished:
            # Made before reading, so that an event counts that is set during the read.
            wake_event = self._wake_events[wait] = trio.Event()
            pause = get_reread_interval(self._timing)
            try:
                await self._subscribe_and_read(wait)
                outage.reset()
            except BrokerError as error:
                self._allowed = False
                if outage.record_failure(error, trio.current_time()):
                    raise
                pause = outage.next_pause()
            if not wait.finished:
                with trio.move_on_after(pause):
                    await wake_event.wait()

    async def _subscribe_and_read(self, wait: ResultWait) -> None:
        keys = list(wait.missing)
        new = [key for key in keys if key not in self._subscribed]
        for key in new:
            self._stale.pop(key, None)
        if self._reader is not None and self._allowed and new and len(keys) <= READ_AT_ONCE:
            documents = await self._reader.subscribe_and_read(new, keys)
            self._mark_subscribed(new)
            for key, document in zip(keys, documents, strict=True):
                if document is not None:
                    self._add_document(key, document)
            return
        for chunk in _chunks(new, SUBSCRIBE_AT_ONCE):
            await self._push.subscribe(*chunk)
            self._mark_subscribed(chunk)
        await self._read(wait)
        self._allowed = True

    def _mark_subscribed(self, keys: Sequence[bytes]) -> None:
        self._subscribed.update(keys)
        # The waits for them may have ended.
        self._mark_stale([key for key in keys if key not in self._waiting])

    async def _read(self, wait: ResultWait) -> None:
        for chunk in _chunks(list(wait.missing.values()), READ_AT_ONCE):
            for key, document in (await self.redis.perform(read_documents(chunk))).items():
                self._add_document(key.encode(), document)
            if wait.finished:
                return

    async def _read_once_for(self, keys: Sequence[str]) -> dict[str, bytes]:
        documents: dict[str, bytes] = {}
        for chunk in _chunks(keys, READ_AT_ONCE):
            part = await self.redis.perform(read_documents(chunk))
            documents |= part
        return documents

    def _add_document(self, key: bytes, document: bytes) -> None:
        if self._waiting.add_document(key, document):
            self._mark_stale([key])
            self._waiting.wake_finished()

    def _make_unavailable(self) -> BrokerUnavailable | None:
        if self._push.connected:
            return None
        return BrokerUnavailable(f"broker {self._where} cannot be reached: the connection was lost")

    def _wake_all(self) -> None:
        """Wake all tasks to read again after a reconnection: announcements were missed meanwhile."""
        for wake_event in self._wake_events.values():
            wake_event.set()

    def _mark_stale(self, keys: Sequence[bytes]) -> None:
        """Schedule these keys, which no task waits for, to be unsubscribed."""
        if keys:
            self._stale.update(dict.fromkeys(keys))
            self._cleanup_due.set()

    async def _unsubscribe_stale(self) -> None:
        """Unsubscribe from channels that no task waits for."""
        while True:
            await self._cleanup_due.wait()
            await trio.sleep(UNSUBSCRIBE_DELAY)
            self._cleanup_due = trio.Event()
            stale = [key for key in self._stale if key not in self._waiting]
            self._stale = {}
            self._subscribed.difference_update(stale)
            for chunk in _chunks(stale, SUBSCRIBE_AT_ONCE):
                await self._push.unsubscribe(*chunk)


def _chunks(keys: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
