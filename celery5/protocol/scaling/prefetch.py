"""Decide how many jobs a worker may hold, from how long its jobs take.

A job that waits in one worker's memory cannot be run by another. So a worker holds only what it runs, plus what
it will start very soon (within `horizon`): hundreds of jobs of microseconds, not one job of seconds.
"""

from collections.abc import Mapping

import msgspec

HORIZON = 0.1
"""Seconds after which every held job should have started."""
MAX_AHEAD = 1024
"""The most jobs held unstarted, however short they are.

This many run while one batch is settled and the next is on its way; with half as many, a worker waits for Redis a
sixth of its time.
"""
BATCH = 256
"""The most jobs read in one trip."""
FAST_RATE = 5000.0
"""Jobs per second that a kind ends beyond which it is never saturated: to move its jobs would take as long as to run
them."""
_WEIGHT = 0.05
"""How much one job's duration moves the mean."""
_MEMORY = 50
_RARE = 0.001


class DurationEstimate(msgspec.Struct):
    """The mean duration of one kind of job, in seconds; None before the first one has run.

    The `horizon` is how far such jobs are read ahead; a prefetch factor widens it.
    """

    mean: float | None = None
    count: int = 0  # of the jobs that it was learned from
    horizon: float = msgspec.field(default_factory=lambda: HORIZON)

    def set_factor(self, factor: float) -> None:
        """Set the factor on how far to read ahead from now on."""
        self.horizon = HORIZON * factor

    def record(self, seconds: float) -> None:
        """Record that one job took `seconds`. A longer job counts in full at once, a shorter one gradually."""
        self.count += 1
        mean = self.mean
        if mean is None or seconds > self.horizon > mean:
            self.mean = seconds
        else:
            self.mean = mean + (seconds - mean) * _WEIGHT

    def assume_slow(self) -> None:
        """Assume that jobs take long: hold none ahead until shorter ones have run."""
        self.mean = max(self.mean or 0.0, self.horizon)


class KindMix:
    """The mix of kinds that a worker reads: what one more read will probably bring."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def record(self, counts: Mapping[str, int]) -> None:
        """Record that one read brought this many jobs of each kind. Fifty jobs weigh as much as all before."""
        total = sum(counts.values())
        if not total:
            return
        weight = total / (total + _MEMORY) if self._shares else 1.0
        for kind in self._shares.keys() | counts.keys():
            before = self._shares.get(kind, 0.0)
            self._shares[kind] = before + (counts.get(kind, 0) / total - before) * weight

    def get_read_limit(self, capacity: Mapping[str, int]) -> int:
        """Return how many jobs to read with this free capacity for each kind.

        Until the mix is known, it is the least capacity.
        """
        if not self._shares:
            return min(capacity.values(), default=1)
        fitting = [int(free / max(self._shares.get(kind, 0.0), _RARE)) for kind, free in capacity.items()]
        return min([*fitting, BATCH])


class KindSaturation:
    """Whether a kind is saturated: its slots are taken, and jobs of other kinds may be behind its jobs on a queue.

    Then the worker goes on reading, and the jobs of this kind that it cannot start go to the waiting lists of their
    tasks. They do until those lists are empty again, so that the order of the jobs stays.
    """

    __slots__ = ("_was_full", "is_saturated")

    def __init__(self) -> None:
        self.is_saturated = False
        self._was_full = False

    def update(self, *, full: bool, others: bool, waiting: bool) -> bool:
        """Update the state, each tenth of a second. Return whether it has changed.

        Args:
            full: All slots of this kind are taken, and so is half of what may be read ahead.
            others: Another kind on its queues has free slots.
            waiting: Jobs of this kind may be in waiting lists.
        """
        before = self.is_saturated
        if before:
            self.is_saturated = full or waiting
        else:
            self.is_saturated = full and ((self._was_full and others) or waiting)
        self._was_full = full
        return self.is_saturated != before


def is_full(*, slots: int, held: int, mean: float | None, ended: int = 0, horizon: float = HORIZON) -> bool:
    """Return whether further jobs of a kind would wait: all slots are taken, and so is half of what is read ahead.

    A kind whose jobs are so short that it runs FAST_RATE of them in a second never counts as full. Nor does one that
    has just done so, though some of its jobs take long: `ended` jobs have ended in the last HORIZON.
    """
    if ended >= FAST_RATE * HORIZON or (mean is not None and slots > FAST_RATE * mean):
        return False
    return held >= slots + count_ahead(slots, mean, horizon) // 2


def count_ahead(slots: int, mean: float | None, horizon: float = HORIZON) -> int:
    """Return how many jobs may wait unstarted: those that will start within the `horizon`.

    `slots` jobs run at once and take `mean` seconds each.
    """
    if mean is None or mean >= horizon:
        return 0
    return min(MAX_AHEAD, int(slots * horizon / max(mean, 1e-9)))


def count_to_read(*, slots: int, held: int, mean: float | None, horizon: float = HORIZON) -> int:
    """Return how many jobs to read now, with `held` jobs held already; 0 means wait.

    With nothing held ahead, every free slot is filled one for one. Otherwise reading waits until a quarter of
    what may be held ahead is gone, so that trips are few and large and executors do not run dry.
    """
    buffer = count_ahead(slots, mean, horizon)
    free = slots + buffer - held
    return min(free, BATCH) if free > buffer // 4 else 0
