"""Process group: a process with pipes, in a group of its own: started, limited, killed, buried with all its
children."""

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
"""Seconds that the kernel has to end what was killed."""
POLL_INTERVAL = 0.02
"""Seconds between two looks, where the kernel cannot tell of a process's end."""


class ProcessGroup:
    """A process that runs `command`, and whatever it starts. Raises BoxCrashed when it cannot be started.

    `environment` are its variables, None for those of this process. It has a session of its own, so that a Ctrl-C is
    not meant for it. It is started in the thread of the loop, which takes about a millisecond: it is the end of the
    thread that started it which ends a box, and a thread that Trio lends ends soon (`box_launcher.py`).
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
        self._reaped = self._stolen = False
        self.start_ticks = get_start_ticks(self.pid)

    @property
    def pid(self) -> int:
        """The id of the process, and of the group."""
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or its signal as a negative number, once it is buried."""
        return self._popen.returncode

    def limit_memory(self, most: int) -> None:
        """Let each process have so many bytes of data from now on. Raises BoxCrashed where that cannot be said."""
        self._restrict(resource.RLIMIT_DATA, most, for_good=True)

    def limit_cpu_time(self, seconds: float) -> None:
        """Let the process use so many seconds of processor time from now on. Raises like `has_memory`."""
        with suppress(OSError):  # it has ended: whoever talks to it will notice
            used = parse_stat(_stat(self.pid), at=0.0, ticks=os.sysconf("SC_CLK_TCK")).cpu_seconds or 0.0
            self._restrict(resource.RLIMIT_CPU, math.ceil(used + seconds), for_good=False)

    def _restrict(self, what: int, most: int, *, for_good: bool) -> None:
        if sys.platform != "linux":
            raise BoxCrashed(
                "Box(memory=..., cpu=...) need Linux: there a running process can be given its limits"
            )
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(self.pid, what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            # What is set for good can never be raised again.
            resource.prlimit(self.pid, what, (most, most if for_good else hard))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group. Its id is nobody else's before the process was reaped."""
        if not (self._reaped or (self._stolen and get_start_ticks(self.pid) not in (self.start_ticks, 0))):
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
        """Kill what is left, and let go of it. To be called under a shield."""
        with trio.move_on_after(KILL_TIMEOUT):
            while not self._has_ended():
                self.signal(signal.SIGKILL)
                await trio.sleep(POLL_INTERVAL)
        self.signal(signal.SIGKILL)
        self._popen.poll()
        self._reaped = True
        for each in (self.stdin, self.stdout, self.stderr):
            await each.aclose()

    def describe_exit(self) -> str:
        """In words."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(-code).name if -code in _SIGNALS else f'signal {-code}'}"

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # a job has waited for all children of the worker
            self._stolen = True
            return True


def get_start_ticks(pid: int) -> int:
    """When the process that has this id now was started, in the kernel's ticks; 0 when there is none, or where the
    kernel does not tell."""
    try:
        return parse_start_ticks(_stat(pid))
    except (OSError, ValueError):
        return 0


def _stat(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read()


def _stream(file: Any) -> trio.lowlevel.FdStream:
    """One end of a pipe, for Trio."""
    stream = trio.lowlevel.FdStream(os.dup(file.fileno()))
    file.close()
    return stream


_SIGNALS = {each.value for each in signal.Signals}
