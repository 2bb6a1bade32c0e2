"""Prefetch: how many jobs a worker may hold, decided from how long its jobs take.

Floor: protocol. Reads: nothing. Writes: nothing.

A job that waits in one worker's memory cannot be run by another. So a worker holds only what it runs, plus what it
will start within the next moment (`horizon`): hundreds of jobs of microseconds, not one job of seconds.
"""

from dataclasses import dataclass, field

HORIZON = 0.1
"""Seconds. What is held unstarted should have started after this long."""
LIMIT = 512
"""The most jobs held unstarted, however short they are."""
BATCH = 256
"""The most jobs read in one trip."""
_WEIGHT = 0.05
"""How much one job's duration moves the mean."""


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


def ahead(slots: int, mean: float | None) -> int:
    """How many jobs may wait unstarted, with `slots` jobs running at once that take `mean` seconds each."""
    if mean is None or mean >= HORIZON:
        return 0
    return min(LIMIT, int(slots * HORIZON / max(mean, 1e-9)))


def to_read(*, slots: int, held: int, mean: float | None) -> int:
    """How many jobs to read now, with `held` jobs in hand; 0 says wait.

    With nothing held ahead every free slot is filled one for one. Otherwise reading waits until half of what may be
    held ahead is gone, so that trips are few and large.
    """
    buffer = ahead(slots, mean)
    room = slots + buffer - held
    return min(room, BATCH) if room > buffer // 2 else 0
