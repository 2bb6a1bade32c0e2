"""Circuits: the circuit breakers of tasks and services at work: who may pass, how long the others wait.

A task has its breaker from its first failure on, or from its first report when it has health checks; until then it
costs nothing. Two small collections are all that the way of a job looks at: `shut` and `restless`, mostly empty.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import trio

from celery5.errors import CircuitOpen
from celery5.health.health_check import HealthCheck
from celery5.logs.log import Log
from celery5.protocol.health.breaker import Breaker, BreakerPolicy, BreakerState
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.names import get_class_names
from celery5.protocol.job.verdict import CircuitBlocked, Outcome, Raised, is_task_healthy
from celery5.tasks.task import Task

AFTER_PROBE_DELAY = 1.0
"""Seconds that held jobs come after the one which will be the probe: by then it may have ended, and the way be free."""

MIN_HOLD = 0.1
"""Seconds that a job is held at least while a probe is under way: less would let jobs turn in circles."""

PASSABLE = "degraded"
"""The one bad state in which a probe may run: a degraded service may still work."""

_KINDS = get_class_names(CircuitOpen("open"))
_SERVICE = "service:"
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
    """One breaker as it is now."""

    of: str
    # closed, open or half-open
    state: str
    # What its policy does while it is open: delay, fail or watch.
    mode: str
    # The effect on its jobs now, as a phrase; '' while it is closed.
    effect: str
    # Failures that count so far.
    failures: int
    # All trips in this worker's life.
    trips: int
    # Seconds until a probe may pass; 0 when one may.
    probe_in: float
    why: str = ""


class CircuitBreaker:
    """One breaker, the probe that is under way, and what is said of it in the log. `now` is Trio's clock."""

    def __init__(
        self, *, name: str, policy: BreakerPolicy, log: Log, checks: Sequence[HealthCheck] = ()
    ) -> None:
        self.name = name
        self.policy = policy
        self.checks: Mapping[str, HealthCheck] = {check.name: check for check in checks}
        self.breaker = Breaker(policy=policy)
        self.trips = 0
        self.why = ""
        self._log = log
        self._probe: object = None
        self._since = 0.0
        self._comes_first = True
        self._seen: dict[str, tuple[str, float]] = {}
        """The state in which each check was seen last, and when."""

    def try_pass(self, who: object) -> float | None:
        """None when `who` may go ahead, and whoever may must say how it went, with `done`; else the seconds after which
        it may try again."""
        now, breaker = trio.current_time(), self.breaker
        if breaker.state is BreakerState.CLOSED:
            return None
        if breaker.is_allowed(now) and (bad := self._bad_check(now)) is not None:
            # A probe would fail, and cost a job an attempt. The next check may be good.
            self.why, self._comes_first = f"health check {bad.name} is {self._seen[bad.name][0]}", True
            self.breaker = replace(breaker, open_until=now + min(self.policy.reset, bad.period))
        elif self.begin_probe(who):
            return None
        if self.policy.mode == "watch":
            return None
        return self._wait(now)

    def begin_probe(self, who: object) -> bool:
        """Let `who` be the probe, whatever the health checks say, if one is due; return whether it is."""
        now = trio.current_time()
        if self.breaker.state is not BreakerState.OPEN or not self.breaker.is_allowed(now):
            return False
        self.breaker = self.breaker.with_probe(now)
        self._probe, self._since = who, now
        self._log.event("breaker:half-opened", "info", breaker=self.name, mode=self.policy.mode)
        return True

    @property
    def is_closed(self) -> bool:
        """Whether all may pass."""
        return self.breaker.state is BreakerState.CLOSED

    def force_probe(self, who: object) -> None:
        """`who` goes ahead whatever the breaker says, for somebody wants it so; it is the probe."""
        if self.breaker.state is BreakerState.OPEN:
            now = trio.current_time()
            self.breaker = replace(self.breaker, open_until=now).with_probe(now)
        self._probe, self._since = who, trio.current_time()

    def _bad_check(self, now: float) -> HealthCheck | None:
        """Return a check whose last state is bad and not yet stale; None when a probe may go ahead.

        A check that only jobs report, and that has no period, never becomes stale: the probe may be the job that would
        report it well, so such a check stops no probe.
        """
        for name, (state, at) in self._seen.items():
            check = self.checks[name]
            is_fresh = math.isfinite(check.stale_after_seconds) and now - at <= check.stale_after_seconds
            if is_fresh and state not in (check.good_state, PASSABLE):
                return check
        return None

    def _wait(self, now: float) -> float:
        short = min(AFTER_PROBE_DELAY, self.policy.reset)
        if self.breaker.state is BreakerState.HALF_OPEN:
            # Nobody knows how long the probe takes: as long again as it has, so that waiting jobs do not turn in
            # circles.
            return max(min(max(now - self._since, short), self.policy.reset), MIN_HOLD)
        rest = max(self.breaker.open_until - now, 0.0)
        if self._comes_first:
            self._comes_first = False
            return rest
        return rest + short * (1 + random.random())

    def record_result(self, who: object, *, succeeded: bool | None, why: str = "") -> None:
        """`who` has passed and come back: `well` or not; None says that nothing was learnt. What began before the
        breaker opened, and ends late, says nothing."""
        before = self.breaker
        if before.state is BreakerState.HALF_OPEN and who is self._probe:
            self._probe = None
        elif before.state is not BreakerState.CLOSED:
            return
        now = trio.current_time()
        if succeeded is None:
            self._become(before.after_cancelled_probe(now), now, why)
        else:
            self._become(before.after_success() if succeeded else before.after_failure(now), now, why)

    def record_check(self, check: HealthCheck, state: str, why: str = "") -> None:
        """Record the state of one of this breaker's health checks, good or bad, also if it is unchanged."""
        now = trio.current_time()
        self._seen[check.name] = (state, now)
        allowed, within = self._allowance(check, state)
        if allowed is None:
            return
        what = state if self.policy.allowed and state in self.policy.allowed else f"{check.name}: {state}"
        after = self.breaker.after_report(what, now, allowed=allowed, within=within)
        self._become(after, now, f"health check {check.name} is {state}" + (f": {why}" if why else ""))

    def _allowance(self, check: HealthCheck, state: str) -> tuple[int | None, float]:
        own = self.policy.allowed or {}
        if state in own:
            return own[state], self.policy.within
        return check.allowed.get(state), check.window

    def _become(self, after: Breaker, now: float, why: str) -> None:
        before, self.breaker = self.breaker, after
        if after.trips != before.trips:
            self.trips += 1
            self.why, self._probe, self._comes_first = why, None, True
            self._log.event(
                "breaker:tripped",
                after.log_level(now),
                breaker=self.name,
                why=why,
                mode=self.policy.mode,
                effect=self._effect(),
                seconds=round(after.open_until - now, 3),
                trips=self.trips,
            )
        elif after.state is BreakerState.CLOSED and before.state is not BreakerState.CLOSED:
            self.why = ""
            self._log.event("breaker:closed", "info", breaker=self.name, mode=self.policy.mode)

    def get_reading(self) -> BreakerReading:
        """How it is now."""
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
        effects = _SERVICE_EFFECTS if self.name.startswith(_SERVICE) else _EFFECTS
        return effects.get(self.policy.mode, "")


