"""Failovers: the processes on a cluster of three primaries with a replica each, or on servers that sentinels watch.

A primary that nobody reaches is played by SIGSTOP for longer than its timeout, and SIGCONT: it comes back and believes
for a moment that it is the primary still. One that only clients reach is cut off from the other nodes by relays between
them, or refuses sentinels and replicas. Clients go to the addresses that nodes and sentinels name, so there are no
proxies before them.
"""

import signal
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import redis
import trio

from celery5.broker.keys import EVENTS
from celery5.broker.servers.embedded import EmbeddedServer
from tests.access import Access, list_denied
from tests.cluster_servers import TestCluster, running_cluster
from tests.faults.nemesis.cluster import Cluster, kind_of
from tests.faults.nemesis.schedule import Fault
from tests.faults.nemesis.verdict import Record, Struck
from tests.network import Network
from tests.redis.commands.staff import Staff
from tests.sentinel_servers import DOWN_AFTER_MS, WatchedServers, watched_servers
from tests.tls_files import find_tls_binary

NODE_TIMEOUT = 2.0
"""Seconds of silence after which the nodes of the cluster think that one of them is down."""
CONSUMING_AGAIN = {"cluster": NODE_TIMEOUT + 3.0, "sentinel": DOWN_AFTER_MS / 1000 + 8.0}
"""Seconds from the death of a primary within which jobs must end again: the vote takes the most of it."""


class Primary(Protocol):
    """A server that can be killed and stopped."""

    def kill(self) -> None:
        """End it at once, as a crash would."""

    def send_signal(self, number: signal.Signals, /) -> None:
        """Send a signal to it."""


class Servers(Protocol):
    """Servers of which one takes over when another fails."""

    @property
    def url(self) -> str:
        """The broker URL."""

    def find_owner(self, key: str, /) -> Any:
        """Return the primary that has a key."""

    def wait_for_another_owner(self, key: str, before: Any, /) -> None:
        """Wait until all of them name another primary for a key."""

    def cut_off(self, server: Any, /) -> None:
        """Cut a server off from all others, but not from clients."""

    def revive(self) -> None:
        """Restart killed servers, resume frozen ones, join those that are cut off, and wait until all work."""


@contextmanager
def running_servers(
    on: str, binary: str | None, access: Access | None
) -> Generator[EmbeddedServer | Servers, None, None]:
    """Run the servers of the processes during the block: `server`, `cluster` or `sentinel`."""
    if access:
        binary = find_tls_binary(binary)
    if on == "cluster":
        timeout = round(1000 * NODE_TIMEOUT)
        with (
            Network().running() as network,
            running_cluster(
                binary, has_replicas=True, node_timeout_ms=timeout, access=access, network=network
            ) as cluster,
        ):
            yield cluster
    elif on == "sentinel":
        options = access.sentinel_options if access else {}
        with watched_servers(binary, replicas=1, password="secret", **options) as servers:
            yield servers
    else:
        program = access.write_program(str(binary)) if access else binary
        with EmbeddedServer.start(program, save=True) as server:
            yield server


class FailoverCluster(Cluster):
    """The same processes on servers of which one takes over when another fails."""

    def __init__(self, servers: Servers, staff: Staff, record: Record, access: Access | None) -> None:
        super().__init__(None, staff, record, access)
        self.servers = servers
        self._changing = trio.Lock()

    def find_url(self, name: str) -> str:
        """Return the broker URL, which differs by the user at most."""
        return self.secure(self.servers.url, kind_of(name))

    def list_denied(self) -> list[str]:
        """Return what was denied to users."""
        servers = self.servers
        if isinstance(servers, TestCluster):
            return list_denied(node.client for node in servers.nodes)
        assert isinstance(servers, WatchedServers)
        return list_denied(server.client for server in (*servers.servers, *servers.sentinels))

    def find_key(self, target: str) -> str:
        """Return a key that the primary has which a fault is to strike."""
        app = self.staff.app
        if target == "stream":
            return app.keys.for_stream("payments").log(0)
        return app.queue(EVENTS if target == "events" else "default").stream

    async def strike(self, fault: Fault) -> None:
        """Perform a fault and undo it. Faults of servers run one at a time, when all servers work."""
        begin = SERVER_FAULTS.get(fault.kind)
        if begin is None:
            await super().strike(fault)
            return
        async with self._changing:
            await begin(self, fault)

    def note(self, fault: Fault, began: float) -> None:
        """Record that the queues of a server stood still, or were behind, until now."""
        self.record.struck.append(Struck(fault.kind, fault.target, 0, began, time.monotonic()))

    def client(self) -> Any:
        """Return what reaches the primaries."""
        tls = self.access.client_options if self.access else {}
        if isinstance(self.servers, TestCluster):
            port = next(node.port for node in self.servers.nodes if node.is_running)
            make: Any = redis.RedisCluster
            return make(host="127.0.0.1", port=port, socket_timeout=5, **tls)
        assert isinstance(self.servers, WatchedServers)
        port, password = self.servers.primary.port, self.servers.password
        return redis.Redis(port=port, password=password, socket_timeout=5, **tls)

    def count_commands(self) -> int:
        """Return how many commands the primaries have carried out, those within scripts included."""
        if not isinstance(self.servers, TestCluster):
            return super().count_commands()
        nodes = self.servers.find_owners()
        return sum(stat["calls"] for node in nodes for stat in node.client.info("commandstats").values())

    async def heal(self) -> None:
        """Make sure that nothing is left of any fault."""
        await trio.to_thread.run_sync(self.servers.revive)
        self.record.healed = time.monotonic()


