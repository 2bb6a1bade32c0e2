"""Fleet: several worker or router processes of one application under one parent.

The parent is plain blocking code with no thread, no event loop and no connection, so it can fork a child again at any
time. What a dead child held is put back by the child's own understudy. To systemd the parent alone speaks, for all of
them.
"""

import ctypes
import fcntl
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from celery5.app import App
from celery5.processes.lifecycle.signals import Terminal
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.masking import escape_text
from celery5.protocol.process.recycling import RESTART_EXIT_CODE
from celery5.services.process.systemd_notify import (
    NotifySettings,
    notify,
    notify_with_retry,
    take_notify_settings,
)

MAX_DEATHS = 100
"""Deaths within PERIOD seconds after which the fleet gives up: jobs that kill workers are buried long before."""
DEATH_WINDOW = 60.0
MAX_FAILED_STARTS = 5
"""Children that could not start, while none has ever come up, after which the fleet gives up."""
KILL_AFTER = 50.0
"""Seconds beyond the grace period that children get before they are killed."""
KILL_INTERVAL = 0.5
"""Seconds between two looks at children that should be dead."""
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGIO, *_PASSED_ON)
_PID = 8
"""Bytes of a process id on the pipe."""


@dataclass(frozen=True, slots=True)
class Child:
    """What `supervise` gives in a child: which `number` it has, from 1, as the one that it replaces had; what to call
    when it consumes, and when it ends because it was told to `retire`."""

    number: int
    ready: Callable[[], None]
    retire: Callable[[], None]


@dataclass(slots=True)
class _Fleet:
    """How many are `wanted`; the children that run, by process id, with their numbers, and which of them consume and
    which were told to end for good; when to start others; the deaths of late; the signal that `insisted` when it was
    `stopping`; what systemd wants and has heard; the `terminal` that it was started from; and the pipe on which
    children say how they are."""

    app: App
    wanted: int
    burst: bool
    systemd: NotifySettings
    word: str
    terminal: Terminal
    pipe: tuple[int, int] = field(default_factory=os.pipe)
    children: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    retiring: set[int] = field(default_factory=set)
    starts: list[float] = field(default_factory=list)
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS))
    begun: bool = False
    in_vain: int = 0
    code: int = 0
    stopping: float | None = None
    insisted: int = 0
    killed: float = 0.0
    fed: float = 0.0
    told: str = ""

    @property
    def free_number(self) -> int:
        """The number of the next child."""
        return min(set(range(1, len(self.children) + 2)) - set(self.children.values()))

    @property
    def kill_at(self) -> float | None:
        """When to kill who is left, once it is stopping."""
        if self.stopping is None:
            return None
        return max(self.stopping + self.app.settings.grace_period + KILL_AFTER, self.killed + KILL_INTERVAL)


def supervise(app: App, *, processes: int, burst: bool = False, kind: str = "worker") -> int | Child:
    """Fork `processes` children and keep them alive. Returns a Child in each child, an exit code in the parent. `word`
    is what they are called.

    A child that ends with 0 is done in a `burst`; else it is replaced like any other. One that ends because it is to be
    recycled is replaced at once, and that is no death.
    """
    systemd, terminal = take_notify_settings(os.environ, os.getpid()), Terminal()
    fleet = _Fleet(app, processes, burst, systemd, kind, terminal)
    fleet.starts.extend([0.0] * processes)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    for each in (signal.SIGALRM, signal.SIGIO, *_PASSED_ON):
        signal.signal(each, _nothing)
    _listen(fleet.pipe[0])
    try:
        while fleet.starts or fleet.children:
            child = _start_due(fleet, mask)
            if child is not None:
                return child
            _keep_time(fleet)
            _react(fleet, signal.sigwait(_WATCHED))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _tell_systemd(fleet, "STOPPING=1")
    for end in fleet.pipe:
        os.close(end)
    return fleet.code


