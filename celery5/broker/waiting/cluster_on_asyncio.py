"""Wait for result documents of a Redis Cluster on asyncio: with one connection for each node."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from celery5.broker.driver import AsyncResultWaiter, StopCondition
from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
from celery5.broker.routing.routed_results import AsyncRoutedResultWaiter
from celery5.broker.routing.unreachable import leave_out_none
from celery5.broker.translate import SlotRedirected
from celery5.broker.waiting.cluster_blocking import (
    PAUSE,
    NodesOfKeys,
    Turns,
    as_unavailable,
    find_move,
    follow,
)
from celery5.broker.waiting.on_asyncio import AsyncioResultWaiter
from celery5.errors import BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress


class AsyncioClusterResultWaiter:
    """Waits in one asyncio loop for documents of a cluster."""

    def __init__(self, redis: AsyncioCluster) -> None:
        self._redis = redis
        self._waiters: dict[NodeAddress, AsyncioResultWaiter] = {}

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        cluster, turns = self._redis.router.map, Turns(keys, timeout)
        while True:
            try:
                await cluster.find_node(None)
                nodes = NodesOfKeys(cluster)

                async def get(name: str, nodes: NodesOfKeys = nodes) -> AsyncResultWaiter:
                    return self._get_waiter(nodes.addresses[name])

                waiter = AsyncRoutedResultWaiter(nodes, get)
                with leave_out_none():
                    found = await waiter.wait(
                        turns.missing, timeout=turns.seconds, enough=turns.with_earlier(enough)
                    )
                turns.add(found)
            except (SlotRedirected, BrokerUnavailable) as error:
                move = find_move(error)
                if move is None and turns.is_hopeless():
                    raise as_unavailable(error) from None
                with suppress(BrokerUnavailable):
                    await follow(cluster, move)
                if move is None:
                    await asyncio.sleep(PAUSE)
            if not turns.missing or turns.is_over or (enough is not None and enough(turns.documents)):
                return turns.documents

    async def aclose(self) -> None:
        """Close the connections. Waits that have not ended raise BrokerUnavailable."""
        for waiter in list(self._waiters.values()):
            await waiter.aclose()

    def _get_waiter(self, address: NodeAddress) -> AsyncioResultWaiter:
        waiter = self._waiters.get(address)
        if waiter is None:
            redis = self._redis.get_node(address)
            waiter = self._waiters[address] = AsyncioResultWaiter(redis, redis.endpoint)
        return waiter
