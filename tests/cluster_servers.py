"""A real Redis Cluster on this machine, for tests: three primaries, and replicas where a test asks for them."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from celery5.broker.servers.embedded import find_binary
from tests.access import Access
from tests.network import Network
from tests.tls_files import make_tls_options

_KEEPER = '"$@" </dev/null & server=$!; read -r _; kill -KILL "$server"; wait "$server" 2>/dev/null'
LIMIT = 20.0
"""Seconds within which the cluster must be up, or a change of it be known to all of its nodes."""
SLOTS = 16384


class ClusterNode:
    """One server of a cluster. With a `network`, other nodes reach it by an address of its own."""

    def __init__(
        self,
        binary: Path,
        folder: Path,
        node_timeout_ms: int,
        access: Access | None,
        network: Network | None,
    ) -> None:
        self.binary = binary
        self.folder = folder
        self.port, self.bus_port = _find_free_ports()
        self.peer_host = network.add(self.port, self.bus_port) if network else "127.0.0.1"
        self._options = {
            "bind": "127.0.0.1",
            "tls-port" if access else "port": str(self.port),
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(node_timeout_ms),
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync-delay": "0",
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            "logfile": str(folder / "server.log"),
            "pidfile": str(folder / "server.pid"),
        }
        if network:
            self._options |= {
                "cluster-announce-ip": self.peer_host,
                "bind-source-addr": self.peer_host,
                "cluster-announce-hostname": "127.0.0.1",
                "cluster-preferred-endpoint-type": "hostname",
            }
        if access:
            self._options |= {"port": "0", "tls-cluster": "yes", **make_tls_options(access.certificates)}
            self._options["aclfile"] = str(access.users_file)
        tls = access.client_options if access else {}
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(
            host="127.0.0.1", port=self.port, socket_timeout=10, decode_responses=True, **tls
        )

    def start(self) -> None:
        """Start the server. It remembers its cluster."""
        self.folder.mkdir(exist_ok=True)
        options = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        # A shell ends it when this process ends, however that may be: its input is closed then.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "celery5-node", str(self.binary), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )

    def answers(self) -> bool:
        """Return whether it answers a PING."""
        with suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the server, if it runs."""
        if self._process is not None:
            os.kill(int((self.folder / "server.pid").read_text()), number)

    @property
    def is_running(self) -> bool:
        """Whether it has been started and not been killed."""
        return self._process is not None

    def is_in_its_place(self, owners: set[int]) -> bool:
        """Return whether it agrees that these ports have the slots, and has a replica if it has some, or follows."""
        with suppress(redis.RedisError):
            state: dict[str, Any] = self.client.info("replication")
            is_replicated = (
                state.get("slave0", {}).get("state") == "online"
                if self.port in owners
                else state.get("master_link_status") == "up"
            )
            return is_replicated and {entry[2][1] for entry in _ask_slots(self)} == owners
        return False

    @property
    def node_id(self) -> str:
        """Its id in the cluster."""
        return str(self.client.execute_command("CLUSTER", "MYID"))

    @property
    def has_sharded_channels(self) -> bool:
        """Whether it knows SSUBSCRIBE and SPUBLISH, as Redis from 7.0."""
        return not str(self.client.info("server")["redis_version"]).startswith("6.")

    def knows_all_slots(self) -> bool:
        """Return whether it knows the owner of each slot, and says that the cluster works."""
        with suppress(redis.RedisError):
            raw = self.client.execute_command("CLUSTER", "INFO")
            fields: dict[str, str] = raw if hasattr(raw, "keys") else _parse_info(str(raw))
            return int(fields["cluster_slots_ok"]) == SLOTS and fields["cluster_state"] == "ok"
        return False


