"""Routed results: waits for documents on several brokers at once, one connection for each."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncResultWaiter, ResultWaiter
from celery5.broker.routing.broker_router import BrokerMap
from celery5.broker.routing.unreachable import UNREACHABLE, get_unreachable
from celery5.broker.waiting.waits import StopCondition
from celery5.errors import BrokerError

POLL_INTERVAL = 0.05
"""Seconds that plain Python waits for one broker before it looks at the next, when the first of many is enough."""


class RoutedResultWaiter:
    """Waits in plain Python, on one broker after the other."""

    def __init__(self, broker_map: BrokerMap, get_waiter: Callable[[str], ResultWaiter]) -> None:
        self._map = broker_map
        self._reach = get_waiter

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`, one broker after the other. An unreachable one raises in its turn."""
        parts = _parts(self._map, keys)
        if len(parts) == 1:
            ((broker, part),) = parts.items()
            return self._reach(broker).wait(part, timeout=timeout, enough=enough)
        ends = math.inf if timeout is None else time.monotonic() + timeout
        found: dict[str, bytes] = {}
        if enough is not None:
            return self._first(parts, ends, enough)
        for broker, part in parts.items():
            left = None if ends == math.inf else max(0.0, ends - time.monotonic())
            try:
                found |= self._reach(broker).wait(part, timeout=left)
            except UNREACHABLE as error:
                _leave_out(broker, error)
        return found

    def close(self) -> None:
        """Its connections are others' to close."""

    def _first(self, parts: dict[str, list[str]], ends: float, enough: StopCondition) -> dict[str, bytes]:
        """In short turns, since any broker may have what is enough."""
        found: dict[str, bytes] = {}
        while True:
            left = ends - time.monotonic()
            for broker, part in parts.items():
                missing = [key for key in part if key not in found]
                if missing:
                    turn = min(POLL_INTERVAL, max(0.0, left))
                    found |= self._reach(broker).wait(missing, timeout=turn, enough=_with(found, enough))
                if enough(found):
                    return found
            if left <= 0 or all(key in found for part in parts.values() for key in part):
                return found


class AsyncRoutedResultWaiter:
    """Waits in an event loop, on all brokers at the same time."""

    def __init__(
        self, broker_map: BrokerMap, get_waiter: Callable[[str], Awaitable[AsyncResultWaiter]]
    ) -> None:
        self._map = broker_map
        self._reach = get_waiter

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`, on all brokers at the same time."""
        parts = _parts(self._map, keys)
        if len(parts) == 1:
            ((broker, part),) = parts.items()
            one = await self._reach(broker)
            return await one.wait(part, timeout=timeout, enough=enough)
        found: dict[str, bytes] = {}

        async def wait_on(broker: str, part: list[str]) -> bool:
            """Whether what has come by the end of this is enough."""
            try:
                results = await self._reach(broker)
                came = await results.wait(part, timeout=timeout, enough=enough and _with(found, enough))
            except UNREACHABLE as error:
                _leave_out(broker, error)
                return False
            found.update(came)
            return enough is not None and enough(found)

        waits = [partial(wait_on, broker, part) for broker, part in parts.items()]
        await (_together_on_trio if current_colour() == "trio" else _together_on_asyncio)(waits)
        return found


WaitFunctions = Sequence[Callable[[], Any]]


async def _together_on_trio(waits: WaitFunctions) -> None:
    """All of them, until one gives that this is enough, or raises."""
    import trio

    failed: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def one(wait: Callable[[], Any]) -> None:
            try:
                over = await wait()
            except Exception as error:
                failed.append(error)
                over = True
            if over:
                nursery.cancel_scope.cancel()

        for each in waits:
            nursery.start_soon(one, each)
    if failed:
        raise failed[0]


async def _together_on_asyncio(waits: WaitFunctions) -> None:
    import asyncio

    tasks = [asyncio.ensure_future(each()) for each in waits]
    try:
        for each in asyncio.as_completed(tasks):
            if await each:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _parts(chart: BrokerMap, keys: Sequence[str]) -> dict[str, list[str]]:
    """The keys by broker, in their order."""
    parts: dict[str, list[str]] = {}
    for key in keys:
        parts.setdefault(chart.find_broker_of_key(key) or chart.brokers[0], []).append(key)
    return parts or {chart.brokers[0]: []}


def _leave_out(broker: str, error: BrokerError) -> None:
    """Go on without this one, where it may be left out. Raises its error where not."""
    left_out = get_unreachable()
    if left_out is None:
        raise error
    left_out[broker] = error


def _with(found: Mapping[str, bytes], enough: StopCondition) -> StopCondition:
    """Whether what came here is enough, with what has come elsewhere."""
    return lambda came: enough({**found, **came})
