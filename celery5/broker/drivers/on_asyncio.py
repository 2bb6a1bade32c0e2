"""The asyncio driver: performs calls in an asyncio program."""

import asyncio
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar, cast

import msgspec

from celery5.broker.call import Call
from celery5.broker.connection.asyncio_link import AsyncioLink, dial
from celery5.broker.connection.exchange import (
    LARGE,
    ProtocolError,
    ResendAllowed,
    WireRequest,
    exchange_all,
    exchange_each,
    exchange_one,
    may_resend,
    maybe_done,
)
from celery5.broker.connection.handshake import Resp
from celery5.broker.connection.pool import circuit_open, new_breaker
from celery5.broker.connection.sentinel import may_be_elsewhere
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")

GATHERED_CALLS = 100
"""The most calls of several callers that leave in one write."""


class _GatheredCall(msgspec.Struct):
    """A call that waits for a connection, and for its reply or its error; None: nobody knows whether it has run."""

    call: Call[Any]
    reply: "asyncio.Future[_Reply | None]"


class _Reply(msgspec.Struct):
    """What a gathered call has brought."""

    value: Any


class AsyncioRedis:
    """The asyncio driver of one event loop, connecting when it is first used.

    Commands are sent again by the rules of `BlockingRedis`. If a task is cancelled before its reply has come, the
    connection is closed, so that the next task does not get that reply.

    While all connections are busy, small calls that may be repeated are gathered and leave in one write. So a hundred
    tasks that send a job each cost half as much, and one that is alone waits for nobody.
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
        self._slots = asyncio.Semaphore(max_connections)
        self._free: list[AsyncioLink] = []
        self._breaker = new_breaker(timing)
        self._closed = False
        self._gathered: deque[_GatheredCall] = deque()
        self._gatherer: asyncio.Task[None] | None = None

    async def perform(self, call: Call[T]) -> T:
        """Perform one call and return its decoded reply. Raises BrokerError."""
        may_have_run = False
        if self._slots.locked() and _may_be_gathered(call):
            reply = await self._gather(call)
            if reply is not None:
                if isinstance(reply.value, BrokerError):
                    raise reply.value
                return cast("T", reply.value)
            may_have_run = True
        exchange = exchange_one(call, reply_within=self.timing.reply, where=self._where)
        return await self._drive(exchange, maybe_done_before=may_have_run)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls in one write and return their decoded replies in order.

        They are no transaction: if some are refused, the others have run all the same. The first error is raised.
        """
        if not calls:
            return []
        return await self._drive(exchange_all(calls, reply_within=self.timing.reply, where=self._where))

    async def perform_each(self, calls: Sequence[Call[T]]) -> list[T | BrokerError]:
        """Perform several calls in one write; return the decoded reply of each, or its error."""
        return await self._drive(exchange_each(calls, reply_within=self.timing.reply, where=self._where))

    def close(self) -> None:
        """Close the connections: idle ones now, the rest when their commands are done."""
        self._closed = True
        self._drop_idle()

    async def aclose(self) -> None:
        """Close the connections as `close`, and wait until the idle ones are gone."""
        self.close()
        # One turn of the loop, for the transports to close.
        await asyncio.sleep(0)

    async def dial(self, *, resp: Resp = 2, within: float | None = None) -> AsyncioLink:
        """Open a connection that does not belong to the pool.

        Args:
            resp: The protocol version.
            within: Seconds, if less than `timing.connect`.

        Raises:
            CircuitOpen: Too many attempts in a row have failed.
            BrokerError: As `asyncio_link.dial`.
        """
        if not self._breaker.is_allowed(time.monotonic()):
            raise circuit_open(self.endpoint, self.timing)
        self._breaker = self._breaker.with_probe(time.monotonic())
        timing = self.timing
        if within is not None and within < timing.connect:
            timing = msgspec.structs.replace(timing, connect=max(within, 0.01))
        try:
            link = await dial(self.endpoint, timing, resp=resp)
        except BrokerUnavailable:
            self._breaker = self._breaker.after_failure(time.monotonic())
            raise
        except BrokerError:
            # Refused is not unreachable: there was a reply.
            self._breaker = self._breaker.after_success()
            raise
        except BaseException:
            self._breaker = self._breaker.after_cancelled_probe(time.monotonic())
            raise
        self._breaker = self._breaker.after_success()
        return link

    async def _gather(self, call: Call[Any]) -> _Reply | None:
        """Have a call sent with others, and return what it has brought."""
        gathered = _GatheredCall(call, asyncio.get_running_loop().create_future())
        self._gathered.append(gathered)
        if self._gatherer is None:
            # A task of its own: no caller that is cancelled takes the replies of others with it.
            self._gatherer = asyncio.create_task(self._send_gathered())
        return await gathered.reply

    async def _send_gathered(self) -> None:
        """Send what is gathered until nothing is left."""
        batch: list[_GatheredCall] = []
        try:
            while self._gathered:
                batch = [self._gathered.popleft() for _ in range(min(GATHERED_CALLS, len(self._gathered)))]
                calls = [gathered.call for gathered in batch]
                exchange = exchange_each(calls, reply_within=self.timing.reply, where=self._where)
                try:
                    replies = [_Reply(value) for value in await self._drive(exchange)]
                except BrokerError as error:
                    replies = [_Reply(copy(error)) for _ in batch]  # each caller raises its own
                _answer(batch, replies)
        finally:
            # Somebody has cancelled this task: the callers that are left send by themselves.
            self._gatherer = None
            left = [*batch, *self._gathered]
            self._gathered.clear()
            _answer(left, [None] * len(left))

    async def _drive(
        self, exchange: Generator[WireRequest, list[Any], T], *, maybe_done_before: bool = False
    ) -> T:
        """Perform an exchange. `maybe_done_before`: a failed attempt may have run, so every error has `maybe_done`."""
        request = next(exchange)
        try:
            while True:
                await self._reserve()
                try:
                    raws: list[Any] | None = None
                    try:
                        raws = await self._attempt(self._idle() or await self.dial(), request, last=False)
                    except ResendAllowed as lost:
                        maybe_done_before = maybe_done_before or lost.maybe_done
                    if raws is None:
                        raws = await self._attempt(await self.dial(), request, last=True)
                finally:
                    self._slots.release()
                request = exchange.send(raws)
        except StopIteration as end:
            value: T = end.value
            return value
        except BrokerError as error:
            if maybe_done_before or request.partly_done:
                error.mark_maybe_done()
            if may_be_elsewhere(error, self.endpoint):
                # The master has moved: the next connection may find the new one behind the same name.
                self._drop_idle()
            raise

    async def _reserve(self) -> None:
        """Wait until one more connection may be used, at most as long as for a reply. Raises BrokerUnavailable."""
        if not self._slots.locked():
            await self._slots.acquire()  # at once: no time limit is set up
            return
        try:
            async with asyncio.timeout(self.timing.reply):
                await self._slots.acquire()
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

    async def _attempt(self, link: AsyncioLink, request: WireRequest, *, last: bool) -> list[Any]:
        try:
            await link.send(request.packed, request.timeouts[0])
            raws = [await link.receive(timeout) for timeout in request.timeouts]
        except (OSError, ProtocolError) as error:
            link.close()
            # The loop sends what it can at once, so it is unknown what was sent.
            done = maybe_done(request, sent=True)
            if may_resend(request, sent=True, last=last):
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


def _may_be_gathered(call: Call[Any]) -> bool:
    """Return whether a call may leave with those of others: it does no harm twice, and holds them up in no way."""
    return (
        call.repeatable
        and not call.blocks
        and not any(type(word) is bytes and len(word) >= LARGE for word in call.words)
    )


def _answer(calls: Iterable[_GatheredCall], replies: Iterable[_Reply | None]) -> None:
    """Give callers their replies, but for those that have been cancelled."""
    for gathered, reply in zip(calls, replies, strict=True):
        if not gathered.reply.done():
            gathered.reply.set_result(reply)
