"""Prefetch: how many jobs a worker may hold, decided from how long its jobs take.

A job that waits in one worker's memory cannot be run by another. So a worker holds only what it runs, plus what it
will start within the next moment (`horizon`): hundreds of jobs of microseconds, not one job of seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

HORIZON = 0.1
"""Seconds. What is held unstarted should have started after this long."""
MAX_AHEAD = 1024
"""The most jobs held unstarted, however short they are. So many run while one batch is settled and the next is on its
way; with half as many a worker waits for Redis a sixth of its time."""
BATCH = 256
"""The most jobs read in one trip."""
FIRST_LOOKAHEAD = 16
"""Jobs of a kind that is full that are read at first, to look behind them."""
RETRY_DELAY = 0.5
"""Seconds, at least, until it is done again when nothing else was behind them."""
MAX_RETURNED_PER_SECOND = 50
"""Jobs that are read and given back in a second, at most, while nothing else is behind them."""
_WEIGHT = 0.05
"""How much one job's duration moves the mean."""
_MEMORY = 50
_RARE = 0.001


@dataclass(slots=True)
class DurationEstimate:
    """The mean duration of one kind of job, in seconds. Nothing is known before the first one has run.

    The `horizon` is how far such jobs are read ahead: a worker that is told to read further has a wider one (`reach`).
    """

    mean: float | None = field(default=None)
    horizon: float = field(default_factory=lambda: HORIZON)

    def set_factor(self, factor: float) -> None:
        """Read so many times as far ahead as usual from now on."""
        self.horizon = HORIZON * factor

    def record(self, seconds: float) -> None:
        """One job took `seconds`. A longer job counts at once and in full, a shorter one little by little."""
        mean = self.mean
        if mean is None or seconds > self.horizon > mean:
            self.mean = seconds
        else:
            self.mean = mean + (seconds - mean) * _WEIGHT

    def assume_slow(self) -> None:
        """Jobs take longer than what was known said: hold none ahead until shorter ones have been seen."""
        self.mean = max(self.mean or 0.0, self.horizon)


class KindMix:
    """Which kinds of jobs a worker meets, and how often: what one more read will probably bring."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def record(self, counts: Mapping[str, int]) -> None:
        """One read brought so many jobs of each kind. Fifty jobs weigh half of all that came before."""
        total = sum(counts.values())
        if not total:
            return
        weight = total / (total + _MEMORY) if self._shares else 1.0
        for kind in self._shares.keys() | counts.keys():
            before = self._shares.get(kind, 0.0)
            self._shares[kind] = before + (counts.get(kind, 0) / total - before) * weight

    def get_read_limit(self, capacity: Mapping[str, int]) -> int:
        """How many jobs to read when there is so much room for each kind. Until something is known, the least room."""
        if not self._shares:
            return min(capacity.values(), default=1)
        fitting = [int(room / max(self._shares.get(kind, 0.0), _RARE)) for kind, room in capacity.items()]
        return min([*fitting, BATCH])


class KindLookahead:
    """The way around a kind that is full: how many of its jobs are read beyond its slots, to get at jobs of other kinds
    that stand behind them on the same queue.

    They wait here and are given back soon, for workers that have room, behind what was sent later. The more there are,
    the more are read at once; and as long as nothing else is behind them, so few that it costs next to nothing.
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
        """How things are, each tenth of a second: all slots of this kind are taken, by jobs that take long; one of the
        `others` on its queues has room. True when there is room beyond the slots from now on."""
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
        """So many jobs of each kind were read where there are jobs of `kind`, which is this one."""
        self._found = self._found or any(count for each, count in counts.items() if each != kind)

    def record_release(self, given_back: int, now: float) -> None:
        """So many waited for too long and were given back."""
        self._again = now if self._found else now + max(RETRY_DELAY, given_back / MAX_RETURNED_PER_SECOND)
        self.extra = 0
        self.has_started = self._found = False
        self._few = min(2 * self._few, BATCH)


def count_ahead(slots: int, mean: float | None, horizon: float = HORIZON) -> int:
    """How many jobs may wait unstarted, with `slots` jobs running at once that take `mean` seconds each: those that
    will start within the `horizon`."""
    if mean is None or mean >= horizon:
        return 0
    return min(MAX_AHEAD, int(slots * horizon / max(mean, 1e-9)))


def count_to_read(*, slots: int, held: int, mean: float | None, horizon: float = HORIZON) -> int:
    """How many jobs to read now, with `held` jobs in hand; 0 says wait.

    With nothing held ahead every free slot is filled one for one. Otherwise reading waits until a quarter of what may
    be held ahead is gone, so that trips are few and large and executors do not run dry meanwhile.
    """
    buffer = count_ahead(slots, mean, horizon)
    room = slots + buffer - held
    return min(room, BATCH) if room > buffer // 4 else 0