def _listen(ear: int) -> None:
    """Have SIGIO sent to this process when there is something to read."""
    fcntl.fcntl(ear, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(ear, fcntl.F_GETFL)
    fcntl.fcntl(ear, fcntl.F_SETFL, flags | os.O_NONBLOCK | os.O_ASYNC)


def _start_due(fleet: _Fleet, mask: set[signal.Signals] | set[int]) -> Child | None:
    now = time.monotonic()
    for due in [each for each in fleet.starts if each <= now]:
        fleet.starts.remove(due)
        sys.stdout.flush()
        sys.stderr.flush()
        parent, number = os.getpid(), fleet.free_number
        pid = os.fork()
        if pid == 0:
            _become_child(parent, mask)
            ear, mouth = fleet.pipe
            os.close(ear)
            return Child(number, partial(_say, mouth, os.getpid()), partial(_say, mouth, -os.getpid()))
        fleet.children[pid] = number
    return None


def _say(mouth: int, word: int) -> None:
    """In a child: it consumes, which its process id says, or ends for good, which the same below zero does."""
    with suppress(OSError):  # its parent is gone, and it is about to hear of that
        os.write(mouth, word.to_bytes(_PID, signed=True))


def _become_child(parent: int, mask: set[signal.Signals] | set[int]) -> None:
    """Out of the terminal's process group, so that Ctrl-C reaches the children once, by way of the parent; and told to
    stop should the parent die."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _keep_time(fleet: _Fleet) -> None:
    """Do what the clock asks for, and have it ring when it next does."""
    now, moments = time.monotonic(), list(fleet.starts)
    if fleet.kill_at is not None and fleet.kill_at <= now:
        fleet.code, fleet.killed = 1, now
        _tell(fleet, signal.SIGKILL)
    if fleet.kill_at is not None:
        moments.append(fleet.kill_at)
    interval = fleet.systemd["interval"]
    if interval is not None:
        if fleet.fed + interval <= now:
            fleet.fed = now
            notify(fleet.systemd["address"], "WATCHDOG=1", _status(fleet))
        moments.append(fleet.fed + interval)
    signal.setitimer(signal.ITIMER_REAL, max(min(moments) - now, 0.001) if moments else 0.0)


def _react(fleet: _Fleet, number: int) -> None:
    if number in (signal.SIGCHLD, signal.SIGIO):
        _hear(fleet)
        _reap(fleet)
    elif number in (signal.SIGTERM, signal.SIGINT) or (number == signal.SIGHUP and fleet.terminal.is_gone()):
        fleet.insisted = 0 if fleet.stopping is None else number
        _stop(fleet)
    elif number in _PASSED_ON:
        _tell(fleet, signal.Signals(number))


def _stop(fleet: _Fleet) -> None:
    """Ask the children to end; those that were asked before end at once."""
    if fleet.stopping is None:
        fleet.stopping = time.monotonic()
    fleet.starts.clear()
    _tell(fleet, signal.SIGTERM)
    _tell_systemd(fleet, "STOPPING=1")


def _hear(fleet: _Fleet) -> None:
    """Which children consume, and which retire; systemd hears of it when all of them consume."""
    with suppress(BlockingIOError):
        said = os.read(fleet.pipe[0], 512 * _PID)
        fleet.begun = True
        words = {int.from_bytes(said[at : at + _PID], signed=True) for at in range(0, len(said), _PID)}
        fleet.ready |= words & fleet.children.keys()
        fleet.retiring |= {-word for word in words} & fleet.children.keys()
    if len(fleet.ready) >= fleet.wanted and fleet.told != "STOPPING=1":
        _tell_systemd(fleet, "READY=1")


def _reap(fleet: _Fleet) -> None:
    while fleet.children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        if pid not in fleet.children:
            continue
        code, was_ready = os.waitstatus_to_exitcode(status), pid in fleet.ready
        retired = pid in fleet.retiring
        fleet.children.pop(pid)
        fleet.ready.discard(pid)
        fleet.retiring.discard(pid)
        fleet.wanted -= retired
        if retired or (code == 0 and (fleet.burst or fleet.stopping is not None)):
            continue
        if code == RESTART_EXIT_CODE and was_ready:
            fleet.starts += [0.0] if fleet.stopping is None else []
            continue
        _tell_people(f"{fleet.word} process {pid} ended with {code}")
        if fleet.stopping is not None:
            told = code == -signal.SIGTERM
            fleet.code = fleet.code or (128 + fleet.insisted if fleet.insisted else 0 if told else 1)
        else:
            _replace(fleet, could_not_start=code > 0 and not was_ready)


def _replace(fleet: _Fleet, *, could_not_start: bool) -> None:
    now = time.monotonic()
    fleet.deaths.append(now)
    fleet.in_vain += could_not_start
    often = len(fleet.deaths) == MAX_DEATHS and now - fleet.deaths[0] < DEATH_WINDOW
    # Once one has come up the others can, too, as soon as the broker is back or a job that kills them is buried.
    in_vain = fleet.in_vain >= MAX_FAILED_STARTS and not fleet.begun
    if often or in_vain:
        _tell_people(f"{fleet.word} processes {'cannot start' if in_vain else 'keep ending'}: giving up")
        fleet.code = 1
        _stop(fleet)
        return
    recent = sum(now - each < DEATH_WINDOW for each in fleet.deaths)
    fleet.starts.append(now + full_jitter(recent - 1, start=0.05, cap=5.0, random=random.random))


def _tell(fleet: _Fleet, number: signal.Signals) -> None:
    for pid in fleet.children:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _tell_systemd(fleet: _Fleet, what: str) -> None:
    """Once."""
    if fleet.told != what:
        fleet.told = what
        notify_with_retry(fleet.systemd["address"], what, _status(fleet))


def _status(fleet: _Fleet) -> str:
    return f"STATUS={len(fleet.ready)} of {fleet.wanted} {fleet.word} processes at work"


def _tell_people(line: str) -> None:
    sys.stderr.write(escape_text(line) + "\n")
    sys.stderr.flush()


def _nothing(_number: int, _frame: object) -> None:
    """A handler, so that these signals are not ignored, nor end the process, when they are not blocked."""
