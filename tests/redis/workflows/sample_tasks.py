"""Tasks for the tests of workflows, what they have done, and how to wait for a state of a run."""

from typing import Any

import trio

from celery5 import App
from celery5.workflows import Outcome, RunState, WorkflowRun
from tests.redis.worker.workers import until_async

QUEUES = ("default", "far")
"""The queues that the tasks are on."""


class SampleTasks:
    """Tasks of one application. `done` has what each call has done, in order."""

    def __init__(self, app: App) -> None:  # noqa: C901  one task after another
        self.done: list[tuple[str, Any]] = []
        self.is_broken = True
        self.begun = trio.Event()
        self.gate = trio.Event()

        @app.task(name="add")
        async def add(one: int, other: int) -> int:
            self.done.append(("add", one + other))
            return one + other

        @app.task(name="total")
        async def total(numbers: list[int]) -> int:
            return sum(numbers)

        @app.task(name="double", queue="far")
        async def double(number: int) -> int:
            self.done.append(("double", number))
            return 2 * number

        @app.task(name="fail", max_retries=0)
        async def fail(number: int) -> int:
            self.done.append(("fail", number))
            if self.is_broken:
                raise ValueError(f"no {number}")
            return number

        @app.task(name="block")
        async def block(number: int) -> int:
            self.begun.set()
            await self.gate.wait()
            return number

        @app.task(name="undo")
        async def undo(number: int) -> None:
            self.done.append(("undo", number))

        @app.task(name="tell")
        async def tell(outcome: Outcome[int]) -> str:
            return f"{outcome.state} {outcome.value} {bool(outcome.error)}"

        @app.task(name="grow", dynamic=True)
        async def grow(number: int) -> Any:
            self.done.append(("grow", number))
            if number == 0:
                return 0
            return group_of(self.double, number)

        self.add, self.total, self.double, self.fail = add, total, double, fail
        self.block, self.undo, self.tell, self.grow = block, undo, tell, grow

    def count(self, name: str) -> int:
        """How often a task has run."""
        return sum(1 for task, _ in self.done if task == name)


def group_of(task: Any, number: int) -> Any:
    """Return a map of a task over so many numbers."""
    return task.map(range(number))


async def until_state(run: WorkflowRun[Any], state: RunState) -> None:
    """Wait until a run is in a state."""

    async def is_there() -> bool:
        return (await run.astatus()).state is state

    await until_async(is_there)
