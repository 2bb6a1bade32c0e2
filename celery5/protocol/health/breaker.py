"""Decide what the circuit breaker of a connection, task or service does, as values and a table.

A closed breaker allows every call. It opens after `threshold` failures, or when a health check was in a bad state more
often than allowed; then it refuses all calls. After the open period it allows one probe (half-open). Success of the
probe closes the breaker; failure opens it again, maybe for longer. A breaker is a frozen value, and each
event returns the next one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Literal

import msgspec

from celery5.errors import Misconfigured

PeriodGrowth = Literal["none", "linear", "exponential"]
Mode = Literal["delay", "fail", "watch", "off"]


class BreakerState(Enum):
    """What a breaker does with the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


STATE_NUMBERS: Mapping[BreakerState, int] = {
    BreakerState.CLOSED: 0,
    BreakerState.HALF_OPEN: 1,
    BreakerState.OPEN: 2,
}
"""The states as metrics show them."""


SERVICE_PREFIX = "service:"
"""Begins the name of the breaker of a service."""
CONNECTION_PREFIX = "connection:"
"""Begins that of a connection to the broker."""
WEBHOOK_PREFIX = "webhook:"
"""Begins that of a webhook."""
OUTLET_PREFIX = "outlet:"
"""Begins that of an outlet for metrics."""
_HELD: Mapping[str, str] = {
    SERVICE_PREFIX: "it is not started again",
    CONNECTION_PREFIX: "nothing is sent to Redis by it",
    WEBHOOK_PREFIX: "notifications of alerts wait",
    OUTLET_PREFIX: "it gets no metrics",
}


def describe_held(of: str) -> str:
    """Return what a breaker that is open holds up, as a phrase, by the name of what it protects."""
    prefix, colon, _ = of.partition(":")
    return _HELD.get(prefix + colon, "its jobs are held back")


class BreakerEvent(Enum):
    """What can happen to a breaker."""

    SUCCESS = "success"
    FAILURE = "failure"
    LAST_FAILURE = "the failure that reaches the threshold"
    PROBE = "the open period is over and a probe starts"
    PROBE_CANCELLED = "the probe was cancelled: its outcome is unknown"


_CLOSED, _OPEN, _HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

