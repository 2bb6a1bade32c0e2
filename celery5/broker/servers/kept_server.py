"""Run the Redis server of a cluster, which keeps its data on disk and outlives the process that started it.

The Controller that holds `controller.lock` runs the server: one process at a time. The server process inherits
`server.lock` as an open file, and so holds it without knowing of it. Therefore two servers never use the same data, and
a server that a dead Controller has left is found and adopted. Its INFO must also name the configuration file of this
folder: any other server that answers on the socket is left alone. So is a folder with other files in it, and a process
that does not have that lock open, whatever its process id.
"""

import os
import re
import signal
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from celery5.broker.servers import kept_folder
from celery5.broker.servers.embedded import MAX_SOCKET_PATH, find_binary
from celery5.errors import BrokerUnavailable, Misconfigured
from celery5.protocol.cluster.own_broker import OwnBroker

START_LIMIT = 600.0
"""Seconds within which a server must have read its data and answer."""
STOP_LIMIT = 60.0
"""Seconds that a server has to end by itself, its data written, before it is killed."""
ANSWER_LIMIT = 5.0
"""Seconds that one reply may take."""
MAX_LOG_BYTES = 10**6
"""A server's log of more bytes is renamed to `server.log.1` when the server starts."""
_MAX_LOG_TAIL = 10_000
_QUERY = b"PING\r\nINFO server\r\nQUIT\r\n"


