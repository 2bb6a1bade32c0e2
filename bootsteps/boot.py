"""Boot: brings the steps of a process up in the order of their requirements, and takes them down in reverse.

Floor: bootsteps. Reads: nothing. Writes: nothing.

A step starts as soon as what it requires is up. Stopping is cancellation, one step at a time, last one first: so a
worker stops reading before it stops running jobs, and settles the last outcome before its connections close.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol

import trio

from celery5.errors import CeleryError


class Service(Protocol):
    """What a step runs: it lives until it is cancelled, and says when it is up."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its `name`, what runs, the names of the steps it `requires`, and limits in seconds."""

    name: str
    service: Service
    requires: tuple[str, ...] = ()
    start_limit: float = 30.0
    stop_limit: float = 120.0


class BootFailed(CeleryError):
    """The steps make no graph, or one of them did not come up in time."""


def in_order(steps: Sequence[Step]) -> list[Step]:
    """The steps, each after what it requires. Raises BootFailed for a step that is missing, doubled or in a circle."""
    by_name: dict[str, Step] = {step.name: step for step in steps}
    if len(by_name) != len(steps):
        raise BootFailed(f"two boot steps have one name: {sorted(step.name for step in steps)}")
    for step in steps:
        for needed in step.requires:
            if needed not in by_name:
                raise BootFailed(f"boot step {step.name!r} requires {needed!r}, which is not there")
    try:
        names = list(TopologicalSorter({step.name: step.requires for step in steps}).static_order())
    except CycleError as error:
        raise BootFailed(f"boot steps require each other in a circle: {' > '.join(error.args[1])}") from None
    return [by_name[name] for name in names]


@dataclass(slots=True)
class _Up:
    """A step that runs, or is about to."""

    step: Step
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    begun: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.begun = True
        try:
            with self.scope:
                await self.step.service.run(task_status=task_status)
        finally:
            self.done.set()

    async def stop(self) -> None:
        self.scope.cancel()
        with trio.move_on_after(self.step.stop_limit):
            await self.done.wait()


class Boot:
    """A process: its steps, up in order and down in reverse. It has the shape of a service itself."""

    def __init__(self, *, steps: Sequence[Step]) -> None:
        self._steps = in_order(steps)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or until a step fails; `started()` when all steps are up."""
        up: list[_Up] = []
        ready = {step.name: trio.Event() for step in self._steps}
        async with trio.open_nursery() as nursery:
            try:
                async with trio.open_nursery() as starting:
                    for step in self._steps:
                        starting.start_soon(self._bring_up, step, nursery, up, ready)
                task_status.started()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    for one in reversed(up):
                        await one.stop()

    async def _bring_up(
        self, step: Step, nursery: trio.Nursery, up: list[_Up], ready: Mapping[str, trio.Event]
    ) -> None:
        for needed in step.requires:
            await ready[needed].wait()
        one = _Up(step)
        # Before it is up: should it be cancelled on the way, what it requires must outlive its end.
        up.append(one)
        try:
            with trio.move_on_after(step.start_limit) as limit:
                await nursery.start(_started(one))
            if limit.cancelled_caught:
                raise BootFailed(f"boot step {step.name!r} was not up after {step.start_limit:g} s")
        except BaseException:
            if not one.begun:
                one.done.set()
            raise
        one.scope.shield = True  # from here on only stop() takes it down, in its turn
        ready[step.name].set()


def _started(one: _Up) -> Any:
    """The step's run, under the step's name: it is what a stack dump of all tasks shows."""

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        await one.run(task_status=task_status)

    run.__qualname__ = f"step:{one.step.name}"
    return run
