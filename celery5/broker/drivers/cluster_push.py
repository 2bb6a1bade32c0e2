"""Receive pushed messages from a Redis Cluster, on one connection to each node that has a subscribed channel.

From Redis 7.0 on a channel belongs to the slot of its name. Its messages stay on the node of the slot and its replicas
(SSUBSCRIBE), and a node ends the subscriptions of a slot that moves away. On older servers each message reaches all
nodes (SUBSCRIBE). On both, this driver subscribes at the primary of the channel's slot. One task subscribes to missing
channels, at the node that has their slot by then, until none is missing.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from celery5.broker.call import Word
from celery5.broker.connection.link import LinkEvent, LinkLost, LinkStatistics, ignore_event
from celery5.broker.connection.push import PushRedis, name_channel
from celery5.broker.drivers.cluster_on_trio import (
    ClusterRedis,
    RunningConnections,
    add_statistics,
    get_worst_breaker,
    keep_trying,
)
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import is_broadcast
from celery5.broker.timing import Timing
from celery5.broker.translate import SlotRedirected
from celery5.errors import BrokerDenied, BrokerError, BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress, group_by_slot
from celery5.protocol.health.breaker import BreakerState

RETRY_PAUSE = 0.25
"""Seconds until channels are tried again if their node cannot be reached."""


class _NodePush(PushRedis):
    """One connection to a node. It reports which subscriptions begin and end, and never renews one itself."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        on_message: Callable[[bytes, bytes], None],
        on_connected: Callable[[], None],
        on_subscribed: Callable[[bytes], None],
        on_removed: Callable[[bytes], None],
        timing: Timing,
        name: str,
        watch: Callable[[LinkEvent], None],
    ) -> None:
        super().__init__(
            endpoint=endpoint,
            on_message=on_message,
            on_connected=on_connected,
            timing=timing,
            name=name,
            watch=watch,
        )
        self._on_subscribed = on_subscribed
        self._on_removed = on_removed

    async def send(self, command: str, channels: list[bytes]) -> None:
        """Subscribe or unsubscribe. Raises the first error after all channels were tried."""
        await self._send(command, channels)

    def _make_commands(self, command: str, names: list[bytes]) -> list[tuple[Word, ...]]:
        greeting = self._link.greeting
        if greeting is None or not greeting.has_sharded_channels:
            return super()._make_commands(command, names)
        of_all_nodes = [name for name in names if is_broadcast(name)]
        of_slots = group_by_slot(name for name in names if not is_broadcast(name))
        return [
            *(super()._make_commands(command, of_all_nodes) if of_all_nodes else ()),
            *((f"S{command}", *part) for part in of_slots.values()),
        ]

    def _pushed(self, frame: list[Any]) -> None:
        match frame[0]:
            case b"message" | b"smessage":
                self._on_message(frame[1], frame[2])
            case b"subscribe" | b"ssubscribe":
                self._on_subscribed(frame[1])
            case b"unsubscribe" | b"sunsubscribe":
                self._on_removed(frame[1])
            case _:
                pass


