"""Supervised: looks after one step of an application: brings it up, tries it again, restarts it when it crashes.

What follows a failure is decided in `celery5.protocol.supervision`; here it is done. An optional step never takes its
worker down, whatever becomes of it.
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
"""Seconds that posting the command may take; then it is done directly."""
ARRIVAL_TIMEOUT = 90.0
"""Seconds after which a command that was posted and did not arrive is done directly."""
_OURS = (Exception, SystemExit)


class WorkingEvent(Protocol):
    """Says when everything mandatory is up."""

    async def wait(self) -> None: ...


class SupervisedStep:
    """One step, looked after. `working` is when its process works: what is put off waits for that."""

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
        """Run until cancelled or over. Raises BootStepFailed for a mandatory step that is to be tried no more; what it
        raises is BrokerUnavailable, or BrokerReplied when Redis refuses for a while, when that is why."""
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
        """Run it once. Gives what it failed of; None when it is over, and well."""
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
        """It is up, and gives `value` to those that require it."""
        self._up_at = trio.current_time()
        self._up.set()
        self._offered[self._step.name.replace("-", "_")] = value
        if self._standing.failures:
            self._log.event("step:started", step=self._step.name, failures=self._standing.failures)
        self._standing.state, self._standing.why, self._standing.failures = StepState.UP, "", 0

    async def _unless_stopping(self, error: BaseException) -> None:
        """An error on the way down is only told of."""
        if trio.current_effective_deadline() == float("-inf"):
            self._tell("step:stop-failed", "warning", error, "the worker stops all the same")
            await trio.lowlevel.checkpoint()

    async def _follow(self, course: RetryState, ruling: StepDecision, error: BaseException) -> RetryState:
        """Do what was ruled; gives the course of the next try, or raises."""
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
        """Have the command do it, once the process works; when it cannot be told, or it does not arrive, without it."""
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
        """Whether somebody asks for it within so many seconds. An optional step can be asked for, no other."""
        with trio.move_on_after(within):
            await self._standing.retry_requested.wait()
        asked = self._standing.retry_requested.is_set()
        self._standing.retry_requested = trio.Event()
        self._insisted = asked
        return asked

    # ---- its circuit breaker (C37)

    async def _admitted(self) -> None:
        """Wait until the breaker lets it be started. Whoever asks for it by the command asks no breaker (C71)."""
        circuit = self._circuit
        if circuit is None:
            return
        while not self._insisted and (rest := circuit.try_pass(self)) is not None:
            await self._asked(rest)
        if self._insisted:
            circuit.force_probe(self)
        self._insisted = False

    async def _proving(self, code: StepCode, up: "_IsUp") -> None:
        """Run it; as a probe it proves itself by being up for a while."""
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
        """What ends the worker: one line. Redis that is away, or refuses for a while, keeps its kind: a later
        incarnation waits for it."""
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
    """Hears that a step's code is up: from then on it has all the time that it wants."""

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
    """Passes on the first time."""

    def __init__(self, status: trio.TaskStatus[None]) -> None:
        self._status: trio.TaskStatus[None] | None = status

    def started(self, value: None = None) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.started()


def _leaf(error: BaseException) -> BaseException:
    """The first error in a group of groups."""
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
