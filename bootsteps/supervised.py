"""Supervise one step of an application: bring it up, try it again, restart it when it crashes.

`celery5.protocol.process.supervision` decides what follows a failure; this module does it. An optional step never
ends its worker.
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

import trio

from celery5.boot_step import BootStep
from celery5.bootsteps.own_steps import ProvidedValues, StepCode
from celery5.broker.transient_errors import is_transient
from celery5.errors import BootStepFailed, BrokerDenied, BrokerReplied, BrokerUnavailable, CeleryError
from celery5.health.circuit_breaker import CircuitBreaker
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import RETRY_BOOT_STEP
from celery5.protocol.counts import format_count
from celery5.protocol.job.tracebacks import format_traceback
from celery5.protocol.job.verdict import iterate_leaves
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.names import get_class_names
from celery5.protocol.process.supervision import (
    STABLE_AFTER,
    FailurePhase,
    RetryState,
    StepDecision,
    StepState,
)
from celery5.runners.user_errors import call_user_code, find_cancellation
from celery5.services.commands.dispatcher import SelfCommandSender
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.step_status import StepStatus

SEND_TIMEOUT = 10.0
"""Seconds that sending the command may take; then the step is retried without it."""
ARRIVAL_TIMEOUT = 90.0
"""Seconds that a sent command may take to arrive; then the step is retried without it."""


class WorkingEvent(Protocol):
    """Set when all mandatory steps are up."""

    async def wait(self) -> None: ...


class SupervisedStep:
    """One supervised step. A deferred retry waits until its process is `working`.

    `on_deaf` is called when it was cancelled, since it was not up in time, and goes on all the same.
    """

    def __init__(
        self,
        *,
        step: BootStep,
        offered: ProvidedValues,
        step_status: StepStatus,
        self_commands: SelfCommandSender,
        log: Log,
        working: WorkingEvent,
        circuit_breakers: CircuitBreakers | None = None,
        on_deaf: Callable[[BootStepFailed], None] = lambda _error: None,
    ) -> None:
        self._step = step
        self._on_deaf = on_deaf
        self._offered = offered
        self._self_commands = self_commands
        self._log = log
        self._working = working
        self._record = step_status.add_step(
            step.name, optional=step.optional, max_tries=step.retry_state.max_tries
        )
        self._up_at: float | None = None
        self._up = trio.Event()
        self._circuit: CircuitBreaker | None = None
        if circuit_breakers is not None and step.stays:
            self._circuit = circuit_breakers.add_service(step.name, step.breaker, step.checks)
        self._retry_requested = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or until the step has ended.

        Raises:
            BootStepFailed: The step is mandatory and is not tried again.
            BrokerUnavailable: The same, because Redis is unreachable.
            BrokerReplied: The same, because Redis refuses commands for a while.
        """
        retry_state = self._step.retry_state
        first_start = _FirstStart(task_status)
        await self._wait_for_breaker()
        while (error := await self._run_once(first_start)) is not None:
            uptime = None if self._up_at is None else trio.current_time() - self._up_at
            is_outage = is_transient(_find_leaf(error))
            is_final = not retry_state.policy.covers(get_class_names(_find_leaf(error)))
            retry_state, decision = retry_state.record_failure(
                uptime=uptime, is_outage=is_outage, final=is_final
            )
            self._update_breaker(uptime, None if is_outage else False, _describe(error))
            retry_state = await self._carry_out(retry_state, decision, error)
            await self._wait_for_breaker()

    async def _run_once(self, first_start: "_FirstStart") -> BaseException | None:
        """Run the step once. Return the error that it failed with; None when it has ended without one."""
        self._record.set_state(StepState.STARTING)
        self._up_at, self._up = None, trio.Event()
        try:
            with trio.move_on_after(self._step.start_limit) as limit:
                up = _StepStarted(self, limit, first_start)
                await self._run_watched(StepCode(step=self._step, offered=self._offered), up, limit)
            if limit.cancelled_caught:
                return TimeoutError(f"not up after {self._step.start_limit:g} s")
        except BaseException as error:
            cancellation = find_cancellation(error)
            if cancellation is None:
                await self._end_if_stopping(error)
                return error
            if cancellation is not error:
                self._log_error("step:stop-failed", "warning", error, "the worker stops all the same")
            raise cancellation from None
        if self._step.stays:
            self._record.set_state(StepState.ENDED)
            self._update_breaker(None, succeeded=True)
            self._log.event("step:ended", step=self._step.name)
        return None

    def mark_up(self, value: Any) -> None:
        """Note that the step is up, and offer `value` to the steps that require it."""
        self._up_at = trio.current_time()
        self._up.set()
        self._offered[self._step.name.replace("-", "_")] = value
        if self._record.failures:
            self._log.event("step:started", step=self._step.name, failures=self._record.failures)
        self._record.set_up()

    async def _end_if_stopping(self, error: BaseException) -> None:
        """While the process stops, log an error and end here, cancelled."""
        if trio.current_effective_deadline() == float("-inf"):
            self._log_error("step:stop-failed", "warning", error, "the worker stops all the same")
            await trio.lowlevel.checkpoint()

    async def _carry_out(
        self, retry_state: RetryState, decision: StepDecision, error: BaseException
    ) -> RetryState:
        """Carry out the decision. Return the state of the next try, or raise."""
        failures = max(retry_state.failures, 1)
        is_given_up = decision not in (StepDecision.RETRY, StepDecision.DEFER)
        state = StepState.GIVEN_UP if is_given_up else StepState.FAILED
        self._record.set_failed(state, _describe(error), failures)
        has_crashed = retry_state.phase is FailurePhase.CRASH
        if decision is StepDecision.STOP:
            self._log_error("step:failed", "error", error, "it is mandatory: this worker stops")
            raise self._make_fatal_error(error, failures, has_crashed) from error
        if decision is StepDecision.RETRY:
            circuit = self._circuit
            probe_in = circuit.get_reading().probe_in if circuit and circuit.policy.mode == "delay" else 0.0
            delay = max(retry_state.get_delay(random.random), probe_in)
            event_name = "step:crashed" if has_crashed else "step:failed"
            self._log_error(event_name, "warning", error, f"it is tried again in {delay:.3g} s")
            return retry_state.restarted() if await self._wait_retry(delay) else retry_state
        if decision is StepDecision.DEFER:
            self._log_error("step:failed", "warning", error, _DEFERRED)
            await self._defer()
        else:
            self._log_error("step:abandoned", "warning", error, _GIVEN_UP)
            await self._wait_retry(float("inf"))
        return retry_state.restarted()

    async def _defer(self) -> None:
        """Retry by the command, once the process is up; without it, when it cannot be sent or does not arrive."""
        await self._working.wait()
        why = f"no answer within {SEND_TIMEOUT:g} s"
        with trio.move_on_after(SEND_TIMEOUT) as limit:
            try:
                await self._self_commands.send(RETRY_BOOT_STEP.name, {"step": self._step.name})
            except CeleryError as error:
                why = str(error)
            else:
                why = "it did not arrive"
        is_sent = why == "it did not arrive" and not limit.cancelled_caught
        if not await self._wait_retry(ARRIVAL_TIMEOUT if is_sent else 0.0):
            self._log.event(
                "step:retry-send-failed", "warning", step=self._step.name, why=why, hint=_DIRECTLY
            )

    async def _wait_retry(self, timeout: float) -> bool:
        """Return whether a retry is requested within this many seconds. Only that of an optional step can be."""
        self._retry_requested = await self._record.wait_retry(timeout)
        return self._retry_requested

    # ---- its circuit breaker

    async def _wait_for_breaker(self) -> None:
        """Wait until the circuit breaker allows a start. A retry by command does not wait for it."""
        circuit = self._circuit
        if circuit is None:
            return
        while not self._retry_requested and (probe_in := circuit.try_pass(self)) is not None:
            await self._wait_retry(probe_in)
        if self._retry_requested:
            circuit.force_probe(self)
        self._retry_requested = False

    async def _run_watched(self, code: StepCode, up: "_StepStarted", limit: trio.CancelScope) -> None:
        """Run the step, and notice when it goes on for `stop_limit` seconds after the limit of its start."""
        errors: list[BaseException] = []
        watch = trio.CancelScope(shield=True)

        async def watch_start() -> None:
            with watch:
                await trio.sleep(self._step.start_limit + self._step.stop_limit)
                if limit.cancel_called:
                    self._report_deaf()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch_start)
                try:
                    await self._run_as_probe(code, up)
                except BaseException as error:
                    errors.append(error)
                watch.cancel()
        except BaseException:
            if not errors:
                raise
        # As the code has raised it, which no nursery would: if that is a cancellation, or has one, it goes on so.
        if errors:
            raise errors[0]

    def _report_deaf(self) -> None:
        step = self._step
        why = f"not up after {step.start_limit:g} s, and it takes no notice of being cancelled"
        self._record.set_failed(StepState.GIVEN_UP, why, 1)
        hint = _DEAF_OPTIONAL if step.optional else _DEAF
        self._log.event("step:failed", "error", step=step.name, why=why, hint=hint, traceback="")
        if not step.optional:
            self._on_deaf(BootStepFailed(f"boot step {step.name!r} did not come up: {why}"))

    async def _run_as_probe(self, code: StepCode, up: "_StepStarted") -> None:
        """Run the step. A probe of the circuit breaker succeeds once it has been up for a while."""
        circuit = self._circuit
        if circuit is None or circuit.is_closed:
            await call_user_code(code.run, task_status=up)
            return

        async def record_success() -> None:
            await self._up.wait()
            await trio.sleep(STABLE_AFTER)
            self._update_breaker(None, succeeded=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(record_success)
            await call_user_code(code.run, task_status=up)
            nursery.cancel_scope.cancel()

    def _update_breaker(self, uptime: float | None, succeeded: bool | None, why: str = "") -> None:
        if self._circuit is not None:
            if uptime is not None and uptime >= STABLE_AFTER:
                self._circuit.record_result(self, succeeded=True)
            self._circuit.record_result(self, succeeded=succeeded, why=why)

    def _log_error(self, event: str, level: Any, error: BaseException, hint: str) -> None:
        self._log.event(
            event,
            level,
            step=self._step.name,
            why=_describe(error),
            hint=hint,
            traceback=format_traceback(error),
        )

    def _make_fatal_error(self, error: BaseException, failures: int, has_crashed: bool) -> CeleryError:
        """Return the error that ends the worker, with a text of one line.

        One of an unreachable or refusing Redis keeps its class: a later incarnation waits for Redis.
        """
        event = "crashed" if has_crashed else "did not come up"
        times = f" {format_count(failures, 'time')} in a row" if failures > 1 else ""
        text = f"boot step {self._step.name!r} {event}{times}: {_describe(error)}"
        match _find_leaf(error):
            case BrokerUnavailable():
                return BrokerUnavailable(text)
            case BrokerDenied():
                return BrokerDenied(text)
            case BrokerReplied(code=code) as refusal if is_transient(refusal):
                return BrokerReplied(text, code=code)
            case _:
                return BootStepFailed(text)


class _StepStarted(trio.TaskStatus[Any]):
    """Marks a step as up, and removes its time limit."""

    def __init__(self, step: SupervisedStep, limit: trio.CancelScope, first_start: "_FirstStart") -> None:
        self._step, self._limit, self._first_start = step, limit, first_start
        self._is_started = False

    def started(self, value: Any = None) -> None:
        if self._is_started:
            raise RuntimeError("task_status.started() was called twice")
        self._is_started = True
        self._limit.deadline = float("inf")
        self._step.mark_up(value)
        self._first_start.started()


class _FirstStart(trio.TaskStatus[None]):
    """Passes on the first `started()` only."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.started()


def _find_leaf(error: BaseException) -> BaseException:
    """Return the first error in a group of groups."""
    return next(iterate_leaves(error), error)


def _describe(error: BaseException) -> str:
    return describe_error(_find_leaf(error), MAX_ERROR_LENGTH)


_DEFERRED = f"it is optional: the worker goes on without it, and tries it again ({RETRY_BOOT_STEP.name})"
_GIVEN_UP = f"the worker goes on without it; the command {RETRY_BOOT_STEP.name} retries it"
_DEAF = "it is mandatory, so this process stops: let its code end when it is cancelled, or raise start_limit"
_DEAF_OPTIONAL = (
    "it is optional, so the process goes on: let its code end when it is cancelled, or raise start_limit"
)
_DIRECTLY = "it is tried again without the command"
