"""Frozen: whether a worker whose interpreter does not run must be ended, and which job holds the interpreter's lock.

C code that holds the lock (a regular expression that backtracks, a driver that waits) stops every thread of its
process: no time limit ends the job, no signal is handled, nothing is logged. What the kernel reports of the threads,
and what `faulthandler` writes of their stacks without the lock, is enough to judge from outside.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import msgspec

LOOK_INTERVAL = 1.0
"""Seconds between two looks at a worker that is silent, and between two beats of its pulse."""
FROZEN_AFTER = 3.0
"""Seconds without a pulse, as seen from outside, after which the interpreter counts as frozen."""
MAX_LOOK_GAP = 10.0
"""Seconds between two looks after which both processes may have been stopped: then nobody is blamed for the time."""
HARD_LIMIT_MARGIN = 5.0
"""Seconds beyond its hard limit that a job may hold the lock. A worker that runs has ended the job by then."""
MAX_REPORT_INTERVAL = 60.0
"""The most seconds between two reports of one freeze: each comes at twice the time of the one before."""
MAX_SHOWN = 3
"""The most jobs, and the most frames of each, in one report."""

_BUSY_SHARE = 0.1
"""The share of a core that a thread uses at least if it holds the lock and works. One that waits for it uses less."""
_WAITING_RATE = 20.0
"""Wake-ups a second that show that a thread waits for the lock: it wakes 200 times a second on a free core."""

_F = TypeVar("_F", bound=Callable[..., Any])
_SLOT = re.compile(r" of slot (\d+)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def name_slot(function: _F, slot: int) -> _F:
    """Return a function whose frames tell on a stack which executor's job they run. It is the same code."""
    plain = cast("FunctionType", function)
    code = plain.__code__.replace(co_name=f"{plain.__code__.co_name} of slot {slot}")
    copy = FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__qualname__, copy.__module__, copy.__kwdefaults__ = (
        plain.__qualname__,
        plain.__module__,
        plain.__kwdefaults__,
    )
    return cast("_F", copy)


class ThreadStack(msgspec.Struct, frozen=True):
    """The stack of one thread, as `faulthandler` has written it."""

    identity: int
    """Python's identity of the thread."""
    frames: tuple[tuple[str, str, str], ...]
    """File, line and function of each frame; the innermost comes first."""

    @property
    def slot(self) -> int | None:
        """The number of the executor whose job runs there; None when the stack does not tell."""
        for _file, _line, function in self.frames:
            if found := _SLOT.search(function):
                return int(found[1])
        return None

    def format_place(self, own_folders: Sequence[str] = ()) -> str:
        """Return where the code stands: the innermost frames, up to the first outside of `own_folders`, in one line.

        Args:
            own_folders: Folders of libraries: where these were called from is shown, too.
        """
        shown: list[str] = []
        for file, line, function in self.frames:
            if len(shown) == MAX_SHOWN:
                break
            shown.append(f"{file}:{line} in {_SLOT.sub('', function)}")
            if not file.startswith(tuple(own_folders)):
                break
        return ", called at ".join(shown) or "an unknown line"


def parse_stacks(text: str) -> list[ThreadStack]:
    """Return the stacks in what `faulthandler` has written of all threads. Lines of another form are ignored."""
    stacks: list[ThreadStack] = []
    identity, frames = 0, list[tuple[str, str, str]]()
    for line in text.splitlines():
        if found := _THREAD.match(line):
            if identity:
                stacks.append(ThreadStack(identity, tuple(frames)))
            identity, frames = int(found[1], 16), []
        elif found := _FRAME.match(line):
            frames.append((found[1], found[2], found[3]))
    return [*stacks, ThreadStack(identity, tuple(frames))] if identity else stacks


def index_stacks(stacks: Iterable[ThreadStack]) -> dict[int, ThreadStack]:
    """Return the stack of each executor's job, by the executor's number.

    The first one counts: the main thread, whose stack is written last, may still stand in the executor of a job that
    has just begun in another thread.
    """
    found: dict[int, ThreadStack] = {}
    for stack in stacks:
        if (slot := stack.slot) is not None:
            found.setdefault(slot, stack)
    return found


class ThreadUse(msgspec.Struct, frozen=True):
    """What the kernel reports of one thread."""

    cpu_seconds: float
    """Processor time that it has used."""
    wakeups: int
    """How often it has gone to sleep by itself (`voluntary_ctxt_switches`)."""


def find_lock_holders(
    before: Mapping[int, ThreadUse], after: Mapping[int, ThreadUse], seconds: float
) -> frozenset[int]:
    """Return the threads that may hold the interpreter's lock, by the kernel's ids.

    A thread that waits for the lock wakes up all the time and does nothing. If one works, it is that; else it is one
    that sleeps all the time, and there may be several.

    Args:
        before: The threads of a frozen process.
        after: The same, later.
        seconds: The time between the two.
    """
    both = before.keys() & after.keys()
    shares = {thread: (after[thread].cpu_seconds - before[thread].cpu_seconds) / seconds for thread in both}
    most = max(shares.values(), default=0.0)
    if most >= _BUSY_SHARE:
        return frozenset(thread for thread, share in shares.items() if share >= max(most / 2, _BUSY_SHARE))
    rates = {thread: (after[thread].wakeups - before[thread].wakeups) / seconds for thread in both}
    return frozenset(thread for thread, rate in rates.items() if rate < _WAITING_RATE)


class FreezeCause(msgspec.Struct, frozen=True):
    """What is known of a freeze."""

    slots: frozenset[int] = frozenset()
    """The executors whose jobs may hold the lock; empty when that is unknown."""
    text: str = ""
    """Which jobs these are, and where they stand, for people."""


class StopRequest(msgspec.Struct, frozen=True):
    """What a worker was asked from outside."""

    asked_at: float = math.inf
    """When it was first asked to stop, by a signal or a command."""
    signalled_at: float = math.inf
    """When the first signal came."""
    insisted: bool = False
    """Whether a further signal has told it to stop at once."""

    def note(self, at: float, signals: int, *, duplicate_window: float) -> "StopRequest":
        """Return the request after `signals` more have arrived at a time; 0 for a command.

        Those within `duplicate_window` seconds of the first are taken for the same one.
        """
        first = min(self.signalled_at, at) if signals else self.signalled_at
        further = signals - (self.signalled_at == math.inf)
        insists = further > 0 and at - first >= duplicate_window
        return StopRequest(min(self.asked_at, at), first, self.insisted or insists)


def find_end_reason(
    *, frozen_for: float, now: float, deadline: float, stop: StopRequest, stop_limit: float
) -> str:
    """Return why a worker must be ended from outside; '' when it need not.

    Args:
        frozen_for: Seconds without a pulse, as seen from outside.
        now: The time.
        deadline: The earliest end of a hard time limit among the jobs that may hold the lock; infinite for none.
        stop: What it was asked.
        stop_limit: Seconds after which a worker that was asked to stop has ended.
    """
    if frozen_for < FROZEN_AFTER:
        return ""
    if stop.insisted:
        return "it was told to stop at once"
    if now - stop.asked_at >= stop_limit:
        return f"it was asked to stop {now - stop.asked_at:.0f} s ago"
    if now - deadline >= HARD_LIMIT_MARGIN:
        return f"the time limit of the job passed {now - deadline:.0f} s ago"
    return ""
