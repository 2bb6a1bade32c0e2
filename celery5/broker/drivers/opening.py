"""Open the blocking driver for an endpoint: a cluster has another one than a server, and most never load it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from celery5.broker.call import Call
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound, ServerFound, find_endpoint, remember_cluster
from celery5.errors import BrokerError

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_blocking import BlockingCluster

T = TypeVar("T")


class BlockingBroker:
    """The blocking driver of a broker: that of a server, or of a cluster as soon as the server says it is part of one.

    Args as those of `BlockingRedis`.
    """

    def __init__(self, endpoint: Endpoint, *, timing: Timing, max_connections: int) -> None:
        self.timing = timing
        self._max_connections = max_connections
        self.driver: BlockingRedis | BlockingCluster = self._open(endpoint)

    @property
    def endpoint(self) -> Endpoint:
        """The server or the cluster, as far as it is known."""
        return self.driver.endpoint

    @property
    def has_connected(self) -> bool:
        """Whether a server has answered before. Until then an error is raised at once: the URL may be wrong."""
        return self.driver.has_connected

    def perform(self, call: Call[T]) -> T:
        """Perform one call and return its decoded reply. Raises BrokerError."""
        try:
            return self.driver.perform(call)
        except ClusterFound as found:
            self.follow(found)
        return self.driver.perform(call)

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls as the driver does."""
        try:
            return self.driver.perform_all(calls)
        except ClusterFound as found:
            self.follow(found)
            if isinstance(found, ServerFound):  # some of the calls may have run on other nodes of the cluster
                raise
        return self.driver.perform_all(calls)

    def perform_replicated(
        self, calls: Sequence[Call[T]], waits: Sequence[Call[int]]
    ) -> tuple[list[T], int | BrokerError]:
        """Perform calls for one queue as the driver does, and wait until replicas have what they have written."""
        try:
            return self.driver.perform_replicated(calls, waits)
        except ClusterFound as found:
            self.follow(found)
        return self.driver.perform_replicated(calls, waits)

    def follow(self, found: ClusterFound) -> None:
        """Use the driver of what was found from now on. Raises the error if a call may have run before it."""
        if found.maybe_done:
            raise found
        remember_cluster(found)
        server = self.driver
        if server.endpoint != find_endpoint(found.endpoint):  # else another thread was first
            self.driver = self._open(found.endpoint)
            server.close()

    def close(self) -> None:
        """Close the connections. The driver opens new ones if it is used again."""
        self.driver.close()

    def _open(self, endpoint: Endpoint) -> "BlockingRedis | BlockingCluster":
        endpoint = find_endpoint(endpoint)
        if endpoint.topology == "cluster":
            from celery5.broker.drivers.cluster_blocking import BlockingCluster

            return BlockingCluster(endpoint, timing=self.timing, max_connections=self._max_connections)
        return BlockingRedis(endpoint, timing=self.timing, max_connections=self._max_connections)


def open_blocking(
    endpoint: Endpoint,
    *,
    timing: Timing = Timing(),  # noqa: B008  frozen
    max_connections: int = 10,
) -> BlockingBroker:
    """Return the blocking driver for an endpoint."""
    return BlockingBroker(endpoint, timing=timing, max_connections=max_connections)
