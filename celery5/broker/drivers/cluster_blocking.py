"""The blocking driver of a Redis Cluster: one ordinary driver for each node."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

from celery5.broker.call import Call
from celery5.broker.colour import run_blocking
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing.cluster_router import ClusterRouter
from celery5.broker.timing import Timing
from celery5.errors import BrokerError
from celery5.protocol.hash_slots import NodeAddress

T = TypeVar("T")


class _BlockingNode:
    """The driver of one node, with the methods of a `NodeDriver`."""

    def __init__(self, redis: BlockingRedis) -> None:
        self.redis = redis

    async def perform(self, call: Call[T], /) -> T:
        return self.redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        return self.redis.perform_all(calls)

    async def perform_each(self, calls: Sequence[Call[T]], /) -> list[T | BrokerError]:
        return self.redis.perform_each(calls)


class BlockingCluster:
    """The blocking driver of a cluster: thread safe, fork safe, connecting to each node when it is first used."""

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
        self._nodes: dict[NodeAddress, _BlockingNode] = {}
        self.router: ClusterRouter = ClusterRouter(endpoint, self._get_node, self._forget)

    @property
    def has_connected(self) -> bool:
        """Whether a node has answered before. Until then an error is raised at once: the URL may be wrong."""
        return any(node.redis.has_connected for node in list(self._nodes.values()))

    def perform(self, call: Call[T]) -> T:
        """Perform one call on the node of its keys. Raises BrokerError."""
        return run_blocking(self.router.perform(call))

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls, those for one node in one write; return their decoded replies in order."""
        return run_blocking(self.router.perform_all(calls))

    def perform_replicated(
        self, calls: Sequence[Call[T]], waits: Sequence[Call[int]]
    ) -> tuple[list[T], int | BrokerError]:
        """Perform calls for one queue, and wait until replicas of its node have what they have written.

        If a failover interrupts them, they are performed again call by call. Only then may WAIT answer too early.
        """
        replies: list[Any] = run_blocking(self.router.perform_each(cast("list[Call[Any]]", [*calls, *waits])))
        values, counts = replies[: len(calls)], replies[len(calls) :]
        failure = next((reply for reply in values if isinstance(reply, BrokerError)), None)
        if failure is not None:
            if any(not isinstance(reply, BrokerError) for reply in values):
                failure.mark_maybe_done()
            raise failure
        return values, next((reply for reply in counts if isinstance(reply, BrokerError)), counts[-1])

    def get_node(self, address: NodeAddress) -> BlockingRedis:
        """Return the driver of one node."""
        node = self._nodes.get(address)
        if node is None:
            redis = BlockingRedis(
                self.endpoint.at_node(address.host, address.port),
                timing=self.timing,
                max_connections=self._max_connections,
            )
            node = self._nodes.setdefault(address, _BlockingNode(redis))  # another thread may have been first
        return node.redis

    def close(self) -> None:
        """Close the connections. The driver opens new ones if it is used again."""
        for node in list(self._nodes.values()):
            node.redis.close()

    async def _get_node(self, address: NodeAddress) -> _BlockingNode:
        self.get_node(address)
        return self._nodes[address]

    def _forget(self, nodes: Iterable[NodeAddress]) -> None:
        """Close the connections to nodes that have no slots."""
        for address in set(self._nodes) - set(nodes):
            node = self._nodes.pop(address, None)
            if node is not None:
                node.redis.close()
