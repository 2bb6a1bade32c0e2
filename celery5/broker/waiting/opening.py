"""Open the waiter for results in plain Python: a cluster has another one than a server, and most never load it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery5.broker.driver import ResultWaiter, StopCondition
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.drivers.opening import BlockingBroker
from celery5.broker.topologies import ClusterFound
from celery5.broker.waiting.blocking import BlockingResultWaiter

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_blocking import BlockingCluster


class BrokerResultWaiter:
    """Waits for documents on the broker of a driver, whether that is a server or a cluster."""

    def __init__(self, redis: BlockingBroker) -> None:
        self._redis = redis
        self._driver = redis.driver
        self._waiter = _open(self._driver)

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        start = time.monotonic()
        try:
            return self._get_waiter().wait(keys, timeout=timeout, enough=enough)
        except ClusterFound as found:
            self._redis.follow(found)
        if timeout is not None:
            timeout -= time.monotonic() - start
        return self._get_waiter().wait(keys, timeout=timeout, enough=enough)

    def close(self) -> None:
        """Close the connections. They open again when needed."""
        self._waiter.close()

    def _get_waiter(self) -> ResultWaiter:
        """Return the waiter of the driver that is in use now."""
        if self._driver is not self._redis.driver:
            # The earlier one stays as it is: other threads may be about to learn from it what this one has learned.
            self._waiter, self._driver = _open(self._redis.driver), self._redis.driver
        return self._waiter


def _open(driver: "BlockingRedis | BlockingCluster") -> ResultWaiter:
    if isinstance(driver, BlockingRedis):
        return BlockingResultWaiter(driver, driver.endpoint)
    from celery5.broker.waiting.cluster_blocking import BlockingClusterResultWaiter

    return BlockingClusterResultWaiter(driver)