class ClusterPush(PushRedis):
    """Listens to channels of a cluster. Arguments as for `PushRedis`, and `control`, the driver that knows the slots.

    `on_connected` is called when lost subscriptions were renewed.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        control: ClusterRedis,
        on_message: Callable[[bytes, bytes], None],
        on_connected: Callable[[], None] = lambda: None,
        timing: Timing = Timing(),  # noqa: B008  frozen
        name: str = "celery5-push",
        watch: Callable[[LinkEvent], None] = ignore_event,
    ) -> None:
        super().__init__(
            endpoint=endpoint, on_message=on_message, on_connected=on_connected, timing=timing, name=name
        )
        self._cluster = endpoint
        self._control = control
        self._timing = timing
        self._watch = watch
        self._make_node = partial(_NodePush, on_message=on_message, timing=keep_trying(timing), name=name)
        self._nodes: dict[NodeAddress, _NodePush] = {}
        self._running = RunningConnections()
        # The node of each subscription; the channels without a subscription; those of them that had one before.
        self._subscribed: dict[bytes, NodeAddress] = {}
        self._missing: set[bytes] = set()
        self._lost: set[bytes] = set()
        # The channels that callers wait for, and the errors of those that were refused.
        self._awaited: set[bytes] = set()
        self._denied: dict[bytes, BrokerError] = {}
        self._changed = trio.Event()
        self._tried = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep subscribed until cancelled, as `PushRedis.run`, but call `started()` at once."""
        failure: BrokerError | None = None

        async def start() -> None:
            nursery.start_soon(self._keep_subscribed)

        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._running.run(start, task_status)
                except BrokerError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        finally:
            self._nodes = {}
            self._missing.update(self._subscribed)
            self._lost.update(self._subscribed)
            self._subscribed = {}
        if failure is not None:
            raise failure

    async def subscribe(self, *channels: str | bytes) -> None:
        """Listen to these channels from now on, as `PushRedis.subscribe`."""
        names = [name_channel(channel) for channel in channels]
        self._channels.update(names)
        new = {name for name in names if name not in self._subscribed}
        if not new:
            return
        self._missing |= new
        self._awaited |= new
        self._changed.set()
        try:
            with trio.move_on_after(self._timing.reply):
                while not new <= self._subscribed.keys():
                    denied = next((error for name in new if (error := self._denied.pop(name, None))), None)
                    if denied is not None:
                        self._forget(new)
                        raise denied
                    await self._tried.wait()
                return
        finally:
            self._awaited -= new
        raise BrokerUnavailable(
            f"broker {self._where}: no subscription was confirmed within {self._timing.reply:g} s"
        )

    async def unsubscribe(self, *channels: str | bytes) -> None:
        """Unsubscribe from these channels, as `PushRedis.unsubscribe`."""
        by_node: dict[NodeAddress, list[bytes]] = {}
        for name in map(name_channel, channels):
            if name in self._subscribed:
                by_node.setdefault(self._subscribed[name], []).append(name)
        self._forget({name_channel(channel) for channel in channels})
        for address, names in by_node.items():
            node = self._nodes.get(address)
            if node is not None and node.connected:
                with suppress(BrokerUnavailable, SlotRedirected):
                    await node.send("UNSUBSCRIBE", names)

    @property
    def connected(self) -> bool:
        """Whether no subscription is lost, and all nodes with subscriptions are connected."""
        return not self._lost and all(
            node.connected for node in map(self._nodes.get, set(self._subscribed.values())) if node
        )

    @property
    def connected_since(self) -> float | None:
        """The time, on Trio's clock, of the last successful handshake with any node."""
        return max((node.connected_since or 0.0 for node in self._nodes.values()), default=None)

    @property
    def breaker(self) -> BreakerState:
        """The state of the circuit breakers: closed if all are."""
        return get_worst_breaker(self._nodes.values())

    def statistics(self) -> LinkStatistics:
        """Return the counters of all connections, closed connections included."""
        return add_statistics([self._running.ended, *(node.statistics() for node in self._nodes.values())])

    # ---- one task that subscribes to missing channels

    async def _keep_subscribed(self) -> None:
        while True:
            self._changed = trio.Event()
            with suppress(BrokerUnavailable):
                await self._subscribe_missing()
            renewed = self._lost - self._missing
            self._lost &= self._missing
            self._tried.set()
            self._tried = trio.Event()
            if renewed:
                self._on_connected()
            with trio.move_on_after(RETRY_PAUSE if self._missing else float("inf")):
                await self._changed.wait()

    async def _subscribe_missing(self) -> None:
        """Subscribe to the missing channels at the nodes that are connected. Raises BrokerUnavailable."""
        slots, by_node = self._control.router.map, dict[NodeAddress, list[bytes]]()
        for slot, names in group_by_slot(self._missing).items():
            by_node.setdefault(await slots.find_node(slot), []).extend(names)
        for address, names in by_node.items():
            node = self._nodes.get(address)
            if node is None:
                self._open_node(address)
            elif node.connected:
                await self._subscribe_at(address, node, names)
            else:
                await slots.read(last=address)
                self._close_lost_nodes()

    async def _subscribe_at(self, address: NodeAddress, node: _NodePush, names: list[bytes]) -> None:
        slots = self._control.router.map
        try:
            await node.send("SUBSCRIBE", names)
        except SlotRedirected as error:
            named = error.redirection.node
            if not named.host:
                named = NodeAddress(address.host, named.port)
            await slots.note_moved(error.redirection.slot, named)
            self._changed.set()
        except BrokerDenied as error:
            # Those that were subscribed before are tried again: a permission that was taken away may be given back.
            refused = self._missing & set(names)
            self._denied.update(dict.fromkeys(refused & self._awaited, error))
        except BrokerUnavailable:
            await slots.read(last=address)

    def _open_node(self, address: NodeAddress) -> None:
        node = self._nodes[address] = self._make_node(
            endpoint=self._cluster.at_node(address.host, address.port),
            on_connected=lambda: self._changed.set(),  # looked up at each call: the event is replaced
            on_subscribed=partial(self._note_subscribed, address),
            on_removed=partial(self._note_removed, address),
            watch=partial(self._watch_node, address),
        )
        self._running.open(node)

    def _close_lost_nodes(self) -> None:
        """End lost connections to nodes that no longer have slots."""
        for address in set(self._nodes) - set(self._control.router.map.slots.nodes):
            if not self._nodes[address].connected:
                self._running.close(self._nodes.pop(address))

    def _watch_node(self, address: NodeAddress, event: LinkEvent) -> None:
        self._watch(event)
        if isinstance(event, LinkLost):
            for name in [name for name, node_address in self._subscribed.items() if node_address == address]:
                self._note_removed(address, name)

    def _note_subscribed(self, address: NodeAddress, name: bytes) -> None:
        if name in self._channels:
            self._subscribed[name] = address
            self._missing.discard(name)

    def _note_removed(self, address: NodeAddress, name: bytes) -> None:
        """Record that a subscription has ended: its slot has moved, or the connection is lost."""
        if self._subscribed.get(name) != address:
            return
        del self._subscribed[name]
        if name in self._channels:
            self._missing.add(name)
            self._lost.add(name)
            self._changed.set()

    def _forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._channels.discard(name)
            self._missing.discard(name)
            self._lost.discard(name)
            self._subscribed.pop(name, None)
