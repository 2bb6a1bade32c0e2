"""The asyncio driver of a Redis Cluster: one ordinary driver for each node."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from celery5.broker.call import Call
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing.cluster_router import ClusterRouter
from celery5.broker.timing import Timing
from celery5.protocol.hash_slots import NodeAddress

T = TypeVar("T")


class AsyncioCluster:
    """The driver of a cluster in one asyncio loop, connecting to each node when it is first used."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
        max_connections: int = 10,
    ) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self._max_connections = max_connections
        self._nodes: dict[NodeAddress, AsyncioRedis] = {}
        self.router: ClusterRouter = ClusterRouter(endpoint, self._get_node, self._forget)

    async def perform(self, call: Call[T]) -> T:
        """Perform one call on the node of its keys. Raises BrokerError."""
        return await self.router.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls, those for one node in one write; return their decoded replies in order."""
        return await self.router.perform_all(calls)

    def get_node(self, address: NodeAddress) -> AsyncioRedis:
        """Return the driver of one node."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = AsyncioRedis(
                self.endpoint.at_node(address.host, address.port),
                timing=self.timing,
                max_connections=self._max_connections,
            )
        return node

    async def aclose(self) -> None:
        """Close the connections: idle ones now, the rest when their commands are done."""
        for node in list(self._nodes.values()):
            await node.aclose()

    async def _get_node(self, address: NodeAddress) -> AsyncioRedis:
        return self.get_node(address)

    def _forget(self, nodes: Iterable[NodeAddress]) -> None:
        """Close the connections to nodes that have no slots."""
        for address in set(self._nodes) - set(nodes):
            self._nodes.pop(address).close()
