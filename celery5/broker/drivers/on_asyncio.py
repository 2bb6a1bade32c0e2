"""On asyncio: performs calls in an asyncio program, on redis-py's connections."""

import asyncio
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from celery5.broker.call import Call
from celery5.broker.connection.asyncio_link import AsyncioLink, dial
from celery5.broker.connection.exchange import (
    ProtocolError,
    ResendAllowed,
    WireRequest,
    exchange_all,
    exchange_one,
    may_resend,
    maybe_done,
)
from celery5.broker.connection.handshake import Resp
from celery5.broker.connection.pool import circuit_open, new_breaker
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError, BrokerReadOnly, BrokerUnavailable

T = TypeVar("T")


class AsyncioRedis:
    """The asyncio driver of one event loop, connecting when it is first used.

    `endpoint`: where the broker is. `timing`: every limit in seconds. `connections`: how many at most.

    The rules are those of `BlockingRedis`. A task that is cancelled while its command is on its way leaves no
    reply behind for the next one: its connection is closed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
        max_connections: int = 10,
    ) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self._where = endpoint.masked_url
        self._limit = max_connections
        self._room = asyncio.Semaphore(max_connections)
        self._free: list[AsyncioLink] = []
        self._breaker = new_breaker(timing)
        self._closed = False

    async def perform(self, call: Call[T]) -> T:
        """Make one trip and read its answer."""
        return await self._drive(exchange_one(call, reply_within=self.timing.reply, where=self._where))

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Make many trips as one: a single write, then all the replies, in order.

        They are not one transaction. When some are refused the rest has run all the same, and the first
        refusal is raised.
        """
        if not calls:
            return []
        return await self._drive(exchange_all(calls, reply_within=self.timing.reply, where=self._where))

    async def aclose(self) -> None:
        """Close the connections: idle ones now, the rest when their commands are done."""
        self._closed = True
        self._drop_idle()
        # Once round the loop, for the transports to close.
        await asyncio.sleep(0)

    async def dial(self, *, resp: Resp = 2, within: float | None = None) -> AsyncioLink:
        """A new connection, outside of the pool, in at most `within` seconds where that is less than the usual time.

        Raises `CircuitOpen` at once after too many failures in a row; else what `asyncio_link.dial` does.
        """
        if not self._breaker.is_allowed(time.monotonic()):
            raise circuit_open(self.endpoint, self.timing)
        self._breaker = self._breaker.with_probe(time.monotonic())
        timing = self.timing
        if within is not None and within < timing.connect:
            timing = replace(timing, connect=max(within, 0.01))
        try:
            link = await dial(self.endpoint, timing, resp=resp)
        except BrokerUnavailable:
            self._breaker = self._breaker.after_failure(time.monotonic())
            raise
        except BrokerError:
            # Refused is not away: somebody answered.
            self._breaker = self._breaker.after_success()
            raise
        except BaseException:
            self._breaker = self._breaker.after_cancelled_probe(time.monotonic())
            raise
        self._breaker = self._breaker.after_success()
        return link

    async def _drive(self, steps: Generator[WireRequest, list[Any], T]) -> T:
        trip = next(steps)
        # Whether an attempt was lost that may have run: then every later error has `maybe_done`.
        maybe_done_before = False
        try:
            while True:
                await self._reserve()
                try:
                    raws: list[Any] | None = None
                    try:
                        raws = await self._attempt(self._idle() or await self.dial(), trip, last=False)
                    except ResendAllowed as lost:
                        maybe_done_before = maybe_done_before or lost.maybe_done
                    if raws is None:
                        raws = await self._attempt(await self.dial(), trip, last=True)
                finally:
                    self._room.release()
                trip = steps.send(raws)
        except StopIteration as end:
            value: T = end.value
            return value
        except BrokerError as error:
            if maybe_done_before or trip.partly_done:
                error.mark_maybe_done()
            if isinstance(error, BrokerReadOnly):
                # The master has moved: the next connection may find the new one behind the same name.
                self._drop_idle()
            raise

    async def _reserve(self) -> None:
        """Wait until one more connection may be used, at most as long as for a reply. Raises BrokerUnavailable."""
        try:
            async with asyncio.timeout(self.timing.reply):
                await self._room.acquire()
        except TimeoutError:
            raise BrokerUnavailable(
                f"all {self._limit} connections to broker {self._where} were busy for {self.timing.reply:g} s"
            ) from None

    def _idle(self) -> AsyncioLink | None:
        while self._free:
            link = self._free.pop()
            if link.is_usable():
                return link
            link.close()
        return None

    async def _attempt(self, link: AsyncioLink, trip: WireRequest, *, last: bool) -> list[Any]:
        try:
            await link.send(trip.packed, trip.timeouts[0])
            raws = [await link.receive(timeout) for timeout in trip.timeouts]
        except (OSError, ProtocolError) as error:
            link.close()
            # The loop sends what it can at once, so nobody knows what has left.
            done = maybe_done(trip, sent=True)
            if may_resend(trip, sent=True, last=last):
                raise ResendAllowed(maybe_done=done) from error
            raise translate_error(error, maybe_done=done, where=self._where) from error
        except BaseException:
            # Cancelled between request and reply: the next user of the link would get our reply.
            link.close()
            raise
        if self._closed:
            link.close()
        else:
            self._free.append(link)
        return raws

    def _drop_idle(self) -> None:
        while self._free:
            self._free.pop().close()
