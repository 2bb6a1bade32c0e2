"""Ask the servers of a broker which of them are primaries, and how far behind their replicas are."""

from contextlib import closing

from msgspec.structs import replace

from celery5.broker.call import Call
from celery5.broker.calls import health as health_calls
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.errors import BrokerError
from celery5.protocol.hash_slots import NodeAddress
from celery5.protocol.health.server_nodes import PrimaryView, merge_replicas, read_primaries, read_replicas
from celery5.protocol.masking import get_error_text

TIMING = Timing(connect=1.0, reply=2.0, first_connect=1.0)


def read_primary_views(endpoint: Endpoint, broker: str = "") -> list[PrimaryView]:
    """Return the primaries of a broker with their replicas. For plain Python.

    Raises:
        BrokerError: The server, or every node of the cluster, cannot be asked.
    """
    with closing(open_blocking(endpoint, timing=TIMING, max_connections=1)) as redis:
        info = redis.perform(health_calls.get_replication_info())
        driver, endpoint = redis.driver, redis.endpoint
        if isinstance(driver, BlockingRedis):
            return [PrimaryView(broker=broker, address=_find_address(endpoint), replicas=read_replicas(info))]
        raw = driver.perform(Call(("CLUSTER", "SLOTS"), lambda reply: reply, repeatable=True))
        asked = driver.router.map.nodes[0]
        views = read_primaries(raw, asked)
    return [replace(_ask(endpoint, view), broker=broker) for view in views]


def _find_address(endpoint: Endpoint) -> str:
    if endpoint.topology == "sentinel":
        views = health_calls.probe_sentinels(endpoint)
        return next((view.primary for view in views if view.primary), "")
    return endpoint.path if endpoint.kind == "unix" else str(NodeAddress(endpoint.host, endpoint.port))


def _ask(endpoint: Endpoint, view: PrimaryView) -> PrimaryView:
    """Return a primary of a cluster with the replicas that it reports."""
    host, _, port = view.address.rpartition(":")
    node = endpoint.at_node(host.strip("[]"), int(port))
    try:
        with closing(BlockingRedis(node, timing=TIMING, max_connections=1)) as redis:
            connected = read_replicas(redis.perform(health_calls.get_replication_info()))
    except BrokerError as error:
        return replace(view, error=get_error_text(error))
    return replace(view, replicas=merge_replicas(view.replicas, connected))
