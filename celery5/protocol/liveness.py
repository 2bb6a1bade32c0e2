"""Liveness: whether a worker that says nothing is alive, judged by what the kernel tells of its process.

Floor: protocol. Reads: nothing. Writes: nothing.

A worker whose job blocks the event loop, or holds the interpreter's lock in C, cannot say that it lives. It does, so
its jobs must not go to others (I3). A worker that was stopped (SIGSTOP) must not count as alive: others have
to go on without it. Between the two is a process that neither works nor was stopped: a driver that waits for the
network with the lock in its hand, or a deadlock. It has the benefit of the doubt for a while.
"""

from dataclasses import dataclass, replace
from enum import Enum

HUNG_AFTER = 300.0
"""Seconds without a word and without work after which a process counts as hung."""
BUSY = 0.05
"""Part of one core that is work. Less is what threads use that only look whether the lock is free."""

BEAT = 2.0
"""Seconds between two words of an event loop, at most; a short limit is divided by more than ten."""


def beat_of(limit: float) -> float:
    """Seconds between two words of a process that is given up when it has said nothing for `limit` seconds."""
    return min(limit / 12, BEAT)


def silence_of(hung_after: float) -> float:
    """Seconds without a word after which a loop surely has hung for `hung_after`: its last word may be as old as a beat
    when it begins to hang."""
    return hung_after + min(hung_after / 10, BEAT)


_STOPPED = frozenset("Tt")
_GONE = frozenset("ZXx")
_RUNNING = "R"


class Life(Enum):
    """What a silent process is taken for."""

    WORKING = "working"
    STILL = "still"
    HUNG = "hung"
    STOPPED = "stopped"
    GONE = "gone"

    @property
    def counts(self) -> bool:
        """Whether its lease is to be renewed."""
        return self in (Life.WORKING, Life.STILL)


@dataclass(frozen=True, slots=True)
class Sign:
    """What was seen of a process: `at` what second of any clock, its `state` as in `/proc/<pid>/stat` ('' where
    it is not known) and the seconds of processor time that it has used so far (None where they are not known)."""

    at: float
    state: str = ""
    used: float | None = None


@dataclass(frozen=True, slots=True)
class Vigil:
    """What is known of a process: `since` when it has been still, and the `last` sign of it."""

    since: float
    last: Sign | None = None


def read_stat(text: str, *, at: float, ticks: int) -> Sign:
    """The sign in the text of `/proc/<pid>/stat`, where `ticks` make a second. Raises ValueError for any other text."""
    # The name stands in parentheses and may itself contain some, and blanks.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        raise ValueError("too short for /proc/<pid>/stat")
    return Sign(at, fields[0], (int(fields[11]) + int(fields[12])) / ticks)


def began(text: str) -> int:
    """When the process with this `/proc/<pid>/stat` was started, in ticks since the machine was: no two processes that
    had one id after another have the same. Raises ValueError for any other text."""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("too short for /proc/<pid>/stat")
    return int(fields[19])


def heard(at: float) -> Vigil:
    """The process has said something."""
    return Vigil(at)


def judge_life(vigil: Vigil, sign: Sign, *, hung_after: float = HUNG_AFTER) -> tuple[Vigil, Life]:
    """What a silent process is taken for by a new sign of it, and what is known of it from then on."""
    if sign.state in _GONE and sign.state:
        return replace(vigil, last=sign), Life.GONE
    if sign.state in _STOPPED and sign.state:
        return replace(vigil, last=sign), Life.STOPPED
    if sign.state == _RUNNING or _has_worked(vigil.last, sign):
        return Vigil(sign.at, sign), Life.WORKING
    return replace(vigil, last=sign), Life.HUNG if sign.at - vigil.since >= hung_after else Life.STILL


def _has_worked(before: Sign | None, now: Sign) -> bool:
    if before is None or before.used is None or now.used is None or now.at <= before.at:
        return False
    return (now.used - before.used) / (now.at - before.at) >= BUSY
