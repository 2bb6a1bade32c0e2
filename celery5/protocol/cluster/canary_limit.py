"""Bound the jobs that a canary can harm before its Controller has judged it, by what the canary knows itself."""

import math
from collections.abc import Callable, Mapping

import msgspec

CANARY_VARIABLE = "CELERY5_CONTROLLER_CANARY"
"""The environment variable by which a worker knows that it is a canary: its attempts and seconds, `10/120`."""
VERDICT_PAUSE = 15.0
"""Seconds for which a canary reads no jobs after its attempts have failed: the Controller, which learns of them within
five seconds at most, stops a bad one meanwhile. Then it goes on: it fails no more than others, or nobody judges it."""


class CanaryBounds(msgspec.Struct, frozen=True):
    """How long a canary is watched, and how many of its attempts may fail or be in progress until it is judged."""

    attempts: int
    seconds: float


def format_bounds(bounds: CanaryBounds) -> str:
    """Return the value of CANARY_VARIABLE."""
    return f"{bounds.attempts}/{bounds.seconds:g}"


def parse_bounds(environ: Mapping[str, str]) -> CanaryBounds | None:
    """Return the bounds in an environment; None when the process is no canary, or they cannot be read."""
    attempts, _, seconds = environ.get(CANARY_VARIABLE, "").partition("/")
    try:
        return CanaryBounds(int(attempts), float(seconds))
    except ValueError:
        return None


class CanaryLimit:
    """Counts how many more jobs a worker may take while it is a canary. A worker that is none has no limit.

    Jobs that it holds and attempts that have failed are `attempts` together at most. When so many have failed, it takes
    none for VERDICT_PAUSE, and then begins to count again. The limit ends with the time for which it is watched.

    Args:
        bounds: None: the worker is no canary.
        count_failures: Returns how many attempts have failed in its process.
        clock: Returns the present time in seconds.
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
        """Return how many more jobs it may take while it holds so many: infinite without a limit."""
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
        """Return the seconds until it takes jobs again; infinite while it is not paused."""
        left = self._paused_until - self._clock()
        return max(left, 0.0) if self._bounds is not None and self._paused_until > -math.inf else math.inf

    def _is_paused_at(self, now: float, failures: int, attempts: int) -> bool:
        """Begin a pause when so many attempts have failed, and end it when it is over."""
        if self._paused_until > -math.inf:
            if now < self._paused_until:
                return True
            self._paused_until, self._judged_failures = -math.inf, failures
        if failures - self._judged_failures >= attempts:
            self._paused_until = now + VERDICT_PAUSE
            return True
        return False
