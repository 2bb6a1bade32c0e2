"""Find out whether a `redis://` URL leads to a server or to a Redis Cluster: the server says it in the handshake.

So nothing is asked for it, and a connection to a single server costs nothing more. The first connection to a node of a
cluster is refused with ClusterFound, before any call is sent on it. Whoever opened it remembers that, and opens its
connections again: each `open_...` asks `find_endpoint` first. When a single server stands in the place of the cluster
later, the same happens in the other direction.
"""

from typing import Any

from celery5.broker.endpoint import Endpoint
from celery5.errors import BrokerUnsupported

_clusters: dict[Endpoint, Endpoint] = {}


class ClusterFound(BrokerUnsupported):
    """The server of a URL that names one server is part of a Redis Cluster. Nothing was sent to it."""

    def __init__(self, message: str, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return ClusterFound, (str(self), self.endpoint), self.__dict__


class ServerFound(ClusterFound):
    """A single server has taken the place of a cluster that this process had found. Nothing was sent to it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerFound, (str(self), self.endpoint), self.__dict__


def find_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return the cluster to which an endpoint leads, if this process has found one there; else the endpoint."""
    return _clusters.get(endpoint, endpoint)


def remember_clusters(errors: Any) -> None:
    """Remember each cluster that was found, in a group of ClusterFound or of groups of it."""
    for error in errors.exceptions:
        if isinstance(error, ClusterFound):
            remember_cluster(error)
        else:
            remember_clusters(error)


def remember_cluster(found: ClusterFound) -> None:
    """Have `find_endpoint` return the cluster from now on; or the server again, if that was found in its place."""
    if isinstance(found, ServerFound):
        _clusters.pop(found.endpoint, None)
    else:
        _clusters[found.endpoint] = found.endpoint.as_cluster()


def forget_clusters() -> None:
    """Forget all clusters that were found: for tests, whose servers take each other's ports."""
    _clusters.clear()
