"""Evaluate the limit rules of an application, and impose on all workers what they say.

Any number of Schedulers have an evaluator, but only one at a time has the turn. What it imposes is stored on every
broker for some seconds and renewed at each evaluation, so the rules of a dead Scheduler lapse, or the next Scheduler
continues with them. Nothing is sent unless the application declares a rule.
"""

from collections.abc import Mapping
from functools import partial

import trio

from celery5.broker.calls import health
from celery5.broker.calls import limits as limit_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.limits.rules import ComputedRule, DeclaredRules
from celery5.logs.log import Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.limit_rules import ImposedLimits, compare_rules
from celery5.protocol.limits import LimitOverride
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.scaling.snapshot import ClusterSnapshot
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import call_in_thread, call_user_code, reraise_cancellation
from celery5.services.process.broker_outages import OutageLog, last_try, retry_until_available
from celery5.services.scaling.observer import ClusterObserver

INTERVAL = 2.0
"""Seconds between two evaluations."""
FUNCTION_TIMEOUT = 5.0
"""Seconds that a rule's function may take. With the interval this is less than a turn, and than a limit's life."""


class LimitRuleEvaluator:
    """Imposes the limits of one application's rules while this Scheduler has the turn."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        broker_connections: Mapping[str, AsyncDriver],
        keys: Keys,
        declared_rules: DeclaredRules,
        rule_observer: ClusterObserver,
        asyncio_runner: AsyncioRunner,
        worker: str,
        log: Log,
    ) -> None:
        self._redis = redis
        self._other_brokers = {
            name: driver for name, driver in broker_connections.items() if name != DEFAULT_BROKER
        }
        self._keys = keys
        self._declared = declared_rules
        self._observer = rule_observer
        self._asyncio_runner = asyncio_runner
        self._name = worker
        self._log = log
        self._has_turn = False
        self._computed: dict[str, Mapping[str, LimitOverride]] = {}
        self._due: dict[str, float] = {}
        self._threads: dict[str, trio.CapacityLimiter] = {}
        self._failed: dict[str, str] = {}
        self._outages = OutageLog(log, "limit-rules:interrupted", "limit-rules:resumed")
        self._broker_outages = {
            broker: OutageLog(log, "limit-rules:broker-failed", broker=broker)
            for broker in self._other_brokers
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Evaluate the rules at intervals until cancelled."""
        task_status.started()
        if not (self._declared.rules or self._declared.computed):
            await trio.sleep_forever()
        try:
            while True:
                await retry_until_available(self.evaluate, self._outages, INTERVAL, even_refused=True)
                await trio.sleep(INTERVAL)
        finally:
            if self._has_turn:
                with last_try(self._log, "limit-rules:lock-release-failed"):
                    await self._redis.perform(limit_calls.claim_rules_turn(self._keys, self._name, seconds=0))

    async def evaluate(self) -> None:
        """Evaluate all rules, if it is this Scheduler's turn, and impose the limits of those that hold."""
        turn = await self._redis.perform(limit_calls.claim_rules_turn(self._keys, self._name))
        if turn.mine != self._has_turn:
            self._change_turn(turn.mine, turn.imposed)
        if not turn.mine:
            return
        await self._compute()
        imposed = ImposedLimits(self._name, {**await self._get_declared(turn.now), **self._computed})
        imposed = ImposedLimits(self._name, {rule: tasks for rule, tasks in imposed.rules.items() if tasks})
        if not (imposed.rules or turn.imposed.rules):
            return
        if not await self._redis.perform(limit_calls.impose_limits(self._keys, self._name, imposed)):
            return
        self._log_changes(turn.imposed, imposed)
        for broker, driver in self._other_brokers.items():
            await self._impose_on(broker, driver, imposed)

    def _change_turn(self, mine: bool, imposed: ImposedLimits) -> None:
        """Continue with what the Scheduler before imposed, until the functions have been called here."""
        self._has_turn = mine
        names = {rule.name for rule in self._declared.computed}
        self._computed = {name: tasks for name, tasks in imposed.rules.items() if name in names}
        self._due.clear()
        self._observer.reset()
        self._log.event("limit-rules:lock-acquired" if mine else "limit-rules:lock-lost", "debug")

    async def _get_declared(self, now: float) -> dict[str, Mapping[str, LimitOverride]]:
        """Return the limits of the declared rules that hold."""
        checks = sorted({rule.check for rule in self._declared.rules if rule.check})
        calls = [health.read_state(self._keys, check) for check in checks]
        readings = await self._redis.perform_all(calls) if calls else []
        states = {reading.check: reading.state for reading in readings if reading is not None}
        return {
            rule.name: {rule.task: rule.override}
            for rule in self._declared.rules
            if rule.holds(self._declared.get_local_time(rule, now), states.get(rule.check))
        }

    async def _compute(self) -> None:
        """Call the functions whose time has come, all at once."""
        now = trio.current_time()
        due = [rule for rule in self._declared.computed if self._due.get(rule.name, now) <= now]
        if not due:
            return
        snapshot = await self._observer.take_snapshot()
        async with trio.open_nursery() as nursery:
            for rule in due:
                self._due[rule.name] = now + rule.every
                nursery.start_soon(self._call, rule, snapshot)

    async def _call(self, rule: ComputedRule, snapshot: ClusterSnapshot) -> None:
        """Call one function. If it fails, what it returned before stays."""
        why = f"took longer than {FUNCTION_TIMEOUT:g} s"
        try:
            with trio.move_on_after(FUNCTION_TIMEOUT):
                returned = await call_user_code(self._run_function, rule, snapshot)
                self._computed[rule.name] = self._declared.parse_limits(rule.name, returned)
                self._failed.pop(rule.name, None)
                return
        except BaseException as error:  # the user's code
            reraise_cancellation(error)
            why = describe_error(error, MAX_ERROR_LENGTH)
        if self._failed.get(rule.name) != why:
            self._failed[rule.name] = why
            self._log.event("limit-rule:failed", "error", rule=rule.name, why=why)

    async def _run_function(self, rule: ComputedRule, snapshot: ClusterSnapshot) -> object:
        """Return what a function returns. Each has one thread, so that one that hangs takes no more."""
        call = partial(rule.function, snapshot)
        if rule.kind == "asyncio":
            return await self._asyncio_runner.call(call)
        if rule.kind == "trio":
            return await call()
        limiter = self._threads.setdefault(rule.name, trio.CapacityLimiter(1))
        return await call_in_thread(surround_call(call, "thread"), limiter=limiter)

    async def _impose_on(self, broker: str, driver: AsyncDriver, imposed: ImposedLimits) -> None:
        """Impose limits on a further broker. While it is unreachable, those there lapse."""
        with self._broker_outages[broker].suppressing():
            await driver.perform(limit_calls.impose_limits(self._keys, self._name, imposed))

    def _log_changes(self, before: ImposedLimits, after: ImposedLimits) -> None:
        changes = compare_rules(before, after)
        for rule, tasks in changes.begun.items():
            for task, override in tasks.items():
                self._log.event(
                    "limit-rule:imposed", rule=rule, task=task, limit=override.limit, rate=override.rate
                )
        for rule in changes.ended:
            self._log.event("limit-rule:lifted", rule=rule)
