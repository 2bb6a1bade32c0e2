"""Decide how often a failed job is tried again, and after what delay."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.masking import describe_error
from celery5.protocol.names import get_error_names

UnpublishableChoice = Literal["backlog", "local", "abandon"]


class UnpublishableRetry(msgspec.Struct, frozen=True):
    """A retry that cannot be published, as a function for `when_unpublishable` gets it."""

    id: str
    task: str
    queue: str
    attempt: int  # the one that failed
    delay: float  # seconds until the next one
    error_type: str
    error_message: str


UnpublishableFallback = Callable[[UnpublishableRetry], UnpublishableChoice]
"""Returns what becomes of a retry while Redis is unreachable. Called in the worker's event loop: it must be quick."""


LONGEST = 100 * 365 * 86400.0
"""The longest wait in seconds: a hundred years, which still fits every clock and script."""

# 2 ** 63 steps of a microsecond are 290,000 years: beyond this every cap is reached, and no integer grows.
_FURTHEST = 63


def exponential(attempt: int, *, start: float, cap: float) -> float:
    """Return the longest wait in seconds after `attempt` (counted from 0): `start` doubled each time, at most `cap`."""
    return min(cap, start * float(1 << min(max(attempt, 0), _FURTHEST)))


def linear(attempt: int, *, start: float, step: float, cap: float) -> float:
    """Return the longest wait in seconds after `attempt` (counted from 0): `step` more each time, at most `cap`."""
    return min(cap, start + step * max(attempt, 0))


def full_jitter(attempt: int, *, start: float, cap: float, random: Callable[[], float]) -> float:
    """Return a random wait in seconds between 0 and `exponential(attempt)`, so never above `cap`.

    `random` returns a number from 0 up to 1, such as `random.random`. Any attempt number is safe.
    """
    return random() * exponential(attempt, start=start, cap=cap)


class CustomBackoff:
    """A user's function that returns how long to wait.

    The worker calls it with the number of the retry, from 0; it returns seconds. When it fails, the numbers of the
    retry policy are used. Raises Misconfigured if it cannot be called.
    """

    __slots__ = ("_function", "_name")

    def __init__(self, function: Callable[[int], float]) -> None:
        if not callable(cast("object", function)) or isinstance(function, type):
            raise Misconfigured(
                f"retry_backoff is {function!r}: give a function of the retry's number, from 0, that gives seconds"
            )
        refuse_injected(function, "retry_backoff")
        self._function = function
        self._name: str = getattr(function, "__qualname__", repr(function))

    def __call__(self, retry: int) -> float | str:
        """Return seconds, at most LONGEST; or the error of the function, in one line."""
        try:
            result = self._function(retry)
            seconds = float(result)
        except BaseException as error:  # the user's code
            return f"retry_backoff {self._name}({retry}) failed: {describe_error(error, 200)}"
        if not seconds >= 0:  # nor is nan
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not 0 seconds or more"
        if seconds == float("inf"):
            return f"retry_backoff {self._name}({retry}) gave {seconds}: not a number of seconds"
        return min(seconds, LONGEST)


if TYPE_CHECKING:
    Errors = Collection[str | type[BaseException]]
