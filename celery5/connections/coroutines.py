"""Colourless: code that is written once, as coroutines, and runs in Trio, in asyncio and in plain Python.

In plain Python such a coroutine runs through without ever waiting for a loop: whatever it awaits blocks.
"""

import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import current_colour

if TYPE_CHECKING:
    from celery5.broker.driver import BlockingDriver

R = TypeVar("R")
T = TypeVar("T")


class BlockingDriverAdapter:
    """The blocking driver, dressed as one that is awaited."""

    def __init__(self, redis: "BlockingDriver") -> None:
        self._redis = redis

    async def perform(self, call: Call[T], /) -> T:
        """Make one trip."""
        return self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Make several trips in one write."""
        return self._redis.perform_all(calls)


def run_blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """What the coroutine returns, in plain Python."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    raise AssertionError("plain Python waited for an event loop")


async def sleep(seconds: float) -> None:
    """Sleep, in whatever colour the caller stands in."""
    colour = current_colour()
    if colour == "trio":
        import trio

        await trio.sleep(seconds)
    elif colour == "asyncio":
        import asyncio

        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251  plain Python: there is no loop
