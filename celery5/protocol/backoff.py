"""Backoff: how long to wait before trying again.

Floor: protocol. Pure: no clock, and chance is passed in. Reads: nothing. Writes: nothing.

Full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015) spreads a crowd of retries best for the
least work: the wait is anything from nothing to the exponential step. The cap includes the jitter.
"""

from collections.abc import Callable
from typing import cast

from celery5.errors import Misconfigured

LONGEST = 100 * 365 * 86400.0
"""Seconds. No wait is longer: a hundred years are for ever, and still fit every clock and script."""

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


class CustomBackoff:
    """A function of the user's own that says how long to wait (Fennel's `retry_backoff`, F45).

    It is called on the worker with the number of the retry, from 0, and gives seconds. What it gets wrong costs
    nothing: the retry policy's own numbers stand in. Raises Misconfigured for what cannot be called.
    """

    __slots__ = ("_function", "_name")

    def __init__(self, function: Callable[[int], float]) -> None:
        if not callable(cast("object", function)) or isinstance(function, type):
            raise Misconfigured(
                f"retry_backoff is {function!r}: give a function of the retry's number, from 0, that gives seconds"
            )
        self._function = function
        self._name: str = getattr(function, "__qualname__", repr(function))

    def __call__(self, retry: int) -> float | str:
        """Seconds, at most LONGEST; or what is wrong with the function, in one line."""
        try:
            said = self._function(retry)
            seconds = float(said)
        except Exception as error:  # the user's code
            return f"retry_backoff {self._name}({retry}) failed: {type(error).__name__}: {_text(error)}"
        if not seconds >= 0:  # nor is nan
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not 0 seconds or more"
        if seconds == float("inf"):
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not a number of seconds"
        return min(seconds, LONGEST)


def _text(error: Exception) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:  # its text is the user's code, too
        return "<no text>"