@dataclass(frozen=True, slots=True)
class BreakerTrip:
    """The breaker of a task has opened, and its jobs are held."""

    task: str
    why: str
    # On Trio's clock.
    open_until: float


class CircuitBreakers:
    """All breakers of one worker, those of its services under `service:<name>`.

    `shut`: those of tasks that are not closed. `restless`: the tasks whose breakers a success would change.
    """

    def __init__(self, *, tasks: Mapping[str, Task[..., Any]], log: Log) -> None:
        self._tasks = tasks
        self._log = log
        self._of: dict[str, CircuitBreaker | None] = {}
        self._services: dict[str, CircuitBreaker] = {}
        self._trips: trio.MemorySendChannel[BreakerTrip] | None = None
        self._sent_trips: dict[str, int] = {}
        self.not_closed: dict[str, CircuitBreaker] = {}
        self.needing_success: set[str] = set()
        for name, task in tasks.items():
            if task.checks:
                self._of[name] = self._made(name)

    def open_trips_channel(self) -> trio.MemoryReceiveChannel[BreakerTrip]:
        """Return a channel on which each task is sent whose jobs are held from now on. There is one such channel."""
        # Unbounded: a task comes again only after its breaker was closed, or a probe has failed.
        self._trips, receive = trio.open_memory_channel[BreakerTrip](math.inf)
        return receive

    def add_service(
        self, name: str, policy: BreakerPolicy | None = None, checks: Sequence[HealthCheck] = ()
    ) -> CircuitBreaker | None:
        """The breaker of a service: on unless said otherwise. Whoever runs the service asks it before it starts
        it again."""
        policy = policy or BreakerPolicy()
        if policy.mode == "off":
            return None
        name = f"{_SERVICE}{name}"
        self._services[name] = CircuitBreaker(name=name, policy=policy, log=self._log, checks=checks)
        return self._services[name]

    def try_bar(self, delivery: Delivery, task: str) -> CircuitBlocked | None:
        """What becomes of a job of a task that is in `shut`; None when it may run."""
        circuit = self.not_closed[task]
        wait = circuit.try_pass(delivery)
        if wait is None:
            return None
        text = f"the circuit breaker of {task} is open: {circuit.why}"
        failure = Failure(type="CircuitOpen", message=text)
        if circuit.policy.mode != "delay":
            return CircuitBlocked(failure, _KINDS)
        command = delivery.command
        if command is not None and command.expires is not None:
            # Who waits for it hears of that in time.
            wait = min(wait, max(command.expires - time.time(), 0.0))
        return CircuitBlocked(failure, _KINDS, wait)

    def record_outcome(self, delivery: Delivery, task: str, outcome: Outcome) -> None:
        """A job has ended."""
        well = is_task_healthy(outcome)
        if well is False and task not in self._of:
            self._of[task] = self._made(task)
        circuit = self._of.get(task)
        if circuit is None or type(outcome) is CircuitBlocked:
            return
        why = f"{outcome.failure.type}: {outcome.failure.message}" if type(outcome) is Raised else ""
        circuit.record_result(delivery, succeeded=well, why=why)
        self._look(task, circuit)

    def record_check(self, check: HealthCheck, state: str, why: str = "") -> None:
        """A health check is in that state, seen again: it counts for all breakers that it is associated with."""
        for name, circuit in self._of.items():
            if circuit is not None and check.name in circuit.checks:
                circuit.record_check(check, state, why)
                self._look(name, circuit)
        for circuit in self._services.values():
            if check.name in circuit.checks:
                circuit.record_check(check, state, why)

    def get_readings(self) -> dict[str, BreakerReading]:
        """How the breakers are now, those of tasks by the task's name, those of services by theirs."""
        made = {name: circuit for name, circuit in self._of.items() if circuit is not None}
        return {name: circuit.get_reading() for name, circuit in (made | self._services).items()}

    def _made(self, task: str) -> CircuitBreaker | None:
        declared = self._tasks[task]
        policy = declared.breaker
        if policy.mode == "off":
            return None
        return CircuitBreaker(name=task, policy=policy, log=self._log, checks=declared.checks)

    def _look(self, task: str, circuit: CircuitBreaker) -> None:
        """Keep the two collections true."""
        if circuit.breaker.state is BreakerState.CLOSED:
            self.not_closed.pop(task, None)
        else:
            self.not_closed[task] = circuit
        if self._trips is not None and circuit.trips > self._sent_trips.get(task, 0):
            self._sent_trips[task] = circuit.trips
            if circuit.policy.mode == "delay":
                self._trips.send_nowait(BreakerTrip(task, circuit.why, circuit.breaker.open_until))
        if circuit.breaker.needs_success:
            self.needing_success.add(task)
        else:
            self.needing_success.discard(task)
