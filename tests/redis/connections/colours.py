"""Colours: one story, told to the blocking, the asyncio and the Trio driver alike.

A story is an `async def`. The blocking driver wears a dress of coroutines that never wait for anything, so
that the same lines can be run without an event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, ResultWaiter, StopCondition
from celery5.broker.drivers.opening import BlockingBroker, open_blocking
from celery5.broker.drivers.opening_on_asyncio import AsyncioBroker
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.waiting.on_trio import TrioResultWaiter
from celery5.broker.waiting.opening import BrokerResultWaiter
from celery5.broker.waiting.opening_on_asyncio import AsyncioBrokerResultWaiter

T = TypeVar("T")
S = TypeVar("S")

COLOURS = ["blocking", "asyncio", "trio"]
POOLED = ["blocking", "asyncio"]
"""The two whose connections each serve one call at a time."""


@dataclass
class Here:
    """What a story has at hand."""

    redis: AsyncDriver
    results: AsyncResultWaiter
    sleep: Callable[[float], Awaitable[Any]]


Story = Callable[[Here], Coroutine[Any, Any, S]]


class _Dressed:
    def __init__(self, redis: BlockingBroker, results: ResultWaiter) -> None:
        self._redis = redis
        self._results = results

    async def perform(self, call: Call[T], /) -> T:
        return self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        return self._redis.perform_all(calls)

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        return self._results.wait(keys, timeout=timeout, enough=enough)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  there is no loop


def raw(*words: str | bytes | float, repeatable: bool = False, blocks: float = 0.0) -> Call[Any]:
    """A command whose answer is given as it came."""
    return Call(words, lambda reply: reply, repeatable=repeatable, blocks=blocks)


def live(
    colour: str,
    at: str | Endpoint,
    story: Story[S],
    *,
    timing: Timing = Timing(),  # noqa: B008
    connections: int = 10,
) -> S:
    """Tell `story` to the driver of that colour and give what it returns."""
    endpoint = Endpoint.from_url(at) if isinstance(at, str) else at
    if colour == "asyncio":
        return asyncio.run(_live_asyncio(endpoint, story, timing, connections))
    if colour == "trio":
        return trio.run(_live_trio, endpoint, story, timing)
    redis = open_blocking(endpoint, timing=timing, max_connections=connections)
    results = BrokerResultWaiter(redis)
    both = _Dressed(redis, results)
    try:
        story(Here(both, both, both.sleep)).send(None)
    except StopIteration as end:
        told: S = end.value
        return told
    finally:
        results.close()
        redis.close()
    raise AssertionError("a blocking story waited for an event loop")


async def _live_asyncio(endpoint: Endpoint, story: Story[S], timing: Timing, connections: int) -> S:
    redis = AsyncioBroker(endpoint, timing=timing, max_connections=connections)
    results = AsyncioBrokerResultWaiter(redis)
    try:
        return await story(Here(redis, results, asyncio.sleep))
    finally:
        await results.aclose()
        await redis.aclose()


async def _live_trio(endpoint: Endpoint, story: Story[S], timing: Timing) -> S:
    failure: Exception | None = None
    told: list[S] = []
    async with trio.open_nursery() as nursery:
        try:
            redis = open_redis(endpoint=endpoint, timing=timing)
            await nursery.start(redis.run)
            results = TrioResultWaiter(redis, timing=timing)
            await nursery.start(results.run)
            told.append(await story(Here(redis, results, trio.sleep)))
        except Exception as error:  # the story's own, without the nursery's wrapping
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return told[0]
