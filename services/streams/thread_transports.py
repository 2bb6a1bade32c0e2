"""Connect the feed of a processor that runs in another thread: in an asyncio loop, or as a plain function.

Its records come in portions, and what it has done goes back without waiting. So an exchange between the threads costs
little, although each record is acknowledged as soon as the next one is taken.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import msgspec
import trio

from celery5.broker.calls.streams import RawEntry
from celery5.errors import CeleryError
from celery5.streams.feed import FeedTransport

T = TypeVar("T")

MAX_QUESTIONS = 16
"""Questions that wait: more than one only if the processor has given up waiting for earlier ones."""


class ProcessorCancelled(CeleryError):
    """Raised in a processor that goes on after it was cancelled, when it asks for something."""


class _Done(msgspec.Struct, frozen=True):
    count: int
    outputs: list[bytes]
    state: dict[str, bytes | None]


class _Question(msgspec.Struct, Generic[T], frozen=True):
    """What the processor wants to be done in Trio, and what takes the reply; None when it is cancelled."""

    work: Callable[[], Awaitable[T]]
    reply: Callable[[T | None], None]


class CrossingTransport(ABC):
    """Connects a feed in another thread with its records, which are in Trio: a `FeedTransport`. Make it in Trio.

    Methods are called by the feed, but for `serve` and `close`.

    Args:
        records: Where records come from.
        group: The name of the processor.
        checkpoint: Is called again and again while the function works; for tests in virtual time.
    """

    def __init__(
        self,
        records: FeedTransport,
        *,
        group: str,
        checkpoint: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._records = records
        self._group = group
        self._checkpoint = checkpoint
        self._token = trio.lowlevel.current_trio_token()
        self._send, self._receive = trio.open_memory_channel["_Question[Any]"](MAX_QUESTIONS)
        self._is_closed = False
        # What is done, and goes back. Both threads use it: it is only appended to there, and emptied in Trio.
        self._done: deque[_Done] = deque()
        self._is_reported = False

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        return self._records.is_stopping or self._is_closed

    async def fetch(self, into: deque[RawEntry], most: int, seconds: float | None) -> None:
        """Wait for the next records."""
        await self._ask(partial(self._records.fetch, into, most, seconds))

    async def fetch_batch(self, into: deque[RawEntry], count: int, within: float) -> None:
        """Wait for the next batch."""
        await self._ask(partial(self._records.fetch_batch, into, count, within))

    def settle(self, count: int, outputs: list[bytes], state: dict[str, bytes | None]) -> None:
        """Acknowledge the first records of those that were fetched, with what they have produced."""
        self._done.append(_Done(count, outputs, state))
        if not self._is_reported:
            self._is_reported = True
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_done)

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state. Raises ProcessorCancelled."""
        values = await self._ask(partial(self._records.get_states, names))
        if values is None:
            raise ProcessorCancelled(f"processor {self._group}: it was cancelled, and is to end")
        return values

    async def flush(self) -> None:
        """Wait until the commit of what was settled is under way."""
        await self._ask(self._records.flush)

    # between the threads

    @abstractmethod
    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Have something done in Trio, and return its result; None when the processor is cancelled."""

    def _post(self, work: Callable[[], Awaitable[T]], reply: Callable[[T | None], None]) -> None:
        try:
            self._token.run_sync_soon(self._accept, _Question(work, reply))
        except trio.RunFinishedError:
            reply(None)

    # in Trio

    def _accept(self, question: _Question[Any]) -> None:
        if self._is_closed:
            question.reply(None)
            return
        try:
            self._send.send_nowait(question)
        except trio.WouldBlock:
            question.reply(None)

    async def serve(self) -> None:
        """Answer questions until cancelled."""
        while True:
            question = await self._wait_question()
            result = None
            try:
                self._apply_done()
                result = await question.work()
            finally:
                question.reply(result)

    async def _wait_question(self) -> _Question[Any]:
        if self._checkpoint is None:
            return await self._receive.receive()
        while True:  # virtual time must not pass, while the function works
            with suppress(trio.WouldBlock):
                return self._receive.receive_nowait()
            await self._checkpoint()

    def close(self) -> None:
        """Take over what the function has done. It has ended, or is left to itself from now on."""
        self._apply_done()
        self._is_closed = True
        with suppress(trio.WouldBlock):
            while True:
                self._receive.receive_nowait().reply(None)

    def _apply_done(self) -> None:
        self._is_reported = False
        while self._done:
            done = self._done.popleft()
            if not self._is_closed:
                self._records.settle(done.count, done.outputs, done.state)


class AsyncioTransport(CrossingTransport):
    """Connects a feed in an asyncio loop."""

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T | None:
        loop = asyncio.get_running_loop()
        replied: asyncio.Future[T | None] = loop.create_future()

        def set_reply(value: T | None) -> None:
            if not replied.done():  # else the function has given up waiting
                replied.set_result(value)

        def reply(value: T | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_reply, value)

        self._post(work, reply)
        return await replied


class ThreadTransport(CrossingTransport):
    """Connects a feed of a plain function in a thread: what is `async` blocks there, and never suspends."""

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T | None:
        replies: SimpleQueue[T | None] = SimpleQueue()
        self._post(work, replies.put)
        return replies.get()
