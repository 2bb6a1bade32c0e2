"""A process with pipes, in its own process group: started, limited, killed and reaped with all its children."""

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio

from celery5.errors import BoxCrashed
from celery5.protocol.process.liveness import parse_start_ticks, parse_stat

KILL_TIMEOUT = 2.0
"""Seconds that the kernel has to end a killed process."""
POLL_INTERVAL = 0.02
"""Seconds between two checks where the kernel cannot notify of a process's end."""


class ProcessGroup:
    """A process and everything that it starts. It has its own session, so Ctrl-C in the terminal does not reach it.

    It is started in the thread of the event loop, which takes about a millisecond. The kernel ends a box with the
    thread that started it (see `boxes/launcher.py`), and Trio's worker threads end soon.

    Args:
        command: The program and its arguments.
        environment: Its variables; None for those of this process.

    Raises:
        BoxCrashed: It cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        try:
            self._popen = subprocess.Popen(
                list(command),
                bufsize=0,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise BoxCrashed(f"cannot start the box {command[0]!r}: {error}") from None
        self.stdin, self.stdout, self.stderr = map(
            _stream, (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        )
        self._is_reaped = self._was_reaped_by_job = False
        self.start_ticks = get_start_ticks(self.pid)

    @property
    def pid(self) -> int:
        """The id of the process, and of the group."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or its signal as a negative number; None before it was reaped."""
        return self._popen.returncode

    def limit_memory(self, size: int) -> None:
        """Limit the data of each process to this many bytes. Raises BoxCrashed if the system cannot do that."""
        self._set_limit(resource.RLIMIT_DATA, size, is_final=True)

    def limit_cpu_time(self, seconds: float) -> None:
        """Limit the processor time that the process uses from now on, in seconds. Raises like `limit_memory`."""
        with suppress(OSError):  # it has ended: the next write to it will fail
            used = parse_stat(_read_stat(self.pid), at=0.0, ticks=os.sysconf("SC_CLK_TCK")).cpu_seconds or 0.0
            self._set_limit(resource.RLIMIT_CPU, math.ceil(used + seconds), is_final=False)

    def _set_limit(self, kind: int, limit: int, *, is_final: bool) -> None:
        if sys.platform != "linux":
            raise BoxCrashed(
                "Box(memory=..., cpu=...) need Linux: there a running process can be given its limits"
            )
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.pid, kind)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            # A hard limit can never be raised again.
            resource.prlimit(self.pid, kind, (limit, limit if is_final else hard))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group. No other process has its id before this one was reaped."""
        if not (
            self._is_reaped
            or (self._was_reaped_by_job and get_start_ticks(self.pid) not in (self.start_ticks, 0))
        ):
            with suppress(ProcessLookupError, PermissionError):  # all of it has ended
                os.killpg(self.pid, number)

    async def wait_ended(self) -> None:
        """Wait for the end of the process, which stays a zombie."""
        try:
            handle = os.pidfd_open(self.pid) if sys.platform == "linux" else -1
        except OSError:
            handle = -1
        try:
            while not self._has_ended():
                if handle < 0:
                    await trio.sleep(POLL_INTERVAL)
                else:
                    await trio.lowlevel.wait_readable(handle)
        finally:
            if handle >= 0:
                os.close(handle)

    async def reap(self) -> None:
        """Kill the rest of the group, reap the process and close its pipes. Call this in a shielded scope."""
        with trio.move_on_after(KILL_TIMEOUT):
            while not self._has_ended():
                self.signal(signal.SIGKILL)
                await trio.sleep(POLL_INTERVAL)
        self.signal(signal.SIGKILL)
        self._popen.poll()
        self._is_reaped = True
        for pipe in (self.stdin, self.stdout, self.stderr):
            await pipe.aclose()

    def describe_exit(self) -> str:
        """Return in words how it ended."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name if -code in _SIGNALS else f'signal {-code}'}"

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # a job has reaped all children of the worker
            self._was_reaped_by_job = True
            return True


def get_start_ticks(pid: int) -> int:
    """Return the start time of a process in the kernel's ticks; 0 if there is no such process or no such time."""
    try:
        return parse_start_ticks(_read_stat(pid))
    except (OSError, ValueError):
        return 0


def _read_stat(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read()


def _stream(file: Any) -> trio.lowlevel.FdStream:
    """Return one end of a pipe as a Trio stream."""
    stream = trio.lowlevel.FdStream(os.dup(file.fileno()))
    file.close()
    return stream


_SIGNALS = {number.value for number in signal.Signals}
