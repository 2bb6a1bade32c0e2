"""SSH connection: run scripts on one host, by the user's own ssh.

One ssh process stays and streams reports from the host; other calls share its connection (ControlMaster). It is
a child with a pipe, not a background process: when this process ends for any reason, the pipe closes, and the
script there and ssh end, too. ssh asks no questions (BatchMode) and trusts only known host keys
(StrictHostKeyChecking). A cancelled call ends on both sides.
"""

import subprocess
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import trio

from celery5.errors import PlatformError
from celery5.protocol.cluster.remote_units import BOOTSTRAP_SCRIPT
from celery5.services.process.own_folder import temporary_folder

SILENCE_LIMIT = 30.0
"""Seconds without output after which a host counts as unreachable. ssh itself usually notices sooner."""
CALL_LIMIT = 25.0
"""Seconds for a call. The script there is ended after the same time."""
MAX_LINE_BYTES = 1_048_576
"""The most bytes of an answer that are read."""
_TEXT = 4096
_LEAVE = 2.0
"""Seconds that ssh has to end before it is killed."""
_TRANSPORT = 255
"""The exit code of ssh when ssh itself failed."""
_TOO_LONG = 124
"""The exit code of timeout(1)."""
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlPersist=no",
    "ClearAllForwardings=yes",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
    "RequestTTY=no",
    "EscapeChar=none",
    "LogLevel=ERROR",
)
_TROUBLE = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its key is another than the one in known_hosts: find out why first",
    ),
    (
        "Host key verification failed",
        "its key is not in known_hosts: log in once by hand, and compare the key",
    ),
    (
        "Permission denied",
        "ssh may not log in without a password: give it a key that is allowed there, or an agent",
    ),
    ("Could not resolve hostname", "nobody knows a host of that name"),
)
"""What ssh prints, and what to do about it. The first match counts."""


class HostUnreachable(PlatformError):
    """The host cannot be reached, or its connection was lost: the state of its members is unknown."""


