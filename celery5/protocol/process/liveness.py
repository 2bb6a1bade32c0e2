"""Liveness: whether a silent worker is alive, judged by what the kernel reports of its process.

A worker whose job blocks the event loop, or holds the interpreter's lock in C, sends no heartbeat. It is alive,
so its jobs must not go to others. A worker that was stopped (SIGSTOP) must not count as alive: others have to
continue without it. Between the two is a process that neither works nor was stopped: a driver that waits for
the network while it holds the lock, or a deadlock. It counts as alive for a while.
"""

import math
from collections.abc import Mapping
from enum import Enum

import msgspec

HUNG_AFTER = 300.0
"""Seconds without a heartbeat and without work after which a process counts as hung."""
MIN_CPU_FRACTION = 0.05
"""The share of one core from which a thread counts as computing. It is measured by thread: one that only waits for
the lock uses less, but many of them together use more."""

MAX_BEAT_INTERVAL = 2.0
"""The most seconds between two heartbeats of an event loop; a short limit is divided by more than ten."""


def get_beat_interval(limit: float) -> float:
    """Return the seconds between two heartbeats of a process that is given up after `limit` seconds of silence."""
    return min(limit / 12, MAX_BEAT_INTERVAL)


def get_silence_limit(hung_after: float) -> float:
    """Return the seconds of silence after which a loop has hung for `hung_after` for certain.

    Its last heartbeat may be one interval old when it begins to hang.
    """
    return hung_after + min(hung_after / 10, MAX_BEAT_INTERVAL)


_STOPPED = frozenset("Tt")
_GONE = frozenset("ZXx")
_RUNNING = "R"


class Liveness(Enum):
    """The verdict on a silent process."""

    WORKING = "working"
    IDLE = "still"
    HUNG = "hung"
    STOPPED = "stopped"
    GONE = "gone"

    @property
    def is_alive(self) -> bool:
        """Return whether its lease should be renewed."""
        return self in (Liveness.WORKING, Liveness.IDLE)


class ProcessSample(msgspec.Struct, frozen=True):
    """One observation of a process."""

    at: float  # seconds of any clock
    state: str = ""  # as in `/proc/<pid>/stat`; '' when unknown
    cpu_seconds: float | None = None  # processor time used so far; None when unknown
    thread_seconds: Mapping[int, float] | None = None  # the same of each thread that lives; None when unknown


class ProcessObservation(msgspec.Struct, frozen=True):
    """What is known of a process: since when it has been idle, and the last sample."""

    idle_since: float
    last_sample: ProcessSample | None = None


def parse_stat(text: str, *, at: float, ticks: int) -> ProcessSample:
    """Return the sample in the text of `/proc/<pid>/stat`, with `ticks` in a second.

    Raises ValueError for any other text.
    """
    # the name is in parentheses, and may itself contain some, and blanks
    fields = text.rpartition(")")[2].split()
    if len(fields) < 13:
        raise ValueError("too short for /proc/<pid>/stat")
    return ProcessSample(at, fields[0], (int(fields[11]) + int(fields[12])) / ticks)


def parse_start_ticks(text: str) -> int:
    """Return when the process with this `/proc/<pid>/stat` was started, in ticks since the machine was.

    It distinguishes processes that have the same id one after another. Raises ValueError for any other text.
    """
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        raise ValueError("too short for /proc/<pid>/stat")
    return int(fields[19])


def observe_heartbeat(at: float) -> ProcessObservation:
    """Return what is known of a process after a heartbeat."""
    return ProcessObservation(at)


def assess_liveness(
    observation: ProcessObservation, sample: ProcessSample, *, hung_after: float = HUNG_AFTER
) -> tuple[ProcessObservation, Liveness]:
    """Return what is known of a silent process after a new sample, and the verdict on it."""
    if sample.state in _GONE and sample.state:
        return msgspec.structs.replace(observation, last_sample=sample), Liveness.GONE
    if sample.state in _STOPPED and sample.state:
        return msgspec.structs.replace(observation, last_sample=sample), Liveness.STOPPED
    if _is_running(observation.last_sample, sample) or _has_worked(observation.last_sample, sample):
        return ProcessObservation(sample.at, sample), Liveness.WORKING
    return msgspec.structs.replace(
        observation, last_sample=sample
    ), Liveness.HUNG if sample.at - observation.idle_since >= hung_after else Liveness.IDLE


def _is_running(before: ProcessSample | None, now: ProcessSample) -> bool:
    """Return whether the main thread computes, or wants to, also where a busy machine lets it get nowhere.

    One that waits for the interpreter's lock runs for a moment now and then: so it has to be seen twice.
    """
    return now.state == _RUNNING and before is not None and before.state == _RUNNING


def _has_worked(before: ProcessSample | None, now: ProcessSample) -> bool:
    if before is None or before.cpu_seconds is None or now.cpu_seconds is None or now.at <= before.at:
        return False
    used = now.cpu_seconds - before.cpu_seconds
    if before.thread_seconds is not None and now.thread_seconds is not None:
        by_thread = [
            seconds - before.thread_seconds.get(thread, 0.0) for thread, seconds in now.thread_seconds.items()
        ]
        by_ended_threads = used - sum(by_thread)
        used = max(by_ended_threads, *by_thread)
    return used / (now.at - before.at) >= MIN_CPU_FRACTION


OUTAGE_FRACTION = 0.6
"""The part of a lease without an answer that counts as an outage.

There are three heartbeats in a lease. A healthy worker loses its lease only in an outage of more than two
thirds of it, so the limit is below that.
"""
RECONNECT_TIME = 2.5
"""Seconds after an outage in which a heartbeat of a healthy worker arrives: it reconnects within 2 s."""
LONGEST_WAIT = 5.0
"""The most seconds without a gap after which a worker judges others, however long the lease is."""


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

    def with_answer(self, now: float, *, at: float, steady_for: float = 0.0) -> "Heartbeats":
        """Return what is known after an answer that arrived `now`; `at` is its time by the clock of Redis.

        Both clocks count. Only that of Redis shows that its time was set forward, which ends all leases at once.

        Args:
            steady_for: Seconds since the heartbeats of all workers last had a gap, if this worker itself sends few.
        """
        gap = now - self.heard > self.outage_after or at - self.at > self.outage_after
        gap = gap and steady_for < self.wait
        since = now if gap else self.steady_since
        return msgspec.structs.replace(self, steady_since=since, heard=now, at=at)

    def may_judge(self, now: float) -> bool:
        """Return whether the last answer is recent, and there was no gap for long enough before it."""
        return now - self.heard <= self.outage_after and self.heard - self.steady_since >= self.wait

    def seconds_until_judging(self, now: float) -> float:
        """Return the seconds after which the next answer allows to judge, if there is no gap until then."""
        return max(self.steady_since + self.wait - now, 0.0)
