"""Wait for result documents on asyncio: one task reads the connection for all, while there are waits."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from celery5.broker.connection.asyncio_link import AsyncioLink
from celery5.broker.connection.exchange import ProtocolError, ReplyError
from celery5.broker.driver import StopCondition
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Outage
from celery5.broker.translate import translate_error
from celery5.broker.waiting.result_waits import (
    ResultWait,
    ResultWaitProtocol,
    get_reread_interval,
    read_documents,
)
from celery5.errors import BrokerError, BrokerUnavailable


class AsyncioResultWaiter:
    """Waits for documents in one event loop.

    Args:
        redis: The driver of the loop.
        endpoint: Where the broker is.
    """

    def __init__(self, redis: AsyncioRedis, endpoint: Endpoint) -> None:
        self._redis = redis
        self._timing = redis.timing
        self._where = endpoint.masked_url
        self._protocol = ResultWaitProtocol(by_slot=endpoint.role == "node")
        self._outage = Outage(redis.timing)
        self._link: AsyncioLink | None = None
        self._reader: asyncio.Task[None] | None = None
        self._reply_due = 0.0
        self._reread_due = 0.0

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `BlockingResultWaiter.wait`."""
        if timeout is not None and timeout <= 0:
            return await self._read_once_for(keys)
        finished = asyncio.Event()
        wait = ResultWait(keys, enough=enough, wake=finished.set)
        if wait.finished:
            return wait.found
        if not self._protocol.has_waits:
            self._outage.reset()
        self._protocol.add(wait)
        try:
            self._send_pending()
            if self._reader is None:
                self._reader = asyncio.create_task(self._read_for_all(), name="celery5-results")
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await finished.wait()
        finally:
            self._protocol.remove(wait)
            self._send_pending()
            if not self._protocol.has_waits and self._reader is not None:
                self._reader.cancel()
                self._reader = None
        return wait.get_documents(self._outage.error)

    async def aclose(self) -> None:
        """Close the connection. Waits that have not ended raise BrokerUnavailable."""
        self._protocol.fail(BrokerUnavailable(f"waiting on broker {self._where} was closed"))
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])
        self._drop()
        await asyncio.sleep(0)

    async def _read_once_for(self, keys: Sequence[str]) -> dict[str, bytes]:
        documents: dict[str, bytes] = {}
        for part in self._protocol.split_for_reading(keys):
            part_documents = await self._redis.perform(read_documents(part))
            documents |= part_documents
        return documents

    async def _read_for_all(self) -> None:
        """Read until the last wait ends, which cancels this task."""
        try:
            while True:
                if self._link is None:
                    await self._connect()
                else:
                    await self._read_once(self._link)
        except Exception as error:
            self._drop()
            self._protocol.fail(error)

    async def _connect(self) -> None:
        try:
            self._link = await self._redis.dial(resp=3)
        except BrokerError as error:
            if self._outage.record_failure(error, time.monotonic()):
                self._protocol.fail(error)
                self._outage.reset()
            await asyncio.sleep(self._outage.next_pause())
            return
        self._outage.reset()
        greeting = self._link.greeting
        self._protocol.reset(has_sharded_channels=greeting is not None and greeting.has_sharded_channels)
        self._reread_due = time.monotonic() + get_reread_interval(self._timing)
        self._send_pending()

    async def _read_once(self, link: AsyncioLink) -> None:
        next_deadline = (
            min(self._reread_due, self._reply_due) if self._protocol.is_reply_due else self._reread_due
        )
        try:
            frames = await link.receive_frames(max(0.0, next_deadline - time.monotonic()))
            self._protocol.receive(frames)
            now = time.monotonic()
            if self._protocol.is_reply_due and now >= self._reply_due:
                raise TimeoutError
        except (OSError, ProtocolError, ReplyError) as error:
            self._handle_loss(error)
            return
        if now >= self._reread_due:
            self._reread_due = now + get_reread_interval(self._timing)
            self._protocol.recheck()
        self._send_pending()

    def _send_pending(self) -> None:
        if self._link is None:
            return
        was_reply_due = self._protocol.is_reply_due
        data = self._protocol.data_to_send()
        if data:
            self._link.write(data)
        if self._protocol.is_reply_due and not was_reply_due:
            self._reply_due = time.monotonic() + self._timing.reply

    def _handle_loss(self, error: Exception) -> None:
        self._drop()
        translation = translate_error(error, maybe_done=False, where=self._where)
        if not isinstance(translation, BrokerUnavailable):
            self._protocol.fail(translation)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
