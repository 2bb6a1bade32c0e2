"""Open the connections of Trio for an endpoint: a cluster has others than a server, and most never load them."""

from collections.abc import Callable

from celery5.broker.connection.link import LinkEvent, ignore_event
from celery5.broker.connection.push import PushRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import find_endpoint


def open_redis(
    *,
    endpoint: Endpoint,
    timing: Timing = Timing(),  # noqa: B008  frozen
    name: str = "celery5",
    watch: Callable[[LinkEvent], None] = ignore_event,
) -> TrioRedis:
    """Return the driver for an endpoint: of a server, or of a cluster.

    The `run` of the driver of a server raises ClusterFound if that is part of a cluster. After `remember_cluster` this
    returns the driver of the cluster.
    """
    endpoint = find_endpoint(endpoint)
    if endpoint.topology == "cluster":
        from celery5.broker.drivers.cluster_on_trio import ClusterRedis

        return ClusterRedis(endpoint=endpoint, timing=timing, name=name, watch=watch)
    return TrioRedis(endpoint=endpoint, timing=timing, name=name, watch=watch)


def open_parked(
    *,
    control: TrioRedis,
    timing: Timing = Timing(),  # noqa: B008  frozen
    name: str = "celery5-park",
    watch: Callable[[LinkEvent], None] = ignore_event,
) -> ParkedRedis:
    """Return the connection for blocking reads of the server of `control`, or those of its cluster."""
    endpoint = control.endpoint
    if endpoint.topology == "cluster":
        from celery5.broker.drivers.cluster_on_trio import ClusterParked, ClusterRedis

        assert isinstance(control, ClusterRedis)
        return ClusterParked(endpoint=endpoint, control=control, timing=timing, name=name, watch=watch)
    return ParkedRedis(endpoint=endpoint, control=control, timing=timing, name=name, watch=watch)


def open_push(
    *,
    control: TrioRedis,
    on_message: Callable[[bytes, bytes], None],
    on_connected: Callable[[], None] = lambda: None,
    timing: Timing = Timing(),  # noqa: B008  frozen
    name: str = "celery5-push",
    watch: Callable[[LinkEvent], None] = ignore_event,
) -> PushRedis:
    """Return a connection that listens to channels of the server of `control`, or of its cluster."""
    endpoint = control.endpoint
    if endpoint.topology == "cluster":
        from celery5.broker.drivers.cluster_on_trio import ClusterRedis
        from celery5.broker.drivers.cluster_push import ClusterPush

        assert isinstance(control, ClusterRedis)
        return ClusterPush(
            endpoint=endpoint,
            control=control,
            on_message=on_message,
            on_connected=on_connected,
            timing=timing,
            name=name,
            watch=watch,
        )
    return PushRedis(
        endpoint=endpoint,
        on_message=on_message,
        on_connected=on_connected,
        timing=timing,
        name=name,
        watch=watch,
    )
