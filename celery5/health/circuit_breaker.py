"""Run one circuit breaker: with its current probe, the health checks that trip it, and its log events."""

import math
import random
from collections.abc import Mapping, Sequence

import msgspec
import trio

from celery5.health.health_check import HealthCheck
from celery5.logs.log import Level, Log
from celery5.protocol.health.breaker import SERVICE_PREFIX, Breaker, BreakerPolicy, BreakerState

AFTER_PROBE_DELAY = 1.0
"""Seconds between the job that will be the probe and the other held jobs, so that the probe may have ended before."""
MIN_HOLD = 0.1
"""The least seconds that a job is held while a probe runs. With less, jobs would be read again all the time."""
PROBE_ALLOWED_STATE = "degraded"
"""The one bad state in which a probe may run: a degraded service may still work."""

_EFFECTS: Mapping[str, str] = {
    "watch": "none: it only watches, its jobs run on",
    "delay": "its jobs wait in Redis",
    "fail": "its jobs fail at once",
}
_SERVICE_EFFECTS: Mapping[str, str] = {
    "watch": "none: it only watches, the service is started as ever",
    "delay": "the service is not started",
}


class BreakerReading(msgspec.Struct, frozen=True):
    """The state of one breaker at one time."""

    of: str  # a task, or `service:` and the name of a service
    state: str  # closed, open or half-open
    mode: str  # what its policy does while it is open: delay, fail or watch
    effect: str  # the effect on its jobs now, as a phrase; '' while it is closed
    failures: int  # the failures that are counted now
    trips: int  # how often it has opened in this process
    probe_in: float  # seconds until a probe may run; 0 when one may
    why: str = ""


