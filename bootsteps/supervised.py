"""Supervise one step of an application: bring it up, try it again, restart it when it crashes.

`celery5.protocol.process.supervision` decides what follows a failure; this module does it. An optional step never
ends its worker.
"""

import random
from collections.abc import Sequence
from traceback import format_exception
from typing import Any, Protocol, cast

import trio

from celery5.boot_step import BootStep
from celery5.bootsteps.own_steps import ProvidedValues, StepCode
from celery5.errors import BootStepFailed, BrokerReplied, BrokerUnavailable, CeleryError
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import RETRY_BOOT_STEP
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.process.supervision import (
    STABLE_AFTER,
    FailurePhase,
    RetryState,
    StepDecision,
    StepState,
)
from celery5.services.commands.dispatcher import SelfCommandSender
from celery5.services.health.circuits import CircuitBreaker, CircuitBreakers
from celery5.services.process.broker_outages import is_transient
from celery5.services.process.step_status import StepStatus

SEND_TIMEOUT = 10.0
"""Seconds that sending the command may take; then the step is retried without it."""
ARRIVAL_TIMEOUT = 90.0
"""Seconds that a sent command may take to arrive; then the step is retried without it."""
_OURS = (Exception, SystemExit)


class WorkingEvent(Protocol):
    """Set when all mandatory steps are up."""

    async def wait(self) -> None: ...


