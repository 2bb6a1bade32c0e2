"""Protocols of drivers, which perform calls on a broker, and of waiters for results, in two colours each.

A service that needs more (`begin` and `finish`, statistics) names the concrete `TrioRedis` or `ParkedRedis`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from celery5.broker.call import Call
from celery5.errors import BrokerError

T = TypeVar("T")

StopCondition = Callable[[Mapping[str, bytes]], bool]
"""Whether these documents are enough to end a wait."""


class BlockingDriver(Protocol):
    """Performs calls and blocks the calling thread until the replies are there. Both methods raise BrokerError."""

    def perform(self, call: Call[T], /) -> T:
        """Perform one call and return its decoded reply."""
        ...

    def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write, which is no transaction; return their decoded replies in order."""
        ...

    def perform_replicated(
        self, calls: Sequence[Call[T]], waits: Sequence[Call[int]], /
    ) -> tuple[list[T], int | BrokerError]:
        """Perform several calls, and wait on the same connection until replicas have what they have written.

        Returns:
            The decoded replies to `calls`, and how many replicas have all, or why that is not known.
        """
        ...


class AsyncDriver(Protocol):
    """Performs calls from a coroutine, on Trio or on asyncio. Both methods raise BrokerError."""

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call and return its decoded reply."""
        ...

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write, which is no transaction; return their decoded replies in order."""
        ...


class ResultWaiter(Protocol):
    """Waits for result documents and blocks the calling thread."""

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait until all documents are there, `enough` is true of those that are, or the timeout is over.

        Args:
            keys: The keys of the documents.
            timeout: Seconds; None to wait without a limit.
            enough: Called with the documents so far.

        Returns:
            The documents that have arrived, by their keys.
        """
        ...

    def close(self) -> None:
        """Close the connection. It opens again when needed."""
        ...


class AsyncResultWaiter(Protocol):
    """Waits for result documents in a coroutine, on Trio or on asyncio."""

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        ...
