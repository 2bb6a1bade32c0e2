"""SSH connection: run scripts on one host, by the user's own ssh.

One ssh process stays and streams reports from the host; other calls share its connection (ControlMaster). It is
a child with a pipe, not a background process: when this process ends for any reason, the pipe closes, and the
remote script and ssh end, too. ssh asks no questions (BatchMode) and trusts only known host keys
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
"""Seconds for a call. The remote script is ended after the same time."""
MAX_LINE_BYTES = 1_048_576
"""The most bytes of an answer that are read."""
_MAX_ERROR_BYTES = 4096
_EXIT_LIMIT = 2.0
"""Seconds that ssh has to end before it is killed."""
_SSH_FAILED = 255
"""The exit code of ssh when ssh itself failed."""
_TIMED_OUT = 124
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
_ERROR_HINTS = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its key differs from the one in known_hosts: find out why first",
    ),
    (
        "Host key verification failed",
        "its key is not in known_hosts: log in once by hand, and compare the key",
    ),
    (
        "Permission denied",
        "ssh may not log in without a password; give it a key that the host accepts, or an agent",
    ),
    ("Could not resolve hostname", "no host of that name is known"),
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
        """Connect, run the script on the host, and yield its lines until it ends. Other calls may run beside it.

        Raises HostUnreachable, or PlatformError for a script that failed, when the context is left after the
        lines ended.
        """
        with temporary_folder("celery5-ssh") as folder:
            path = f"{folder}/line"  # short: a socket's path has 100 characters
            options = ("ControlMaster=yes", f"ControlPath={path}")
            try:
                async with self._running(options, script, 0) as (process, error_output):
                    self._socket = path
                    lines = OutputLines(process, SILENCE_LIMIT)
                    yield lines
                    self._socket = ""
                    code = (
                        None
                        if lines.is_timed_out or not lines.is_ended
                        else await _wait_for_exit_code(process)
                    )
            finally:
                self._socket = ""
        if lines.is_timed_out:
            raise HostUnreachable(f"host {self._name} has sent nothing for {lines.limit:g} seconds")
        if lines.is_ended:
            raise self._failed(code, error_output)

    async def run_script(self, script: bytes) -> list[str]:
        """Run a script on the host and return its lines.

        Raises HostUnreachable; PlatformError for a script that failed.
        """
        if not self._socket:
            raise HostUnreachable(f"host {self._name} is unreachable")
        options = ("ControlMaster=no", f"ControlPath={self._socket}")
        output: list[str] = []
        async with self._running(options, script, CALL_LIMIT) as (process, error_output):
            lines = OutputLines(process, CALL_LIMIT + _EXIT_LIMIT)
            while (line := await lines.read_line()) is not None:
                output.append(line)
            code = None if lines.is_timed_out else await _wait_for_exit_code(process)
        if lines.is_timed_out:
            raise HostUnreachable(f"host {self._name} has not answered within {lines.limit:g} seconds")
        if code != 0:
            raise self._failed(code, error_output)
        return output

    @asynccontextmanager
    async def _running(
        self, options: tuple[str, ...], script: bytes, limit: float
    ) -> AsyncGenerator[tuple[trio.Process, bytearray]]:
        """Run ssh with a script, and collect its stderr."""
        flags = [flag for option in (*_OPTIONS, *options) for flag in ("-o", option)]
        remote_command = f"exec sh -c '{BOOTSTRAP_SCRIPT}' sh {limit:g}"
        command = [*self._program, *flags, "-T", "--", self._destination, remote_command]
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
        error_output = bytearray()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_collect_errors, process, error_output)
                nursery.start_soon(_send_script, process, script)
                yield process, error_output
                nursery.cancel_scope.cancel()
        finally:
            await _end_process(process)

    def _failed(self, code: int | None, error_output: bytearray) -> PlatformError:
        output = error_output.decode(errors="replace")
        for printed, hint in _ERROR_HINTS:
            if code == _SSH_FAILED and printed in output:
                return HostUnreachable(f"host {self._name} ({self._destination}): {hint}")
        if code == _TIMED_OUT:
            return PlatformError(f"host {self._name} has not finished within {CALL_LIMIT:g} seconds")
        last = next(
            (line.strip() for line in reversed(output.splitlines()) if line.strip()), f"exit code {code}"
        )
        if code == _SSH_FAILED:
            return HostUnreachable(f"host {self._name} ({self._destination}) is unreachable: {last[:200]}")
        return PlatformError(f"host {self._name} ({self._destination}) reports an error: {last[:200]}")


class OutputLines:
    """The lines that a process writes to stdout.

    It ends after `limit` seconds without output; `is_timed_out` is true then, and `is_ended` in any case.
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


async def _send_script(process: trio.Process, script: bytes) -> None:
    """Send the script and leave the pipe open: when it closes, the script knows that this process is gone."""
    assert process.stdin is not None
    try:
        await process.stdin.send_all(script)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # it has ended: its exit code says why


async def _collect_errors(process: trio.Process, error_output: bytearray) -> None:
    """Collect the end of stderr."""
    assert process.stderr is not None
    async for piece in process.stderr:
        error_output += piece
        del error_output[:-_MAX_ERROR_BYTES]


async def _wait_for_exit_code(process: trio.Process) -> int | None:
    """Return the exit code of a process that closed its output; None when it does not end."""
    with trio.move_on_after(_EXIT_LIMIT):
        return await process.wait()
    return None


async def _end_process(process: trio.Process) -> None:
    """End the process, even when the call was cancelled."""
    with trio.CancelScope(shield=True):
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                await pipe.aclose()
        for end in (process.terminate, process.kill):
            with trio.move_on_after(_EXIT_LIMIT):
                if process.poll() is None:
                    end()
                await process.wait()
                return