async def _kill_primary(cluster: FailoverCluster, fault: Fault) -> None:
    """Kill a primary; another one takes over, and it comes back as its replica."""
    servers, key = cluster.servers, cluster.find_key(fault.target)
    before = await trio.to_thread.run_sync(servers.find_owner, key)
    began = time.monotonic()
    await trio.to_thread.run_sync(before.kill)
    await trio.to_thread.run_sync(servers.wait_for_another_owner, key, before)
    cluster.note(fault, began)
    await trio.sleep(fault.seconds)
    await trio.to_thread.run_sync(servers.revive)


async def _freeze_primary(cluster: FailoverCluster, fault: Fault) -> None:
    """Stop a primary until another one has taken over, and let it come back."""
    servers, key = cluster.servers, cluster.find_key(fault.target)
    before = await trio.to_thread.run_sync(servers.find_owner, key)
    began = time.monotonic()
    before.send_signal(signal.SIGSTOP)
    await trio.to_thread.run_sync(servers.wait_for_another_owner, key, before)
    await trio.sleep(max(0.0, began + fault.seconds - time.monotonic()))
    await trio.to_thread.run_sync(servers.revive)
    cluster.note(fault, began)


async def _cut_off_primary(cluster: FailoverCluster, fault: Fault) -> None:
    """Cut a primary off from all other servers, and not from clients, until another one has taken over, or longer."""
    servers, key = cluster.servers, cluster.find_key(fault.target)
    before = await trio.to_thread.run_sync(servers.find_owner, key)
    began = time.monotonic()
    await trio.to_thread.run_sync(servers.cut_off, before)
    await trio.to_thread.run_sync(servers.wait_for_another_owner, key, before)
    refuses_by_now = isinstance(servers, TestCluster)
    if refuses_by_now:  # what it accepts later is excused by nothing
        cluster.note(fault, began)
    await trio.sleep(max(0.0, began + fault.seconds - time.monotonic()))
    await trio.to_thread.run_sync(servers.revive)
    if not refuses_by_now:
        cluster.note(fault, began)


async def _change_primary(cluster: FailoverCluster, fault: Fault) -> None:
    """Have the sentinels promote the replica while the primary is well."""
    servers, began = cluster.servers, time.monotonic()
    assert isinstance(servers, WatchedServers)
    await trio.to_thread.run_sync(servers.fail_over)
    await trio.to_thread.run_sync(servers.revive)
    cluster.note(fault, began)


async def _kill_sentinel(cluster: FailoverCluster, fault: Fault) -> None:
    """Kill the sentinel that clients ask first."""
    servers = cluster.servers
    assert isinstance(servers, WatchedServers)
    await trio.to_thread.run_sync(servers.sentinels[0].kill)
    await trio.sleep(fault.seconds)
    await trio.to_thread.run_sync(servers.revive)


async def _migrate_slot(cluster: FailoverCluster, fault: Fault) -> None:
    """Move a slot to another primary, and back: key by key, or at once where the servers can."""
    servers, key = cluster.servers, cluster.find_key(fault.target)
    assert isinstance(servers, TestCluster)
    move = servers.migrate
    if fault.kind == "migrate slot at once":
        if not await trio.to_thread.run_sync(lambda: servers.can_migrate_at_once):
            return
        move = servers.migrate_at_once
    source = await trio.to_thread.run_sync(servers.find_owner, key)
    target = next(node for node in servers.find_owners() if node is not source)
    for node in (target, source):
        began = time.monotonic()
        await trio.to_thread.run_sync(move, key, node)
        cluster.note(fault, began)
        await trio.sleep(fault.seconds)


SERVER_FAULTS: Mapping[str, Callable[[FailoverCluster, Fault], Awaitable[None]]] = {
    "kill primary": _kill_primary,
    "freeze primary": _freeze_primary,
    "cut off primary": _cut_off_primary,
    "change primary": _change_primary,
    "kill sentinel": _kill_sentinel,
    "migrate slot": _migrate_slot,
    "migrate slot at once": _migrate_slot,
}
