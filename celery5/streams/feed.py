"""The feed of a processor: where its records come from, and where its outputs and its state go."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from celery5.broker.calls.streams import RawEntry
from celery5.streams.middleware import MiddlewareCalls

PORTION = 100
"""The most records that a feed takes at once."""


class FeedTransport(Protocol):
    """How records come to a feed, and what is done goes back: within Trio, or from another thread."""

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        ...

    async def fetch(self, into: deque[RawEntry], most: int, seconds: float | None, /) -> None:
        """Wait for the next records, unless some have come already, or the processor is to end.

        Args:
            into: Where they are put as soon as they are taken: who waits may have given up.
            most: The most records.
            seconds: The limit; None for none.
        """
        ...

    async def fetch_batch(self, into: deque[RawEntry], count: int, within: float, /) -> None:
        """Wait for the next batch, unless the processor is to end. What has come before becomes a part of it."""
        ...

    def settle(self, count: int, outputs: list[bytes], state: dict[str, bytes | None], /) -> None:
        """Acknowledge the first records of those that were fetched, with what they have produced."""
        ...

    async def get_states(self, names: Sequence[str], /) -> list[bytes | None]:
        """Return values of the keyed state, as they are with all that was settled."""
        ...

    async def flush(self) -> None:
        """Wait until the commit of what was settled is under way."""
        ...


class RecordFeed:
    """The records of one partition for one call of a processor's function, and what that produces.

    It takes records in portions. Each is acknowledged when the next one is asked for, with its outputs and its changes
    of state.

    Args:
        transport: Where records come from.
        group: The name of the processor.
        partition: The partition.
        grace_period: Seconds that the processor has to end.
        concurrency: How many feeds the partition has.
        now: Returns the time of a clock that never goes back, in seconds.
        portion: The most records that are taken at once.
        middleware: What is called around each record.
    """

    def __init__(
        self,
        transport: FeedTransport,
        *,
        group: str,
        partition: int,
        grace_period: float,
        concurrency: int,
        now: Callable[[], float],
        portion: int = PORTION,
        middleware: MiddlewareCalls | None = None,
    ) -> None:
        self.group = group
        self.partition = partition
        self.grace_period = grace_period
        self.concurrency = concurrency
        self.now = now
        self._transport = transport
        self._portion = portion
        self._middleware = middleware
        # Records that are here, how many were taken last, and what these have produced.
        self._waiting: deque[RawEntry] = deque()
        self._taken = 0
        self._outputs: list[bytes] = []
        self._state: dict[str, bytes | None] = {}

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        return self._transport.is_stopping

    # records

    def take_next(self) -> RawEntry | None:
        """Acknowledge what was taken before, and return the next record if it is here.

        With middleware it is never here: that may wait, and so only `wait_next` calls it.
        """
        return self._take() if self._middleware is None else None

    async def wait_next(self, seconds: float | None = None) -> RawEntry | None:
        """Acknowledge what was taken before, and return the next record when it is here.

        Args:
            seconds: The limit; None for none.

        Returns:
            None when the processor is to end, or none has come in this time.
        """
        while True:
            if self._middleware is not None:
                await self._middleware.leave()
            raw = self._take()
            while raw is None and not self._transport.is_stopping:
                await self._transport.fetch(self._waiting, self._portion, seconds)
                raw = self._take()
                if seconds is not None:
                    break
            if raw is None or self._middleware is None:
                return raw
            for passed in await self._middleware.enter([raw]):
                return passed

    def _take(self) -> RawEntry | None:
        self._settle()
        if not self._waiting or self._transport.is_stopping:
            return None
        self._taken = 1
        return self._waiting.popleft()

    async def wait_batch(self, count: int, within: float) -> Sequence[RawEntry]:
        """Acknowledge what was taken before, and return the next batch; an empty one when the processor is to end.

        Args:
            count: The most records.
            within: Seconds to wait for more, once the first one is there.
        """
        while True:
            if self._middleware is not None:
                await self._middleware.leave()
            self._settle()
            await self._transport.fetch_batch(self._waiting, count, within)
            if self._transport.is_stopping:
                return ()
            batch = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
            self._taken = len(batch)
            passed = batch if self._middleware is None else await self._middleware.enter(batch)
            if passed or not batch:
                return passed

    # what is produced

    def add_output(self, output: bytes) -> None:
        """Add an output to what is committed with the records that were taken last."""
        self._outputs.append(output)

    async def get_state(self, name: str) -> bytes | None:
        """Return a value of the keyed state."""
        if name in self._state:
            return self._state[name]
        (value,) = await self._transport.get_states([name])
        return value

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state."""
        missing = [name for name in names if name not in self._state]
        found = dict(zip(missing, await self._transport.get_states(missing), strict=True)) if missing else {}
        return [self._state[name] if name in self._state else found[name] for name in names]

    def set_state(self, name: str, value: bytes | None) -> None:
        """Set a value of the keyed state, with the records that were taken last; None removes it."""
        self._state[name] = value

    def settle(self) -> None:
        """Acknowledge what was taken, and have it committed soon with its outputs and changes of state.

        What has come without records, as time went by, is committed, too. With middleware it happens when the next
        record is asked for: what follows a record may wait.
        """
        if self._middleware is None:
            self._settle()

    def _settle(self) -> None:
        taken, outputs, state = self._taken, self._outputs, self._state
        if not (taken or outputs or state):
            return
        self._taken = 0
        if outputs:
            self._outputs = []
        if state:
            self._state = {}
        self._transport.settle(taken, outputs, state)

    async def flush(self) -> None:
        """Acknowledge what was taken, and wait until the commit of that is under way."""
        if self._middleware is not None:
            await self._middleware.leave()
        self._settle()
        await self._transport.flush()

    @property
    def unsettled(self) -> tuple[int, list[bytes], dict[str, bytes | None]]:
        """What the function had in hand when it ended: how many records, and what they have produced."""
        return self._taken, self._outputs, self._state
