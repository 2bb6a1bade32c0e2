"""Prefetch: how many jobs a worker may hold, decided from how long its jobs take.

Floor: protocol. Reads: nothing. Writes: nothing.

A job that waits in one worker's memory cannot be run by another. So a worker holds only what it runs, plus what it
will start within the next moment (`horizon`): hundreds of jobs of microseconds, not one job of seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

HORIZON = 0.1
"""Seconds. What is held unstarted should have started after this long."""
LIMIT = 512
"""The most jobs held unstarted, however short they are."""
BATCH = 256
"""The most jobs read in one trip."""
_WEIGHT = 0.05
"""How much one job's duration moves the mean."""
_MEMORY = 50
_RARE = 0.001


@dataclass(slots=True)
class Pace:
    """The mean duration of one kind of job, in seconds. Nothing is known before the first one has run."""

    mean: float | None = field(default=None)

    def ran(self, seconds: float) -> None:
        """One job took `seconds`. A longer job counts at once and in full, a shorter one little by little."""
        mean = self.mean
        if mean is None or seconds > HORIZON > mean:
            self.mean = seconds
        else:
            self.mean = mean + (seconds - mean) * _WEIGHT

    def slow(self) -> None:
        """Jobs take longer than what was known said: hold none ahead until shorter ones have been seen."""
        self.mean = max(self.mean or 0.0, HORIZON)


class Mix:
    """Which kinds of jobs a worker meets, and how often: what one more read will probably bring."""

    __slots__ = ("_shares",)

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def read(self, counts: Mapping[str, int]) -> None:
        """One read brought so many jobs of each kind. Fifty jobs weigh half of all that came before."""
        total = sum(counts.values())
        if not total:
            return
        weight = total / (total + _MEMORY) if self._shares else 1.0
        for kind in self._shares.keys() | counts.keys():
            before = self._shares.get(kind, 0.0)
            self._shares[kind] = before + (counts.get(kind, 0) / total - before) * weight

    def fits(self, rooms: Mapping[str, int]) -> int:
        """How many jobs to read when there is so much room for each kind. Until something is known, the least room."""
        if not self._shares:
            return min(rooms.values(), default=1)
        fitting = [int(room / max(self._shares.get(kind, 0.0), _RARE)) for kind, room in rooms.items()]
        return min([*fitting, BATCH])


def ahead(slots: int, mean: float | None) -> int:
    """How many jobs may wait unstarted, with `slots` jobs running at once that take `mean` seconds each."""
    if mean is None or mean >= HORIZON:
        return 0
    return min(LIMIT, int(slots * HORIZON / max(mean, 1e-9)))


def to_read(*, slots: int, held: int, mean: float | None) -> int:
    """How many jobs to read now, with `held` jobs in hand; 0 says wait.

    With nothing held ahead every free slot is filled one for one. Otherwise reading waits until a quarter of what may
    be held ahead is gone, so that trips are few and large and executors do not run dry meanwhile.
    """
    buffer = ahead(slots, mean)
    room = slots + buffer - held
    return min(room, BATCH) if room > buffer // 4 else 0