# All transitions. A late failure or success of a call that began before the breaker opened changes nothing.
TRANSITIONS: Mapping[BreakerState, Mapping[BreakerEvent, BreakerState]] = {
    _CLOSED: {
        BreakerEvent.SUCCESS: _CLOSED,
        BreakerEvent.FAILURE: _CLOSED,
        BreakerEvent.LAST_FAILURE: _OPEN,
        BreakerEvent.PROBE: _CLOSED,
        BreakerEvent.PROBE_CANCELLED: _CLOSED,
    },
    _OPEN: {
        BreakerEvent.SUCCESS: _OPEN,
        BreakerEvent.FAILURE: _OPEN,
        BreakerEvent.LAST_FAILURE: _OPEN,
        BreakerEvent.PROBE: _HALF,
        BreakerEvent.PROBE_CANCELLED: _OPEN,
    },
    _HALF: {
        BreakerEvent.SUCCESS: _CLOSED,
        BreakerEvent.FAILURE: _OPEN,
        BreakerEvent.LAST_FAILURE: _OPEN,
        BreakerEvent.PROBE: _HALF,
        BreakerEvent.PROBE_CANCELLED: _OPEN,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a breaker opens, for how long, and what becomes of a task's jobs. Times are in seconds."""

    # Failures that open it, in a row or within `window`; None: failures never do.
    threshold: int | None = 3
    window: float | None = None
    # How often its health checks may be in each state within `within`; once more opens it. For other states, the
    # checks' own `allowed` counts.
    allowed: Mapping[str, int] | None = None
    within: float = 10.0
    # The first open period.
    reset: float = 30.0
    # How open periods grow while no probe succeeds: not at all, by `reset` each time, or doubled each time.
    growth: PeriodGrowth = "none"
    # The longest open period.
    longest: float = 600.0
    # This many trips within `error_within` are logged as an error instead of a warning; so are all that follow within
    # `error_for`.
    error_after: int = 3
    error_within: float = 300.0
    error_for: float = 1800.0
    # For a task: `delay` holds its jobs in Redis while the breaker is open, `fail` fails them, `watch` runs them and
    # only logs, `off` does nothing.
    mode: Mode = "delay"

    def __post_init__(self) -> None:
        """Raise Misconfigured for invalid values."""
        periods = (
            1.0 if self.window is None else self.window,
            self.within,
            self.error_within,
            self.error_for,
        )
        is_invalid = (
            (self.threshold is not None and self.threshold < 1)
            or not 0 <= self.reset <= self.longest < inf
            or self.error_after < 1
            or not all(period > 0 for period in periods)
            or any(count < 0 for count in (self.allowed or {}).values())
        )
        if is_invalid:
            raise Misconfigured(
                "a breaker needs threshold >= 1, 0 <= reset <= longest, error_after >= 1, counts of 0 or more and "
                f"periods of more than 0 seconds, not {self}"
            )
        if self.growth not in ("none", "linear", "exponential") or self.mode not in _MODES:
            raise Misconfigured(
                "a breaker needs growth 'none', 'linear' or 'exponential', and mode 'delay', 'fail', 'watch' or 'off', "
                f"not {self.growth!r} and {self.mode!r}"
            )

    def get_open_period(self, opened: int) -> float:
        """Return the seconds of the open period after the breaker has opened `opened` times in a row."""
        times = max(opened, 1)
        if self.growth == "linear":
            return min(self.longest, self.reset * times)
        if self.growth == "exponential":
            return min(self.longest, self.reset * float(1 << min(times - 1, 63)))
        return self.reset


_MODES = ("delay", "fail", "watch", "off")


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """One breaker at one time. All times are of the clock of `now`. The policy bounds the length of each tuple."""

    policy: BreakerPolicy = BreakerPolicy()
    state: BreakerState = BreakerState.CLOSED
    # Failures while closed, in a row or within the window.
    failures: int = 0
    # Open periods since the last success.
    opened: int = 0
    open_until: float = 0.0
    # The times of the failures within the window.
    failed_at: tuple[float, ...] = ()
    # The bad states of its health checks, each with its time.
    bad_states: tuple[tuple[str, float], ...] = ()
    # The times of the latest trips.
    trips: tuple[float, ...] = ()
    # Until when trips are logged as errors.
    error_until: float = -inf

    @property
    def needs_success(self) -> bool:
        """Return whether a success would change it."""
        return self.state is not _CLOSED or (self.failures > 0 and self.policy.window is None)

    def log_level(self, now: float) -> Literal["warning", "error"]:
        """Return the level at which a trip at that time is logged."""
        return "error" if now < self.error_until else "warning"

    def is_allowed(self, now: float) -> bool:
        """Return whether a call may start now. When open and due, the caller must first call `with_probe`."""
        if self.state is _CLOSED:
            return True
        return self.state is _OPEN and now >= self.open_until

    def with_probe(self, now: float) -> "Breaker":
        """Return the breaker after an allowed call started: an open one becomes half-open, and refuses other calls."""
        if self.state is _OPEN and now < self.open_until:
            return self
        return msgspec.structs.replace(self, state=TRANSITIONS[self.state][BreakerEvent.PROBE])

    def after_success(self) -> "Breaker":
        """Return the breaker after a success. Failures within a window still count, unless this closes the breaker."""
        state = TRANSITIONS[self.state][BreakerEvent.SUCCESS]
        if state is not _CLOSED or (self.state is _CLOSED and self.policy.window is not None):
            return self
        bad_states = self.bad_states if self.state is _CLOSED else ()
        return msgspec.structs.replace(
            self, state=state, failures=0, opened=0, open_until=0.0, failed_at=(), bad_states=bad_states
        )

    def after_failure(self, now: float) -> "Breaker":
        """Return the breaker after a failure.

        Calls that began before the breaker opened and fail late do not prolong the open period.
        """
        threshold, window = self.policy.threshold, self.policy.window
        if self.state is _CLOSED and threshold is None:
            return self
        failed_at: tuple[float, ...] = ()
        failures = self.failures + 1
        if window is not None:
            failed_at = (*(at for at in self.failed_at if now - at < window), now)
            failures = len(failed_at)
        is_last = threshold is not None and failures >= threshold
        state = TRANSITIONS[self.state][BreakerEvent.LAST_FAILURE if is_last else BreakerEvent.FAILURE]
        if state is _CLOSED:
            return msgspec.structs.replace(self, failures=failures, failed_at=failed_at)
        return self if self.state is _OPEN else self._tripped(now)

    def after_report(self, reported: str, now: float, *, allowed: int, within: float) -> "Breaker":
        """Return the breaker after a health check was in the bad state `reported`.

        More than `allowed` times in `within` seconds open the breaker. While it is open, reports do not count.
        """
        if self.state is _OPEN:
            return self
        others = tuple((state, at) for state, at in self.bad_states if state != reported)
        same = tuple((state, at) for state, at in self.bad_states if state == reported and now - at < within)
        if len(same) < allowed:
            return msgspec.structs.replace(self, bad_states=(*others, *same, (reported, now)))
        return self._tripped(now)

    def after_cancelled_probe(self, now: float) -> "Breaker":
        """Return the breaker after the probe was cancelled: open again, and due for another probe at once."""
        if self.state is not _HALF:
            return self
        return msgspec.structs.replace(
            self, state=TRANSITIONS[self.state][BreakerEvent.PROBE_CANCELLED], open_until=now
        )

    def _tripped(self, now: float) -> "Breaker":
        policy, opened = self.policy, self.opened + 1
        trips = (*(at for at in self.trips if now - at < policy.error_within), now)[-policy.error_after :]
        error_until = self.error_until
        if now >= error_until and len(trips) == policy.error_after:
            error_until = now + policy.error_for
        return msgspec.structs.replace(
            self,
            state=TRANSITIONS[self.state][BreakerEvent.LAST_FAILURE],
            failures=0,
            opened=opened,
            open_until=now + policy.get_open_period(opened),
            failed_at=(),
            bad_states=(),
            trips=trips,
            error_until=error_until,
        )
