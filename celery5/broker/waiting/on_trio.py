"""Waiting, Trio: tasks wait for documents: one connection listens for all, and the driver's own reads."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TypeVar

import trio

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError, pack_commands
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Outage, Timing
from celery5.broker.translate import translate_reply
from celery5.broker.waiting.conversation import (
    READ_AT_ONCE,
    SUBSCRIBE_AT_ONCE,
    get_reread_interval,
    read_documents,
)
from celery5.broker.waiting.waits import ResultWait, ResultWaits, StopCondition
from celery5.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")
Key = TypeVar("Key", str, bytes)

# Channels are left a little late and many at a time: one who waits for one result after the other pays
# nothing for it.
UNSUBSCRIBE_DELAY = 0.05


class _Ear(PushRedis):
    """A listening connection that can read, too: RESP3 lets a subscriber do both."""

    async def subscribe_and_read(
        self, channels: Sequence[bytes], keys: Sequence[bytes]
    ) -> list[bytes | None]:
        """Subscribe, then read, in one write: half the time of one after the other.

        Only for one who has been allowed both: a refusal to read would look like no answer at all, since a refusal to
        subscribe is a reply too many.
        """
        commands: list[tuple[Word, ...]] = [("SUBSCRIBE", *channels), ("MGET", *keys)]
        ticket = PendingRequest(pack_commands(commands), self._link.deadline(), repeatable=False)
        ticket.allow_error_replies()
        try:
            await self._link.perform(ticket)
        except BrokerUnavailable:
            self._channels.update(channels)
            raise
        documents: list[bytes | None] = []
        for reply in ticket.replies or ():
            if type(reply) is ReplyError:
                raise translate_reply(str(reply), where=self._where)
            documents = reply
        self._channels.update(channels)
        return documents


class TrioResultWaiter:
    """Waits for documents in one Trio run; works while `run` runs.

    `redis`: what reads. `endpoint`: where the listening connection goes.
    """

    def __init__(
        self,
        redis: AsyncDriver,
        endpoint: Endpoint,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
    ) -> None:
        self.redis = redis
        self._timing = timing
        self._where = endpoint.masked_url
        self._push = _Ear(
            endpoint=endpoint,
            on_message=self._hear,
            on_connected=self._look_again,
            timing=timing,
            name="celery5-results",
        )
        self._waiting = ResultWaits()
        self._bells: dict[ResultWait, trio.Event] = {}
        self._subscribed: set[bytes] = set()
        self._allowed = False
        self._stale: dict[bytes, None] = {}
        self._untidy = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Raises as `PushRedis.run` does, after telling everybody who waits."""
        failure: BrokerError | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_tidy)
                try:
                    await self._push.run(task_status=task_status)
                except BrokerError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            end = failure or BrokerUnavailable(f"waiting on broker {self._where} was closed")
            self._waiting.fail(end)
        if failure is not None:
            raise failure

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """What has arrived of the documents under `keys`; as `BlockingResults.wait`."""
        wait = ResultWait(keys, enough=enough, wake=lambda: self._bells[wait].set())
        if wait.finished:
            return wait.found
        if timeout is not None and timeout <= 0:
            return await self._look(list(wait.missing.values()))
        outage = Outage(self._timing)
        self._bells[wait] = trio.Event()
        self._waiting.add(wait)
        try:
            with trio.move_on_after(inf if timeout is None else timeout):
                await self._until_finished(wait, outage)
        finally:
            self._abandon(self._waiting.remove(wait))
            del self._bells[wait]
        return wait.get_documents(outage.error or self._away())

    async def _until_finished(self, wait: ResultWait, outage: Outage) -> None:
        while not wait.finished:
            # Made before looking: a bell that rings meanwhile counts.
            bell = self._bells[wait] = trio.Event()
            patience = get_reread_interval(self._timing)
            try:
                await self._subscribe_and_read(wait)
                outage.reset()
            except BrokerError as error:
                self._allowed = False
                if outage.record_failure(error, trio.current_time()):
                    raise
                patience = outage.next_pause()
            if not wait.finished:
                with trio.move_on_after(patience):
                    await bell.wait()

    async def _subscribe_and_read(self, wait: ResultWait) -> None:
        keys = list(wait.missing)
        new = [key for key in keys if key not in self._subscribed]
        for key in new:
            self._stale.pop(key, None)
        if self._allowed and new and len(keys) <= READ_AT_ONCE:
            documents = await self._push.subscribe_and_read(new, keys)
            self._listening_to(new)
            for key, document in zip(keys, documents, strict=True):
                if document is not None:
                    self._hear(key, document)
            return
        for some in _chunks(new, SUBSCRIBE_AT_ONCE):
            await self._push.subscribe(*some)
            self._listening_to(some)
        await self._read(wait)
        self._allowed = True

    def _listening_to(self, keys: Sequence[bytes]) -> None:
        self._subscribed.update(keys)
        # Whoever wanted them may be gone by now.
        self._abandon([key for key in keys if key not in self._waiting])

    async def _read(self, wait: ResultWait) -> None:
        for some in _chunks(list(wait.missing.values()), READ_AT_ONCE):
            for key, document in (await self.redis.perform(read_documents(some))).items():
                self._hear(key.encode(), document)
            if wait.finished:
                return

    async def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for some in _chunks(keys, READ_AT_ONCE):
            documents = await self.redis.perform(read_documents(some))
            found |= documents
        return found

    def _hear(self, key: bytes, document: bytes) -> None:
        if self._waiting.add_document(key, document):
            self._abandon([key])
            self._waiting.wake_finished()

    def _away(self) -> BrokerUnavailable | None:
        if self._push.connected:
            return None
        return BrokerUnavailable(f"broker {self._where} cannot be reached: the connection was lost")

    def _look_again(self) -> None:
        """There is a new connection: what was announced meanwhile was not heard."""
        for bell in self._bells.values():
            bell.set()

    def _abandon(self, keys: Sequence[bytes]) -> None:
        """Nobody waits for these any more."""
        if keys:
            self._stale.update(dict.fromkeys(keys))
            self._untidy.set()

    async def _keep_tidy(self) -> None:
        """Leave the channels that nobody listens to."""
        while True:
            await self._untidy.wait()
            await trio.sleep(UNSUBSCRIBE_DELAY)
            self._untidy = trio.Event()
            stale = [key for key in self._stale if key not in self._waiting]
            self._stale = {}
            self._subscribed.difference_update(stale)
            for some in _chunks(stale, SUBSCRIBE_AT_ONCE):
                await self._push.unsubscribe(*some)


def _chunks(keys: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size]
