"""Wait for result documents of a Redis Cluster in plain Python: with one connection for each node.

Each wait lasts a few seconds at most and is then begun again where the slots are by then: so a result is found on the
node that has taken the place of another.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from celery5.broker.colour import run_blocking
from celery5.broker.driver import ResultWaiter, StopCondition
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.routing.cluster_router import ClusterMap
from celery5.broker.routing.routed_results import RoutedResultWaiter
from celery5.broker.routing.unreachable import leave_out_none
from celery5.broker.timing import OUTAGE_LIMIT
from celery5.broker.translate import SlotRedirected
from celery5.broker.waiting.blocking import BlockingResultWaiter
from celery5.broker.waiting.result_waits import REREAD_INTERVAL
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.hash_slots import Redirection, get_key_slot

TURN = REREAD_INTERVAL
"""Seconds after which a wait looks again where its keys are: documents are read again as often anyway."""


PAUSE = 0.1
"""Seconds after which a node is asked again that could not be reached, or whose slot is moved key by key."""


def find_move(error: BrokerError) -> Redirection | None:
    """Return what a node has said of a slot that is on another one for good; None while it is on its way there."""
    if isinstance(error, SlotRedirected) and error.redirection.kind == "MOVED":
        return error.redirection
    return None


async def follow(cluster: ClusterMap, move: Redirection | None) -> None:
    """Read the map of slots again, first from the node that has been named. Raises BrokerUnavailable."""
    if move is not None and move.node.host:
        await cluster.note_moved(move.slot, move.node)
    else:
        await cluster.read()


def as_unavailable(error: BrokerError) -> BrokerUnavailable:
    """Return the error of a wait that has found no node with its keys: a redirection would blame the URL."""
    if isinstance(error, BrokerUnavailable):
        return error
    return BrokerUnavailable(f"a slot of the keys is being moved ({error}); try again soon")


class NodesOfKeys:
    """Says which node has a key, by its name."""

    def __init__(self, cluster: ClusterMap) -> None:
        self._cluster = cluster
        self.addresses = {str(node): node for node in cluster.nodes}

    @property
    def brokers(self) -> Sequence[str]:
        """The names of the nodes."""
        return tuple(self.addresses)

    def find_broker_of_key(self, key: str) -> str | None:
        """Return the name of the node that has a key."""
        node = self._cluster.slots.find_node(get_key_slot(key))
        if node is None:
            return None
        self.addresses[str(node)] = node
        return str(node)


class Turns:
    """The time of one wait, and the documents that it has."""

    def __init__(self, keys: Sequence[str], timeout: float | None) -> None:
        self.documents: dict[str, bytes] = {}
        self.missing: list[str] = list(keys)
        self._end = None if timeout is None else time.monotonic() + timeout
        self._lost_since: float | None = None

    @property
    def seconds(self) -> float:
        """How long the next turn may take."""
        return TURN if self._end is None else max(0.0, min(TURN, self._end - time.monotonic()))

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._end is not None and time.monotonic() >= self._end

    def add(self, documents: dict[str, bytes]) -> None:
        """Take what one turn has brought."""
        self._lost_since = None
        self.documents |= documents
        self.missing = [key for key in self.missing if key not in self.documents]

    def is_hopeless(self) -> bool:
        """Record that a node did not answer; return whether that has lasted for as long as is waited for any server."""
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        return self.is_over or now - self._lost_since >= OUTAGE_LIMIT

    def with_earlier(self, enough: StopCondition | None) -> StopCondition | None:
        """Return the condition for the documents of a turn, which counts those of the turns before it, too."""
        if enough is None:
            return None
        earlier = dict(self.documents)
        return lambda found: enough({**earlier, **found})


class BlockingClusterResultWaiter:
    """Waits in plain Python for documents of a cluster."""

    def __init__(self, redis: BlockingCluster) -> None:
        self._redis = redis
        self._waiters: dict[str, BlockingResultWaiter] = {}

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        cluster, turns = self._redis.router.map, Turns(keys, timeout)
        while True:
            try:
                run_blocking(cluster.find_node(None))  # reads the map, if that was not done yet
                nodes = NodesOfKeys(cluster)
                waiter = RoutedResultWaiter(nodes, self._make_getter(nodes))
                with leave_out_none():
                    found = waiter.wait(
                        turns.missing, timeout=turns.seconds, enough=turns.with_earlier(enough)
                    )
                turns.add(found)
            except (SlotRedirected, BrokerUnavailable) as error:
                move = find_move(error)
                if move is None and turns.is_hopeless():
                    raise as_unavailable(error) from None
                with suppress(BrokerUnavailable):
                    run_blocking(follow(cluster, move))
                if move is None:
                    time.sleep(PAUSE)
            if not turns.missing or turns.is_over or (enough is not None and enough(turns.documents)):
                return turns.documents

    def close(self) -> None:
        """Close the connections. They open again when needed."""
        for waiter in list(self._waiters.values()):
            waiter.close()

    def _make_getter(self, nodes: NodesOfKeys) -> Callable[[str], ResultWaiter]:
        def get(name: str) -> ResultWaiter:
            waiter = self._waiters.get(name)
            if waiter is None:
                redis = self._redis.get_node(nodes.addresses[name])
                waiter = self._waiters[name] = BlockingResultWaiter(redis, redis.endpoint)
            return waiter

        return get