class SupervisedStep:
    """One supervised step. A deferred retry waits until its process is `working`."""

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
    ) -> None:
        self._step = step
        self._offered = offered
        self._posts = self_commands
        self._log = log
        self._working = working
        self._board = step_status
        self._standing = step_status.add_step(step.name, optional=step.optional)
        self._up_at: float | None = None
        self._up = trio.Event()
        self._circuit: CircuitBreaker | None = None
        if circuit_breakers is not None and step.stays:
            self._circuit = circuit_breakers.add_service(step.name, step.breaker, step.checks)
        self._insisted = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or until the step has ended.

        Raises:
            BootStepFailed: The step is mandatory and is not tried again.
            BrokerUnavailable: The same, because Redis is unreachable.
            BrokerReplied: The same, because Redis refuses commands for a while.
        """
        course = self._step.retry_state
        self._standing.max_tries = course.max_tries
        first = _Once(task_status)
        await self._admitted()
        while (error := await self._once(first)) is not None:
            up_for = None if self._up_at is None else trio.current_time() - self._up_at
            blameless = is_transient(_leaf(error))
            final = not course.policy.covers(_kinds(error))
            course, ruling = course.record_failure(uptime=up_for, is_outage=blameless, final=final)
            self._learn(up_for, None if blameless else False, _told(error))
            course = await self._follow(course, ruling, error)
            await self._admitted()

    async def _once(self, first: "_Once") -> BaseException | None:
        """Run the step once. Return the error that it failed with; None when it has ended without one."""
        self._standing.state = StepState.STARTING
        self._up_at, self._up = None, trio.Event()
        try:
            with trio.move_on_after(self._step.start_limit) as limit:
                up = _IsUp(self, limit, first)
                await self._proving(StepCode(step=self._step, offered=self._offered), up)
            if limit.cancelled_caught:
                return TimeoutError(f"not up after {self._step.start_limit:g} s")
        except _OURS as error:
            await self._unless_stopping(error)
            return error
        except BaseExceptionGroup as group:
            found: tuple[Any, Any] = group.split(_OURS)
            if found[0] is not None:
                await self._unless_stopping(found[0])
            if found[1] is not None:
                raise found[1] from None
            return cast("BaseException", found[0])
        if self._step.stays:
            self._standing.state = StepState.ENDED
            self._learn(None, well=True)
            self._log.event("step:ended", step=self._step.name)
        return None

    def mark_up(self, value: Any) -> None:
        """Note that the step is up, and offer `value` to the steps that require it."""
        self._up_at = trio.current_time()
        self._up.set()
        self._offered[self._step.name.replace("-", "_")] = value
        if self._standing.failures:
            self._log.event("step:started", step=self._step.name, failures=self._standing.failures)
        self._standing.state, self._standing.why, self._standing.failures = StepState.UP, "", 0

    async def _unless_stopping(self, error: BaseException) -> None:
        """Only log an error while the process stops."""
        if trio.current_effective_deadline() == float("-inf"):
            self._tell("step:stop-failed", "warning", error, "the worker stops all the same")
            await trio.lowlevel.checkpoint()

    async def _follow(self, course: RetryState, ruling: StepDecision, error: BaseException) -> RetryState:
        """Carry out the decision. Return the state of the next try, or raise."""
        standing = self._standing
        standing.why, standing.failures = _told(error), max(course.failures, 1)
        crashed = course.phase is FailurePhase.CRASH
        if ruling is StepDecision.STOP:
            standing.state = StepState.GIVEN_UP
            self._tell("step:failed", "error", error, "it is mandatory: this worker stops")
            raise self._fatal(error, standing.failures, crashed) from error
        if ruling is StepDecision.RETRY:
            circuit = self._circuit
            rest = circuit.get_reading().probe_in if circuit and circuit.policy.mode == "delay" else 0.0
            wait = max(course.get_delay(random.random), rest)
            standing.state = StepState.FAILED
            event = "step:crashed" if crashed else "step:failed"
            self._tell(event, "warning", error, f"it is tried again in {wait:.3g} s")
            return course.restarted() if await self._asked(wait) else course
        standing.state = StepState.FAILED if ruling is StepDecision.DEFER else StepState.GIVEN_UP
        event, hint = (
            ("step:failed", _PUT_OFF) if ruling is StepDecision.DEFER else ("step:abandoned", _GIVEN_UP)
        )
        self._tell(event, "warning", error, hint)
        if ruling is StepDecision.DEFER:
            await self._put_off()
        else:
            await self._asked(float("inf"))
        return course.restarted()

    async def _put_off(self) -> None:
        """Retry by the command, once the process is up; without it, when it cannot be sent or does not arrive."""
        await self._working.wait()
        why = f"no answer within {SEND_TIMEOUT:g} s"
        with trio.move_on_after(SEND_TIMEOUT) as limit:
            try:
                await self._posts.send(RETRY_BOOT_STEP.name, {"step": self._step.name})
            except CeleryError as error:
                why = str(error)
            else:
                why = "it did not arrive"
        posted = why == "it did not arrive" and not limit.cancelled_caught
        if not await self._asked(ARRIVAL_TIMEOUT if posted else 0.0):
            self._log.event(
                "step:retry-send-failed", "warning", step=self._step.name, why=why, hint=_DIRECTLY
            )

    async def _asked(self, within: float) -> bool:
        """Return whether a retry is requested within so many seconds. Only that of an optional step can be."""
        with trio.move_on_after(within):
            await self._standing.retry_requested.wait()
        asked = self._standing.retry_requested.is_set()
        self._standing.retry_requested = trio.Event()
        self._insisted = asked
        return asked

    # ---- its circuit breaker

    async def _admitted(self) -> None:
        """Wait until the circuit breaker allows a start. A retry by command does not wait for it."""
        circuit = self._circuit
        if circuit is None:
            return
        while not self._insisted and (rest := circuit.try_pass(self)) is not None:
            await self._asked(rest)
        if self._insisted:
            circuit.force_probe(self)
        self._insisted = False

    async def _proving(self, code: StepCode, up: "_IsUp") -> None:
        """Run the step. A probe of the circuit breaker succeeds once it has been up for a while."""
        circuit = self._circuit
        if circuit is None or circuit.is_closed:
            await code.run(task_status=up)
            return

        async def prove() -> None:
            await self._up.wait()
            await trio.sleep(STABLE_AFTER)
            self._learn(None, well=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prove)
            await code.run(task_status=up)
            nursery.cancel_scope.cancel()

    def _learn(self, up_for: float | None, well: bool | None, why: str = "") -> None:
        if self._circuit is not None:
            if up_for is not None and up_for >= STABLE_AFTER:
                self._circuit.record_result(self, succeeded=True)
            self._circuit.record_result(self, succeeded=well, why=why)

    def _tell(self, event: str, level: Any, error: BaseException, hint: str) -> None:
        self._log.event(
            event,
            level,
            step=self._step.name,
            why=_told(error),
            hint=hint,
            traceback="".join(format_exception(error)),
        )

    def _fatal(self, error: BaseException, failures: int, crashed: bool) -> CeleryError:
        """Return the error that ends the worker, with a text of one line.

        One of an unreachable or refusing Redis keeps its class: a later incarnation waits for Redis.
        """
        what = "crashed" if crashed else "did not come up"
        often = f" {failures} times in a row" if failures > 1 else ""
        text = f"boot step {self._step.name!r} {what}{often}: {_told(error)}"
        match _leaf(error):
            case BrokerUnavailable():
                return BrokerUnavailable(text)
            case BrokerReplied(code=code) as refusal if is_transient(refusal):
                return BrokerReplied(text, code=code)
            case _:
                return BootStepFailed(text)


class _IsUp(trio.TaskStatus[Any]):
    """Notes that a step's code is up, and removes its time limit."""

    def __init__(self, one: SupervisedStep, limit: trio.CancelScope, first: "_Once") -> None:
        self._one, self._limit, self._first = one, limit, first
        self._said = False

    def started(self, value: Any = None) -> None:
        if self._said:
            raise RuntimeError("task_status.started() was called twice")
        self._said = True
        self._limit.deadline = float("inf")
        self._one.mark_up(value)
        self._first.started()


class _Once(trio.TaskStatus[None]):
    """Passes on the first `started()` only."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.started()


def _leaf(error: BaseException) -> BaseException:
    """Return the first error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("Sequence[BaseException]", error.exceptions)[0]
    return error


def _kinds(error: BaseException) -> list[str]:
    return [f"{each.__module__}.{each.__qualname__}" for each in type(_leaf(error)).__mro__]


def _told(error: BaseException) -> str:
    return describe_error(_leaf(error), MAX_ERROR_LENGTH)


_PUT_OFF = f"it is optional: the worker goes on without it, and tries it again ({RETRY_BOOT_STEP.name})"
_GIVEN_UP = f"the worker goes on without it; the command {RETRY_BOOT_STEP.name} has it tried again"
_DIRECTLY = "it is tried again without the command"