class TestCluster:
    """A cluster whose slots are divided among its primaries."""

    __test__ = False

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        primaries: int,
        node_timeout_ms: int,
        access: Access | None = None,
        network: Network | None = None,
    ) -> None:
        self._binary = binary
        self._access = access
        self.network = network
        self._folder = folder
        self._numbers = count()
        self._node_timeout_ms = node_timeout_ms
        self.primaries = [self._make_node() for _ in range(primaries)]
        self.replicas: list[ClusterNode] = []

    @property
    def nodes(self) -> list[ClusterNode]:
        """All of its servers."""
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        """The broker URL, as for a cluster without TLS and users."""
        nodes = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)
        return f"redis+cluster://{nodes}"

    def start(self) -> None:
        """Start the servers, divide the slots, and wait until all of them know it."""
        for node in self.primaries:
            node.start()
        for number, node in enumerate(self.primaries):
            wait_until(node.answers, f"node {node.port} answers")
            first, end = (SLOTS * at // len(self.primaries) for at in (number, number + 1))
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.client.execute_command("CLUSTER", "ADDSLOTS", *range(first, end))
            if number:
                self._introduce(node, self.primaries[0])
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until each node knows the owner of each slot."""
        for node in self.nodes:
            wait_until(node.knows_all_slots, f"node {node.port} is up")

    def add_replica(self, primary: ClusterNode) -> ClusterNode:
        """Start a replica of a primary, and wait until it follows."""
        node = self._make_node()
        node.start()
        self.replicas.append(node)
        wait_until(node.answers, f"node {node.port} answers")
        self._introduce(node, primary)
        wait_until(node.knows_all_slots, "the replica has met all")
        node.client.execute_command("CLUSTER", "REPLICATE", primary.node_id)
        wait_until(
            lambda: node.client.info("replication").get("master_link_status") == "up", "the replica follows"
        )
        return node

    def find_owner(self, key: str) -> ClusterNode:
        """Return the primary that has a key."""
        slot = self.find_slot(key)
        for first, last, (_host, port, *_) in (entry[:3] for entry in self._ask_slots()):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(key)

    def find_owners(self) -> list[ClusterNode]:
        """Return the primaries that have slots: others than `primaries` after a failover."""
        ports = {entry[2][1] for entry in self._ask_slots()}
        return [node for node in self.nodes if node.port in ports]

    def find_slot(self, key: str) -> int:
        """Return the slot of a key."""
        return key_slot(key.encode())

    def wait_for_another_owner(self, key: str, before: ClusterNode) -> None:
        """Wait until all other nodes that run name another primary for a key."""
        slot = self.find_slot(key)
        others = [node for node in self.nodes if node.is_running and node is not before]

        def is_another() -> bool:
            ports = [_find_ports(node, slot) for node in others]
            return all(found and before.port not in found for found in ports)

        wait_until(is_another, "another primary")

    def cut_off(self, node: ClusterNode) -> None:
        """Cut a node off from all others, but not from clients."""
        assert self.network is not None
        self.network.cut_off(node.peer_host)

    def revive(self) -> None:
        """Restart killed servers, resume frozen ones, join those that are cut off, and wait until each primary has its
        replica.
        """
        if self.network:
            self.network.join_all()
        for node in self.nodes:
            if node.is_running:
                node.send_signal(signal.SIGCONT)
            else:
                node.start()
                wait_until(node.answers, f"node {node.port} answers")
        self.wait_until_whole()
        wait_until(self._is_in_order, "all nodes agree, and each primary has its replica")

    def migrate(self, key: str, target: ClusterNode) -> None:
        """Move the slot of a key to another primary, key by key, as `redis-cli --cluster reshard` does."""
        slot, source = self.find_slot(key), self.find_owner(key)
        self.begin_migration(key, target)
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            self.migrate_keys(keys, source, target)
        for node in (target, source, *self.find_owners()):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target.node_id)

    def migrate_at_once(self, key: str, target: ClusterNode) -> None:
        """Move the slot of a key to another primary at once, as Valkey 9 can."""
        slot = self.find_slot(key)
        command = ("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.node_id)
        self.find_owner(key).client.execute_command(*command)
        wait_until(lambda: self.find_owner(key) is target, "the slot has moved")

    @property
    def can_migrate_at_once(self) -> bool:
        """Whether the servers move slots at once."""
        return "MIGRATESLOTS" in str(self.nodes[0].client.execute_command("CLUSTER", "HELP"))

    def begin_migration(self, key: str, target: ClusterNode) -> None:
        """Declare that the slot of a key is on its way to another primary. All of its keys are where they were."""
        slot, source = self.find_slot(key), self.find_owner(key)
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id)

    def migrate_keys(self, keys: Sequence[str], source: ClusterNode, target: ClusterNode) -> None:
        """Move keys of a slot that is on its way."""
        source.client.execute_command(
            "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys
        )

    def scan_keys(self, pattern: str = "*") -> list[str]:
        """Return the keys of all primaries that match."""
        return [key for node in self.primaries for key in node.client.scan_iter(pattern, count=1000)]

    def stop(self) -> None:
        """End all servers and remove their files."""
        for node in self.nodes:
            node.kill()
            node.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_in_order(self) -> bool:
        owners = [{entry[2][1] for entry in _ask_slots(node)} for node in self.nodes]
        return all(node.is_in_its_place(owners[0]) for node in self.nodes)

    def _introduce(self, node: ClusterNode, other: ClusterNode) -> None:
        node.client.execute_command("CLUSTER", "MEET", other.peer_host, other.port, other.bus_port)

    def _make_node(self) -> ClusterNode:
        folder = self._folder / str(next(self._numbers))
        return ClusterNode(self._binary, folder, self._node_timeout_ms, self._access, self.network)

    def _ask_slots(self) -> Sequence[Any]:
        for node in self.nodes:
            if entries := _ask_slots(node):
                return entries
        return []


@contextmanager
def running_cluster(
    binary: str | None,
    *,
    primaries: int = 3,
    has_replicas: bool = False,
    node_timeout_ms: int = 1000,
    access: Access | None = None,
    network: Network | None = None,
) -> Generator[TestCluster, None, None]:
    """Run a cluster during the block: with a replica for each primary if that is wanted, with an `access` they
    speak TLS alone, and have its users. Through a `network`, which runs, its nodes can be cut off from each other.
    """
    folder = Path(tempfile.mkdtemp(prefix="c5-cluster-", dir="/tmp"))
    cluster = TestCluster(
        find_binary(binary),
        folder,
        primaries=primaries,
        node_timeout_ms=node_timeout_ms,
        access=access,
        network=network,
    )
    try:
        cluster.start()
        for primary in cluster.primaries if has_replicas else ():
            cluster.add_replica(primary)
        yield cluster
    finally:
        cluster.stop()


def wait_until(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Wait until a condition is true. Raises AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit:g} s: {what}"
        time.sleep(0.01)


def _find_free_ports() -> tuple[int, int]:
    """Return a port for clients, and that for the bus of the cluster, which is 10,000 higher: 6.2 knows no other."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 10_000))
                return port, port + 10_000


def _ask_slots(node: ClusterNode) -> Sequence[Any]:
    """Return the slots that a node reports: first, last and the primary's address; nothing if the node is down."""
    with suppress(redis.RedisError):
        found: Any = node.client.execute_command("CLUSTER", "SLOTS")
        return _as_entries(found) if hasattr(found, "items") else found
    return []


def _find_ports(node: ClusterNode, slot: int) -> list[int]:
    """Return the port of a slot's primary, as a node says it; it may know of none."""
    return [entry[2][1] for entry in _ask_slots(node) if entry[0] <= slot <= entry[1]]


def _parse_info(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _as_entries(found: dict[tuple[int, int], Any]) -> list[Any]:
    """Return the reply to CLUSTER SLOTS as the server sends it: redis-py makes a mapping of it."""
    return [[first, last, facts["primary"]] for (first, last), facts in found.items()]
