"""Kept server: a Redis of the cluster's own, which keeps its data and outlives the process that started it.

Whoever has `controller.lock` keeps the server: one process at a time. `server.lock` is held by the server itself, which
inherits it and knows nothing of it: so there never are two over the same data, and one that a dead Controller has left
is found and taken over. It also names its configuration file: what else may answer on the socket is let alone. So is a
folder that has other things in it, and a process that has not that very lock open, whatever its number.
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
from typing import NamedTuple
from urllib.parse import quote

from celery5.broker.servers import kept_folder
from celery5.broker.servers.embedded import MAX_SOCKET_PATH, find_binary
from celery5.errors import BrokerUnavailable, Misconfigured
from celery5.protocol.cluster.own_broker import OwnBroker

START_LIMIT = 600.0
"""Seconds within which a server must have read its data and answer."""
STOP_LIMIT = 60.0
"""Seconds that a server has to end by itself, its data written, before it is killed."""
ANSWER_LIMIT = 5.0
"""Seconds that one answer may take."""
MAX_LOG_BYTES = 10**6
"""Bytes of the server's log; what is longer when it starts is put aside, once."""
_LAST = 10_000
_ASK = b"PING\r\nINFO server\r\nQUIT\r\n"


class KeptServer:
    """A Redis server with these settings. Its methods block: from Trio, call them in a thread.

    Raises Misconfigured when its folder cannot be used, or another process keeps a server there; ServerNotFound.
    """

    def __init__(self, settings: OwnBroker) -> None:
        self.folder = Path(settings.folder)
        self.socket = Path(settings.socket) if settings.socket else self.folder / "redis.sock"
        self.binary = find_binary(None if settings.server == "auto" else os.path.expanduser(settings.server))
        self.pid = 0
        self._told = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._own = -1
        self._check_socket()
        self._lock = kept_folder.lock_folder(self.folder)
        try:
            self._password = kept_folder.ensure_password(self.folder / "password") if settings.port else ""
        except OSError as error:
            os.close(self._lock)
            raise Misconfigured(f"broker: its password cannot be kept: {error}") from None

    @property
    def url(self) -> str:
        """Its URL, for all that use it."""
        if self._told.port:
            return f"redis://:{self._password}@127.0.0.1:{self._told.port}/0"
        return f"unix://{quote(str(self.socket))}?db=0"

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        if self._child is not None:
            return self._child.poll() is None
        return self.pid != 0 and _is_there(self.pid)

    def start(self, is_cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Start the server if needed and wait until it answers, unless cancelled. Return whether it ran already.

        Raises BrokerUnavailable with its last words, Misconfigured when another server answers on the socket.
        """
        try:
            return self._begin(is_cancelled)
        except OSError as error:
            raise BrokerUnavailable(f"the broker {self.binary} cannot be started: {error}") from None

    def _begin(self, given_up: Callable[[], bool]) -> bool:
        file, configuration = self.folder / "redis.conf", self._configuration()
        adopted = self._finds() and file.exists() and file.read_text(errors="replace") == configuration
        if not adopted:
            self._end()
            self._hold(given_up)
            kept_folder.write_private(file, configuration)
            self._start(file)
        self._wait_until_it_answers(given_up)
        kept_folder.write_private(self.folder / "url", f"{self.url}\n")
        return adopted

    def is_responding(self) -> bool:
        """Whether it answers, if only that it still reads its data."""
        return self._asked() is not None

    def kill(self) -> None:
        """End it at once."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(STOP_LIMIT)

    def stop(self) -> None:
        """End it in order, what was written stays; and let go of it."""
        self._end()
        for each in (self._own, self._lock):
            if each >= 0:
                os.close(each)
        self._own = self._lock = -1

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
        told = self._told
        lines = (
            "# Written by the Controller at each start: say what you want in the cluster description.",
            *(_listening(told.port, self._password) if told.port else ("port 0",)),
            f"unixsocket {_quoted(self.socket)}",
            "unixsocketperm 700",
            f"dir {_quoted(self.folder)}",
            "daemonize no",
            "supervised no",
            'save ""',
            "appendonly yes",
            f"appendfsync {told.fsync}",
            "maxmemory-policy noeviction",
        )
        return "".join(f"{line}\n" for line in lines)

    def _finds(self) -> bool:
        """Whether one runs that a former Controller has left, and can be gone on with. Raises Misconfigured when
        another server answers on the socket, or one over this data that no Controller has started."""
        if self._child is not None:
            return False
        held = kept_folder.find_lock_holder(self.folder / "server.lock")
        # Who began it may have died before it wrote the number down: what is there then is another's.
        found = () if held is None else (held.pid, _said(self.socket, "", ask=False).pid)
        self.pid = next((each for each in found if held and kept_folder.has_file_open(each, held.file)), 0)
        asked = self._asked()
        if asked is not None and held is None:
            raise Misconfigured(
                f"broker: a server over the data in {self.folder} runs already (process {asked[0]}), which no "
                "Controller has started: end it"
            )
        self.pid = self.pid or (0 if asked is None else asked[0])
        return asked is not None and asked[0] == self.pid

    def _hold(self, given_up: Callable[[], bool]) -> None:
        """Have the lock that the server inherits. Raises Misconfigured when a server has it that does not end."""
        if self._own >= 0:
            return
        self._own = kept_folder.open_lock(self.folder / "server.lock")
        limit = time.monotonic() + STOP_LIMIT
        while not kept_folder.try_lock(self._own):
            if given_up() or time.monotonic() > limit:
                raise Misconfigured(
                    f"broker: a server over the data in {self.folder} runs already, and does not end"
                )
            time.sleep(0.02)

    def _start(self, file: Path) -> None:
        path = self.folder / "server.log"
        with suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG_BYTES:
                path.replace(path.with_suffix(".log.1"))
        os.ftruncate(self._own, 0)  # the number of a former one says nothing from now on
        surroundings = {name: value for name, value in os.environ.items() if name not in _NOT_ITS_AFFAIR}
        with path.open("ab") as log:
            self._child = subprocess.Popen(
                [str(self.binary), str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # Redis 7 ends at once under a locale that is not installed.
                env={**surroundings, "LC_ALL": "C"},
                start_new_session=True,
                pass_fds=(self._own,),
            )
        self.pid = self._child.pid
        kept_folder.write_pid(self._own, self.pid)

    def _wait_until_it_answers(self, given_up: Callable[[], bool]) -> None:
        limit = time.monotonic() + START_LIMIT
        while (asked := self._asked()) is None or asked != (self.pid, True):
            if not self.is_running:
                raise BrokerUnavailable(f"the broker {self.binary} ended: {self._last_words()}")
            if given_up() or time.monotonic() > limit:
                raise BrokerUnavailable(f"the broker {self.binary} does not answer yet: {self._last_words()}")
            time.sleep(0.02)

    def _asked(self) -> tuple[int, bool] | None:
        """Its process, and whether it serves; None when nobody answers. Raises Misconfigured for another server, also
        for one that says nothing."""
        said = _said(self.socket, self._password)
        if not said.there or (not said.words and self.pid and said.pid in (0, self.pid)):
            return None
        process = re.search(rb"process_id:(\d+)", said.words)
        file = re.search(rb"config_file:([^\r\n]*)", said.words)
        if process is None or file is None or file[1] != os.fsencode(self.folder / "redis.conf"):
            raise Misconfigured(
                f"broker: a server answers at {self.socket} that is not the one of {self.folder}"
            )
        return int(process[1]), b"+PONG" in said.words

    def _end(self) -> None:
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

    def _last_words(self) -> str:
        try:
            said = (self.folder / "server.log").read_text(errors="replace")[-_LAST:]
        except OSError as error:
            return str(error)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _listening(port: int, password: str) -> tuple[str, ...]:
    return f"port {port}", "bind 127.0.0.1", "protected-mode yes", f"requirepass {password}"


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # one that has ended, and whose parent has not noticed, runs no more
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not os.path.exists("/proc/self")


class _Said(NamedTuple):
    """What came from a socket: whether somebody is `there`, whose process that is (0: nobody knows), and its words."""

    there: bool
    pid: int = 0
    words: bytes = b""


def _said(path: Path, password: str, *, ask: bool = True) -> _Said:
    """What the server at that socket says of itself, if it is to be asked."""
    said, pid = b"", 0
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(ANSWER_LIMIT)
        try:
            line.connect(os.fsencode(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return _Said(there=False)
        except OSError:
            return _Said(there=True)
        pid = _listens(line)
        try:
            if ask:
                line.sendall((f"AUTH {password}\r\n".encode() if password else b"") + _ASK)
            while ask and (part := line.recv(65536)):
                said += part
        except OSError:
            return _Said(there=True, pid=pid)
    return _Said(there=True, pid=pid, words=said)


def _listens(line: socket.socket) -> int:
    """The process at the other end; 0 where the system does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    pid, _user, _group = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


_NOT_ITS_AFFAIR = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"})