class CircuitBreaker:
    """One breaker, with its current probe and its log events. Times are of Trio's clock.

    Args:
        name: What it protects, for people.
        policy: When it opens, and for how long.
        log: Where its changes are logged.
        checks: The health checks that open it.
        effect: What it does while it is open, as a phrase; by default what that is for jobs or a service.
        logs_probes: Whether probes and their failures are logged at their usual levels. If not, they are at debug,
            except the first failure that is an error. For a breaker with a probe each second.
    """

    def __init__(
        self,
        *,
        name: str,
        policy: BreakerPolicy,
        log: Log,
        checks: Sequence[HealthCheck] = (),
        effect: str = "",
        logs_probes: bool = True,
    ) -> None:
        self.name = name
        self.policy = policy
        self.checks: Mapping[str, HealthCheck] = {check.name: check for check in checks}
        self.breaker: Breaker = Breaker(policy=policy)
        self.trips: int = 0
        self.why: str = ""
        self._log = log
        self._custom_effect = effect
        self._logs_probes = logs_probes
        self._trip_level: Level = "debug"
        self._probe: object = None
        self._probe_began = 0.0
        self._is_next_probe = True
        self._check_states: dict[str, tuple[str, float]] = {}
        """The last state of each check, and its time."""

    def try_pass(self, caller: object) -> float | None:
        """Return None when `caller` may start, else the seconds after which it may try again.

        A caller that starts must report the outcome with `record_result`.
        """
        now, breaker = trio.current_time(), self.breaker
        if breaker.state is BreakerState.CLOSED:
            return None
        if breaker.is_allowed(now) and (bad := self._bad_check(now)) is not None:
            # A probe would fail, and use up an attempt of a job. The next check may be good.
            state, _ = self._check_states[bad.name]
            self.why, self._is_next_probe = f"health check {bad.name} is {state}", True
            self.breaker = msgspec.structs.replace(
                breaker, open_until=now + min(self.policy.reset, bad.period)
            )
        elif self.begin_probe(caller):
            return None
        if self.policy.mode == "watch":
            return None
        return self._get_wait(now)

    def begin_probe(self, caller: object) -> bool:
        """Make `caller` the probe if one is due, whatever the health checks report; return whether it is the probe."""
        now = trio.current_time()
        if self.breaker.state is not BreakerState.OPEN or not self.breaker.is_allowed(now):
            return False
        self.breaker = self.breaker.with_probe(now)
        self._probe, self._probe_began = caller, now
        level: Level = self._quiet_level if self._logs_probes else "debug"
        self._log.event("breaker:half-opened", level, breaker=self.name, mode=self.policy.mode)
        return True

    @property
    def is_closed(self) -> bool:
        """Return whether everything may start."""
        return self.breaker.state is BreakerState.CLOSED

    def force_probe(self, caller: object) -> None:
        """Make `caller` the probe although none is due: a user has requested it."""
        if self.breaker.state is BreakerState.OPEN:
            now = trio.current_time()
            self.breaker = msgspec.structs.replace(self.breaker, open_until=now).with_probe(now)
        self._probe, self._probe_began = caller, trio.current_time()

    def _bad_check(self, now: float) -> HealthCheck | None:
        """Return a check whose last state is bad and not yet stale; None when a probe may go ahead.

        A check without a period, which only jobs report, never becomes stale. It prevents no probe, since the probe may
        be the job that would report a good state.
        """
        for name, (state, at) in self._check_states.items():
            check = self.checks[name]
            is_fresh = math.isfinite(check.stale_after_seconds) and now - at <= check.stale_after_seconds
            if is_fresh and state not in (check.good_state, PROBE_ALLOWED_STATE):
                return check
        return None

    def _get_wait(self, now: float) -> float:
        short = min(AFTER_PROBE_DELAY, self.policy.reset)
        if self.breaker.state is BreakerState.HALF_OPEN:
            # How long the probe takes is unknown: wait as long again as it has run already, so that jobs are not read
            # and held again all the time.
            return max(min(max(now - self._probe_began, short), self.policy.reset), MIN_HOLD)
        remaining = max(self.breaker.open_until - now, 0.0)
        if self._is_next_probe:
            self._is_next_probe = False
            return remaining
        return remaining + short * (1 + random.random())

    def record_result(self, caller: object, *, succeeded: bool | None, why: str = "") -> None:
        """Record how `caller` ended; `succeeded` is None when that is unknown.

        A result counts only if the breaker is closed or the caller is the probe: others began before it opened.
        """
        before = self.breaker
        if before.state is BreakerState.HALF_OPEN and caller is self._probe:
            self._probe = None
        elif before.state is not BreakerState.CLOSED:
            return
        now = trio.current_time()
        if succeeded is None:
            self._set_breaker(before.after_cancelled_probe(now), now, why)
        else:
            self._set_breaker(before.after_success() if succeeded else before.after_failure(now), now, why)

    def record_check(self, check: HealthCheck, state: str, why: str = "") -> None:
        """Record the state of one of this breaker's health checks, good or bad, also if it is unchanged."""
        now = trio.current_time()
        self._check_states[check.name] = (state, now)
        allowed, within = self._get_allowance(check, state)
        if allowed is None:
            return
        reported = state if self.policy.allowed and state in self.policy.allowed else f"{check.name}: {state}"
        after = self.breaker.after_report(reported, now, allowed=allowed, within=within)
        self._set_breaker(after, now, f"health check {check.name} is {state}" + (f": {why}" if why else ""))

    def _get_allowance(self, check: HealthCheck, state: str) -> tuple[int | None, float]:
        """Return how often the check may be in that state before the breaker opens, and in how many seconds."""
        allowed = self.policy.allowed or {}
        if state in allowed:
            return allowed[state], self.policy.within
        return check.allowed.get(state), check.window

    def _set_breaker(self, after: Breaker, now: float, why: str) -> None:
        before, self.breaker = self.breaker, after
        if after.trips != before.trips:
            self.trips += 1
            self.why, self._probe, self._is_next_probe = why, None, True
            self._log.event(
                "breaker:tripped",
                self._get_trip_level(before, after, now),
                breaker=self.name,
                why=why,
                mode=self.policy.mode,
                effect=self._effect(),
                seconds=round(after.open_until - now, 3),
                trips=self.trips,
            )
        elif after.state is BreakerState.CLOSED and before.state is not BreakerState.CLOSED:
            self.why = ""
            self._log.event("breaker:closed", self._quiet_level, breaker=self.name, mode=self.policy.mode)

    def _get_trip_level(self, before: Breaker, after: Breaker, now: float) -> Level:
        """Return the level of a trip: debug for one that says no more than the trip before it."""
        level, last = after.log_level(now), self._trip_level
        self._trip_level = level
        is_repeat = before.state is not BreakerState.CLOSED and level == last
        return "debug" if is_repeat and not self._logs_probes else level

    @property
    def _quiet_level(self) -> Level:
        """The level of a change that needs nobody; of one that changes nothing either, when this only watches."""
        return "debug" if self.policy.mode == "watch" else "info"

    def get_reading(self) -> BreakerReading:
        """Return its current state."""
        breaker = self.breaker
        wait = (
            max(0.0, breaker.open_until - trio.current_time()) if breaker.state is BreakerState.OPEN else 0.0
        )
        return BreakerReading(
            of=self.name,
            state=breaker.state.value,
            mode=self.policy.mode,
            effect="" if self.is_closed else self._effect(),
            failures=breaker.failures,
            trips=self.trips,
            probe_in=round(wait, 3),
            why=self.why,
        )

    def _effect(self) -> str:
        """Return what a breaker that is not closed does, as a phrase."""
        if self._custom_effect:
            return self._custom_effect
        effects = _SERVICE_EFFECTS if self.name.startswith(SERVICE_PREFIX) else _EFFECTS
        return effects.get(self.policy.mode, "")
