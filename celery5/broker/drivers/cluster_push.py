"""The connections on which the nodes of a Redis Cluster push messages: one to each node that has a channel.

From 7.0 on a channel belongs to the slot of its name, and its messages stay on the node of that slot and its replicas
(SSUBSCRIBE). Such a node ends the subscriptions of a slot that leaves it. On an older node a message of any node is
heard (SUBSCRIBE). Either way a channel is heard at the primary of its slot. One task subscribes to what is not heard,
wherever that is by then, until all is.
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
from celery5.broker.keys import is_heard_on_all_nodes
from celery5.broker.timing import Timing
from celery5.broker.translate import SlotRedirected
from celery5.errors import BrokerDenied, BrokerError, BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress, group_by_slot
from celery5.protocol.health.breaker import BreakerState

RETRY_PAUSE = 0.25
"""Seconds after which channels are tried again whose node cannot be reached."""


class _NodePush(PushRedis):
    """One connection to a node. It says which channels are heard and which no more, and renews nothing by itself."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        on_message: Callable[[bytes, bytes], None],
        on_connected: Callable[[], None],
        on_heard: Callable[[bytes], None],
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
        self._on_heard = on_heard
        self._on_removed = on_removed

    async def send(self, command: str, channels: list[bytes]) -> None:
        """Subscribe or unsubscribe. Raises the first error, when all channels have been tried."""
        await self._send(command, channels)

    def _make_commands(self, command: str, names: list[bytes]) -> list[tuple[Word, ...]]:
        greeting = self._link.greeting
        if greeting is None or not greeting.has_sharded_channels:
            return super()._make_commands(command, names)
        of_all_nodes = [name for name in names if is_heard_on_all_nodes(name)]
        of_slots = group_by_slot(name for name in names if not is_heard_on_all_nodes(name))
        return [
            *(super()._make_commands(command, of_all_nodes) if of_all_nodes else ()),
            *((f"S{command}", *part) for part in of_slots.values()),
        ]

    def _pushed(self, frame: list[Any]) -> None:
        match frame[0]:
            case b"message" | b"smessage":
                self._on_message(frame[1], frame[2])
            case b"subscribe" | b"ssubscribe":
                self._on_heard(frame[1])
            case b"unsubscribe" | b"sunsubscribe":
                self._on_removed(frame[1])
            case _:
                pass


class ClusterPush(PushRedis):
    """Listens to channels of a cluster. The arguments are those of `PushRedis`, and the driver that knows the slots.

    `on_connected` is called when channels are heard again that were not for a while.
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
        # Where each channel is heard; the wanted ones that are not; and of these, those that were before.
        self._heard: dict[bytes, NodeAddress] = {}
        self._missing: set[bytes] = set()
        self._lost: set[bytes] = set()
        # What was refused, for the callers that wait for it.
        self._awaited: set[bytes] = set()
        self._denied: dict[bytes, BrokerError] = {}
        self._changed = trio.Event()
        self._passed = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep subscribed until cancelled; as `PushRedis.run`, but `started()` at once."""
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
            self._missing.update(self._heard)
            self._lost.update(self._heard)
            self._heard = {}
        if failure is not None:
            raise failure

    async def subscribe(self, *channels: str | bytes) -> None:
        """Listen to these channels from now on, as `PushRedis.subscribe`."""
        names = [name_channel(channel) for channel in channels]
        self._channels.update(names)
        new = {name for name in names if name not in self._heard}
        if not new:
            return
        self._missing |= new
        self._awaited |= new
        self._changed.set()
        try:
            with trio.move_on_after(self._timing.reply):
                while not new <= self._heard.keys():
                    denied = next((error for name in new if (error := self._denied.pop(name, None))), None)
                    if denied is not None:
                        self._forget(new)
                        raise denied
                    await self._passed.wait()
                return
        finally:
            self._awaited -= new
        raise BrokerUnavailable(
            f"broker {self._where}: nobody has confirmed a subscription within {self._timing.reply:g} s"
        )

    async def unsubscribe(self, *channels: str | bytes) -> None:
        """Unsubscribe from these channels, as `PushRedis.unsubscribe`."""
        by_node: dict[NodeAddress, list[bytes]] = {}
        for name in map(name_channel, channels):
            if name in self._heard:
                by_node.setdefault(self._heard[name], []).append(name)
        self._forget({name_channel(channel) for channel in channels})
        for address, names in by_node.items():
            node = self._nodes.get(address)
            if node is not None and node.connected:
                with suppress(BrokerUnavailable, SlotRedirected):
                    await node.send("UNSUBSCRIBE", names)

    @property
    def connected(self) -> bool:
        """Whether all nodes are connected right now at which something is to be heard, and all is heard."""
        return not self._lost and all(
            node.connected for node in map(self._nodes.get, set(self._heard.values())) if node
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
        """Return the counters of all connections that there were."""
        return add_statistics([self._running.ended, *(node.statistics() for node in self._nodes.values())])

    # ---- one task that subscribes to what is missing

    async def _keep_subscribed(self) -> None:
        while True:
            self._changed = trio.Event()
            with suppress(BrokerUnavailable):
                await self._subscribe_missing()
            found = self._lost - self._missing
            self._lost &= self._missing
            self._passed.set()
            self._passed = trio.Event()
            if found:
                self._on_connected()
            with trio.move_on_after(RETRY_PAUSE if self._missing else float("inf")):
                await self._changed.wait()

    async def _subscribe_missing(self) -> None:
        """Subscribe to what is not heard, at the nodes that are connected. Raises BrokerUnavailable."""
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
            refused = self._missing & set(names)
            self._denied.update(dict.fromkeys(refused & self._awaited, error))
            if not refused <= self._awaited:
                self._running.fail(error)
        except BrokerUnavailable:
            await slots.read(last=address)

    def _open_node(self, address: NodeAddress) -> None:
        node = self._nodes[address] = self._make_node(
            endpoint=self._cluster.at_node(address.host, address.port),
            on_connected=lambda: self._changed.set(),  # the event of that moment
            on_heard=partial(self._note_heard, address),
            on_removed=partial(self._note_removed, address),
            watch=partial(self._watch_node, address),
        )
        self._running.open(node)

    def _close_lost_nodes(self) -> None:
        """End the connections that are lost to nodes that have no slots."""
        for address in set(self._nodes) - set(self._control.router.map.slots.nodes):
            if not self._nodes[address].connected:
                self._running.close(self._nodes.pop(address))

    def _watch_node(self, address: NodeAddress, event: LinkEvent) -> None:
        self._watch(event)
        if isinstance(event, LinkLost):
            for name in [name for name, heard_at in self._heard.items() if heard_at == address]:
                self._note_removed(address, name)

    def _note_heard(self, address: NodeAddress, name: bytes) -> None:
        if name in self._channels:
            self._heard[name] = address
            self._missing.discard(name)

    def _note_removed(self, address: NodeAddress, name: bytes) -> None:
        """Take in that a channel is not heard any more: its slot has moved, or the connection is lost."""
        if self._heard.get(name) != address:
            return
        del self._heard[name]
        if name in self._channels:
            self._missing.add(name)
            self._lost.add(name)
            self._changed.set()

    def _forget(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._channels.discard(name)
            self._missing.discard(name)
            self._lost.discard(name)
            self._heard.pop(name, None)
