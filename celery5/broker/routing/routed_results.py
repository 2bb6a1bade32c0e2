"""Wait for documents on several brokers at once, with one connection for each."""

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncResultWaiter, ResultWaiter, StopCondition
from celery5.broker.routing.unreachable import UNREACHABLE, get_unreachable
from celery5.errors import BrokerError

POLL_INTERVAL = 0.05
"""Seconds that plain Python waits for one broker before it looks at the next, when the first of many is enough."""


class KeyMap(Protocol):
    """Says which broker, or which node of a cluster, has a key: `BrokerMap` is one."""

    @property
    def brokers(self) -> Sequence[str]:
        """The names of all of them."""
        ...

    def find_broker_of_key(self, key: str) -> str | None:
        """Return the name of that which has a key; None for the first one."""
        ...


class RoutedResultWaiter:
    """Waits in plain Python, on one broker after the other."""

    def __init__(self, broker_map: KeyMap, get_waiter: Callable[[str], ResultWaiter]) -> None:
        self._map = broker_map
        self._reach = get_waiter

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`, one broker after the other. An unreachable broker raises in its turn."""
        parts = _parts(self._map, keys)
        if len(parts) == 1:
            ((broker, part),) = parts.items()
            return self._reach(broker).wait(part, timeout=timeout, enough=enough)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        documents: dict[str, bytes] = {}
        if enough is not None:
            return self._first(parts, deadline, enough)
        for broker, part in parts.items():
            remaining = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            try:
                documents |= self._reach(broker).wait(part, timeout=remaining)
            except UNREACHABLE as error:
                _leave_out(broker, error)
        return documents

    def close(self) -> None:
        """Do nothing: the connections belong to the application."""

    def _first(self, parts: dict[str, list[str]], deadline: float, enough: StopCondition) -> dict[str, bytes]:
        """Wait for each broker in short turns, since any of them may have enough documents."""
        documents: dict[str, bytes] = {}
        while True:
            remaining = deadline - time.monotonic()
            for broker, part in parts.items():
                missing = [key for key in part if key not in documents]
                if missing:
                    turn_timeout = min(POLL_INTERVAL, max(0.0, remaining))
                    try:
                        documents |= self._reach(broker).wait(
                            missing, timeout=turn_timeout, enough=_with(documents, enough)
                        )
                    except UNREACHABLE as error:
                        _leave_out(broker, error)
                        parts = {reachable: keys for reachable, keys in parts.items() if reachable != broker}
                if enough(documents):
                    return documents
            if remaining <= 0 or all(key in documents for part in parts.values() for key in part):
                return documents


class AsyncRoutedResultWaiter:
    """Waits in an event loop, on all brokers at the same time."""

    def __init__(self, broker_map: KeyMap, get_waiter: Callable[[str], Awaitable[AsyncResultWaiter]]) -> None:
        self._map = broker_map
        self._reach = get_waiter

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`, on all brokers at the same time."""
        parts = _parts(self._map, keys)
        if len(parts) == 1:
            ((broker, part),) = parts.items()
            waiter = await self._reach(broker)
            return await waiter.wait(part, timeout=timeout, enough=enough)
        documents: dict[str, bytes] = {}

        async def wait_on(broker: str, part: list[str]) -> bool:
            """Wait on one broker; return whether there are enough documents now."""
            try:
                waiter_of_part = await self._reach(broker)
                part_documents = await waiter_of_part.wait(
                    part, timeout=timeout, enough=enough and _with(documents, enough)
                )
            except UNREACHABLE as error:
                _leave_out(broker, error)
                return False
            documents.update(part_documents)
            return enough is not None and enough(documents)

        waits = [partial(wait_on, broker, part) for broker, part in parts.items()]
        await (_together_on_trio if current_colour() == "trio" else _together_on_asyncio)(waits)
        return documents


WaitFunctions = Sequence[Callable[[], Any]]


async def _together_on_trio(waits: WaitFunctions) -> None:
    """Run all, until one returns true or raises."""
    import trio

    errors: list[Exception] = []
    async with trio.open_nursery() as nursery:

        async def run(wait: Callable[[], Any]) -> None:
            try:
                is_over = await wait()
            except Exception as error:
                errors.append(error)
                is_over = True
            if is_over:
                nursery.cancel_scope.cancel()

        for wait in waits:
            nursery.start_soon(run, wait)
    if errors:
        raise errors[0]


async def _together_on_asyncio(waits: WaitFunctions) -> None:
    import asyncio

    tasks = [asyncio.ensure_future(wait()) for wait in waits]
    try:
        for completed in asyncio.as_completed(tasks):
            if await completed:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _parts(broker_map: KeyMap, keys: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys by broker, in their order."""
    parts: dict[str, list[str]] = {}
    for key in keys:
        parts.setdefault(broker_map.find_broker_of_key(key) or broker_map.brokers[0], []).append(key)
    return parts or {broker_map.brokers[0]: []}


def _leave_out(broker: str, error: BrokerError) -> None:
    """Leave out an unreachable broker if `skip_unreachable` is in force; else raise its error."""
    unreachable = get_unreachable()
    if unreachable is None:
        raise error
    unreachable[broker] = error


def _with(documents: Mapping[str, bytes], enough: StopCondition) -> StopCondition:
    """Return a condition for the documents of one broker which counts those of the others, too."""
    return lambda part_documents: enough({**documents, **part_documents})
