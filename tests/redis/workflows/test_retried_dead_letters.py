"""Dead letters of steps that a retry of the run runs again: they are removed, and not replayed meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest

from celery5 import App, group
from celery5.dead_letters.run_members import find_unwanted_jobs
from celery5.errors import TaskFailed, WorkflowFailed
from celery5.workflows import RunState, WorkflowRun
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks, until_state


class FarTasks(SampleTasks):
    """Tasks that fail, also on another queue and with a key."""

    def __init__(self, app: App) -> None:
        super().__init__(app)

        self.broken_numbers: set[int] = set()

        @app.task(name="fail_some", max_retries=0)
        async def fail_some(number: int) -> int:
            if number in self.broken_numbers:
                raise ValueError(f"no {number}")
            return number

        @app.task(name="fail_far", queue="far", max_retries=0)
        async def fail_far(number: int) -> int:
            return int(await self.fail.function(number))

        @app.task(name="return_map", dynamic=True)
        async def return_map() -> Any:
            return self.fail.map([5, 6])

        @app.task(name="on_failure", max_retries=0)
        async def on_failure(failures: list[Any]) -> None:
            raise ValueError("and this fails, too")

        self.fail_some, self.fail_far = fail_some, fail_far
        self.return_map, self.on_failure = return_map, on_failure


@pytest.fixture
def tasks(app: App) -> FarTasks:
    """The tasks of the application."""
    return FarTasks(app)


async def list_letters(app: App) -> list[str]:
    """Return the ids of all dead jobs, sorted."""
    return sorted([job.id async for job in app.dlq.aread()])


async def fail(run: WorkflowRun[Any], active: int = 0) -> None:
    """Wait until a run has failed, and no job of it is left."""
    with pytest.raises(WorkflowFailed):
        await run.aget(30)

    async def has_stopped() -> bool:
        return (await run.astatus()).active == active

    await until_async(has_stopped)


STEPS: dict[str, tuple[Callable[[FarTasks], Workflow[Any]], int]] = {
    "one": (lambda t: t.add.s(1, 2) >> t.fail.s(2), 1),
    "on another queue": (lambda t: t.add.s(1, 2) >> t.fail_far.s(2), 1),
    "with a key": (lambda t: t.add.s(1, 2) >> t.fail.options(key="k").s(2), 1),
    "members": (lambda t: t.fail.map([1, 2, 3], need=1.0), 3),
    "members on another queue": (lambda t: t.fail_far.map([1, 2, 3], need=1.0), 3),
    "inside another run": (lambda t: t.return_map.s() | t.total.s(), 2),
    "several": (lambda t: group(t.fail.s(1), t.fail_far.s(2)), 2),
}


@pytest.mark.parametrize("name", STEPS)
async def test_a_retry_removes_the_dead_letters_of_what_it_runs_again(
    app: App, tasks: FarTasks, name: str
) -> None:
    workflow, most = STEPS[name]
    async with working(app, queues=QUEUES):
        other = await tasks.fail.adelay(9)
        with pytest.raises(TaskFailed):
            await other.aget(30)
        run = await workflow(tasks).astart()
        await fail(run)
        assert 1 < len(await list_letters(app)) <= 1 + most
        tasks.is_broken = False
        await run.aretry()
        await run.aget(30)

        async def is_other_alone() -> bool:
            return await list_letters(app) == [other.id]

        await until_async(is_other_alone)


async def test_a_step_that_fails_again_after_a_retry_has_its_new_dead_letter_alone(
    app: App, tasks: FarTasks
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail_far.s(2).astart()
        await fail(run)
        (first,) = await list_letters(app)
        await run.aretry()
        await fail(run)

        async def is_replaced() -> bool:
            letters = await list_letters(app)
            return len(letters) == 1 and letters != [first]

        await until_async(is_replaced)
        before = await list_letters(app)
        for _ in range(2):  # as when a worker died before its entry of the outbox was removed
            await app.workflows.remove_replaced(run.queue, run.id)
        assert await list_letters(app) == before
        assert (await app.dlq.areplay()).left == {"run-ended": 1}


async def test_a_replaced_step_is_not_replayed_before_its_dead_letter_is_removed(
    app: App, tasks: FarTasks
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail.s(2).astart()
        await fail(run)
    tasks.is_broken = False
    await run.aretry()
    for dry_run in (True, False):
        tally = await app.dlq.areplay(dry_run=dry_run)
        assert (tally.matched, tally.done, tally.left) == (1, 0, {"run-retried": 1})
    async with working(app, queues=QUEUES):
        assert await run.aget(30) == 2

        async def is_empty() -> bool:
            return not await list_letters(app)

        await until_async(is_empty)
    assert tasks.count("fail") == 2


async def test_a_held_dead_letter_of_a_retried_run_can_be_replayed(app: App, tasks: FarTasks) -> None:
    """The step had not begun when the run failed, so its first job belongs to the retried run."""
    hold = tasks.fail_some.options(on_error="hold")
    async with working(app, queues=QUEUES):
        run = await (tasks.fail.s(1) >> hold.s(2)).astart()
        await fail(run)
        tasks.is_broken = False
        tasks.broken_numbers = {2}
        await run.aretry()
        await until_state(run, RunState.HELD)
        tasks.broken_numbers = set()
        assert (await app.dlq.areplay(task="fail_some")).done == 1
        assert await run.aget(30) == 2


async def test_the_dead_letter_of_an_on_failure_job_survives_a_retry(app: App, tasks: FarTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail.options(on_failure=tasks.on_failure).s(1).astart()
        await fail(run)

        async def has_both() -> bool:
            return len(await list_letters(app)) == 2

        await until_async(has_both)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget(30) == 1

        async def has_one() -> bool:
            return len(await list_letters(app)) == 1

        await until_async(has_one)
        (letter,) = [job async for job in app.dlq.aread()]
        assert letter.task == "on_failure"
        redis = await app.connections.get_async_driver()
        assert await find_unwanted_jobs(app, redis, [letter]) == {}
