"""Run several worker or router processes of one application under one parent.

The parent is plain blocking code with no thread, no event loop and no connection, so it can fork a child again at any
time. When a child is started, asked to end or killed is decided as in a cluster (`protocol/cluster/foreman.py`). What a
dead child held is put back by its own sidecar process. The parent alone speaks to systemd, for all of them.
"""

import ctypes
import fcntl
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import cast

import msgspec

from celery5.app import App
from celery5.processes.lifecycle.loaded_code import find_code_file
from celery5.processes.lifecycle.signals import Terminal
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.foreman import ClusterState
from celery5.protocol.cluster.members import (
    Ended,
    Kill,
    Kind,
    Member,
    Permit,
    Phase,
    Ready,
    Start,
    Stop,
    Stopping,
)
from celery5.protocol.masking import escape_text
from celery5.protocol.process.recycling import RESTART_EXIT_CODE
from celery5.services.process.systemd_notify import (
    format_code,
    notify,
    notify_with_retry,
    take_notify_settings,
)
from celery5.services.worker.recycling import Successor

MAX_DEATHS = 100
"""Deaths within DEATH_WINDOW after which the fleet gives up: jobs that kill workers are dead-lettered long before."""
DEATH_WINDOW = 60.0
"""Seconds."""
MAX_FAILED_STARTS = 5
"""Children that could not start, while none has ever come up, after which the fleet gives up."""
KILL_AFTER = 50.0
"""Seconds beyond the grace period that children get before they are killed."""
STOP_CHECK_INTERVAL = 0.5
"""Seconds between two checks of children that are to end."""
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGIO, *_PASSED_ON)
_PID_SIZE = 8
"""Bytes of a process id on the pipe."""
_WANTS_SUCCESSOR = 1 << 40
"""What is added to the process id of a child that asks for its successor."""


class Child(msgspec.Struct, frozen=True):
    """What `supervise` returns in a child."""

    number: int  # from 1; a child that replaces another has the same number
    ready: Callable[[], None]  # to call when it consumes
    retire: Callable[[], None]  # to call when it ends for good by a command
    successor: Successor  # the child that takes its place when it is recycled


def supervise(app: App, *, processes: int, burst: bool = False, kind: str = "worker") -> int | Child:
    """Fork children and keep them alive.

    A child that ends with 0 is done in a burst; else it is replaced like any other. One that is to be recycled asks for
    its successor, and ends when that consumes; if it ends before, it is replaced at once, and neither is a death.

    Args:
        app: The application.
        processes: How many children.
        burst: Whether a child that ends with 0 is done.
        kind: Their kind, for people.

    Returns:
        A Child in each child, an exit code in the parent.
    """
    return _Fleet(app, processes, burst=burst, kind=kind).run()


