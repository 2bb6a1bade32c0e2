"""Perform the calls of a long operation again while Redis is unreachable or full: it goes on where it was."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import AwaitableConnections, sleep
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerError

T = TypeVar("T")

RETRY_DELAY = 0.5
"""Seconds between two attempts."""


class RetryingDriver:
    """A driver for an operation of many calls, which an outage of a second must not end in the middle.

    What is transient is what `is_outage` says: Redis cannot be reached, is loading, busy, a replica, or full. A call
    that may have run, and is not safe to repeat, is not made again.

    Args:
        redis: The driver that performs the calls.
        limit: Seconds that an outage may last; after that its last error is raised.
        record_error: Called with the first error of an outage, and with the further ones.
        record_recovery: Called after each call that succeeds.

    A server that has never answered is not waited for: its URL may be wrong.
    """

    def __init__(
        self,
        redis: AsyncDriver,
        *,
        limit: float,
        record_error: Callable[[Exception], object],
        record_recovery: Callable[[], object],
    ) -> None:
        self._redis = redis
        self._limit = limit
        self._record_error = record_error
        self._record_recovery = record_recovery
        self._waits = bool(getattr(redis, "has_connected", True))

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call."""
        return await self._persist(lambda: self._redis.perform(call), call.repeatable)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write; all of them again if one of them is refused."""
        return await self._persist(
            lambda: self._redis.perform_all(calls), all(call.repeatable for call in calls)
        )

    async def _persist(self, attempt: Callable[[], Awaitable[T]], is_repeatable: bool) -> T:
        deadline: float | None = None
        while True:
            try:
                result = await attempt()
            except BrokerError as error:
                if not self._waits or not is_outage(error) or (error.maybe_done and not is_repeatable):
                    raise
                now = time.monotonic()
                deadline = now + self._limit if deadline is None else deadline
                if now >= deadline:
                    raise
                self._record_error(error)
                await sleep(RETRY_DELAY)
            else:
                self._waits = True
                self._record_recovery()
                return result


class RetryingConnections:
    """The connections of an operation that makes its calls by a `RetryingDriver`."""

    def __init__(self, connections: AwaitableConnections, redis: RetryingDriver) -> None:
        self._connections = connections
        self._redis = redis

    async def get_async_driver(self) -> AsyncDriver:
        """Return the driver."""
        return self._redis

    async def get_async_result_waiter(self) -> AsyncResultWaiter:
        """Return the waiter for results."""
        return await self._connections.get_async_result_waiter()