else:
    Errors = tuple[str, ...]  # as it is stored, and in messages


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a failed job is tried again.

    The wait before retry n (from 0) is `backoff` * 2**n seconds, or, with a `step`, `backoff` + n * `step`. Raises
    Misconfigured for anything but classes of errors.
    """

    max_retries: Annotated[int, Meta(ge=0)] = 3  # attempts after the first
    backoff: Annotated[float, Meta(ge=0, le=LONGEST)] = 1.0
    cap: Annotated[float, Meta(ge=0, le=LONGEST)] = 3600.0  # the longest wait
    jitter: bool = True  # draw the wait evenly between 0 and that
    step: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    # Errors that are retried, as classes or full names, with their subclasses; none: all.
    autoretry_for: Errors = ()
    # Errors that are never retried. Overrides `autoretry_for`.
    dont_autoretry_for: Errors = ()

    def __post_init__(self) -> None:
        # A message has a tuple of texts already, which is not checked.
        for name in ("autoretry_for", "dont_autoretry_for"):
            errors = getattr(self, name)
            if errors and not _is_named(errors):
                force_setattr(self, name, _named(name, errors))

    @staticmethod
    def parse(policy: "RetryPolicy | Mapping[str, Any]") -> "RetryPolicy":
        """Return the policy that `said` describes: itself, a mapping with its fields, or one with Celery's names.

        Celery's names are `max_retries`, `interval_start` (0), `interval_step` (0.2) and `interval_max` (0.2), in
        seconds: growing evenly, without jitter. Missing fields have their defaults. Raises Misconfigured.
        """
        if isinstance(policy, RetryPolicy):
            return policy.checked()
        if not isinstance(cast("object", policy), Mapping):
            raise Misconfigured(f"retry_policy is {policy!r}: give a RetryPolicy, or a mapping")
        unknown = [name for name in policy if name not in _TYPES and name not in _INTERVALS]
        if unknown:
            known = ", ".join([*_TYPES, *_INTERVALS])
            raise Misconfigured(f"retry_policy has {unknown[0]!r}, which is not known; known: {known}")
        fields = {name: value for name, value in policy.items() if name in _TYPES}
        intervals = {name: policy[name] for name in _INTERVALS if name in policy}
        if intervals:
            fields = _convert_intervals(fields, intervals)
        return RetryPolicy(**fields).checked()

    def checked(self) -> "RetryPolicy":
        """Return itself. Raises Misconfigured for an invalid number, or a name that is not a full one."""
        for name in _TYPES:
            _check(name, name, getattr(self, name))
        for name in ("autoretry_for", "dont_autoretry_for"):
            _named(name, getattr(self, name))
        return self

    def allows(self, attempt: int) -> bool:
        """Return whether a job that failed at `attempt` (from 1) may be tried again."""
        return attempt <= self.max_retries

    def covers(self, kinds: Iterable[str]) -> bool:
        """Return whether an error is retried, by the names of its class and bases."""
        if not (self.autoretry_for or self.dont_autoretry_for):
            return True
        names = set(kinds)
        is_included = not self.autoretry_for or not names.isdisjoint(self.autoretry_for)
        return is_included and names.isdisjoint(self.dont_autoretry_for)

    def delay(self, attempt: int, random: Callable[[], float]) -> float:
        """Return the seconds to wait after `attempt` (from 1) failed. `random` returns numbers in [0, 1)."""
        draw = random if self.jitter else _draw_maximum
        if self.step is not None:
            return draw() * linear(attempt - 1, start=self.backoff, step=self.step, cap=self.cap)
        return full_jitter(attempt - 1, start=self.backoff, cap=self.cap, random=draw)


def _draw_maximum() -> float:
    return 1.0


def _is_named(errors: Collection[object]) -> bool:
    return isinstance(errors, tuple) and all(isinstance(error, str) for error in errors)


def _named(name: str, errors: Any) -> tuple[str, ...]:
    try:
        return get_error_names(errors)
    except Misconfigured as error:
        raise Misconfigured(f"{name}: {error}") from None


def _convert_intervals(fields: dict[str, Any], intervals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy whose waits grow linearly, from Celery's names."""
    duplicates = [name for name in ("backoff", "step", "cap") if name in fields]
    if duplicates:
        raise Misconfigured(
            f"retry_policy has {duplicates[0]!r} and {next(iter(intervals))!r}: use one spelling"
        )
    policy: dict[str, Any] = {"backoff": 0.0, "step": 0.2, "cap": 0.2, "jitter": False}
    for name, value in intervals.items():
        policy[_INTERVALS[name]] = _check(name, "cap", value)
    return policy | fields


def _check(name: str, like: str, value: Any) -> Any:
    """Return `value` if it is valid for the field `like`. Raises Misconfigured, which names `name`."""
    try:
        msgspec.convert(value, _TYPES[like])
    except msgspec.ValidationError as error:
        raise Misconfigured(f"{name} is {value!r}: {error}") from None
    return value


_TYPES = get_type_hints(RetryPolicy, include_extras=True)
_INTERVALS = {"interval_start": "backoff", "interval_step": "step", "interval_max": "cap"}
