"""Run the health checks of a Publisher, each with its circuit breaker, in a daemon or in any process that sends.

While a breaker is open, nothing is published: messages stay in their backlog. When the open period is over, the
check runs again, and its success closes the breaker. A daemon has one instance for the application's own
checks, and one for each broker. A process that publishes by itself runs its own checks in a thread.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import trio

from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.health.circuit_breaker import CircuitBreaker
from celery5.health.health_check import CheckContext, CheckFunction, HealthCheck
from celery5.logs.log import Log
from celery5.protocol.health.breaker import BreakerPolicy, BreakerState
from celery5.protocol.health.readings import get_worst_state, parse_states
from celery5.protocol.observability.families import MetricFamily, make_gauge

MAX_BREAKER_RESET = 30.0
"""The most seconds after which a breaker's check runs again; fewer where its period is shorter."""


class _CheckCircuit:
    """One check and its breaker."""

    def __init__(self, check: HealthCheck, log: Log, reset: float) -> None:
        self.check = check
        self.last_error = ""
        policy = BreakerPolicy(threshold=None, reset=reset, longest=max(reset, 600.0))
        self.circuit = CircuitBreaker(
            name=f"publisher {check.name}",
            policy=policy,
            log=log,
            checks=(check,),
            effect="messages stay in the backlog",
            logs_probes=False,
        )


class PublishingChecks:
    """Runs the `checks`, with the broker at `redis` if they need one.

    `reset` is the seconds from the opening of a breaker to the next check; None derives them from the check's
    period.
    """

    def __init__(
        self,
        *,
        checks: Sequence[HealthCheck],
        keys: Keys,
        log: Log,
        redis: AsyncDriver | None = None,
        reset: float | None = None,
    ) -> None:
        self._context = CheckContext(keys, redis)
        self._log = log
        self._circuits = {
            check.name: _CheckCircuit(
                check, log, min(MAX_BREAKER_RESET, check.period) if reset is None else reset
            )
            for check in checks
        }
        self._all_closed = trio.Event()
        self._check_requested = {name: trio.Event() for name in self._circuits}
        self._update_closed()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run each check at its period until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            for circuit in self._circuits.values():
                nursery.start_soon(self._keep_checking, circuit)
            await trio.sleep_forever()

    @property
    def all_closed(self) -> bool:
        """Return whether all breakers let messages through."""
        return self._all_closed.is_set()

    async def wait_until_closed(self) -> None:
        """Return when all breakers are closed."""
        await self._all_closed.wait()

    def report_failure(self, name: str, reason: str) -> None:
        """Report that an operation covered by this check failed.

        It counts as a failed check, and a second check is due.
        """
        circuit = self._circuits[name]
        self._report(circuit, circuit.check.states[0], reason)
        self._check_requested[name].set()

    # ---- running checks

    async def _keep_checking(self, circuit: _CheckCircuit) -> None:
        """Run one check at its period. A check that reports by itself is run only to close its breaker."""
        while True:
            # cleared before the check runs: a failure reported during it causes another
            self._check_requested[circuit.check.name] = trio.Event()
            if circuit.check.is_polled:
                await self._check(circuit)
            if circuit.circuit.is_closed:
                with trio.move_on_after(circuit.check.period):
                    await self._check_requested[circuit.check.name].wait()
                    await trio.sleep(min(1.0, circuit.check.period))  # not again at once
            else:
                await trio.sleep_until(circuit.circuit.breaker.open_until)

    async def _check(self, circuit: _CheckCircuit) -> None:
        circuit.circuit.begin_probe(circuit)  # when its breaker is open and due, this check is the probe
        state = await self._run_functions(circuit)
        is_good = state == circuit.check.good_state
        if circuit.circuit.breaker.state is BreakerState.HALF_OPEN:
            succeeded = None if state is None else is_good
            circuit.circuit.record_result(
                circuit, succeeded=succeeded, why=f"health check {circuit.check.name} is {state}"
            )
        elif not is_good and state:
            self._report(circuit, state, circuit.check.why)
        self._update_closed()

    async def _run_functions(self, circuit: _CheckCircuit) -> str | None:
        """Return the worst state of the check's functions.

        That is the good one when none complains, and None when all failed or timed out, which is logged and
        decides nothing.
        """
        check, states, answered = circuit.check, list[str](), False
        functions: Sequence[CheckFunction | None] = check.functions or [None]
        for function in functions:
            why = f"took longer than its {check.timeout:g} s"
            try:
                with trio.move_on_after(check.timeout):
                    states += parse_states(await check.run_check(function, self._context), check.states)
                    answered = True
                    continue
            except (Exception, SystemExit) as error:  # user code
                why = f"{type(error).__name__}: {error}"
            if why != circuit.last_error:
                self._log.event("health:check-failed", "error", check=check.name, why=why)
            circuit.last_error = why
        return (get_worst_state(states, check.states) or check.good_state) if answered else None

    def _report(self, circuit: _CheckCircuit, state: str, why: str) -> None:
        circuit.circuit.record_check(circuit.check, state, why)
        self._update_closed()

    def _update_closed(self) -> None:
        if all(circuit.circuit.is_closed for circuit in self._circuits.values()):
            self._all_closed.set()
        elif self._all_closed.is_set():
            self._all_closed = trio.Event()

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if a breaker is open."""
        return {
            circuit.circuit.name: "" if circuit.circuit.is_closed else circuit.circuit.why
            for circuit in self._all()
        }

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the states of the checks and breakers."""
        yield make_gauge(
            "celery5_publisher_check_failing",
            "1 while a health check keeps messages in the backlog.",
            *[
                (float(not circuit.circuit.is_closed), {"check": circuit.check.name})
                for circuit in self._all()
            ],
        )

    def _all(self) -> Sequence[_CheckCircuit]:
        return list(self._circuits.values())


class ProcessChecks:
    """Runs the publisher checks of an application in a thread of this process, from the first message on.

    It serves plain Python and any event loop alike, since it is part of none of them.
    """

    def __init__(self, *, checks: Sequence[HealthCheck], keys: Keys, log: Log) -> None:
        self._checks = PublishingChecks(checks=checks, keys=keys, log=log)
        self._thread = threading.Thread(target=self._run, name="celery5-publisher-checks", daemon=True)
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._is_stopped = False
        self._thread.start()

    @property
    def why(self) -> str:
        """Return why nothing may be published; '' when all breakers are closed."""
        if self._checks.all_closed:
            return ""
        return next((why for why in self._checks.conditions().values() if why), "a health check has failed")

    def stop(self) -> None:
        """Stop running the checks. The thread ends soon; nobody waits for it."""
        self._is_stopped = True
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)

    def _run(self) -> None:
        trio.run(self._run_checks)

    async def _run_checks(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            if not self._is_stopped:
                await self._checks.run()
