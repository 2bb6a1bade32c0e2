"""Open the blocking driver for an endpoint: a cluster has another one than a server, and most never load it."""

from typing import TYPE_CHECKING, Union

from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing

if TYPE_CHECKING:
    from celery5.broker.drivers.cluster_blocking import BlockingCluster

BlockingBroker = Union[BlockingRedis, "BlockingCluster"]
"""The blocking driver of a server, or of a cluster."""


def open_blocking(
    endpoint: Endpoint,
    *,
    timing: Timing = Timing(),  # noqa: B008  frozen
    max_connections: int = 10,
) -> BlockingBroker:
    """Return the blocking driver for an endpoint: of a server, or of a cluster."""
    if endpoint.topology == "cluster":
        from celery5.broker.drivers.cluster_blocking import BlockingCluster

        return BlockingCluster(endpoint, timing=timing, max_connections=max_connections)
    return BlockingRedis(endpoint, timing=timing, max_connections=max_connections)
