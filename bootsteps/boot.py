"""Boot: brings the steps of a process up in the order of their requirements, and takes them down in reverse.

A step starts as soon as what it requires is up. Stopping is cancellation, one step at a time, last one first: so a
worker stops reading before it stops running jobs, and settles the last outcome before its connections close.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol

import trio

from celery5.boot_step import BootStep
from celery5.bootsteps.own_steps import check_step
from celery5.bootsteps.supervised import SupervisedStep
from celery5.errors import CeleryError, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.process.supervision import StepState
from celery5.protocol.similar_names import did_you_mean
from celery5.services.commands.dispatcher import SelfCommandSender
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.process.step_status import StepStatus

Step = BootStep
"""A step of celery5's own, as the wiring pages call it. It is the very same thing as an application's."""

EXECUTION_STEP = "execution"
"""The step that runs jobs. What an application prepares is there before the first job, and until after the last one."""


class Service(Protocol):
    """What a step runs: it lives until it is cancelled, and says when it is up."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...


class BootFailed(CeleryError):
    """One of celery5's own steps did not come up in time."""


def sort_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps, each after what it requires. Raises Misconfigured for one that is missing, doubled or in a circle, and
    for a mandatory one that requires an optional one: it could not hold its promise."""
    by_name: dict[str, Step] = {step.name: step for step in steps}
    if len(by_name) != len(steps):
        names = [step.name for step in steps]
        raise Misconfigured(
            f"two boot steps are named {max(names, key=names.count)!r}: give one another name"
        )
    for step in steps:
        for needed in step.requires:
            if needed not in by_name:
                hint = did_you_mean(needed, by_name, otherwise=f"there are: {', '.join(sorted(by_name))}")
                raise Misconfigured(
                    f"boot step {step.name!r} requires {needed!r}, which is not there; {hint}"
                )
            if by_name[needed].optional and not step.optional:
                raise Misconfigured(
                    f"boot step {step.name!r} requires {needed!r}, which is optional: make both optional, or neither"
                )
    try:
        names = list(TopologicalSorter({step.name: step.requires for step in steps}).static_order())
    except CycleError as error:
        circle = " > ".join(error.args[1])
        raise Misconfigured(f"boot steps require each other in a circle: {circle}") from None
    return [by_name[name] for name in names]


def merge_steps(own_steps: Sequence[Step], added_steps: Sequence[Step]) -> list[Step]:
    """celery5's `own` steps and those that an application `added`, in order.

    What runs jobs comes after all that the application calls mandatory, but for what itself waits for jobs to run.
    Raises Misconfigured.
    """
    names = {step.name for step in own_steps}
    for step in added_steps:
        if step.name in names:
            raise Misconfigured(
                f"boot step {step.name!r} has the name of one of celery5's own: give it another; "
                f"taken: {', '.join(sorted(names))}"
            )
    sort_steps([*own_steps, *added_steps])
    after = {EXECUTION_STEP}
    for step in sort_steps([*own_steps, *added_steps]):
        if not after.isdisjoint(step.requires):
            after.add(step.name)
    first = tuple(step.name for step in added_steps if not step.optional and step.name not in after)
    first = first if EXECUTION_STEP in names else ()
    return sort_steps(
        [
            *(
                replace(step, requires=(*step.requires, *first)) if step.name == EXECUTION_STEP else step
                for step in own_steps
            ),
            *added_steps,
        ]
    )


@dataclass(slots=True)
class _Up:
    """A step that runs, or is about to."""

    step: Step
    service: Service
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    begun: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.begun = True
        try:
            with self.scope:
                await self.service.run(task_status=task_status)
        finally:
            self.done.set()

    async def stop(self) -> bool:
        """Gives whether it has ended."""
        self.scope.cancel()
        with trio.move_on_after(self.step.stop_limit):
            await self.done.wait()
        return self.done.is_set()


class BootGraph:
    """A process: its steps, up in order and down in reverse. It has the shape of a service itself.

    `added` are the steps of the application, `offered` is what their code may ask for by name. `stuck` is called when a
    step has not ended within its `stop_limit`: the others are stopped all the same, but it is waited for. Raises
    Misconfigured.
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
        self._stuck = on_stuck
        self._steps = merge_steps(steps, added)
        self._offered = dict(offered or {})
        self._own = {step.name for step in steps}
        self._board, self._posts, self._log = step_status or StepStatus(), self_commands, log
        self._circuits = circuit_breakers
        names = {step.name for step in added}
        for step in added:
            check_step(step, self._offered, names)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or until a mandatory step fails; `started()` when all of those are up."""
        up: list[_Up] = []
        ready = {step.name: trio.Event() for step in self._steps}
        working = trio.Event()
        offered = dict(self._offered)
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as starting:
                    for step in self._steps:
                        one = _Up(step, self._runs(step, offered, working))
                        # Nobody waits for what is optional.
                        where = nursery if step.optional else starting
                        where.start_soon(self._bring_up, one, nursery, up, ready)
                working.set()
                task_status.started()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    for one in reversed(up):
                        if not await one.stop():
                            self._tell_stuck(one.step)

    def _tell_stuck(self, step: Step) -> None:
        if self._log is not None:
            self._log.event("step:stuck", "error", step=step.name, after=step.stop_limit, hint=_STUCK)
        self._stuck()

    def _runs(self, step: Step, offered: dict[str, Any], working: trio.Event) -> Service:
        """What runs a step: celery5's own code by itself, all else supervised."""
        if step.name in self._own and not step.optional:
            own: Service = step.run
            return own
        if self._posts is None or self._log is None:
            raise TypeError("a step that is supervised needs somebody to post commands, and a log")
        return SupervisedStep(
            step=step,
            offered=offered,
            step_status=self._board,
            self_commands=self._posts,
            log=self._log,
            working=working,
            circuit_breakers=self._circuits,
        )

    async def _bring_up(
        self, one: _Up, nursery: trio.Nursery, up: list[_Up], ready: Mapping[str, trio.Event]
    ) -> None:
        step = one.step
        for needed in step.requires:
            await ready[needed].wait()
        # Before it is up: should it be cancelled on the way, what it requires must outlive its end.
        up.append(one)
        supervised = isinstance(one.service, SupervisedStep)  # it sees to the limit itself, for each try
        try:
            with trio.move_on_after(float("inf") if supervised else step.start_limit) as limit:
                await nursery.start(_started(one))
            if limit.cancelled_caught:
                raise BootFailed(f"boot step {step.name!r} was not up after {step.start_limit:g} s")
        except BaseException:
            if not one.begun:
                one.done.set()
            raise
        # Who is cancelled already stays so: a shield would take that back in the middle of a step's own checkpoint.
        await trio.lowlevel.checkpoint_if_cancelled()
        one.scope.shield = True  # from here on only stop() takes it down, in its turn
        if not supervised:
            self._board.add_step(step.name, optional=False).state = StepState.UP
        ready[step.name].set()


def _started(one: _Up) -> Any:
    """The step's run, under the step's name: it is what a stack dump of all tasks shows."""

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await one.run(task_status=task_status)

    run.__qualname__ = f"step:{one.step.name}"
    return run


_STUCK = "it takes no notice of being cancelled: should it not end soon, its process is ended"