class _Fleet:
    """The parent, and the state of its children."""

    def __init__(self, app: App, processes: int, *, burst: bool, kind: str) -> None:
        self._systemd = take_notify_settings(os.environ, os.getpid())
        self._terminal = Terminal()
        self._burst = burst
        self._code = format_code(find_code_file(app))
        self._kind = kind
        # Nobody is killed for starting slowly: a child may wait for its broker.
        self._cluster = Cluster(
            restart_limit=MAX_DEATHS, restart_period=DEATH_WINDOW, hung_after=0, start_limit=inf
        )
        self._state = ClusterState(self._cluster, random=random.random)
        self._numbers = {f"{kind}-{number}": number for number in range(1, processes + 1)}
        stop_after = app.settings.grace_period + KILL_AFTER
        # The children that must run, by name.
        self._wanted = {
            name: Member(name=name, kind=cast("Kind", kind), arguments=(), stop_after=stop_after)
            for name in self._numbers
        }
        self._state.set_desired(self._cluster, self._wanted.values())
        # The names of the children that run, by process id.
        self._children: dict[int, str] = {}
        # The children whose successor has started, or is to start, by its name.
        self._replaced: dict[str, str] = {}
        # The pipes on which children hear that their successor consumes, by process id.
        self._permits: dict[int, int] = {}
        # The pipe on which children report.
        self._read_end, self._write_end = os.pipe()
        self._any_ready = False
        self._failed_starts = 0
        self._exit_code = 0
        # The second signal to stop; 0 for none.
        self._second_signal = 0
        self._watchdog_at = 0.0
        self._notified = ""

    def run(self) -> int | Child:
        """Keep the children alive until all have ended for good."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        for number in (signal.SIGALRM, signal.SIGIO, *_PASSED_ON):
            signal.signal(number, _ignore)
        _signal_when_readable(self._read_end)
        try:
            while self._children or self._state.next_start_at < inf:
                child = self._act(mask)
                if child is not None:
                    return child
                self._set_timer()
                self._handle_signal(signal.sigwait(_WATCHED))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._notify_systemd("STOPPING=1")
        os.close(self._read_end)
        os.close(self._write_end)
        return self._exit_code

    def _act(self, mask: set[signal.Signals] | set[int]) -> Child | None:
        """Perform what was decided. Return a Child in a child."""
        for action in self._state.decide(time.monotonic()):
            match action:
                case Start(member):
                    child = self._fork(member.name, mask)
                    if child is not None:
                        return child
                case Stop(name):
                    self._signal_children(signal.SIGTERM, {name})
                case Kill(name):
                    self._exit_code = 1
                    self._signal_children(signal.SIGKILL, {name})
                case Permit():  # children report no status, so none asks: they use the pipe
                    pass
        return None

    def _fork(self, name: str, mask: set[signal.Signals] | set[int]) -> Child | None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        permit, grant = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_child(parent, mask)
            for descriptor in (self._read_end, grant, *self._permits.values()):
                os.close(descriptor)
            report, own = partial(_report, self._write_end), os.getpid()
            return Child(
                self._numbers[name],
                partial(report, own),
                partial(report, -own),
                Successor(partial(report, own + _WANTS_SUCCESSOR), permit),
            )
        os.close(permit)
        self._children[pid], self._permits[pid] = name, grant
        return None

    def _set_timer(self) -> None:
        """Feed systemd's watchdog when that is due, and have SIGALRM sent when there is something to do next."""
        now, moments = time.monotonic(), [self._state.next_start_at]
        if any(member.phase is Phase.STOPPING for member in self._state.members.values()):
            moments.append(now + STOP_CHECK_INTERVAL)
        interval = self._systemd["interval"]
        if interval is not None:
            if self._watchdog_at <= now:
                self._watchdog_at = now + interval
                notify(self._systemd["address"], "WATCHDOG=1", self._status)
            moments.append(self._watchdog_at)
        earliest = min(moments)
        signal.setitimer(signal.ITIMER_REAL, max(earliest - now, 0.001) if earliest < inf else 0.0)

    def _handle_signal(self, number: int) -> None:
        if number in (signal.SIGCHLD, signal.SIGIO):
            self._read_reports()
            self._reap()
        elif number in (signal.SIGTERM, signal.SIGINT) or (
            number == signal.SIGHUP and self._terminal.is_gone()
        ):
            if self._state.draining:
                self._second_signal = number
                self._signal_children(signal.SIGTERM)
            self._stop()
        elif number in _PASSED_ON:
            self._signal_children(signal.Signals(number))

    def _stop(self) -> None:
        self._state.drain()
        self._notify_systemd("STOPPING=1")

    def _read_reports(self) -> None:
        """Read which children consume, and which end for good."""
        with suppress(BlockingIOError):
            data = os.read(self._read_end, 512 * _PID_SIZE)
            self._any_ready = True
            now = time.monotonic()
            for at in range(0, len(data), _PID_SIZE):
                word = int.from_bytes(data[at : at + _PID_SIZE], signed=True)
                name = self._children.get(abs(word) % _WANTS_SUCCESSOR)
                if name is None:
                    continue
                if word > _WANTS_SUCCESSOR:
                    self._start_successor(name)
                    continue
                if word < 0:
                    self._retire(name)
                elif name in self._replaced:
                    self._permit_end(self._replaced[name])
                self._state.handle_event(Ready(name) if word > 0 else Stopping(name), now)
        if self._up_count >= len(self._wanted) and not self._state.draining:
            self._notify_systemd("READY=1")

    def _start_successor(self, name: str) -> None:
        """Start a child that takes the place of another one, which ends when that consumes."""
        if self._state.draining or name in self._replaced.values() or name not in self._wanted:
            return
        number = next(n for n in itertools.count(1) if f"{self._kind}-{n}" not in self._state.members)
        successor = f"{self._kind}-{number}"
        self._numbers[successor], self._replaced[successor] = number, name
        self._wanted[successor] = msgspec.structs.replace(self._wanted[name], name=successor)
        self._state.set_desired(self._cluster, self._wanted.values())

    def _permit_end(self, name: str) -> None:
        """Let a child end: its successor consumes."""
        for pid, child in self._children.items():
            if child == name:
                with suppress(OSError):  # it has just ended
                    os.write(self._permits[pid], b"1")

    def _retire(self, name: str) -> None:
        """Stop replacing this child."""
        if self._wanted.pop(name, None) is not None:
            self._state.set_desired(self._cluster, self._wanted.values())

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            name = self._children.pop(pid, None)
            if name is not None:
                os.close(self._permits.pop(pid))
                self._handle_end(name, pid, os.waitstatus_to_exitcode(status))

    def _handle_end(self, name: str, pid: int, code: int) -> None:
        retired, was_starting = name not in self._wanted, self._state.members[name].phase is Phase.STARTING
        if code == 0 and self._burst:
            self._retire(name)
        if successor := next((new for new, old in self._replaced.items() if old == name), ""):
            del self._replaced[successor]
            self._retire(name)  # that one has its place
        self._state.handle_event(Ended(name, f"ended with {code}", code), time.monotonic())
        stopping = self._state.draining
        if retired or (code == 0 and (self._burst or stopping)):
            return
        if code == RESTART_EXIT_CODE and not was_starting:
            return
        _write_line(f"{self._kind} process {pid} ended with {code}")
        if stopping:
            stop_code = 0 if code == -signal.SIGTERM else 1
            self._exit_code = self._exit_code or (
                128 + self._second_signal if self._second_signal else stop_code
            )
            return
        self._failed_starts += code > 0 and was_starting
        # Once one has come up the others can, too, as soon as the broker is back or a job that kills them is
        # dead-lettered.
        cannot_start = self._failed_starts >= MAX_FAILED_STARTS and not self._any_ready
        if cannot_start or self._death_count >= MAX_DEATHS:
            _write_line(
                f"{self._kind} processes {'cannot start' if cannot_start else 'keep ending'}: giving up"
            )
            self._exit_code = 1
            self._stop()

    @property
    def _death_count(self) -> int:
        """The recent deaths of all children."""
        since = time.monotonic() - DEATH_WINDOW
        return sum(died > since for member in self._state.members.values() for died in member.recent_deaths)

    @property
    def _up_count(self) -> int:
        return sum(member.phase is Phase.UP for member in self._state.members.values())

    @property
    def _status(self) -> str:
        return f"STATUS={self._up_count} of {len(self._wanted)} {self._kind} processes at work"

    def _signal_children(self, number: signal.Signals, names: set[str] | None = None) -> None:
        for pid, name in self._children.items():
            if names is None or name in names:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _notify_systemd(self, state: str) -> None:
        """Send it once."""
        if self._notified != state:
            self._notified = state
            notify_with_retry(self._systemd["address"], state, *self._code, self._status)


def _signal_when_readable(descriptor: int) -> None:
    """Have SIGIO sent to this process when there is something to read."""
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_ASYNC)


def _report(write_end: int, word: int) -> None:
    """Report, in a child, that it consumes: its process id; or that it ends for good: the same below zero."""
    with suppress(OSError):  # its parent is gone, and it is about to hear of that
        os.write(write_end, word.to_bytes(_PID_SIZE, signed=True))


def _become_child(parent: int, mask: set[signal.Signals] | set[int]) -> None:
    """Leave the terminal's process group, so that Ctrl-C reaches the children once, by way of the parent; and have
    SIGTERM sent should the parent die."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _write_line(line: str) -> None:
    sys.stderr.write(escape_text(line) + "\n")
    sys.stderr.flush()


def _ignore(_number: int, _frame: object) -> None:
    """A handler, so that these signals are not ignored, nor end the process, when they are not blocked."""
