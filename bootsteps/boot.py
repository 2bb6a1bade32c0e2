"""Bring the steps of a process up in the order of their requirements, and take them down in reverse.

A step starts as soon as what it requires is up. Stopping is cancellation, one step at a time, last one first: so a
worker stops reading before it stops running jobs, and settles the last outcome before its connections close.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol

import msgspec
import trio

from celery5.boot_step import BootStep
from celery5.bootsteps.own_steps import check_step
from celery5.bootsteps.supervised import SupervisedStep
from celery5.errors import BootStepFailed, CeleryError, Misconfigured
from celery5.logs.log import Log
from celery5.runners.context import LOG_EVENT
from celery5.services.commands.dispatcher import SelfCommandSender
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.fenced import run_fenced
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.step_status import StepStatus
from celery5.similar_names import did_you_mean

Step = BootStep
"""A step of celery5's own; the same class as an application's."""

EXECUTION_STEP = "execution"
"""The step that runs jobs. Mandatory steps of the application are up before the first job and until after the last."""
RUNNING_STEPS = (EXECUTION_STEP, "timer-runs", "processors")
"""The steps that run jobs, timers and processors, which may use what the mandatory steps of the application provide."""


class Service(Protocol):
    """What a step runs: it goes on until it is cancelled, and reports when it is up."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...


class BootFailed(CeleryError):
    """One of celery5's own steps did not come up in time."""


