"""Health: runs the health checks of a worker, and knows their states.

Each check has a timer here, and may be told by the command `check-expired` that its time has come: as long as that
comes, the timer only watches over it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import trio

from celery5.broker.calls import health
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, CeleryError, CommandRefused
from celery5.health.checks import EventLoopLag
from celery5.health.event_loop import LoopBlock, LoopBlocks
from celery5.health.health_check import CheckContext, CheckFunction, HealthCheck
from celery5.logs.log import Level, Log
from celery5.protocol.health.readings import UNKNOWN_STATE, CheckReading, get_worst_state, parse_states
from celery5.services.health.circuits import CircuitBreakers

RETRY_DELAY = 5.0
"""Seconds between attempts to tell others of a global check while AsyncDriver is away."""
BUSY = 0.5
"""The share of a period after which a check may be told again that its period has lapsed."""
NO_REASON = "no reason was given by its function or report"
"""The `why` of a bad state for which none was given."""
MAX_REMEMBERED_FAULTS = 20
"""Different faults of one function that are known at most: a text with a time in it is new at each look."""


class HealthMonitor:
    """The health checks of one worker: what it is built with, and those of its application."""

    def __init__(
        self,
        *,
        checks: Mapping[str, HealthCheck],
        circuit_breakers: CircuitBreakers,
        redis: AsyncDriver,
        keys: Keys,
        health_store: str,
        loop_blocks: LoopBlocks,
        log: Log,
    ) -> None:
        self._circuits = circuit_breakers
        self._redis = redis
        self._keys = keys
        self._context = CheckContext(keys, redis)
        self._log = log
        self._loop_blocks = loop_blocks
        kept = health_store != "none"
        self._off = [check.name for check in checks.values() if check.scope == "global" and not kept]
        self._checks = {name: check for name, check in checks.items() if name not in self._off}
        self._readings: dict[str, CheckReading] = {}
        self._seen: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._news: dict[str, trio.Event] = {name: trio.Event() for name in self._checks}
        self._looking: set[str] = set()
        self._faults: dict[tuple[str, int], set[str]] = {}
        self._to_tell: dict[str, CheckReading] = {}
        self._telling = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    # ---- what others ask

    def get_readings(self) -> dict[str, CheckReading]:
        """What is known of each check now, by its name."""
        return {name: self.get_reading(name) for name in self._checks}

    def get_reading(self, name: str) -> CheckReading:
        """What is known of one check now. Raises CommandRefused when there is none of that name."""
        check = self._check(name)
        reading = self._readings.get(name)
        if reading is None:
            return CheckReading(name, UNKNOWN_STATE, is_good=False, scope=check.scope)
        stale = trio.current_time() - self._seen[name] > check.stale_after_seconds
        return CheckReading(name, reading.state, reading.is_good, reading.at, stale, reading.why, check.scope)

    # ---- what it is told

    async def check_expired(self, parameters: Mapping[str, Any]) -> object:
        """The command `check-expired`: the period of a `check`, or of several `checks`, has lapsed. Gives its new
        reading; of several, those that are known here, each with its state."""
        several = parameters.get("checks")
        if several is None:
            return await self._expired(self._check(str(parameters.get("check", ""))))
        if not isinstance(several, list):
            raise CommandRefused(f"checks is {several!r}: give a list of names")
        known = [check for name, check in self._checks.items() if name in cast("list[object]", several)]
        async with trio.open_nursery() as nursery:
            for check in known:
                nursery.start_soon(self._expired, check)
        return {check.name: self.get_reading(check.name).state for check in known}

    async def _expired(self, check: HealthCheck) -> CheckReading:
        seen = self._seen.get(check.name, -math.inf)
        if trio.current_time() - seen >= BUSY * check.period:
            await self.run_check(check)
        # Whoever tells us goes on to do so: the timer is for when nobody does.
        self._expect(check, trio.current_time() + 1.5 * check.period)
        return self.get_reading(check.name)

    async def report_health(self, _parameters: Mapping[str, Any]) -> object:
        """The command `health`: all checks and breakers."""
        return {
            "checks": list(self.get_readings().values()),
            "breakers": list(self._circuits.get_readings().values()),
        }

    def record_report(self, check: HealthCheck, state: str, why: str, /) -> None:
        """A task or a service reports, from whatever thread."""
        token = self._token
        if token is None:
            return
        if _is_ours(token):
            self._heard(check, state, why)
            return
        try:
            token.run_sync_soon(self._heard, check, state, why)
        except trio.RunFinishedError:
            return  # the worker is gone

    # ---- its life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look at each check when its period has lapsed, until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        if self._off:
            why = "the setting health_store is 'none', and what all workers share must be kept somewhere"
            self._log.event("health:disabled", "warning", checks=self._off, why=why)
        for check in self._checks.values():
            check.attach(self.record_report)
        self._loop_blocks.add_listener(self._loop_was_blocked)
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell_others)
                for check in self._checks.values():
                    if check.is_polled or check.scope == "global":
                        nursery.start_soon(self._keep_looking, check)
        finally:
            self._loop_blocks.remove_listener(self._loop_was_blocked)
            for check in self._checks.values():
                check.detach(self.record_report)

    def _loop_was_blocked(self, block: LoopBlock) -> None:
        """Notify the checks of the loop at once: their own next check may be seconds away."""
        for check in self._checks.values():
            if isinstance(check, EventLoopLag):
                state = check.get_state_after(block)
                if state != check.good_state:
                    self._heard(check, state, block.why)

    async def run_check(self, check: HealthCheck) -> None:
        """One look at one check, unless somebody looks already; of a global one by one worker for all."""
        if check.name in self._looking:
            return
        self._looking.add(check.name)
        try:
            if check.scope == "local":
                await self._look(check)
            else:
                await self._look_for_all(check)
        finally:
            self._looking.discard(check.name)

    async def _look_for_all(self, check: HealthCheck) -> None:
        try:
            turn = check.is_polled and await self._redis.perform(
                health.claim_turn(self._keys, check.name, check.period)
            )
            if not turn:
                self._learn(check, await self._redis.perform(health.read_state(self._keys, check.name)))
        except BrokerError as error:
            # What others have seen cannot be known now; what we see ourselves can.
            turn = check.is_polled
            self._log.event("health:share-failed", "debug", check=check.name, why=str(error))
        if turn:
            await self._look(check)

    async def _keep_looking(self, check: HealthCheck) -> None:
        while True:
            with trio.move_on_at(self._due.get(check.name, 0.0)):
                while True:  # another time was set: wait for that
                    await self._news[check.name].wait()
                    self._news[check.name] = trio.Event()
                    if self._due[check.name] <= trio.current_time():
                        break
            if self._due.get(check.name, 0.0) > trio.current_time():
                continue
            self._due[check.name] = trio.current_time() + check.period
            await self.run_check(check)

    def _expect(self, check: HealthCheck, when: float) -> None:
        self._due[check.name] = when
        self._news[check.name].set()

    async def _look(self, check: HealthCheck) -> None:
        """Have each function of the check look; the worst state counts. One that fails is told of, once until it looks
        again, and ignored."""
        found: list[str] = []
        functions: Sequence[CheckFunction | None] = check.functions or [None]
        for place, function in enumerate(functions):
            why = f"took longer than its {check.timeout:g} s"
            try:
                with trio.move_on_after(check.timeout):
                    found += parse_states(await check.run_check(function, self._context), check.states)
                    self._faults.pop((check.name, place), None)
                    continue
            except (Exception, SystemExit) as error:  # the user's code
                why = f"{type(error).__name__}: {error}"
            self._failed(check, place, why)
        state = get_worst_state(found, check.states)
        if state is not None:
            self._heard(check, state, "" if state == check.good_state else check.why)

    def _failed(self, check: HealthCheck, place: int, why: str) -> None:
        """Tell what is wrong with a function of a check, unless that was told since it looked last."""
        known = self._faults.setdefault((check.name, place), set())
        if why in known:
            return
        if len(known) >= MAX_REMEMBERED_FAULTS:
            known.clear()
        known.add(why)
        self._log.event("health:check-failed", "error", check=check.name, why=why)

    # ---- what becomes of a state

    def _heard(self, check: HealthCheck, state: str, why: str) -> None:
        is_good = state == check.good_state
        why = why or ("" if is_good else NO_REASON)
        reading = CheckReading(check.name, state, is_good, round(time.time(), 3), False, why, check.scope)
        self._seen_as(check, reading)
        if check.scope == "global":
            self._to_tell[check.name] = reading
            self._telling.set()

    def _learn(self, check: HealthCheck, found: CheckReading | None) -> None:
        """What another worker has seen, unless we know it, or know better. Clocks of machines differ: which of two
        times is later says nothing."""
        known = self._readings.get(check.name)
        if found is None or found.state not in check.states or check.name in self._to_tell:
            return
        if known is None or (found.at, found.state) != (known.at, known.state):
            self._seen_as(check, found)

    def _seen_as(self, check: HealthCheck, reading: CheckReading) -> None:
        before = self._readings.get(check.name)
        self._readings[check.name] = reading
        self._seen[check.name] = trio.current_time()
        check.state = reading.state
        was = UNKNOWN_STATE if before is None else before.state
        if was != reading.state and not (before is None and reading.is_good):
            level: Level = "info" if reading.is_good else "warning"
            self._log.event(
                "health:changed", level, check=check.name, state=reading.state, before=was, why=reading.why
            )
        # A breaker names the check and its state, which is reason enough.
        self._circuits.record_check(check, reading.state, "" if reading.why == NO_REASON else reading.why)

    async def _tell_others(self) -> None:
        """Keep the states of global checks where all workers find them: of each check the newest."""
        while True:
            await self._telling.wait()
            self._telling = trio.Event()
            failed = [name for name in list(self._to_tell) if not await self._tell(name)]
            if failed:
                await trio.sleep(RETRY_DELAY)
                self._telling.set()

    async def _tell(self, name: str) -> bool:
        reading = self._to_tell[name]
        try:
            await self._redis.perform(
                health.write_state(self._keys, reading, ttl=self._checks[name].stale_after_seconds)
            )
        except CeleryError as error:
            self._log.event("health:share-failed", "warning", check=name, why=str(error))
            return False
        if self._to_tell[name] is reading:  # nothing newer was said meanwhile
            del self._to_tell[name]
        return True

    def _check(self, name: str) -> HealthCheck:
        try:
            return self._checks[name]
        except KeyError:
            known = ", ".join(sorted(self._checks)) or "none"
            raise CommandRefused(f"no health check {name!r} on this worker; known: {known}") from None


def _is_ours(token: trio.lowlevel.TrioToken) -> bool:
    """Whether this code runs in the worker's own loop."""
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        return False
