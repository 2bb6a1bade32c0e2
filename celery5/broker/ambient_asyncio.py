"""Keep the connections of each asyncio loop: an asynchronous generator closes them, which `asyncio.run` closes."""

import asyncio
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from celery5.broker.drivers.opening_on_asyncio import AsyncioBroker
from celery5.broker.endpoint import Endpoint
from celery5.broker.waiting.opening_on_asyncio import AsyncioBrokerResultWaiter


@dataclass
class LoopConnections:
    """The connections of one asyncio loop to one endpoint."""

    redis: AsyncioBroker
    results: AsyncioBrokerResultWaiter
    closing: AsyncGenerator[None, None]


_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, LoopConnections]] = (
    weakref.WeakKeyDictionary()
)


async def get_loop_connections(endpoint: Endpoint) -> LoopConnections:
    """Return the connections of the running asyncio loop to `endpoint`."""
    loop = asyncio.get_running_loop()
    loop_connections = _homes.get(loop)
    if loop_connections is None:
        for old_loop in list(_homes):
            # A connection refers to its loop, so a loop that was not shut down properly would never be collected.
            if old_loop.is_closed():
                del _homes[old_loop]
        loop_connections = _homes[loop] = {}
    connections = loop_connections.get(endpoint)
    if connections is None:
        driver = AsyncioBroker(endpoint)
        waiter = AsyncioBrokerResultWaiter(driver)
        connections = loop_connections[endpoint] = LoopConnections(
            driver, waiter, _close_with_the_loop(loop, endpoint, driver, waiter)
        )
        # Runs to its yield without a checkpoint.
        await anext(connections.closing)
    return connections


async def _close_with_the_loop(
    loop: asyncio.AbstractEventLoop,
    endpoint: Endpoint,
    driver: AsyncioBroker,
    results: AsyncioBrokerResultWaiter,
) -> AsyncGenerator[None, None]:
    """Close the connections when the loop ends.

    asyncio reports that only to asynchronous generators: `asyncio.run` closes those that are open.
    """
    try:
        yield
    finally:
        _homes.get(loop, {}).pop(endpoint, None)
        await results.aclose()
        await driver.aclose()
