"""Retry policy: how often a failed job is tried again, and how long it waits before that."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from celery5.errors import Misconfigured
from celery5.protocol.job.names import get_error_names
from celery5.protocol.masking import describe_error

LONGEST = 100 * 365 * 86400.0
"""Seconds. No wait is longer: a hundred years are for ever, and still fit every clock and script."""

# 2 ** 63 steps of a microsecond are 290,000 years: beyond this no cap is ever in doubt, and no integer grows.
_FURTHEST = 63


def exponential(attempt: int, *, start: float, cap: float) -> float:
    """Return the longest wait in seconds after `attempt` (counted from 0): `start` doubled each time, at most `cap`."""
    return min(cap, start * float(1 << min(max(attempt, 0), _FURTHEST)))


def linear(attempt: int, *, start: float, step: float, cap: float) -> float:
    """Return the longest wait in seconds after `attempt` (counted from 0): `step` more each time, at most `cap`."""
    return min(cap, start + step * max(attempt, 0))


def full_jitter(attempt: int, *, start: float, cap: float, random: Callable[[], float]) -> float:
    """A wait in seconds between 0 and `exponential(attempt)`, so never above `cap`.

    `random` gives a number from 0 up to 1, such as `random.random`. Any attempt number is safe, however
    large.
    """
    return random() * exponential(attempt, start=start, cap=cap)


class CustomBackoff:
    """A function of the user's own that returns how long to wait.

    The worker calls it with the number of the retry, from 0; it returns seconds. When it fails, the numbers of the
    retry policy are used. Raises Misconfigured if it cannot be called.
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
            return f"retry_backoff {self._name}({retry}) failed: {describe_error(error, 200)}"
        if not seconds >= 0:  # nor is nan
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not 0 seconds or more"
        if seconds == float("inf"):
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not a number of seconds"
        return min(seconds, LONGEST)


if TYPE_CHECKING:
    Errors = Collection[str | type[BaseException]]
else:
    Errors = tuple[str, ...]  # what it is once it is made, and what a message holds


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a failed job is tried again.

    `max_retries` counts further attempts after the first. The wait before retry n (from 0) is `backoff` * 2**n seconds
    up to `cap` seconds, or, with a `step`, `backoff` + n * `step`. With `jitter` it is drawn evenly between 0 and that.
    `autoretry_for` are the errors to try again for, as classes or full names, with their subclasses (none: all).
    `dont_autoretry_for` are those never to try again for, and takes precedence. Raises Misconfigured for what is no
    class of errors.
    """

    max_retries: Annotated[int, Meta(ge=0)] = 3
    backoff: Annotated[float, Meta(ge=0, le=LONGEST)] = 1.0
    cap: Annotated[float, Meta(ge=0, le=LONGEST)] = 3600.0
    jitter: bool = True
    step: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    autoretry_for: Errors = ()
    dont_autoretry_for: Errors = ()

    def __post_init__(self) -> None:
        # What comes from a message is a tuple of texts already, and is believed.
        for name in ("autoretry_for", "dont_autoretry_for"):
            said = getattr(self, name)
            if said and not _is_named(said):
                force_setattr(self, name, _named(name, said))

    @staticmethod
    def parse(said: "RetryPolicy | Mapping[str, Any]") -> "RetryPolicy":
        """Return the policy that `said` describes: itself, a mapping with its fields, or one with Celery's names.

        Celery's names are `max_retries`, `interval_start` (0), `interval_step` (0.2) and `interval_max` (0.2), in
        seconds: growing evenly, without jitter. Missing fields have their defaults. Raises Misconfigured.
        """
        if isinstance(said, RetryPolicy):
            return said.checked()
        if not isinstance(cast("object", said), Mapping):
            raise Misconfigured(f"retry_policy is {said!r}: give a RetryPolicy, or a mapping")
        unknown = [name for name in said if name not in _TYPES and name not in _INTERVALS]
        if unknown:
            known = ", ".join([*_TYPES, *_INTERVALS])
            raise Misconfigured(f"retry_policy has {unknown[0]!r}, which is not known; known: {known}")
        fields = {name: value for name, value in said.items() if name in _TYPES}
        intervals = {name: said[name] for name in _INTERVALS if name in said}
        if intervals:
            fields = _evenly(fields, intervals)
        return RetryPolicy(**fields).checked()

    def checked(self) -> "RetryPolicy":
        """Itself; raises Misconfigured when a number makes no sense, or a name is not a full one."""
        for name in _TYPES:
            _check(name, name, getattr(self, name))
        for name in ("autoretry_for", "dont_autoretry_for"):
            _named(name, getattr(self, name))
        return self

    def allows(self, attempt: int) -> bool:
        """Whether a job that failed at `attempt` (from 1) may be tried again."""
        return attempt <= self.max_retries

    def covers(self, kinds: Iterable[str]) -> bool:
        """Whether an error is tried again for, by the names of its class and bases."""
        if not (self.autoretry_for or self.dont_autoretry_for):
            return True
        names = set(kinds)
        wanted = not self.autoretry_for or not names.isdisjoint(self.autoretry_for)
        return wanted and names.isdisjoint(self.dont_autoretry_for)

    def delay(self, attempt: int, random: Callable[[], float]) -> float:
        """Seconds to wait after `attempt` (from 1) failed. `random` gives numbers in [0, 1)."""
        draw = random if self.jitter else _most
        if self.step is not None:
            return draw() * linear(attempt - 1, start=self.backoff, step=self.step, cap=self.cap)
        return full_jitter(attempt - 1, start=self.backoff, cap=self.cap, random=draw)


def _most() -> float:
    return 1.0


def _is_named(said: Collection[object]) -> bool:
    return isinstance(said, tuple) and all(isinstance(each, str) for each in said)


def _named(name: str, said: Any) -> tuple[str, ...]:
    try:
        return get_error_names(said)
    except Misconfigured as error:
        raise Misconfigured(f"{name}: {error}") from None


def _evenly(fields: dict[str, Any], intervals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy whose waits grow evenly, from Celery's names."""
    twice = [name for name in ("backoff", "step", "cap") if name in fields]
    if twice:
        raise Misconfigured(f"retry_policy has {twice[0]!r} and {next(iter(intervals))!r}: use one spelling")
    even: dict[str, Any] = {"backoff": 0.0, "step": 0.2, "cap": 0.2, "jitter": False}
    for name, value in intervals.items():
        even[_INTERVALS[name]] = _check(name, "cap", value)
    return even | fields


def _check(name: str, like: str, value: Any) -> Any:
    """`value`, if it is fit for the field `like`. Raises Misconfigured, which calls it `name`."""
    try:
        msgspec.convert(value, _TYPES[like])
    except msgspec.ValidationError as error:
        raise Misconfigured(f"{name} is {value!r}: {error}") from None
    return value


_TYPES = get_type_hints(RetryPolicy, include_extras=True)
_INTERVALS = {"interval_start": "backoff", "interval_step": "step", "interval_max": "cap"}
