"""Liveness: whether a worker that says nothing is alive, judged by what the kernel tells of its process.

A worker whose job blocks the event loop, or holds the interpreter's lock in C, cannot say that it lives. It does, so
its jobs must not go to others (I3). A worker that was stopped (SIGSTOP) must not count as alive: others have
to go on without it. Between the two is a process that neither works nor was stopped: a driver that waits for the
network with the lock in its hand, or a deadlock. It has the benefit of the doubt for a while.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum

import msgspec

HUNG_AFTER = 300.0
"""Seconds without a word and without work after which a process counts as hung."""
MIN_CPU_FRACTION = 0.05
"""Part of one core that is work. Less is what threads use that only look whether the lock is free."""

MAX_BEAT_INTERVAL = 2.0
"""Seconds between two words of an event loop, at most; a short limit is divided by more than ten."""


def get_beat_interval(limit: float) -> float:
    """Seconds between two words of a process that is given up when it has said nothing for `limit` seconds."""
    return min(limit / 12, MAX_BEAT_INTERVAL)


def get_silence_limit(hung_after: float) -> float:
    """Seconds without a word after which a loop surely has hung for `hung_after`: its last word may be as old as a beat
    when it begins to hang."""
    return hung_after + min(hung_after / 10, MAX_BEAT_INTERVAL)


_STOPPED = frozenset("Tt")
_GONE = frozenset("ZXx")
_RUNNING = "R"


class Liveness(Enum):
    """What a silent process is taken for."""

    WORKING = "working"
    IDLE = "still"
    HUNG = "hung"
    STOPPED = "stopped"
    GONE = "gone"

    @property
    def is_alive(self) -> bool:
        """Whether its lease is to be renewed."""
        return self in (Liveness.WORKING, Liveness.IDLE)


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """What was seen of a process: `at` what second of any clock, its `state` as in `/proc/<pid>/stat` ('' where
    it is not known) and the seconds of processor time that it has used so far (None where they are not known)."""

    at: float
    state: str = ""
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessObservation:
    """What is known of a process: `since` when it has been still, and the `last` sign of it."""

    idle_since: float
    last_sample: ProcessSample | None = None


def parse_stat(text: str, *, at: float, ticks: int) -> ProcessSample:
    """The sign in the text of `/proc/<pid>/stat`, where `ticks` make a second. Raises ValueError for any other text."""
    # The name stands in parentheses and may itself contain some, and blanks.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        raise ValueError("too short for /proc/<pid>/stat")
    return ProcessSample(at, fields[0], (int(fields[11]) + int(fields[12])) / ticks)


def parse_start_ticks(text: str) -> int:
    """When the process with this `/proc/<pid>/stat` was started, in ticks since the machine was: no two processes that
    had one id after another have the same. Raises ValueError for any other text."""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("too short for /proc/<pid>/stat")
    return int(fields[19])


def observe_heartbeat(at: float) -> ProcessObservation:
    """The process has said something."""
    return ProcessObservation(at)


def assess_liveness(
    observation: ProcessObservation, sample: ProcessSample, *, hung_after: float = HUNG_AFTER
) -> tuple[ProcessObservation, Liveness]:
    """What a silent process is taken for by a new sign of it, and what is known of it from then on."""
    if sample.state in _GONE and sample.state:
        return replace(observation, last_sample=sample), Liveness.GONE
    if sample.state in _STOPPED and sample.state:
        return replace(observation, last_sample=sample), Liveness.STOPPED
    if sample.state == _RUNNING or _has_worked(observation.last_sample, sample):
        return ProcessObservation(sample.at, sample), Liveness.WORKING
    return replace(
        observation, last_sample=sample
    ), Liveness.HUNG if sample.at - observation.idle_since >= hung_after else Liveness.IDLE


def _has_worked(before: ProcessSample | None, now: ProcessSample) -> bool:
    if before is None or before.cpu_seconds is None or now.cpu_seconds is None or now.at <= before.at:
        return False
    return (now.cpu_seconds - before.cpu_seconds) / (now.at - before.at) >= MIN_CPU_FRACTION


OUTAGE_FRACTION = 0.6
"""Part of a lease without an answer that counts as an outage. There are three heartbeats in a lease. A healthy worker
loses its lease only in an outage of more than two thirds of it, so the limit is below that."""
RECONNECT_TIME = 2.5
"""Seconds after an outage in which a heartbeat of a healthy worker arrives: its connection works again within 2 s."""
LONGEST_WAIT = 5.0
"""Seconds without a gap, at most, after which a worker judges others, however long the lease is."""


class Heartbeats(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker knows from the answers to its heartbeats on one queue. All times in seconds."""

    lease: float
    steady_since: float = math.inf
    """The first answer after the last gap, by the worker's clock."""
    heard: float = -math.inf
    """The last answer, by the worker's clock."""
    at: float = -math.inf
    """The last answer, by the clock of Redis."""

    @property
    def outage_after(self) -> float:
        """Return the seconds without an answer that count as an outage."""
        return self.lease * OUTAGE_FRACTION

    @property
    def wait(self) -> float:
        """Return the seconds after an outage before others are judged."""
        return min(max(self.lease, RECONNECT_TIME), LONGEST_WAIT)

    def with_answer(self, now: float, *, at: float) -> "Heartbeats":
        """Return what is known after an answer that arrived `now`; `at` is its time by the clock of Redis.

        Both clocks count. Only that of Redis shows that its time was set forward, which ends all leases at once.
        """
        gap = now - self.heard > self.outage_after or at - self.at > self.outage_after
        since = now if gap else self.steady_since
        return msgspec.structs.replace(self, steady_since=since, heard=now, at=at)

    def may_judge(self, now: float) -> bool:
        """Return whether the last answer is recent, and there was no gap for long enough before it."""
        return now - self.heard <= self.outage_after and self.heard - self.steady_since >= self.wait

    def seconds_until_judging(self, now: float) -> float:
        """Return the seconds after which the next answer allows to judge, if there is no gap until then."""
        return max(self.steady_since + self.wait - now, 0.0)
