"""Open the waiter for results on asyncio: a cluster has another one than a server, and most never load it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery5.broker.driver import StopCondition
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.drivers.opening_on_asyncio import AsyncioBroker
from celery5.broker.topologies import ClusterFound
from celery5.broker.waiting.on_asyncio import AsyncioResultWaiter

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
    from celery5.broker.waiting.cluster_on_asyncio import AsyncioClusterResultWaiter


class AsyncioBrokerResultWaiter:
    """Waits in one asyncio loop for documents on the broker of a driver, whether that is a server or a cluster."""

    def __init__(self, redis: AsyncioBroker) -> None:
        self._redis = redis
        self._driver = redis.driver
        self._waiter = _open(self._driver)

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        start = time.monotonic()
        try:
            return await self._get_waiter().wait(keys, timeout=timeout, enough=enough)
        except ClusterFound as found:
            await self._redis.follow(found)
        if timeout is not None:
            timeout -= time.monotonic() - start
        return await self._get_waiter().wait(keys, timeout=timeout, enough=enough)

    async def aclose(self) -> None:
        """Close the connections. Waits that have not ended raise BrokerUnavailable."""
        await self._waiter.aclose()

    def _get_waiter(self) -> "AsyncioResultWaiter | AsyncioClusterResultWaiter":
        """Return the waiter of the driver that is in use now."""
        if self._driver is not self._redis.driver:
            # The earlier one stays as it is: other tasks may be about to learn from it what this one has learned.
            self._waiter, self._driver = _open(self._redis.driver), self._redis.driver
        return self._waiter


def _open(driver: "AsyncioRedis | AsyncioCluster") -> "AsyncioResultWaiter | AsyncioClusterResultWaiter":
    if isinstance(driver, AsyncioRedis):
        return AsyncioResultWaiter(driver, driver.endpoint)
    from celery5.broker.waiting.cluster_on_asyncio import AsyncioClusterResultWaiter

    return AsyncioClusterResultWaiter(driver)
