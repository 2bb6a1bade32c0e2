"""Open the asyncio driver for an endpoint: a cluster has another one than a server, and most never load it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from celery5.broker.call import Call
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound, ServerFound, find_endpoint, remember_cluster

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster

T = TypeVar("T")


class AsyncioBroker:
    """The asyncio driver of a broker: that of a server, or of a cluster as soon as the server says it is part of one.

    Args as those of `AsyncioRedis`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
        max_connections: int = 10,
    ) -> None:
        self._timing = timing
        self._max_connections = max_connections
        self.driver: AsyncioRedis | AsyncioCluster = self._open(endpoint)

    async def perform(self, call: Call[T]) -> T:
        """Perform one call and return its decoded reply. Raises BrokerError."""
        try:
            return await self.driver.perform(call)
        except ClusterFound as found:
            await self.follow(found)
        return await self.driver.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls as the driver does."""
        try:
            return await self.driver.perform_all(calls)
        except ClusterFound as found:
            await self.follow(found)
            if isinstance(found, ServerFound):  # some of the calls may have run on other nodes of the cluster
                raise
        return await self.driver.perform_all(calls)

    async def follow(self, found: ClusterFound) -> None:
        """Use the driver of what was found from now on. Raises the error if a call may have run before it."""
        if found.maybe_done:
            raise found
        remember_cluster(found)
        server = self.driver
        if server.endpoint != find_endpoint(found.endpoint):  # else another task was first
            self.driver = self._open(found.endpoint)
            await server.aclose()

    async def aclose(self) -> None:
        """Close the connections: idle ones now, the rest when their commands are done."""
        await self.driver.aclose()

    def _open(self, endpoint: Endpoint) -> "AsyncioRedis | AsyncioCluster":
        endpoint = find_endpoint(endpoint)
        if endpoint.topology == "cluster":
            from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster

            return AsyncioCluster(endpoint, timing=self._timing, max_connections=self._max_connections)
        return AsyncioRedis(endpoint, timing=self._timing, max_connections=self._max_connections)
