"""Backoff: how long to wait before trying again.

Floor: protocol. Pure: no clock, and chance is passed in. Reads: nothing. Writes: nothing.

Full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015) spreads a crowd of retries best for the
least work: the wait is anything from nothing to the exponential step. The cap includes the jitter.
"""

from collections.abc import Callable

# 2 ** 63 steps of a microsecond are 290,000 years: beyond this no cap is ever in doubt, and no integer grows.
_FURTHEST = 63


def exponential(attempt: int, *, start: float, cap: float) -> float:
    """The longest wait in seconds after `attempt` (counted from 0): `start` doubled each time, at most `cap`."""
    return min(cap, start * float(1 << min(max(attempt, 0), _FURTHEST)))


def linear(attempt: int, *, start: float, step: float, cap: float) -> float:
    """The longest wait in seconds after `attempt` (counted from 0): `step` more each time, at most `cap` (C22)."""
    return min(cap, start + step * max(attempt, 0))


def full_jitter(attempt: int, *, start: float, cap: float, random: Callable[[], float]) -> float:
    """A wait in seconds between 0 and `exponential(attempt)`, so never above `cap`.

    `random` gives a number from 0 up to 1, such as `random.random`. Any attempt number is safe, however
    large.
    """
    return random() * exponential(attempt, start=start, cap=cap)
