"""Refuse to start on a server that celery5 cannot use, for processes that otherwise start without their broker."""

import trio

from celery5.app import App
from celery5.broker.connection.link import LinkConnectFailed, LinkEvent
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound, remember_cluster
from celery5.errors import BrokerError, BrokerUnsupported

CHECK_LIMIT = 1.0
"""Seconds that a server has to answer: such a process must not start much later because its broker is unreachable."""


async def check_servers(app: App) -> None:
    """Shake hands with all brokers of an application, at the same time. A broker that cannot be reached is left out.

    Raises:
        BrokerUnsupported: A server is a Sentinel, for example.
    """
    unsupported: list[BrokerUnsupported] = []
    async with trio.open_nursery() as nursery:
        for name in app.brokers.names:
            nursery.start_soon(_check_server, app.brokers.get(name).endpoint, unsupported)
    if unsupported:
        raise unsupported[0]


async def _check_server(endpoint: Endpoint, unsupported: list[BrokerUnsupported]) -> None:
    """Make one attempt to connect, and keep the error of a server that cannot be used."""
    async with trio.open_nursery() as nursery:

        def end_at_failure(event: LinkEvent) -> None:
            if isinstance(event, LinkConnectFailed):
                nursery.cancel_scope.cancel()  # such a process reports that itself, and waits for its broker

        timing = Timing(first_connect=CHECK_LIMIT, connect=CHECK_LIMIT)
        redis = open_redis(endpoint=endpoint, timing=timing, watch=end_at_failure)
        try:
            await nursery.start(redis.run)
        except ClusterFound as found:
            remember_cluster(found)
            nursery.start_soon(_check_server, endpoint, unsupported)
            return
        except BrokerUnsupported as error:
            unsupported.append(error)
        except BrokerError:
            pass  # the same
        nursery.cancel_scope.cancel()
