"""A primary, its replicas and three sentinels on this machine, for tests of failovers."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis

from celery5.broker.servers.embedded import find_binary

LIMIT = 60.0
"""Seconds within which the servers must be up, and a failover over."""
SERVICE = "shop-primary"
PEER = "peer"
"""The user as whom sentinels and replicas connect to servers with a password."""
DOWN_AFTER_MS = 1000
"""Milliseconds of silence after which a sentinel thinks that the primary is down."""


class Server:
    """One server, or one sentinel."""

    def __init__(
        self, binary: Path, folder: Path, port: int, lines: Sequence[str], client: dict[str, Any]
    ) -> None:
        self.port = port
        self.folder = folder
        self._binary = binary
        self._lines = lines
        self.process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(port=port, socket_timeout=5, decode_responses=True, **client)

    def start(self, *arguments: str) -> None:
        """Start it, with the configuration that it has written, if it has run before."""
        self.folder.mkdir(exist_ok=True)
        config = self.folder / "server.conf"
        if not config.exists():
            config.write_text("\n".join(self._lines) + "\n")
        self.process = subprocess.Popen(
            [str(self._binary), str(config), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def answers(self) -> bool:
        """Return whether it answers a PING."""
        with suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    @property
    def role(self) -> str:
        """`master`, `slave`, or empty when it does not answer."""
        with suppress(redis.RedisError):
            return str(self.client.info("replication")["role"])
        return ""


class WatchedServers:
    """Servers that sentinels watch.

    Args:
        binary: The server program.
        folder: For their files.
        replicas: How many replicas there are.
        password: What clients of the servers must give.
        sentinel_password: What clients of the sentinels must give.
        tls: The lines of the configuration that make all of them speak TLS, and redis-py's options for it.
        options: More lines of the configuration of servers.
        sentinel_options: More lines of the configuration of sentinels.
    """

    def __init__(
        self,
        binary: Path,
        folder: Path,
        *,
        replicas: int = 1,
        password: str = "",
        sentinel_password: str = "",
        tls: tuple[Sequence[str], dict[str, Any]] | None = None,
        options: Sequence[str] = (),
        sentinel_options: Sequence[str] = (),
    ) -> None:
        ports = find_free_ports(4 + replicas)
        self._folder, self.password, self._sentinel_password = folder, password, sentinel_password
        tls_lines, tls_client = tls or ((), {})
        self._tls = tls_client

        def make(name: str, port: int, lines: Sequence[str], client: dict[str, Any]) -> Server:
            listen = [f"tls-port {port}", "port 0"] if tls else [f"port {port}"]
            every = ["bind 127.0.0.1", *listen, *tls_lines, f"dir {folder / name}", "logfile server.log"]
            return Server(binary, folder / name, port, [*every, *lines], {**client, **tls_client})

        login, auth = list[str](), list[str]()
        if password:
            login = [f"requirepass {password}", f"user {PEER} on >{PEER} ~* &* +@all"]
            login += [f"masteruser {PEER}", f"masterauth {PEER}"]
            auth = [f"sentinel auth-user {SERVICE} {PEER}", f"sentinel auth-pass {SERVICE} {PEER}"]
        lines = ['save ""', "appendonly no", "repl-diskless-sync-delay 0", *login, *options]
        client = {"password": password} if password else {}
        self.servers = [make(f"server{at}", port, lines, client) for at, port in enumerate(ports[3:])]
        ids = [uuid4().hex + uuid4().hex[:8] for _ in range(3)]
        self.sentinels: list[Server] = []
        for at, port in enumerate(ports[:3]):
            others = [
                f"sentinel known-sentinel {SERVICE} 127.0.0.1 {ports[other]} {ids[other]}"
                for other in range(3)
                if other != at
            ]
            lines = [
                f"sentinel myid {ids[at]}",
                f"sentinel monitor {SERVICE} 127.0.0.1 {ports[3]} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
                *auth,
                *(f"sentinel known-replica {SERVICE} 127.0.0.1 {port}" for port in ports[4:]),
                *others,
                *([f"requirepass {sentinel_password}"] if sentinel_password else []),
                *sentinel_options,
            ]
            client = {"password": sentinel_password} if sentinel_password else {}
            self.sentinels.append(make(f"sentinel{at}", port, lines, client))

    @property
    def url(self) -> str:
        """The broker URL."""
        nodes = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        login = f":{self.password}@" if self.password else ""
        options = f"?sentinel_password={self._sentinel_password}" if self._sentinel_password else ""
        return f"redis+sentinel://{login}{nodes}/{SERVICE}/0{options}"

    @property
    def primary(self) -> Server:
        """The server that the sentinels name."""
        port = _name_primary(next(sentinel for sentinel in self.sentinels if sentinel.process is not None))
        return next(server for server in self.servers if server.port == port)

    def find_owner(self, _key: str) -> Server:
        """Return the server that has a key: the primary."""
        return self.primary

    def wait_for_another_owner(self, _key: str, before: Server) -> None:
        """Wait until all sentinels name another primary."""
        self.wait_for_another(before)

    @property
    def replicas(self) -> list[Server]:
        """The other servers."""
        primary = self.primary
        return [server for server in self.servers if server is not primary]

    def start(self) -> None:
        """Start all of them, and wait until the sentinels could promote a replica."""
        for at, server in enumerate(self.servers):
            server.start(*(("--replicaof", "127.0.0.1", str(self.servers[0].port)) if at else ()))
        for server in self.servers:
            wait_until(server.answers, f"{server.port} answers")
        for sentinel in self.sentinels:
            sentinel.start("--sentinel")
        for sentinel in self.sentinels:
            wait_until(sentinel.answers, f"sentinel {sentinel.port} answers")
            # How often it asks for news, which is seconds: from Redis 7 on it can be told to hurry.
            with suppress(redis.RedisError):
                sentinel.client.execute_command(
                    "SENTINEL", "DEBUG", "info-period", 200, "publish-period", 200, "ask-period", 100
                )
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Wait until all sentinels see each other, and all replicas follow."""
        wait_until(lambda: all(map(self._is_whole, self.sentinels)), "the sentinels see all")
        primary = self.primary
        wait_until(
            lambda: all(_follows(replica, primary) for replica in self.replicas), "the replicas follow"
        )

    def cut_off(self, server: Server) -> None:
        """Cut a server off from sentinels and replicas, whose user it refuses. Clients with the password reach it."""
        assert self.password
        server.client.acl_setuser(PEER, enabled=False)
        server.client.execute_command("CLIENT", "KILL", "USER", PEER)

    def revive(self) -> None:
        """Restart killed servers, resume frozen ones, join those that are cut off, and wait until all work."""
        for server in self.servers:
            if server.process is not None:
                server.send_signal(signal.SIGCONT)
                if self.password:
                    server.client.acl_setuser(PEER, enabled=True)
            else:
                server.start()
                wait_until(server.answers, f"{server.port} answers")
        for sentinel in self.sentinels:
            if sentinel.process is None:
                sentinel.start("--sentinel")
                wait_until(sentinel.answers, f"sentinel {sentinel.port} answers")
        self.wait_until_whole()

    def fail_over(self) -> None:
        """Have a sentinel promote a replica, and wait until all sentinels say so."""
        before = self.primary
        # Again while it is the old one: a failover is given up if its replica does not follow in time.
        wait_until(lambda: self.primary is not before or self._begin_failover(), "a failover")
        self.wait_for_another(before)

    def wait_for_another(self, before: Server) -> None:
        """Wait until all sentinels name another primary than this one, and it is one."""
        running = [sentinel for sentinel in self.sentinels if sentinel.process is not None]
        wait_until(
            lambda: all(_name_primary(sentinel) != before.port for sentinel in running), "another primary"
        )
        wait_until(lambda: self.primary.role == "master", "it is a primary")

    def stop(self) -> None:
        """End all of them and remove their files."""
        for server in [*self.sentinels, *self.servers]:
            server.kill()
            server.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin_failover(self) -> bool:
        with suppress(redis.ResponseError):  # in progress, or no good replica yet
            self.sentinels[0].client.execute_command("SENTINEL", "FAILOVER", SERVICE)
        return False

    def _is_replicated(self) -> bool:
        primary = self.primary
        return all(_follows(server, primary) for server in self.servers if server is not primary)

    def _is_whole(self, sentinel: Server) -> bool:
        state = sentinel.client.sentinel_master(SERVICE)
        replicas = sentinel.client.sentinel_slaves(SERVICE)
        healthy = [state for state in replicas if not state["is_sdown"] and not state["is_disconnected"]]
        others = sentinel.client.sentinel_sentinels(SERVICE)
        return bool(
            not state["is_sdown"]
            and len(healthy) == len(self.servers) - 1
            and len(others) == len(self.sentinels) - 1
            and not any(other["is_sdown"] or other["is_disconnected"] for other in others)
        )


def _name_primary(sentinel: Server) -> int:
    """Return the port of the primary, as a sentinel says it."""
    _host, port = sentinel.client.sentinel_get_master_addr_by_name(SERVICE)
    return int(port)


def _follows(server: Server, primary: Server) -> bool:
    with suppress(redis.RedisError):
        state = server.client.info("replication")
        return bool(state.get("master_link_status") == "up" and state.get("master_port") == primary.port)
    return False


@contextmanager
def watched_servers(binary: str | None, **options: Any) -> Iterator[WatchedServers]:
    """Run servers and sentinels during the block."""
    folder = Path(tempfile.mkdtemp(prefix="c5-sentinel-", dir="/tmp"))
    servers = WatchedServers(find_binary(binary), folder, **options)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


def wait_until(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Wait until a condition is true. Raises AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"not within {limit:g} s: {what}"
        time.sleep(0.02)


def find_free_ports(number: int) -> list[int]:
    """Return ports on which nothing listens."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for server in sockets:
            server.bind(("127.0.0.1", 0))
        return [server.getsockname()[1] for server in sockets]
    finally:
        for server in sockets:
            server.close()
