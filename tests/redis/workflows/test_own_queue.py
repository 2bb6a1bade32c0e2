"""Own queue: a job with a key or a time on the queue where its run lives ends there, without a detour by the outbox."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery5 import App, chain
from celery5.services.workflows.run_progress import NEW_RUNS, RunRelay
from celery5.workflows import RunState, WorkflowRun
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


class Blocked(SampleTasks):
    """Tasks that end when the test says so."""

    def __init__(self, app: App) -> None:
        super().__init__(app)

        @app.task(name="end_so", max_retries=0)
        async def end_so(number: int) -> int:
            self.begun.set()
            await self.gate.wait()
            if number < 0:
                raise ValueError(f"no {number}")
            return number

        @app.task(name="double_there", queue="x:default")
        async def double_there(number: int) -> int:
            return 2 * number

        self.end_so, self.double_there = end_so, double_there


@pytest.fixture
def tasks(app: App) -> Blocked:
    """The tasks of the application."""
    return Blocked(app)


ENDS: dict[str, Callable[[Blocked], tuple[Workflow[Any], Any]]] = {
    "a key": lambda t: (t.end_so.options(key="k").s(1) | t.add.s(1), 2),
    "a time": lambda t: (t.end_so.options(countdown=0.01).s(1) | t.add.s(1), 2),
    "members with a time": lambda t: (t.end_so.options(countdown=0.01).map([1]), [1]),
    "a failure": lambda t: (
        chain(t.end_so.options(key="k", on_error="continue").s(-1), t.tell.s()),
        "DEAD None True",
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_a_job_on_the_queue_of_its_run_ends_without_the_outbox(
    app: App, tasks: Blocked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workflow, value = ENDS[name](tasks)
    async with working(app, queues=QUEUES):
        run = await workflow.astart()
        await tasks.begun.wait()

        async def read_nothing(*_args: Any) -> list[Any]:
            """Stand for a worker that is slow with what is in the outbox."""
            return []

        monkeypatch.setattr(RunRelay, "_read", read_nothing)
        tasks.gate.set()
        assert await run.aget() == value
        assert (await run.astatus()).state is RunState.SUCCESS


async def test_a_queue_whose_name_ends_with_that_of_the_home_is_another_one(app: App, tasks: Blocked) -> None:
    async with working(app, queues=("default", "x:default")):
        run = await (tasks.add.s(1, 1) | tasks.double_there.s() | tasks.add.s(1)).astart()
        assert run.queue == "default"
        assert await run.aget() == 5


@pytest.mark.parametrize("how", ["purge", "revoke"])
async def test_workers_are_told_of_an_end_that_none_of_them_has_brought_about(
    app: App, redis_client: "redis.Redis", how: str
) -> None:
    tasks = SampleTasks(app)
    if how == "purge":
        async with working(app):
            run = await tasks.fail.options(on_error="hold").s(1).astart()
            await until_async(lambda: is_held(run))
    else:
        run = await tasks.add.s(1, 2).astart()
    listening: Any = redis_client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    with listening as listener:
        listener.subscribe(app.queue(run.queue).wake)
        await until(lambda: redis_client.pubsub_numsub(app.queue(run.queue).wake)[0][1] == 1)
        if how == "purge":
            await app.dlq.apurge()
        else:
            await app.workflows.revoke_jobs(run.queue, [f"{run.id}~0"])
        messages = list[Any]()

        def is_told() -> bool:
            message = listener.get_message()
            messages.extend([message["data"]] if message else [])
            return NEW_RUNS in messages

        await until(is_told)


async def is_held(run: WorkflowRun[Any]) -> bool:
    """Return whether a run waits for the replay of a dead letter."""
    return (await run.astatus()).state is RunState.HELD
