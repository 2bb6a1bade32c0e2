"""Decide how many jobs a worker may hold, from how long its jobs take.

A job that waits in one worker's memory cannot be run by another. So a worker holds only what it runs, plus what
it will start very soon (within `horizon`): hundreds of jobs of microseconds, not one job of seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

HORIZON = 0.1
"""Seconds after which every held job should have started."""
MAX_AHEAD = 1024
"""The most jobs held unstarted, however short they are.

So many run while one batch is settled and the next is on its way; with half as many, a worker waits for Redis a
sixth of its time.
"""
BATCH = 256
"""The most jobs read in one trip."""
FIRST_LOOKAHEAD = 16
"""Jobs of a full kind that are read at first, to find others behind them."""
RETRY_DELAY = 0.5
"""The least seconds until the lookahead is tried again when nothing else was behind them."""
MAX_RETURNED_PER_SECOND = 50
"""The most jobs read and released in a second while nothing else is behind them."""
_WEIGHT = 0.05
"""How much one job's duration moves the mean."""
_MEMORY = 50
_RARE = 0.001


@dataclass(slots=True)
class DurationEstimate:
    """The mean duration of one kind of job, in seconds; None before the first one has run.

    The `horizon` is how far such jobs are read ahead; a prefetch factor widens it.
    """

    mean: float | None = field(default=None)
    horizon: float = field(default_factory=lambda: HORIZON)

    def set_factor(self, factor: float) -> None:
        """Set the factor on how far to read ahead from now on."""
        self.horizon = HORIZON * factor

    def record(self, seconds: float) -> None:
        """Record that one job took `seconds`. A longer job counts in full at once, a shorter one gradually."""
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
        """Record that one read brought so many jobs of each kind. Fifty jobs weigh as much as all before."""
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


class KindLookahead:
    """The lookahead past a kind that is full: how many of its jobs are read beyond its slots, to reach jobs of
    other kinds behind them on the same queue.

    The surplus jobs are released soon, for workers with free slots, behind jobs that were sent later. The more
    there are, the more are read at once. As long as nothing else is behind them, so few are read that the cost
    is negligible.
    """

    __slots__ = ("_again", "_few", "_found", "_full", "extra", "has_started")

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.extra = 0
        self.has_started = False
        self._few = FIRST_LOOKAHEAD
        self._full = False
        self._found = False
        self._again = 0.0

    def update(self, *, full: bool, others: bool, now: float) -> bool:
        """Update the state, each tenth of a second; return whether there is lookahead capacity from now on.

        `full`: all slots of this kind are taken by long jobs. `others`: another kind on its queues has free
        slots.
        """
        if not full:
            self._reset()
            return False
        before, self._full = self._full, True
        if not others:
            self.extra = 0
        elif before and not self.extra and now >= self._again:
            self.extra, self.has_started = self._few, True
            return True
        return False

    def record_read(self, counts: Mapping[str, int], kind: str) -> None:
        """Record one read that brought jobs of `kind`, which is this one, and how many of each kind."""
        self._found = self._found or any(count for read_kind, count in counts.items() if read_kind != kind)

    def record_release(self, given_back: int, now: float) -> None:
        """Record that so many jobs waited for too long and were released."""
        self._again = now if self._found else now + max(RETRY_DELAY, given_back / MAX_RETURNED_PER_SECOND)
        self.extra = 0
        self.has_started = self._found = False
        self._few = min(2 * self._few, BATCH)


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
    what may be held ahead is gone, so that trips are few and large and executors do not run dry meanwhile.
    """
    buffer = count_ahead(slots, mean, horizon)
    free = slots + buffer - held
    return min(free, BATCH) if free > buffer // 4 else 0
