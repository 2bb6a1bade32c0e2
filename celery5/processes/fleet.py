"""Fleet: several worker processes of one application under one parent.

Floor: processes. Reads: signals. Writes: what recovering a dead child's jobs writes; lines on stderr.

The parent is plain blocking code with no thread and no event loop, so it can fork a child again at any time. It
reports a child's death at once: the child's jobs are put back within moments, not when its lease has lapsed.
"""

import ctypes
import mmap
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from celery5.app import App
from celery5.broker import calls
from celery5.errors import BrokerError
from celery5.protocol.backoff import full_jitter
from celery5.protocol.job import new_id

DEATHS = 10
"""Deaths within PERIOD seconds after which the fleet gives up."""
PERIOD = 60.0
KILL_AFTER = 50.0
"""Seconds beyond the grace period that children get before they are killed."""
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM)


@dataclass(frozen=True, slots=True)
class Child:
    """What `supervise` gives in a child: the name it is to have, and what to call when it consumes."""

    name: str
    ready: Callable[[], None]


@dataclass(slots=True)
class _Fleet:
    """The children that run, by process id; when to start others; the deaths of late; and one byte that it shares with
    its children, which is 1 once one of them has consumed."""

    app: App
    prefix: str
    children: dict[int, str] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    deaths: deque[float] = field(default_factory=lambda: deque(maxlen=DEATHS))
    begun: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))
    code: int = 0
    stopping: float | None = None


def supervise(app: App, *, processes: int, name: str = "") -> int | Child:
    """Fork `processes` children and keep them alive. Returns a Child in each child, an exit code in the parent."""
    fleet = _Fleet(app, name or f"{socket.gethostname()}:{os.getpid()}", starts=[0.0] * processes)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal.signal(signal.SIGALRM, _nothing)
    try:
        while fleet.starts or fleet.children:
            child = _start_due(fleet, mask)
            if child is not None:
                return child
            _set_alarm(fleet)
            _react(fleet, signal.sigwait(_WATCHED))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return fleet.code


def _start_due(fleet: _Fleet, mask: set[signal.Signals] | set[int]) -> Child | None:
    now = time.monotonic()
    for due in [each for each in fleet.starts if each <= now]:
        fleet.starts.remove(due)
        name = f"{fleet.prefix}:{new_id()[:6]}"
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_child(parent, mask)
            return Child(name, lambda: _say_begun(fleet))
        fleet.children[pid] = name
    return None


def _say_begun(fleet: _Fleet) -> None:
    """In a child: it consumes."""
    fleet.begun[0] = 1


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


def _set_alarm(fleet: _Fleet) -> None:
    moments = list(fleet.starts)
    if fleet.stopping is not None:
        moments.append(fleet.stopping + fleet.app.settings.grace_period + KILL_AFTER)
    pause = min(moments) - time.monotonic() if moments else 0.0
    signal.setitimer(signal.ITIMER_REAL, max(pause, 0.001) if moments else 0.0)


def _react(fleet: _Fleet, number: int) -> None:
    if number == signal.SIGCHLD:
        _reap(fleet)
    elif number in (signal.SIGTERM, signal.SIGINT):
        if fleet.stopping is None:
            fleet.stopping = time.monotonic()
        fleet.starts.clear()
        _tell(fleet, signal.SIGTERM)
    elif (
        fleet.stopping is not None
        and time.monotonic() > fleet.stopping + fleet.app.settings.grace_period + KILL_AFTER
    ):
        fleet.code = 1
        _tell(fleet, signal.SIGKILL)


def _reap(fleet: _Fleet) -> None:
    while fleet.children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid not in fleet.children:
            continue
        name = fleet.children.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            continue
        _say(f"worker {name} (pid {pid}) ended with {code}")
        _recover(fleet.app, name)
        if fleet.stopping is not None:
            fleet.code = fleet.code or (0 if code == -signal.SIGTERM else 1)
        else:
            _replace(fleet, code)


def _replace(fleet: _Fleet, code: int) -> None:
    now = time.monotonic()
    fleet.deaths.append(now)
    often = len(fleet.deaths) == DEATHS and now - fleet.deaths[0] < PERIOD
    # It ended by itself, and none has ever come up: another would not either.
    in_vain = code > 0 and not fleet.begun[0]
    if often or in_vain:
        _say(f"worker processes {'cannot start' if in_vain else 'keep ending'}: giving up")
        fleet.code, fleet.stopping = 1, now
        fleet.starts.clear()
        _tell(fleet, signal.SIGTERM)
        return
    recent = sum(now - each < PERIOD for each in fleet.deaths)
    fleet.starts.append(now + full_jitter(recent - 1, start=0.05, cap=5.0, random=random.random))


def _recover(app: App, name: str) -> None:
    """Put back what a dead child held, at once."""
    try:
        redis = app.connections.blocking(instead="")
        for queue in redis.perform(calls.queues(app.keys)):
            while True:
                done = redis.perform(
                    calls.recover(
                        app.queue(queue),
                        worker=name,
                        max_deliveries=app.settings.max_deliveries,
                        limit=100,
                        ttl=app.settings.results_ttl,
                    )
                )
                if not done.more:
                    break
    except BrokerError as error:
        _say(f"jobs of {name} are recovered when its lease lapses: {error}")


def _tell(fleet: _Fleet, number: signal.Signals) -> None:
    for pid in fleet.children:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _nothing(_number: int, _frame: object) -> None:
    """A handler, so that SIGALRM is not ignored while it is blocked."""
