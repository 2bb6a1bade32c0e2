"""Decide when the timer of a process is due, and what happens then."""

import math
from typing import Literal

import msgspec

from celery5.protocol.scheduling.periodic import OverlapPolicy

TimerAction = Literal["run", "wait", "skip"]
OVERLAP_POLICIES: tuple[OverlapPolicy, ...] = ("skip", "queue", "allow")
MAX_RUNS_AT_ONCE = 10
"""The most runs of one timer at once, with `overlap="allow"`."""


class TimerCounts(msgspec.Struct):
    """What has become of a timer since the process started."""

    # Runs that have begun.
    runs: int = 0
    # Runs that raised.
    failures: int = 0
    # Runs that were left out.
    skipped: int = 0
    # Runs that have not ended.
    running: int = 0

    def add_run(self) -> None:
        """Count a run that begins."""
        self.runs += 1

    def add_failure(self) -> None:
        """Count a run that raised."""
        self.failures += 1

    def add_skipped(self, count: int) -> None:
        """Count runs that were left out."""
        self.skipped += count

    def change_running(self, by: int) -> None:
        """Count what begins to run (1), or has ended (-1)."""
        self.running += by


class TimerStanding(msgspec.Struct):
    """What a process knows of the leader of the timers, kept over its incarnations."""

    # Whether it has asked for the lead before.
    has_asked: bool = False

    def record_request(self, *, is_leader: bool, others: int) -> bool:
        """Note an answer to a request for the lead. Return whether the cluster has started with this process.

        It has if the process is the first one: it never asked before, nobody leads, and no other one asks.
        """
        is_first, self.has_asked = not self.has_asked, True
        return is_first and is_leader and not others


def decide_run(overlap: OverlapPolicy, *, running: int, is_waiting: bool) -> TimerAction:
    """Return what happens when a timer is due.

    Args:
        overlap: The policy of the timer.
        running: How many of its runs have not ended.
        is_waiting: Whether a run waits for the end of another one.
    """
    if running == 0 or (overlap == "allow" and running < MAX_RUNS_AT_ONCE):
        return "run"
    return "wait" if overlap == "queue" and not is_waiting else "skip"


def get_next_tick(last: int, elapsed: float, interval: float) -> int:
    """Return the number of the next tick: tick n is due n intervals after the start.

    Ticks that have passed are left out, so a process that was blocked does not run them all at once.

    Args:
        last: The number of the last tick; 0 for none.
        elapsed: Seconds since the start.
        interval: Seconds between two ticks.
    """
    return max(last, math.floor(elapsed / interval)) + 1