class KeptServer:
    """A Redis server with these settings. Its methods block: from Trio, call them in a thread.

    Raises Misconfigured when its folder cannot be used, or another process keeps a server there; ServerNotFound.
    """

    def __init__(self, settings: OwnBroker) -> None:
        self.folder = Path(settings.folder)
        self.socket = Path(settings.socket) if settings.socket else self.folder / "redis.sock"
        self.binary = find_binary(None if settings.server == "auto" else os.path.expanduser(settings.server))
        self.pid = 0
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._server_lock = -1
        self._check_socket()
        self._lock = kept_folder.lock_folder(self.folder)
        try:
            self._password = kept_folder.ensure_password(self.folder / "password") if settings.port else ""
        except OSError as error:
            os.close(self._lock)
            raise Misconfigured(f"broker: its password cannot be kept: {error}") from None

    @property
    def url(self) -> str:
        """The URL of the server."""
        if self._settings.port:
            return f"redis://:{self._password}@127.0.0.1:{self._settings.port}/0"
        return f"unix://{quote(str(self.socket))}?db=0"

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        if self._child is not None:
            return self._child.poll() is None
        return self.pid != 0 and _is_alive(self.pid)

    def start(self, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Start the server if needed and wait until it answers, unless cancelled. Return whether it ran already.

        Raises BrokerUnavailable with the last line of its log, Misconfigured when another server answers on the socket.
        """
        try:
            return self._start_or_adopt(is_cancelled)
        except OSError as error:
            raise BrokerUnavailable(f"the broker {self.binary} cannot be started: {error}") from None

    def _start_or_adopt(self, is_cancelled: Callable[[], bool]) -> bool:
        file, configuration = self.folder / "redis.conf", self._configuration()
        adopted = self._find_running() and file.exists() and file.read_text(errors="replace") == configuration
        if not adopted:
            self._terminate()
            self._lock_data(is_cancelled)
            kept_folder.write_private(file, configuration)
            self._start(file)
        self._wait_until_ready(is_cancelled)
        kept_folder.write_private(self.folder / "url", f"{self.url}\n")
        return adopted

    def is_responding(self) -> bool:
        """Return whether it replies, even if only that it still loads its data."""
        return self._inspect() is not None

    def kill(self) -> None:
        """Kill it."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(STOP_LIMIT)

    def stop(self) -> None:
        """Terminate it, so that all that was written is kept, and release the locks."""
        self._terminate()
        for lock in (self._server_lock, self._lock):
            if lock >= 0:
                os.close(lock)
        self._server_lock = self._lock = -1

    def _check_socket(self) -> None:
        path = self.socket
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise Misconfigured(
                f"broker: {path} is too long for a socket, {MAX_SOCKET_PATH} bytes at most: say socket = in [broker]"
            )
        if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
            raise Misconfigured(f"broker: {path} is there, and is no socket")
        if path.parent != self.folder and not path.parent.is_dir():
            raise Misconfigured(f"broker: there is no folder {path.parent} for its socket")

    def _configuration(self) -> str:
        settings = self._settings
        lines = (
            "# Written by the Controller at each start: say what you want in the cluster description.",
            *(_make_port_options(settings.port, self._password) if settings.port else ("port 0",)),
            f"unixsocket {_quoted(self.socket)}",
            "unixsocketperm 700",
            f"dir {_quoted(self.folder)}",
            "daemonize no",
            "supervised no",
            'save ""',
            "appendonly yes",
            f"appendfsync {settings.fsync}",
            "maxmemory-policy noeviction",
        )
        return "".join(f"{line}\n" for line in lines)

    def _find_running(self) -> bool:
        """Return whether a server runs that an earlier Controller has left, and that can be adopted.

        Raises Misconfigured when another server answers on the socket, or one over this data that it did not start.
        """
        if self._child is not None:
            return False
        holder = kept_folder.find_lock_holder(self.folder / "server.lock")
        # The Controller that started it may have died before it wrote the process id: the file then has an older one.
        pids = () if holder is None else (holder.pid, _read_socket(self.socket, "", ask=False).pid)
        self.pid = next((pid for pid in pids if holder and kept_folder.has_file_open(pid, holder.file)), 0)
        server = self._inspect()
        if server is not None and holder is None:
            raise Misconfigured(
                f"broker: a server over the data in {self.folder} runs already (process {server.pid}), which no "
                "Controller has started: end it"
            )
        self.pid = self.pid or (0 if server is None else server.pid)
        return server is not None and server.pid == self.pid

    def _lock_data(self, is_cancelled: Callable[[], bool]) -> None:
        """Take the lock that the server inherits. Raises Misconfigured when a server holds it and does not end."""
        if self._server_lock >= 0:
            return
        self._server_lock = kept_folder.open_lock(self.folder / "server.lock")
        limit = time.monotonic() + STOP_LIMIT
        while not kept_folder.try_lock(self._server_lock):
            if is_cancelled() or time.monotonic() > limit:
                raise Misconfigured(
                    f"broker: a server over the data in {self.folder} runs already, and does not end"
                )
            time.sleep(0.02)

    def _start(self, file: Path) -> None:
        path = self.folder / "server.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                path.replace(path.with_suffix(".log.1"))
        os.ftruncate(self._server_lock, 0)  # the process id of an earlier server is not valid any more
        environment = {
            name: value for name, value in os.environ.items() if name not in _SUPERVISION_VARIABLES
        }
        with path.open("ab") as log:
            self._child = subprocess.Popen(
                [str(self.binary), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # Redis 7 ends at once under a locale that is not installed.
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,
                pass_fds=(self._server_lock,),
            )
        self.pid = self._child.pid
        kept_folder.write_pid(self._server_lock, self.pid)

    def _wait_until_ready(self, is_cancelled: Callable[[], bool]) -> None:
        limit = time.monotonic() + START_LIMIT
        while self._inspect() != ServerState(self.pid, is_serving=True):
            if not self.is_running:
                raise BrokerUnavailable(f"the broker {self.binary} ended: {self._get_last_line()}")
            if is_cancelled() or time.monotonic() > limit:
                raise BrokerUnavailable(
                    f"the broker {self.binary} does not answer yet: {self._get_last_line()}"
                )
            time.sleep(0.02)

    def _inspect(self) -> "ServerState | None":
        """Return the state of the server; None when it does not reply.

        Raises Misconfigured for another server, also for one that accepts the connection and sends nothing.
        """
        reply = _read_socket(self.socket, self._password)
        if not reply.is_connected or (not reply.text and self.pid and reply.pid in (0, self.pid)):
            return None
        process = re.search(rb"process_id:(\d+)", reply.text)
        file = re.search(rb"config_file:([^\r\n]*)", reply.text)
        if process is None or file is None or file[1] != os.fsencode(self.folder / "redis.conf"):
            raise Misconfigured(
                f"broker: a server answers at {self.socket} that is not the one of {self.folder}"
            )
        return ServerState(int(process[1]), is_serving=b"+PONG" in reply.text)

    def _terminate(self) -> None:
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if not self._wait(STOP_LIMIT):
                self.kill()
        self.pid, self._child = 0, None

    def _wait(self, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while self.is_running:
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
        return True

    def _get_last_line(self) -> str:
        try:
            text = (self.folder / "server.log").read_text(errors="replace")[-_MAX_LOG_TAIL:]
        except OSError as error:
            return str(error)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _make_port_options(port: int, password: str) -> tuple[str, ...]:
    return f"port {port}", "bind 127.0.0.1", "protected-mode yes", f"requirepass {password}"


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # a process that has ended may still be listed, until its parent reads its exit status
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.exists("/proc/self")


class ServerState(msgspec.Struct, frozen=True):
    """The server process that replies on the socket."""

    pid: int
    is_serving: bool  # not while it loads its data


class _SocketReply(msgspec.Struct, frozen=True):
    """What a process sent over a socket."""

    is_connected: bool
    pid: int = 0  # of the process; 0 when it is not known
    text: bytes = b""


def _read_socket(path: Path, password: str, *, ask: bool = True) -> _SocketReply:
    """Connect to the server at a socket and, if `ask`, return what it replies to PING and INFO."""
    text, pid = b"", 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_LIMIT)
        try:
            connection.connect(os.fsencode(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return _SocketReply(is_connected=False)
        except OSError:
            return _SocketReply(is_connected=True)
        pid = _get_peer_pid(connection)
        try:
            if ask:
                connection.sendall((f"AUTH {password}\r\n".encode() if password else b"") + _QUERY)
            while ask and (part := connection.recv(65536)):
                text += part
        except OSError:
            return _SocketReply(is_connected=True, pid=pid)
    return _SocketReply(is_connected=True, pid=pid, text=text)


def _get_peer_pid(connection: socket.socket) -> int:
    """Return the process at the other end; 0 where the system does not provide it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid, _user, _group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


_SUPERVISION_VARIABLES = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"}
)