def sort_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the steps, each after those that it requires.

    Raises:
        Misconfigured: A step is missing, has the name of another, is in a circle, or is mandatory and requires an
            optional one.
    """
    by_name: dict[str, Step] = {step.name: step for step in steps}
    if len(by_name) != len(steps):
        names = [step.name for step in steps]
        raise Misconfigured(
            f"two boot steps are named {max(names, key=names.count)!r}: give one another name"
        )
    for step in steps:
        for requirement in step.requires:
            if requirement not in by_name:
                hint = did_you_mean(
                    requirement, by_name, otherwise=f"there are: {', '.join(sorted(by_name))}"
                )
                raise Misconfigured(
                    f"boot step {step.name!r} requires {requirement!r}, which is not there; {hint}"
                )
            if by_name[requirement].optional and not step.optional:
                raise Misconfigured(
                    f"boot step {step.name!r} requires {requirement!r}, which is optional: make both optional, "
                    "or neither"
                )
    try:
        names = list(TopologicalSorter({step.name: step.requires for step in steps}).static_order())
    except CycleError as error:
        circle = " > ".join(error.args[1])
        raise Misconfigured(f"boot steps require each other in a circle: {circle}") from None
    return [by_name[name] for name in names]


def merge_steps(own_steps: Sequence[Step], added_steps: Sequence[Step]) -> list[Step]:
    """Return celery5's own steps and those of the application, in order.

    The steps that run jobs, timers and processors come after all mandatory steps of the application that do not
    require them. Raises Misconfigured.
    """
    names = {step.name for step in own_steps}
    for step in added_steps:
        if step.name in names:
            raise Misconfigured(
                f"boot step {step.name!r} has the name of one of celery5's own: give it another; "
                f"taken: {', '.join(sorted(names))}"
            )
    sort_steps([*own_steps, *added_steps])
    dependents = set[str](RUNNING_STEPS)
    for step in sort_steps([*own_steps, *added_steps]):
        if not dependents.isdisjoint(step.requires):
            dependents.add(step.name)
    first = tuple(step.name for step in added_steps if not step.optional and step.name not in dependents)
    first = first if EXECUTION_STEP in names else ()
    return sort_steps(
        [
            *(
                replace(step, requires=(*step.requires, *first)) if step.name in RUNNING_STEPS else step
                for step in own_steps
            ),
            *added_steps,
        ]
    )


class _RunningStep(msgspec.Struct):
    """A step that runs, or is about to."""

    step: Step
    service: Service
    incarnation_end: IncarnationEnd
    scope: trio.CancelScope = msgspec.field(default_factory=trio.CancelScope)
    done: trio.Event = msgspec.field(default_factory=trio.Event)
    begun: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.begun = True
        try:
            with self.scope:
                if getattr(self.service, "only_observes", False):
                    await run_fenced(self.step.name, self.service, task_status=task_status)
                else:
                    await self.service.run(task_status=task_status)
        except BaseException as error:
            self.incarnation_end.note(error)
            raise
        finally:
            self.done.set()

    async def stop(self) -> bool:
        """Cancel the step and wait for up to its `stop_limit`. Return whether it has ended."""
        self.scope.cancel()
        with trio.move_on_after(self.step.stop_limit):
            await self.done.wait()
        return self.done.is_set()


class BootGraph:
    """A process: its steps, up in order and down in reverse. It is a service itself.

    `added` are the steps of the application, `offered` are the values that their code may ask for by name. `on_stuck`
    is called when a step has not ended within its `stop_limit`: the others are stopped all the same, and the process
    waits for it. Raises Misconfigured.
    """

    def __init__(
        self,
        *,
        steps: Sequence[Step],
        added: Sequence[Step] = (),
        offered: Mapping[str, Any] | None = None,
        step_status: StepStatus | None = None,
        self_commands: SelfCommandSender | None = None,
        log: Log | None = None,
        circuit_breakers: CircuitBreakers | None = None,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_stuck = on_stuck
        self._steps = merge_steps(steps, added)
        self._offered = dict(offered or {})
        self._own = {step.name for step in steps}
        self._step_status, self._posts, self._log = step_status or StepStatus(), self_commands, log
        self._circuit_breakers = circuit_breakers
        names = {step.name for step in added}
        for step in added:
            check_step(step, self._offered, names)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or until a mandatory step fails; `started()` when all of those are up."""
        if self._log is not None:
            LOG_EVENT.set(self._log.event)  # what fails in an observer is in the log of this process
        up: list[_RunningStep] = []
        ready = {step.name: trio.Event() for step in self._steps}
        working = trio.Event()
        offered = dict(self._offered)
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as starting:
                    for step in self._steps:
                        service = self._make_service(step, offered, working, nursery)
                        running_step = _RunningStep(step, service, self._step_status.incarnation_end)
                        # The process does not wait for optional steps.
                        target = nursery if step.optional else starting
                        target.start_soon(self._bring_up, running_step, nursery, up, ready)
                working.set()
                task_status.started()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    for running_step in reversed(up):
                        if not await running_step.stop():
                            self._report_stuck(running_step.step)

    def _report_stuck(self, step: Step) -> None:
        if self._log is not None:
            self._log.event("step:stuck", "error", step=step.name, after=step.stop_limit, hint=_STUCK)
        self._on_stuck()

    def _make_service(
        self, step: Step, offered: dict[str, Any], working: trio.Event, nursery: trio.Nursery
    ) -> Service:
        """Return the service of a step: celery5's own code as it is, all other steps supervised."""
        if step.name in self._own and not step.optional:
            own: Service = step.run
            return own
        if self._posts is None or self._log is None:
            raise TypeError("a step that is supervised needs somebody to post commands, and a log")

        def end(error: BootStepFailed) -> None:
            # What waits for the step itself may wait for ever.
            self._on_stuck()
            nursery.start_soon(_raise, error)

        return SupervisedStep(
            step=step,
            offered=offered,
            step_status=self._step_status,
            self_commands=self._posts,
            log=self._log,
            working=working,
            circuit_breakers=self._circuit_breakers,
            on_deaf=end,
        )

    async def _bring_up(
        self,
        running_step: _RunningStep,
        nursery: trio.Nursery,
        up: list[_RunningStep],
        ready: Mapping[str, trio.Event],
    ) -> None:
        step = running_step.step
        for requirement in step.requires:
            await ready[requirement].wait()
        # Before it is up: should it be cancelled, the steps that it requires must outlive it.
        up.append(running_step)
        supervised = isinstance(
            running_step.service, SupervisedStep
        )  # it applies the limit itself, for each try
        try:
            with trio.move_on_after(float("inf") if supervised else step.start_limit) as limit:
                await nursery.start(_make_named_run(running_step))
            if limit.cancelled_caught:
                raise BootFailed(f"boot step {step.name!r} was not up after {step.start_limit:g} s")
        except BaseException:
            if not running_step.begun:
                running_step.done.set()
            raise
        # A step that is cancelled already stays so: a shield would revoke that in the middle of its own checkpoint.
        await trio.lowlevel.checkpoint_if_cancelled()
        running_step.scope.shield = True  # from now on only stop() ends it, in its turn
        if not supervised:
            self._step_status.add_step(step.name, optional=False).set_up()
        ready[step.name].set()


async def _raise(error: Exception) -> None:
    raise error


def _make_named_run(running_step: _RunningStep) -> Any:
    """Return the step's `run` under the step's name, which a stack dump of all tasks shows."""

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await running_step.run(task_status=task_status)

    run.__qualname__ = f"step:{running_step.step.name}"
    return run


_STUCK = "it takes no notice of being cancelled: should it not end soon, its process is ended"
