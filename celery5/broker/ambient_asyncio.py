"""Keep the connections of each asyncio loop: an asynchronous generator closes them, which `asyncio.run` closes."""

import asyncio
import weakref
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.waiting.on_asyncio import AsyncioResultWaiter

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
    from celery5.broker.waiting.cluster_on_asyncio import AsyncioClusterResultWaiter

    AsyncioBroker = AsyncioRedis | AsyncioCluster
    AsyncioBrokerWaiter = AsyncioResultWaiter | AsyncioClusterResultWaiter


@dataclass
class LoopConnections:
    """The connections of one asyncio loop to one endpoint."""

    redis: "AsyncioBroker"
    results: "AsyncioBrokerWaiter"
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
        driver, waiter = _open(endpoint)
        connections = loop_connections[endpoint] = LoopConnections(
            driver, waiter, _close_with_the_loop(loop, endpoint, driver, waiter)
        )
        # Runs to its yield without a checkpoint.
        await anext(connections.closing)
    return connections


def _open(endpoint: Endpoint) -> "tuple[AsyncioBroker, AsyncioBrokerWaiter]":
    if endpoint.topology == "cluster":  # most never load it
        from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
        from celery5.broker.waiting.cluster_on_asyncio import AsyncioClusterResultWaiter

        cluster = AsyncioCluster(endpoint)
        return cluster, AsyncioClusterResultWaiter(cluster)
    driver = AsyncioRedis(endpoint)
    return driver, AsyncioResultWaiter(driver, endpoint)


async def _close_with_the_loop(
    loop: asyncio.AbstractEventLoop,
    endpoint: Endpoint,
    driver: "AsyncioBroker",
    results: "AsyncioBrokerWaiter",
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
