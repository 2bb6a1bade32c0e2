"""Driver: what performs calls on a connection to the broker, in one of two colours."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from celery5.broker.call import Call

T = TypeVar("T")


class BlockingDriver(Protocol):
    """Performs calls and blocks the calling thread until the replies are there."""

    def perform(self, call: Call[T], /) -> T: ...

    def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]: ...


class AsyncDriver(Protocol):
    """Performs calls from a coroutine, on Trio or on asyncio."""

    async def perform(self, call: Call[T], /) -> T: ...

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]: ...
