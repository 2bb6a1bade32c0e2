"""The Trio drivers of a Redis Cluster: for each node a connection for calls, for each slot one for blocking reads.

They have the methods of the drivers of one server, so that services do not know the difference.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from celery5.broker.call import Call
from celery5.broker.connection.link import LinkEvent, LinkStatistics, SingleConnection, ignore_event
from celery5.broker.connection.pipeline import PendingRequest
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing.cluster_router import ClusterRouter, guard_script, join_replies
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound
from celery5.broker.translate import SlotRedirected
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress, find_keys, get_key_slot, split_words, with_block
from celery5.protocol.health.breaker import BreakerState

T = TypeVar("T")

MAX_PARKED = 32
"""The most slots for which one reader waits at the same time. It looks at further slots in turns."""
REFUSED_RETRY = 1.0
"""Seconds until a node that has refused a connection is tried again."""
TURN = 0.25
"""Seconds after which a reader of more slots looks at the others."""


class RunningConnections:
    """Connections that run in one nursery, as long as that is open."""

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None
        self._scopes: dict[SingleConnection, trio.CancelScope] = {}
        self._failure: BrokerError | None = None
        self._is_up = False
        self.ended = LinkStatistics(0, 0, 0, 0, 0)

    async def run(self, start: Callable[[], Any], task_status: trio.TaskStatus[None]) -> None:
        """Run the connections until cancelled; `started()` when `start` has returned. Raises their first error
        until then."""
        self._failure, self._is_up = None, False
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    await start()
                except BrokerError as error:
                    self.fail(error)
                else:
                    self._is_up = True
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self._nursery = None
            self._scopes = {}
        if self._failure is not None:
            raise self._failure

    def open(self, connection: SingleConnection) -> None:
        """Run a connection. Raises BrokerUnavailable while nothing runs."""
        if self._nursery is None:
            raise BrokerUnavailable("the connections to the cluster are closed; nothing was sent")
        scope = self._scopes[connection] = trio.CancelScope()
        self._nursery.start_soon(self._keep, connection, scope)

    def close(self, connection: SingleConnection) -> None:
        """End a connection."""
        self._count(connection)
        scope = self._scopes.pop(connection, None)
        if scope is not None:
            scope.cancel()

    async def _keep(self, connection: SingleConnection, scope: trio.CancelScope) -> None:
        """Run a connection until it is closed.

        A node that refuses its first connection while others run may be a new one, whose users are not set up yet.
        """
        with scope:
            while True:
                try:
                    await connection.run()
                except BrokerError as error:
                    if not self._is_up or isinstance(error, ClusterFound):
                        self.fail(error)
                        return
                await trio.sleep(REFUSED_RETRY)

    def fail(self, error: BrokerError) -> None:
        """End all of them: `run` raises the first error."""
        if self._nursery is not None:
            self._failure = self._failure or error
            self._nursery.cancel_scope.cancel()

    def _count(self, connection: SingleConnection) -> None:
        self.ended = add_statistics([self.ended, connection.statistics()])


def add_statistics(statistics: Iterable[LinkStatistics]) -> LinkStatistics:
    """Return the sums of the counters of several connections."""
    return LinkStatistics(
        *map(sum, zip(*(msgspec.structs.astuple(counters) for counters in statistics), strict=True))
    )


def keep_trying(timing: Timing) -> Timing:
    """Return the limits of a connection to one node. It tries without end, since the other nodes serve meanwhile."""
    return msgspec.structs.replace(timing, first_connect=float("inf"))


class ClusterRedis(TrioRedis):
    """The driver of a cluster: one connection to each node, made when it is first used, for all tasks of a process."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5",
        watch: Callable[[LinkEvent], None] = ignore_event,
    ) -> None:
        super().__init__(endpoint=endpoint, timing=timing, name=name, watch=watch)
        self._make_node = partial(TrioRedis, timing=keep_trying(timing), name=name, watch=watch)
        self._cluster = endpoint
        self._first_connect = timing.first_connect
        self._nodes: dict[NodeAddress, TrioRedis] = {}
        self._running = RunningConnections()
        self.router: ClusterRouter = ClusterRouter(endpoint, self._get_node, self._forget)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled; `started()` when the slots are known. Raises as `TrioRedis.run`."""
        try:
            await self._running.run(self._find_slots_first, task_status)
        finally:
            self._nodes = {}

    async def perform(self, call: Call[T]) -> T:
        """Perform one call on the node of its keys, as `TrioRedis.perform`."""
        return await self.router.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls, those for one node in one write, as `TrioRedis.perform_all`."""
        return await self.router.perform_all(calls)

    async def perform_each(self, calls: Sequence[Call[T]]) -> list[T | BrokerError]:
        """Perform several calls; return the decoded reply of each, or its error."""
        return await self.router.perform_each(calls)

    def begin(self, call: Call[Any]) -> PendingRequest | None:
        """Send a call at once, as `TrioRedis.begin`. Returns None if its node is not connected or not idle."""
        call = guard_script(call)
        node = self._find_idle_node(call)
        return None if node is None else node.begin(call)

    async def finish(self, call: Call[T], request: PendingRequest) -> T:
        """Return the decoded reply to a call that was begun. Raises as `perform`."""
        call = guard_script(call)
        node = self._find_idle_node(call) or next(iter(self._nodes.values()))
        try:
            return await node.finish(call, request)
        except (SlotRedirected, BrokerUnavailable) as error:
            return await self.router.perform_again(call, error)

    async def get_node(self, slot: int) -> TrioRedis:
        """Return the driver of the node that has a slot."""
        return await self._get_node(await self.router.map.find_node(slot))

    @property
    def connected(self) -> bool:
        """Whether all primaries that were used are connected right now."""
        primaries = self._used_primaries
        return bool(primaries) and all(node.connected for node in primaries)

    @property
    def connected_since(self) -> float | None:
        """The time, on Trio's clock, of the last successful handshake with any node."""
        return max((node.connected_since or 0.0 for node in self._nodes.values()), default=None)

    @property
    def client_id(self) -> int | None:
        """No id: each node has its own."""
        return None

    @property
    def server_version(self) -> str | None:
        """The version of one of the nodes."""
        return next((node.server_version for node in self._nodes.values() if node.server_version), None)

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breakers: closed if all are."""
        return get_worst_breaker(self._used_primaries)

    def statistics(self) -> LinkStatistics:
        """Return the counters of all connections, closed connections included."""
        return add_statistics([self._running.ended, *(node.statistics() for node in self._nodes.values())])

    @property
    def _used_primaries(self) -> list[TrioRedis]:
        """The drivers of the nodes that have slots: a node that the URL names may be gone, or a replica."""
        return [node for address in self.router.map.slots.nodes if (node := self._nodes.get(address))]

    async def _find_slots_first(self) -> None:
        """Read the map of slots, for as long as a first connection may take."""
        give_up = trio.current_time() + self._first_connect
        failure: BrokerUnavailable | None = None
        while True:
            with trio.move_on_at(give_up) as scope:
                try:
                    return await self.router.map.read()
                except BrokerUnavailable as error:
                    failure = error
                    await trio.sleep(0.1)
            if scope.cancelled_caught:
                raise failure or BrokerUnavailable(f"broker {self._where}: none of its nodes answers")

    def _find_idle_node(self, call: Call[Any]) -> TrioRedis | None:
        address = self.router.map.slots.find_node(get_key_slot(find_keys(call.words)[0]))
        return None if address is None else self._nodes.get(address)

    async def _get_node(self, address: NodeAddress) -> TrioRedis:
        node = self._nodes.get(address)
        if node is None:
            node = self._make_node(endpoint=self._cluster.at_node(address.host, address.port))
            self._running.open(node)
            self._nodes[address] = node
        return node

    def _forget(self, nodes: Iterable[NodeAddress]) -> None:
        """End the connections that are lost to nodes that have no slots."""
        for address in set(self._nodes) - set(nodes):
            if not self._nodes[address].connected:
                self._running.close(self._nodes.pop(address))


def get_worst_breaker(connections: Iterable[SingleConnection]) -> BreakerState:
    """Return the state of several circuit breakers: closed if all are."""
    states = {connection.breaker for connection in connections}
    return next(
        (state for state in (BreakerState.OPEN, BreakerState.HALF_OPEN) if state in states),
        BreakerState.CLOSED,
    )


class ClusterParked(ParkedRedis):
    """Blocking reads in a cluster: a connection for each slot, to the node that has it.

    A read of several slots looks at all of them without waiting. Only if all are empty, it waits on each, and the
    first that has something ends the others' waits; what they have got by then is returned, too.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        control: ClusterRedis,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5-park",
        watch: Callable[[LinkEvent], None] = ignore_event,
    ) -> None:
        super().__init__(endpoint=endpoint, control=control, timing=timing, name=name, watch=watch)
        self._make_park = partial(ParkedRedis, timing=keep_trying(timing), name=name, watch=watch)
        self._cluster = endpoint
        self._nodes_of_cluster = control
        self._parks: dict[int, tuple[NodeAddress, ParkedRedis]] = {}
        self._running = RunningConnections()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connected until cancelled; as `TrioRedis.run`."""

        async def start() -> None:
            return

        try:
            await self._running.run(start, task_status)
        finally:
            self._parks = {}

    async def perform(self, call: Call[T], on_reply: Callable[[T], None] | None = None) -> T:
        """Perform one call, blocking or not, as `ParkedRedis.perform`, on each of its slots."""
        call = guard_script(call)
        slots = list(dict.fromkeys(map(get_key_slot, find_keys(call.words))))
        if len(slots) == 1:
            return await self._perform_on(slots[0], call, on_reply)
        keys = find_keys(call.words)
        words_by_slot = split_words(call.words)
        command = call.words[0]
        replies: dict[int, Any] = {}

        def take(slot: int, raw: Any) -> None:
            replies[slot] = raw
            if on_reply is not None:
                on_reply(call.decode(join_replies(command, keys, (), [raw])))

        def read(slot: int, block: float) -> Call[Any]:
            words = with_block(words_by_slot[slot], block)
            return Call(words, lambda raw: raw, repeatable=call.repeatable, blocks=block)

        await self._read_all({slot: read(slot, 0.0) for slot in slots}, take)
        end = trio.current_time() + call.blocks
        while not replies and (left := end - trio.current_time()) > 0:
            parked, others = slots[:MAX_PARKED], slots[MAX_PARKED:]
            block = min(left, TURN) if others else left
            await self._wait_any({slot: read(slot, block) for slot in parked}, take)
            if others:
                await self._read_all({slot: read(slot, 0.0) for slot in others}, take)
                slots = [*others, *parked]
        return call.decode(join_replies(command, keys, (), list(replies.values())))

    @property
    def connected(self) -> bool:
        """Whether all connections are there right now."""
        return all(park.connected for _, park in self._parks.values())

    @property
    def connected_since(self) -> float | None:
        """The time, on Trio's clock, of the last successful handshake."""
        return max((park.connected_since or 0.0 for _, park in self._parks.values()), default=None)

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breakers: closed if all are."""
        return get_worst_breaker(park for _, park in self._parks.values())

    def statistics(self) -> LinkStatistics:
        """Return the counters of all connections, closed connections included."""
        return add_statistics([self._running.ended, *(park.statistics() for _, park in self._parks.values())])

    async def _perform_on(self, slot: int, call: Call[T], on_reply: Callable[[T], None] | None) -> T:
        """Perform a call on one slot; once more where the slot is now, if it has moved."""
        cluster = self._nodes_of_cluster.router.map
        for _ in range(3):
            park = await self._get_park(slot)
            try:
                return await park.perform(call, on_reply)
            except SlotRedirected as error:
                named = error.redirection.node
                if error.redirection.kind == "ASK":
                    raise BrokerUnavailable(f"{error}; the slot migrates") from None
                if not named.host:
                    named = NodeAddress(self._parks[slot][0].host, named.port)
                await cluster.note_moved(slot, named)
            except BrokerUnavailable:
                await cluster.read(last=self._parks[slot][0])
                raise
        raise BrokerUnavailable(f"broker {self._where}: the slot {slot} moves")

    async def _read_all(self, calls: dict[int, Call[Any]], take: Callable[[int, Any], None]) -> None:
        """Perform a read on each slot, all at the same time. Raises the first error, when all have ended."""
        await self._together(calls, take, is_first_enough=False)

    async def _wait_any(self, calls: dict[int, Call[Any]], take: Callable[[int, Any], None]) -> None:
        """Perform a read on each slot until one has something. Raises the first error, when all have ended."""
        await self._together(calls, take, is_first_enough=True)

    async def _together(
        self, calls: dict[int, Call[Any]], take: Callable[[int, Any], None], *, is_first_enough: bool
    ) -> None:
        errors: list[BrokerError] = []
        async with trio.open_nursery() as nursery:

            async def read(slot: int, call: Call[Any]) -> None:
                def on_reply(raw: Any) -> None:
                    take(slot, raw)
                    if is_first_enough:
                        nursery.cancel_scope.cancel()

                try:
                    await self._perform_on(slot, call, on_reply)
                except BrokerError as error:
                    errors.append(error)
                    if is_first_enough:
                        nursery.cancel_scope.cancel()

            for slot, call in calls.items():
                nursery.start_soon(read, slot, call)
        if errors:
            raise errors[0]

    async def _get_park(self, slot: int) -> ParkedRedis:
        address = await self._nodes_of_cluster.router.map.find_node(slot)
        found = self._parks.get(slot)
        if found is not None and found[0] == address:
            return found[1]
        control = await self._nodes_of_cluster.get_node(slot)
        if found is not None:
            self._running.close(found[1])
        park = self._make_park(endpoint=self._cluster.at_node(address.host, address.port), control=control)
        self._running.open(park)
        self._parks[slot] = address, park
        return park
