"""Breaker: the circuit breaker of one connection or one task, as values and a table.

Floor: protocol. Pure: no clock, `now` is an argument. Reads: nothing. Writes: nothing.

Closed lets everything through. After `threshold` failures in a row it opens and refuses all. When the open
period is over one probe may pass (half-open): its success closes the breaker, its failure opens it again, for
longer if so wished. A breaker is a frozen value; each event gives the next one, so whoever holds it decides
where it is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

Growth = Literal["none", "linear", "exponential"]


class BreakerState(Enum):
    """What a breaker does with the next call."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    """What can happen to a breaker."""

    SUCCESS = "success"
    FAILURE = "failure"
    LIMIT = "the last failure that it takes"
    PROBE = "the open period is over and a probe is let through"
    GIVE_UP = "the probe was cancelled: nothing was learnt"


_CLOSED, _OPEN, _HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

# The whole machine. A late failure or success of a call that began before the breaker opened changes nothing.
TRANSITIONS: Mapping[BreakerState, Mapping[BreakerEvent, BreakerState]] = {
    _CLOSED: {
        BreakerEvent.SUCCESS: _CLOSED,
        BreakerEvent.FAILURE: _CLOSED,
        BreakerEvent.LIMIT: _OPEN,
        BreakerEvent.PROBE: _CLOSED,
        BreakerEvent.GIVE_UP: _CLOSED,
    },
    _OPEN: {
        BreakerEvent.SUCCESS: _OPEN,
        BreakerEvent.FAILURE: _OPEN,
        BreakerEvent.LIMIT: _OPEN,
        BreakerEvent.PROBE: _HALF,
        BreakerEvent.GIVE_UP: _OPEN,
    },
    _HALF: {
        BreakerEvent.SUCCESS: _CLOSED,
        BreakerEvent.FAILURE: _OPEN,
        BreakerEvent.LIMIT: _OPEN,
        BreakerEvent.PROBE: _HALF,
        BreakerEvent.GIVE_UP: _OPEN,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a breaker opens, and for how long.

    `threshold`: failures in a row that open it. `reset`: seconds of the first open period. `growth`: how
    further open periods grow while no probe succeeds: not at all, by `reset` each time, or doubled each time.
    `longest`: the cap, in seconds.
    """

    threshold: int = 3
    reset: float = 30.0
    growth: Growth = "none"
    longest: float = 600.0

    def __post_init__(self) -> None:
        if self.threshold < 1 or self.reset < 0 or self.longest < self.reset:
            raise ValueError("a breaker needs threshold >= 1 and 0 <= reset <= longest")

    def period(self, opened: int) -> float:
        """Seconds of the open period when the breaker has opened `opened` times in a row (counted from 1)."""
        times = max(opened, 1)
        if self.growth == "linear":
            return min(self.longest, self.reset * times)
        if self.growth == "exponential":
            return min(self.longest, self.reset * float(1 << min(times - 1, 63)))
        return self.reset


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """One breaker at one moment.

    `failures` counts failures in a row while closed; `opened` counts open periods since the last success;
    `until` is when the open period is over, on whatever clock `now` comes from.
    """

    policy: BreakerPolicy = BreakerPolicy()
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    opened: int = 0
    until: float = 0.0

    def allows(self, now: float) -> bool:
        """Whether a call may pass now.

        When open and due, the caller that goes must first `begin` the probe.
        """
        if self.state is _CLOSED:
            return True
        return self.state is _OPEN and now >= self.until

    def begin(self, now: float) -> "Breaker":
        """A call that was allowed sets out: an open breaker becomes half-open, so that nobody else goes with it."""
        if self.state is _OPEN and now < self.until:
            return self
        return replace(self, state=TRANSITIONS[self.state][BreakerEvent.PROBE])

    def succeeded(self) -> "Breaker":
        """A call came back well."""
        state = TRANSITIONS[self.state][BreakerEvent.SUCCESS]
        if state is not _CLOSED:
            return self
        return replace(self, state=state, failures=0, opened=0, until=0.0)

    def failed(self, now: float) -> "Breaker":
        """A call failed.

        Calls that began before the breaker opened and fail late do not prolong the open period.
        """
        failures = self.failures + 1
        event = BreakerEvent.LIMIT if failures >= self.policy.threshold else BreakerEvent.FAILURE
        state = TRANSITIONS[self.state][event]
        if state is _CLOSED:
            return replace(self, failures=failures)
        if self.state is _OPEN:
            return self
        opened = self.opened + 1
        return replace(self, state=state, failures=0, opened=opened, until=now + self.policy.period(opened))

    def given_up(self, now: float) -> "Breaker":
        """The probe was cancelled, so nothing was learnt: open again, and due for another at once."""
        if self.state is not _HALF:
            return self
        return replace(self, state=TRANSITIONS[self.state][BreakerEvent.GIVE_UP], until=now)