class SSHConnection:
    """The connection to one host.

    Args:
        name: what the cluster calls the host.
        destination: what ssh calls it.
        program: the ssh command.
    """

    def __init__(self, *, name: str, destination: str, program: Sequence[str] = ("ssh",)) -> None:
        self._name = name
        self._destination = destination
        self._program = tuple(program)
        self._socket = ""

    @asynccontextmanager
    async def stream_lines(self, script: bytes) -> AsyncGenerator["OutputLines"]:
        """Connect, run the script there, and yield its lines until it ends. Other calls are possible meanwhile.

        Raises HostUnreachable, or PlatformError for a script that failed, when the context is left after the
        lines ended.
        """
        with temporary_folder("celery5-ssh") as folder:
            path = f"{folder}/line"  # short: a socket's path has 100 characters
            options = ("ControlMaster=yes", f"ControlPath={path}")
            try:
                async with self._running(options, script, 0) as (process, trouble):
                    self._socket = path
                    lines = OutputLines(process, SILENCE_LIMIT)
                    yield lines
                    self._socket = ""
                    code = None if lines.is_timed_out or not lines.is_ended else await _code(process)
            finally:
                self._socket = ""
        if lines.is_timed_out:
            raise HostUnreachable(f"host {self._name} has said nothing for {lines.limit:g} seconds")
        if lines.is_ended:
            raise self._failed(code, trouble)

    async def run_script(self, script: bytes) -> list[str]:
        """Run a script there and return its lines.

        Raises HostUnreachable; PlatformError for a script that failed.
        """
        if not self._socket:
            raise HostUnreachable(f"host {self._name} is away")
        options = ("ControlMaster=no", f"ControlPath={self._socket}")
        said: list[str] = []
        async with self._running(options, script, CALL_LIMIT) as (process, trouble):
            lines = OutputLines(process, CALL_LIMIT + _LEAVE)
            while (line := await lines.read_line()) is not None:
                said.append(line)
            code = None if lines.is_timed_out else await _code(process)
        if lines.is_timed_out:
            raise HostUnreachable(f"host {self._name} has not answered within {lines.limit:g} seconds")
        if code != 0:
            raise self._failed(code, trouble)
        return said

    @asynccontextmanager
    async def _running(
        self, options: tuple[str, ...], script: bytes, limit: float
    ) -> AsyncGenerator[tuple[trio.Process, bytearray]]:
        """Run ssh with a script, and collect its stderr."""
        flags = [flag for each in (*_OPTIONS, *options) for flag in ("-o", each)]
        there = f"exec sh -c '{BOOTSTRAP_SCRIPT}' sh {limit:g}"
        command = [*self._program, *flags, "-T", "--", self._destination, there]
        try:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the Controller's terminal must not end it early
            )
        except OSError as error:
            raise PlatformError(
                f"{command[0]} cannot be started: {error.strerror}: install an OpenSSH client"
            ) from None
        trouble = bytearray()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_gather, process, trouble)
                nursery.start_soon(_send, process, script)
                yield process, trouble
                nursery.cancel_scope.cancel()
        finally:
            await _end(process)

    def _failed(self, code: int | None, trouble: bytearray) -> PlatformError:
        said = trouble.decode(errors="replace")
        for sign, what in _TROUBLE:
            if code == _TRANSPORT and sign in said:
                return HostUnreachable(f"host {self._name} ({self._destination}): {what}")
        if code == _TOO_LONG:
            return PlatformError(f"host {self._name} has not done it within {CALL_LIMIT:g} seconds")
        last = next(
            (each.strip() for each in reversed(said.splitlines()) if each.strip()), f"exit code {code}"
        )
        if code == _TRANSPORT:
            return HostUnreachable(f"host {self._name} ({self._destination}) is away: {last[:200]}")
        return PlatformError(f"host {self._name} ({self._destination}) cannot do it: {last[:200]}")


class OutputLines:
    """The lines that a process writes to stdout.

    It ends after `limit` seconds without output; `silent` is true then, and `ended` in any case.
    """

    def __init__(self, process: trio.Process, limit: float) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._ready: deque[bytes] = deque()
        self._rest = b""
        self.limit = limit
        self.is_ended = False
        self.is_timed_out = False

    async def read_line(self) -> str | None:
        """Return the next line; None at the end."""
        while not self._ready and not self.is_ended:
            piece: bytes | bytearray = b""
            with trio.move_on_after(self.limit) as scope:
                piece = await self._stdout.receive_some()
            self.is_timed_out = scope.cancelled_caught
            self.is_ended = not piece
            *lines, rest = (self._rest + bytes(piece)).split(b"\n")
            self._ready.extend(lines)
            self._rest = rest[-MAX_LINE_BYTES:]
        return self._ready.popleft().decode(errors="replace").rstrip("\r") if self._ready else None


async def _send(process: trio.Process, script: bytes) -> None:
    """Send the script and leave the pipe open: when it closes, the script knows that this process is gone."""
    assert process.stdin is not None
    try:
        await process.stdin.send_all(script)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # it has ended: its exit code says why


async def _gather(process: trio.Process, trouble: bytearray) -> None:
    """Collect the end of stderr."""
    assert process.stderr is not None
    async for piece in process.stderr:
        trouble += piece
        del trouble[:-_TEXT]


async def _code(process: trio.Process) -> int | None:
    """Return the exit code of a process that closed its output; None when it does not end."""
    with trio.move_on_after(_LEAVE):
        return await process.wait()
    return None


async def _end(process: trio.Process) -> None:
    """End the process, even when the call was cancelled."""
    with trio.CancelScope(shield=True):
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                await pipe.aclose()
        for ask in (process.terminate, process.kill):
            with trio.move_on_after(_LEAVE):
                if process.poll() is None:
                    ask()
                await process.wait()
                return
