"""Breaker: the circuit breaker of one connection, task or service, as values and a table.

Closed lets everything through. After `threshold` failures it opens and refuses all; so it does when a health check has
been in a bad state more often than is allowed. When the open period is over one probe may pass (half-open): its success
closes the breaker, its failure opens it again, for longer if so wished. A breaker is a frozen value; each event gives
the next one, so whoever holds it decides where it is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Literal

from celery5.errors import Misconfigured

PeriodGrowth = Literal["none", "linear", "exponential"]
Mode = Literal["delay", "fail", "watch", "off"]


class BreakerState(Enum):
    """What a breaker does with the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    """What can happen to a breaker."""

    SUCCESS = "success"
    FAILURE = "failure"
    LAST_FAILURE = "the last failure that it takes"
    PROBE = "the open period is over and a probe is let through"
    PROBE_CANCELLED = "the probe was cancelled: nothing was learnt"


_CLOSED, _OPEN, _HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

# The whole machine. A late failure or success of a call that began before the breaker opened changes nothing.
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
    """When a breaker trips, for how long, what becomes of a task's jobs meanwhile, how loudly it is told.

    `threshold`: failures that trip it, in a row or, with `window`, within so many seconds; None: failures never do.
    `allowed`: how often its health checks may be in each state within `within` seconds; once more trips it. What it
    does not say, the checks say themselves. `reset`: seconds of the first open period. `growth`: how further open
    periods grow while no probe succeeds: not at all, by `reset` each time, or doubled each time. `longest`: the cap, in
    seconds.

    `error_after` trips within `error_within` seconds are told as an error instead of a warning, and so are all that
    follow in the next `error_for` seconds.

    `mode`, of a task's breaker: `delay` holds its jobs in Redis while the breaker is open, `fail` fails them, `watch`
    lets them run and only tells, `off` does nothing.
    """

    threshold: int | None = 3
    window: float | None = None
    allowed: Mapping[str, int] | None = None
    within: float = 10.0
    reset: float = 30.0
    growth: PeriodGrowth = "none"
    longest: float = 600.0
    error_after: int = 3
    error_within: float = 300.0
    error_for: float = 1800.0
    mode: Mode = "delay"

    def __post_init__(self) -> None:
        """Raises Misconfigured for numbers that make no sense."""
        periods = (
            1.0 if self.window is None else self.window,
            self.within,
            self.error_within,
            self.error_for,
        )
        wrong = (
            (self.threshold is not None and self.threshold < 1)
            or not 0 <= self.reset <= self.longest < inf
            or self.error_after < 1
            or not all(each > 0 for each in periods)
            or any(count < 0 for count in (self.allowed or {}).values())
        )
        if wrong:
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
        """Seconds of the open period when the breaker has opened `opened` times in a row (counted from 1)."""
        times = max(opened, 1)
        if self.growth == "linear":
            return min(self.longest, self.reset * times)
        if self.growth == "exponential":
            return min(self.longest, self.reset * float(1 << min(times - 1, 63)))
        return self.reset


_MODES = ("delay", "fail", "watch", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """One breaker at one moment.

    `failures` counts failures while closed, in a row or, by their times in `failed_at`, within the window; `opened`
    counts open periods since the last success; `until` is when the open period is over, on whatever clock `now` comes
    from. `seen` are the bad states of its health checks, each with its time. `trips` are the times of the latest trips,
    and trips before `loud_until` are errors. All of them are bounded by the policy.
    """

    policy: BreakerPolicy = BreakerPolicy()
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened: int = 0
    open_until: float = 0.0
    failed_at: tuple[float, ...] = ()
    bad_states: tuple[tuple[str, float], ...] = ()
    trips: tuple[float, ...] = ()
    error_until: float = -inf

    @property
    def needs_success(self) -> bool:
        """Whether a success would change it."""
        return self.state is not _CLOSED or (self.failures > 0 and self.policy.window is None)

    def log_level(self, now: float) -> Literal["warning", "error"]:
        """How loudly a trip at that time is told."""
        return "error" if now < self.error_until else "warning"

    def is_allowed(self, now: float) -> bool:
        """Whether a call may pass now.

        When open and due, the caller that goes must first `begin` the probe.
        """
        if self.state is _CLOSED:
            return True
        return self.state is _OPEN and now >= self.open_until

    def with_probe(self, now: float) -> "Breaker":
        """A call that was allowed sets out: an open breaker becomes half-open, so that nobody else goes with it."""
        if self.state is _OPEN and now < self.open_until:
            return self
        return replace(self, state=TRANSITIONS[self.state][BreakerEvent.PROBE])

    def after_success(self) -> "Breaker":
        """A call came back well. What lies in a window is not forgotten for it, unless this closes the breaker."""
        state = TRANSITIONS[self.state][BreakerEvent.SUCCESS]
        if state is not _CLOSED or (self.state is _CLOSED and self.policy.window is not None):
            return self
        seen = self.bad_states if self.state is _CLOSED else ()
        return replace(self, state=state, failures=0, opened=0, open_until=0.0, failed_at=(), bad_states=seen)

    def after_failure(self, now: float) -> "Breaker":
        """A call failed.

        Calls that began before the breaker opened and fail late do not prolong the open period.
        """
        threshold, window = self.policy.threshold, self.policy.window
        if self.state is _CLOSED and threshold is None:
            return self
        at: tuple[float, ...] = ()
        failures = self.failures + 1
        if window is not None:
            at = (*(each for each in self.failed_at if now - each < window), now)
            failures = len(at)
        limit = threshold is not None and failures >= threshold
        state = TRANSITIONS[self.state][BreakerEvent.LAST_FAILURE if limit else BreakerEvent.FAILURE]
        if state is _CLOSED:
            return replace(self, failures=failures, failed_at=at)
        return self if self.state is _OPEN else self._tripped(now)

    def after_report(self, what: str, now: float, *, allowed: int, within: float) -> "Breaker":
        """A health check is in the bad state `what`. More than `allowed` times in `within` seconds trips; what is
        reported while the breaker is open is not counted."""
        if self.state is _OPEN:
            return self
        others = tuple(each for each in self.bad_states if each[0] != what)
        same = tuple(each for each in self.bad_states if each[0] == what and now - each[1] < within)
        if len(same) < allowed:
            return replace(self, bad_states=(*others, *same, (what, now)))
        return self._tripped(now)

    def after_cancelled_probe(self, now: float) -> "Breaker":
        """The probe was cancelled, so nothing was learnt: open again, and due for another at once."""
        if self.state is not _HALF:
            return self
        return replace(self, state=TRANSITIONS[self.state][BreakerEvent.PROBE_CANCELLED], open_until=now)

    def _tripped(self, now: float) -> "Breaker":
        policy, opened = self.policy, self.opened + 1
        trips = (*(each for each in self.trips if now - each < policy.error_within), now)[
            -policy.error_after :
        ]
        loud_until = self.error_until
        if now >= loud_until and len(trips) == policy.error_after:
            loud_until = now + policy.error_for
        return replace(
            self,
            state=TRANSITIONS[self.state][BreakerEvent.LAST_FAILURE],
            failures=0,
            opened=opened,
            open_until=now + policy.get_open_period(opened),
            failed_at=(),
            bad_states=(),
            trips=trips,
            error_until=loud_until,
        )
