"""Limit how many jobs a canary can fail before its Controller has judged it. The canary itself counts."""

import math
from collections.abc import Callable, Mapping

import msgspec

CANARY_VARIABLE = "CELERY5_CONTROLLER_CANARY"
"""The environment variable that makes a worker a canary: the attempts and the seconds of its limit, `10/120`."""
VERDICT_PAUSE = 15.0
"""Seconds for which a canary reads no jobs after so many attempts have failed.

The Controller learns of failures within five seconds, and stops a bad canary in this time. If the canary still runs
after the pause, it fails no more than the others, or no Controller judges it. So it reads jobs again.
"""


class CanaryBounds(msgspec.Struct, frozen=True):
    """The limit of a canary."""

    # How many of its attempts may have failed or run, together, until it is judged.
    attempts: int
    # For how long its Controller watches it.
    seconds: float


def format_bounds(bounds: CanaryBounds) -> str:
    """Return the value of CANARY_VARIABLE."""
    return f"{bounds.attempts}/{bounds.seconds:g}"


def parse_bounds(environ: Mapping[str, str]) -> CanaryBounds | None:
    """Return the bounds in an environment; None if there are none, or they cannot be read."""
    attempts, _, seconds = environ.get(CANARY_VARIABLE, "").partition("/")
    try:
        return CanaryBounds(int(attempts), float(seconds))
    except ValueError:
        return None


class CanaryLimit:
    """Counts how many more jobs a worker may take while it is a canary.

    The jobs that it has, and its failed attempts, are `attempts` together at most. When that many have failed, it takes
    no jobs for VERDICT_PAUSE. Then it counts failures from 0 again. The limit ends VERDICT_PAUSE after `seconds`.

    Args:
        bounds: The limit; None if the worker is no canary.
        count_failures: Returns how many attempts have failed in this process.
        clock: Returns the current time in seconds.
    """

    def __init__(
        self,
        bounds: CanaryBounds | None,
        *,
        count_failures: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._bounds = bounds
        self._count_failures = count_failures
        self._clock = clock
        self._ends_at = math.inf
        self._judged_failures = 0
        self._paused_until = -math.inf

    def count_free(self, held: int) -> float:
        """Return how many more jobs it may take while it has `held` jobs; infinity without a limit."""
        bounds = self._bounds
        if bounds is None:
            return math.inf
        now = self._clock()
        if self._ends_at == math.inf:
            self._ends_at = now + bounds.seconds + VERDICT_PAUSE  # the Controller counts from when it is up
        if now >= self._ends_at:
            self._bounds = None
            return math.inf
        failures = self._count_failures()
        if self._is_paused_at(now, failures, bounds.attempts):
            return 0
        return max(bounds.attempts - (failures - self._judged_failures) - held, 0)

    @property
    def pause_left(self) -> float:
        """Return the seconds until it takes jobs again; infinity while it is not paused."""
        return self._count_seconds(self._paused_until)

    @property
    def next_change(self) -> float:
        """Return the seconds until a pause or the limit ends; infinity when none will.

        It is 0 until `count_free` has noticed an end, so that who waits asks again.
        """
        return self._count_seconds(self._paused_until, self._ends_at)

    def _count_seconds(self, *times: float) -> float:
        """Return the seconds until the first of these times; infinity when none is set, or without a limit."""
        if self._bounds is None:
            return math.inf
        first = min((at for at in times if at > -math.inf), default=math.inf)
        return max(first - self._clock(), 0.0)

    def _is_paused_at(self, now: float, failures: int, attempts: int) -> bool:
        """Return whether it is paused; begin a pause after `attempts` failures, and end one that is over."""
        if self._paused_until > -math.inf:
            if now < self._paused_until:
                return True
            self._paused_until, self._judged_failures = -math.inf, failures
        if failures - self._judged_failures >= attempts:
            self._paused_until = now + VERDICT_PAUSE
            return True
        return False
