"""Run the health checks of a worker, keep their states, and notify workers when the periods of checks are over.

Of several Schedulers one claims each period of a check and sends the command `check-expired` to workers. Each worker
also has a timer for each check, which every such command postpones. So the timer runs a check only when no Scheduler is
alive or the inbox is off; and a local check without functions always, which no command announces.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.broker.calls import health
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, CeleryError, CommandRefused
from celery5.health.checks import EventLoopLag
from celery5.health.event_loop import LoopBlocks
from celery5.health.health_check import CheckContext, CheckFunction, HealthCheck
from celery5.logs.log import Level, Log
from celery5.protocol.commands.definitions import (
    CHECK_EXPIRED,
    CheckExpiredParameters,
    NoParameters,
    get_inbox_name,
)
from celery5.protocol.health.readings import UNKNOWN_STATE, CheckReading, get_worst_state, parse_states
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_masked_text
from celery5.results.job_details import read_app_state
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.user_errors import call_user_code, reraise_cancellation
from celery5.services.commands.inbox import InboxAddress
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.broker_outages import OutageLog

RETRY_DELAY = 5.0
"""Seconds between attempts to store the state of a shared check while Redis is unreachable."""
MIN_PERIOD_SHARE = 0.5
"""The share of its period that must be over before `check-expired` runs a check again."""
NO_REASON = "no reason was given by its function or report"
"""The `why` of a bad state for which none was given."""
MAX_REMEMBERED_ERRORS = 20
"""The most different errors of one function that are remembered: a text with a time in it is always new."""


class HealthMonitor:
    """The health checks of one worker: its own and those of its application."""

    def __init__(
        self,
        *,
        checks: Mapping[str, HealthCheck],
        circuit_breakers: CircuitBreakers,
        redis: AsyncDriver,
        keys: Keys,
        health_store: str,
        worker_group: str,
        app: App,
        asyncio_runner: AsyncioRunner,
        loop_blocks: LoopBlocks,
        log: Log,
    ) -> None:
        self._circuits = circuit_breakers
        self._redis = redis
        self._keys = keys
        self._context = CheckContext(keys, redis, app.loop, asyncio_runner.call)
        self._log = log
        self._loop_blocks = loop_blocks
        has_store = health_store != "none"
        self._group = worker_group
        self._off = [check.name for check in checks.values() if check.scope != "local" and not has_store]
        self._checks = {name: check for name, check in checks.items() if name not in self._off}
        self._readings: dict[str, CheckReading] = {}
        self._seen_at: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._due_changed: dict[str, trio.Event] = {name: trio.Event() for name in self._checks}
        self._bad: dict[str, trio.Event] = {name: trio.Event() for name in self._checks}
        self._running: set[str] = set()
        self._logged_errors: dict[tuple[str, int], set[str]] = {}
        self._unstored: dict[str, CheckReading] = {}
        self._has_unstored = trio.Event()
        self._not_shared: set[str] = set()
        self._token: trio.lowlevel.TrioToken | None = None

    # ---- readings

    def get_readings(self) -> dict[str, CheckReading]:
        """Return the current reading of each check, by name."""
        return {name: self.get_reading(name) for name in self._checks}

    def get_reading(self, name: str) -> CheckReading:
        """Return the current reading of one check. Raises CommandRefused when there is none of that name."""
        check = self._get_check(name)
        reading = self._readings.get(name)
        if reading is None:
            return CheckReading(
                name, UNKNOWN_STATE, is_good=False, scope=check.scope, group=self._get_group(check)
            )
        stale = trio.current_time() - self._seen_at[name] > check.stale_after_seconds
        return replace(reading, is_stale=stale, scope=check.scope, group=self._get_group(check))

    # ---- commands and reports

    async def check_expired(self, parameters: CheckExpiredParameters) -> object:
        """Run the command `check-expired`: the period of a `check`, or of several `checks`, is over.

        Return the new reading of the one; of several, the state of each that this worker has.
        """
        if parameters.checks is None:
            return await self._run_expired(self._get_check(parameters.check or ""))
        checks = [check for name, check in self._checks.items() if name in parameters.checks]
        async with trio.open_nursery() as nursery:
            for check in checks:
                nursery.start_soon(self._run_expired, check)
        return {check.name: self.get_reading(check.name).state for check in checks}

    async def _run_expired(self, check: HealthCheck) -> CheckReading:
        seen_at = self._seen_at.get(check.name, -math.inf)
        if trio.current_time() - seen_at >= MIN_PERIOD_SHARE * check.period:
            await self.run_check(check)
        # The Scheduler sends the command again: the timer is for when it does not.
        self._postpone(check, trio.current_time() + 1.5 * check.period)
        return self.get_reading(check.name)

    async def report_health(self, _parameters: NoParameters) -> object:
        """Run the command `health`: return the readings of all checks and breakers."""
        return {
            "checks": list(self.get_readings().values()),
            "breakers": list(self._circuits.get_readings().values()),
        }

    def record_report(self, check: HealthCheck, state: str, why: str, /) -> None:
        """Record a state that a task or a service reports, from any thread."""
        token = self._token
        if token is None:
            return
        if _is_current_loop(token):
            self._record(check, state, why)
            return
        try:
            token.run_sync_soon(self._record, check, state, why)
        except trio.RunFinishedError:
            return  # the worker has ended

    # ---- running checks

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run each check at the end of its period, until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        if self._off:
            why = "the setting health_store is 'none', so that workers cannot share the states of checks"
            self._log.event("health:disabled", "warning", checks=self._off, why=why)
        for check in self._checks.values():
            check.attach(self.record_report)
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._store_states)
                nursery.start_soon(self._follow_loop_blocks)
                for check in self._checks.values():
                    if check.is_polled or check.scope != "local":
                        nursery.start_soon(self._keep_checking, check)
                    if check.recheck_period is not None and check.scope == "local":
                        nursery.start_soon(self._recheck_while_bad, check, check.recheck_period)
        finally:
            for check in self._checks.values():
                check.detach(self.record_report)

    async def _follow_loop_blocks(self) -> None:
        """Record each block in the checks of the event loop at once: their next run may be seconds away."""
        while True:
            block = await self._loop_blocks.wait_block()
            for check in self._checks.values():
                if isinstance(check, EventLoopLag):
                    state = check.get_state_after(block)
                    if state != check.good_state:
                        self._record(check, state, block.why)

    async def _recheck_while_bad(self, check: HealthCheck, period: float) -> None:
        """Run a check more often while it is in a bad state, so that its recovery is seen soon.

        That it still is in the same state is not recorded: circuit breakers count the runs of its own period.
        """
        while True:
            await self._bad[check.name].wait()
            # Many workers whose Redis is back do not ask it together.
            await trio.sleep(period * random.uniform(0.5, 1.0))
            reading = self._readings[check.name]
            if reading.is_good:
                self._bad[check.name] = trio.Event()
            elif check.name not in self._running:
                self._running.add(check.name)
                try:
                    await self._run_functions(check, known_state=reading.state)
                finally:
                    self._running.discard(check.name)

    async def run_check(self, check: HealthCheck) -> None:
        """Run a check, unless it runs already. A shared one is run by one worker for all that share it."""
        if check.name in self._running:
            return
        self._running.add(check.name)
        try:
            if check.scope == "local":
                await self._run_functions(check)
            else:
                await self._run_shared(check)
        finally:
            self._running.discard(check.name)

    async def _run_shared(self, check: HealthCheck) -> None:
        try:
            has_turn = check.is_polled and await self._redis.perform(
                health.claim_turn(self._keys, check.name, check.period, group=self._get_group(check))
            )
            if not has_turn:
                stored = await self._redis.perform(
                    health.read_state(self._keys, check.name, group=self._get_group(check))
                )
                self._record_stored(check, stored)
        except BrokerError as error:
            # The state that other workers found is not available: this worker runs the check itself.
            has_turn = check.is_polled
            self._log.event("health:share-failed", "debug", check=check.name, why=str(error))
        if has_turn:
            await self._run_functions(check)

    async def _keep_checking(self, check: HealthCheck) -> None:
        while True:
            with trio.move_on_at(self._due.get(check.name, 0.0)):
                while True:  # another time was set: wait for that
                    await self._due_changed[check.name].wait()
                    self._due_changed[check.name] = trio.Event()
                    if self._due[check.name] <= trio.current_time():
                        break
            if self._due.get(check.name, 0.0) > trio.current_time():
                continue
            self._due[check.name] = trio.current_time() + check.period
            await self.run_check(check)

    def _postpone(self, check: HealthCheck, until: float) -> None:
        self._due[check.name] = until
        self._due_changed[check.name].set()

    async def _run_functions(self, check: HealthCheck, *, known_state: str = "") -> None:
        """Run all functions of the check; the worst state counts. One that fails is ignored, and logged once.

        The state is recorded unless it is `known_state`.
        """
        states: list[str] = []
        functions: Sequence[CheckFunction | None] = check.functions or [None]
        for index, function in enumerate(functions):
            why = f"took longer than its {check.timeout:g} s"
            try:
                with trio.move_on_after(check.timeout):
                    states += parse_states(
                        await call_user_code(check.run_check, function, self._context), check.states
                    )
                    self._logged_errors.pop((check.name, index), None)
                    continue
            except BaseException as error:  # the user's code
                reraise_cancellation(error)
                why = describe_error(error, MAX_ERROR_LENGTH)
            self._log_failure(check, index, why)
        state = get_worst_state(states, check.states)
        if state is not None and state != known_state:
            self._record(check, state, "" if state == check.good_state else check.why)

    def _log_failure(self, check: HealthCheck, index: int, why: str) -> None:
        """Log the error of a function of a check, once until it has worked again."""
        logged = self._logged_errors.setdefault((check.name, index), set())
        if why in logged:
            return
        if len(logged) >= MAX_REMEMBERED_ERRORS:
            logged.clear()
        logged.add(why)
        self._log.event("health:check-failed", "error", check=check.name, why=why)

    # ---- recording states

    def _record(self, check: HealthCheck, state: str, why: str) -> None:
        is_good = state == check.good_state
        # It is shared through Redis, and it comes from a report or a class of the user's.
        why = get_masked_text(why, MAX_ERROR_LENGTH) or ("" if is_good else NO_REASON)
        reading = CheckReading(
            check.name, state, is_good, round(time.time(), 3), False, why, check.scope, self._get_group(check)
        )
        self._set_reading(check, reading)
        if check.scope != "local":
            self._unstored[check.name] = reading
            self._has_unstored.set()

    def _record_stored(self, check: HealthCheck, stored: CheckReading | None) -> None:
        """Record the reading of another worker, unless it is recorded already or this worker has one to store.

        The clocks of machines differ, so the later of two times is not always the newer.
        """
        current = self._readings.get(check.name)
        if stored is None or stored.state not in check.states or check.name in self._unstored:
            return
        if current is None or (stored.at, stored.state) != (current.at, current.state):
            self._set_reading(check, stored)

    def _set_reading(self, check: HealthCheck, reading: CheckReading) -> None:
        before = self._readings.get(check.name)
        self._readings[check.name] = reading
        self._seen_at[check.name] = trio.current_time()
        if not reading.is_good:
            self._bad[check.name].set()
        check.record_state(reading.state)
        state_before = UNKNOWN_STATE if before is None else before.state
        if state_before != reading.state and not (before is None and reading.is_good):
            level: Level = "info" if reading.is_good else "warning"
            self._log.event(
                "health:changed",
                level,
                check=check.name,
                state=reading.state,
                before=state_before,
                why=reading.why,
            )
        # A breaker reports the check and its state, which is enough of a reason.
        self._circuits.record_check(check, reading.state, "" if reading.why == NO_REASON else reading.why)

    async def _store_states(self) -> None:
        """Store the newest state of each shared check in Redis."""
        while True:
            await self._has_unstored.wait()
            self._has_unstored = trio.Event()
            failed = [name for name in list(self._unstored) if not await self._try_to_store(name)]
            if failed:
                await trio.sleep(RETRY_DELAY)
                self._has_unstored.set()

    async def _try_to_store(self, name: str) -> bool:
        reading = self._unstored[name]
        try:
            await self._redis.perform(
                health.write_state(self._keys, reading, ttl=self._checks[name].stale_after_seconds)
            )
        except CeleryError as error:
            is_repeated = name in self._not_shared
            self._log.event(
                "health:share-failed", "debug" if is_repeated else "warning", check=name, why=str(error)
            )
            self._not_shared.add(name)
            return False
        self._not_shared.discard(name)
        if self._unstored[name] is reading:  # no newer one was recorded
            del self._unstored[name]
        return True

    def _get_group(self, check: HealthCheck) -> str:
        """Return the group whose workers share a check; '' for all of them, or for none."""
        return self._group if check.scope == "group" else ""

    def _get_check(self, name: str) -> HealthCheck:
        try:
            return self._checks[name]
        except KeyError:
            known = ", ".join(sorted(self._checks)) or "none"
            raise CommandRefused(f"no health check {name!r} on this worker; known: {known}") from None


def _is_current_loop(token: trio.lowlevel.TrioToken) -> bool:
    """Return whether this code runs in the event loop of `token`."""
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        return False


EARLY_SHARE = 0.05
"""The share of its period by which a check may be announced early, together with others."""


def _is_announced(check: HealthCheck) -> bool:
    """Return whether a Scheduler announces the periods of a check.

    It leaves out local ones without functions, such as a worker's own: their timers run them as often, without a
    command to each worker.
    """
    return bool(check.functions) or (check.is_polled and check.scope != "local")


class CheckCommandSender(Protocol):
    """Sends signed commands."""

    async def send(
        self, inbox: str, command: str, parameters: Mapping[str, Any], /, *, expires: float
    ) -> bool: ...


class CheckExpirations:
    """Notifies workers when the periods of an application's checks are over. Without an inbox it does nothing."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        app: App,
        keys: Keys,
        command_sender: CheckCommandSender,
        address: InboxAddress,
        checks: Mapping[str, HealthCheck],
        log: Log,
    ) -> None:
        self._redis = redis
        self._app = app
        self._keys = keys
        self._command_sender = command_sender
        self._is_open = address.is_open
        self._checks = {check.name: check for check in checks.values() if _is_announced(check)}
        self._outages = OutageLog(log, "expirations:interrupted", level="debug", logs_repeats=True)
        self._due: dict[str, float] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Notify workers of each check at the end of its period, until cancelled."""
        task_status.started()
        if not (self._is_open and self._checks):
            await trio.sleep_forever()
        began = trio.current_time()
        self._due = {name: began + check.period for name, check in self._checks.items()}
        while True:
            await trio.sleep_until(min(self._due.values()))
            with self._outages.suppressing():
                await self.send_expired(self._take_due())

    async def send_expired(self, names: Sequence[str]) -> None:
        """Notify every live worker of these checks, except those that another Scheduler has claimed."""
        claims = [health.claim_notice(self._keys, name, self._checks[name].period) for name in names]
        turns = await self._redis.perform_all(claims)
        claimed = [name for name, has_turn in zip(names, turns, strict=True) if has_turn]
        if not claimed:
            return
        state = await read_app_state(self._app, self._redis, None)
        expires = min(self._checks[name].period for name in claimed)
        for inbox in sorted({get_inbox_name(worker) for worker in state.workers}):
            await self._command_sender.send(inbox, CHECK_EXPIRED.name, {"checks": claimed}, expires=expires)

    def _take_due(self) -> list[str]:
        """Return the checks whose period is over, or nearly. One that missed several periods is returned once."""
        now, due = trio.current_time(), list[str]()
        for name, check in self._checks.items():
            if self._due[name] <= now + EARLY_SHARE * check.period:
                due.append(name)
                self._due[name] = max(self._due[name] + check.period, now + check.period / 2)
        return due
