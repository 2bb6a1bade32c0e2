"""Promptly: the way to a further broker for who has others to look at, too: it does not wait long for one that is
silent (C108).

Floor: services. Reads and writes: what the calls say.

A Scheduler's turn would end while it waited as long as a connection does. Who was waited for in vain is not asked again
for a moment: several commands to workers on one broker that is gone cost the time once.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio

from celery5.broker.call import Call
from celery5.errors import BrokerUnavailable

REPLY_TIMEOUT = 2.0
"""Seconds in which it must answer."""
UNREACHABLE_PAUSE = 1.0
"""Seconds for which one that did not is left alone."""

T = TypeVar("T")


class PromptRedis(Protocol):
    """Makes trips to Redis."""

    async def perform(self, call: Call[T], /) -> T: ...

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]: ...


class TimeLimitedDriver:
    """One broker, which answers soon or is away. It raises BrokerUnavailable then, as `redis` does."""

    def __init__(self, *, redis: PromptRedis, broker: str) -> None:
        self._redis = redis
        self._broker = broker
        self._rests_until = 0.0

    async def perform(self, call: Call[T], /) -> T:
        """Make one trip."""
        return await self._in_time(lambda: self._redis.perform(call))

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Make several trips in one write."""
        return await self._in_time(lambda: self._redis.perform_all(calls))

    async def _in_time(self, trip: Callable[[], Awaitable[T]]) -> T:
        if trio.current_time() >= self._rests_until:
            with trio.move_on_after(REPLY_TIMEOUT):
                return await trip()
            self._rests_until = trio.current_time() + UNREACHABLE_PAUSE
        raise BrokerUnavailable(f"broker {self._broker} has not answered within {REPLY_TIMEOUT:g} s")
