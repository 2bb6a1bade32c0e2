"""Feed a processor that runs in another thread: in an asyncio loop, or as a plain function.

Its records come in portions, and what it has done goes back without waiting. So an exchange between the threads costs
little, although each record is acknowledged as soon as the next one is taken.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import trio

from celery5.broker.calls.streams import RawEntry
from celery5.errors import CeleryError
from celery5.services.streams.lane_feed import LaneFeed

T = TypeVar("T")

PORTION = 100
"""The most records that go over at once."""
MAX_QUESTIONS = 16
"""Questions that wait: more than one only if the processor has given up waiting for earlier ones."""


class ProcessorCancelled(CeleryError):
    """Raised in a processor that goes on after it was cancelled, when it asks for something."""


@dataclass(frozen=True)
class _Done:
    count: int
    outputs: list[bytes]
    state: dict[str, bytes | None]


@dataclass(frozen=True)
class _Question(Generic[T]):
    """What the processor wants to be done in Trio, and what takes the reply; None when it is cancelled."""

    work: Callable[[], Awaitable[T]]
    reply: Callable[[T | None], None]


class RemoteFeed(ABC):
    """The records of a lane, for a function in another thread: a `RecordFeed`. Make it in Trio.

    Methods are called by the function, but for `serve` and `close`.

    Args:
        lane: Where records come from.
        checkpoint: Is called again and again while the function works; for tests in virtual time.
    """

    def __init__(self, lane: LaneFeed, *, checkpoint: Callable[[], Awaitable[None]] | None = None) -> None:
        self.group = lane.group
        self.partition = lane.partition
        self.grace_period = lane.grace_period
        self.concurrency = lane.concurrency
        self._lane = lane
        self._checkpoint = checkpoint
        self._token = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock()
        self._send, self._receive = trio.open_memory_channel["_Question[Any]"](MAX_QUESTIONS)
        self._is_closed = False
        # Records that are over here: those that wait, and those that the function has.
        self._waiting: deque[RawEntry] = deque()
        self._current: Sequence[RawEntry] = ()
        self._outputs: list[bytes] = []
        self._state: dict[str, bytes | None] = {}
        # What is done, and goes back. Both threads use it: it is only appended to here, and emptied there.
        self._done: deque[_Done] = deque()
        self._is_reported = False

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        return self._lane.is_stopping or self._is_closed

    def now(self) -> float:
        """Return the time of the Trio clock."""
        return self._clock.current_time()

    # records

    def take_next(self) -> RawEntry | None:
        """Acknowledge what was taken before, and return the next record if it is here."""
        self.settle()
        if not self._waiting or self.is_stopping:
            return None
        raw = self._waiting.popleft()
        self._current = (raw,)
        return raw

    async def wait_next(self) -> RawEntry | None:
        """Return the next record when it is here; None when the processor is to end."""
        while not self.is_stopping:
            raw = self.take_next()
            if raw is not None:
                return raw
            await self._ask(self._fetch_portion)
        return None

    async def wait_next_within(self, seconds: float) -> RawEntry | None:
        """Return the next record; None when none has come in this time, or the processor is to end."""
        raw = self.take_next()
        if raw is None and not self.is_stopping:
            await self._ask(partial(self._fetch_portion, seconds))
            raw = self.take_next()
        return raw

    async def wait_batch(self, count: int, within: float) -> Sequence[RawEntry]:
        """Acknowledge what was taken before, and return the next batch; an empty one when the processor is to end."""
        self.settle()
        await self._ask(partial(self._fetch_batch, count, within))
        if self.is_stopping:
            return ()
        self._current = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        return self._current

    # what is produced

    def add_output(self, output: bytes) -> None:
        """Add an output to what is committed with the records that were taken last."""
        self._outputs.append(output)

    async def get_state(self, name: str) -> bytes | None:
        """Return a value of the keyed state. Raises ProcessorCancelled."""
        (value,) = await self.get_states([name])
        return value

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state. Raises ProcessorCancelled."""
        missing = [name for name in names if name not in self._state]
        found = dict(zip(missing, await self._ask_for_states(missing), strict=True)) if missing else {}
        return [self._state[name] if name in self._state else found[name] for name in names]

    async def _ask_for_states(self, names: Sequence[str]) -> list[bytes | None]:
        async def get() -> list[bytes | None]:
            return await self._lane.get_states(names)

        values = await self._ask(get)
        if values is None:
            raise ProcessorCancelled(f"processor {self.group}: it was cancelled, and is to end")
        return values

    def set_state(self, name: str, value: bytes | None) -> None:
        """Set a value of the keyed state, with the records that were taken last; None removes it."""
        self._state[name] = value

    def settle(self) -> None:
        """Acknowledge what was taken, and have it committed soon."""
        count, outputs, state = len(self._current), self._outputs, self._state
        if not (count or outputs or state):
            return
        self._current = ()
        if outputs:
            self._outputs = []
        if state:
            self._state = {}
        self._done.append(_Done(count, outputs, state))
        if not self._is_reported:
            self._is_reported = True
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_done)

    async def flush(self) -> None:
        """`settle`, and wait until the commit of that is under way."""
        self.settle()
        await self._ask(self._lane.flush)

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
        """Take over what the function has done, and what it was at. It has ended, or is left to itself from now on."""
        self._apply_done()
        self._is_closed = True
        with suppress(trio.WouldBlock):
            while True:
                self._receive.receive_nowait().reply(None)
        self._lane.take_over(len(self._current), self._outputs, self._state)

    def _apply_done(self) -> None:
        self._is_reported = False
        while self._done:
            done = self._done.popleft()
            if not self._is_closed:
                self._lane.settle_first(done.count, done.outputs, done.state)

    async def _fetch_portion(self, seconds: float | None = None) -> None:
        if not self._waiting:
            self._waiting.extend(await self._lane.wait_portion(PORTION, seconds))

    async def _fetch_batch(self, count: int, within: float) -> None:
        if len(self._waiting) < count:
            self._lane.return_behind(0)
            self._waiting.clear()
            self._waiting.extend(await self._lane.wait_batch(count, within))


class AsyncioFeed(RemoteFeed):
    """Feeds a function in an asyncio loop."""

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


class ThreadFeed(RemoteFeed):
    """Feeds a plain function in a thread: what is `async` blocks there, and never suspends."""

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T | None:
        replies: SimpleQueue[T | None] = SimpleQueue()
        self._post(work, replies.put)
        return replies.get()
