"""Ambient, asyncio: the connections of one asyncio loop, closed when the loop shuts down.

Floor: broker. Reads and writes: what the drivers do.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from celery5.broker.endpoint import Endpoint
from celery5.broker.on_asyncio import AsyncioRedis
from celery5.broker.waiting_asyncio import AsyncioResultWaiter


@dataclass
class LoopConnections:
    """What one loop has for one endpoint."""

    redis: AsyncioRedis
    results: AsyncioResultWaiter
    closing: AsyncGenerator[None, None]


_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, LoopConnections]] = (
    weakref.WeakKeyDictionary()
)


async def get_loop_connections(endpoint: Endpoint) -> LoopConnections:
    """The connections of the running loop to `endpoint`."""
    loop = asyncio.get_running_loop()
    homes = _homes.get(loop)
    if homes is None:
        for old in list(_homes):
            # A connection knows its loop, so a loop that was not shut down properly would stay for ever.
            if old.is_closed():
                del _homes[old]
        homes = _homes[loop] = {}
    found = homes.get(endpoint)
    if found is None:
        driver = AsyncioRedis(endpoint)
        waiting = AsyncioResultWaiter(driver, endpoint)
        found = homes[endpoint] = LoopConnections(
            driver, waiting, _close_with_the_loop(loop, endpoint, driver, waiting)
        )
        # Runs up to its yield without giving way to other tasks.
        await anext(found.closing)
    return found


async def _close_with_the_loop(
    loop: asyncio.AbstractEventLoop, endpoint: Endpoint, driver: AsyncioRedis, results: AsyncioResultWaiter
) -> AsyncGenerator[None, None]:
    """asyncio tells nobody that a loop ends, but asynchronous generators:

    `asyncio.run` closes those that are open.
    """
    try:
        yield
    finally:
        _homes.get(loop, {}).pop(endpoint, None)
        await results.aclose()
        await driver.aclose()
