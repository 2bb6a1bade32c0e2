"""Workflows together with the rest: what holds for a job holds for the jobs of a workflow."""

from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, current_job
from celery5.errors import WorkflowFailed
from celery5.tasks import CurrentJob
from tests.redis.worker.workers import until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


OPTIONS: dict[str, dict[str, Any]] = {
    "a high priority": {"priority": "high"},
    "a low priority": {"priority": "low"},
    "a countdown": {"countdown": 0.05},
    "an expiry": {"expires": 60},
    "a limit in time": {"time_limit": 20},
    "retries": {"max_retries": 5},
}
DECLARED: dict[str, dict[str, Any]] = {
    "a limit": {"limit": 1},
    "a limit for each key": {"limit": 1, "concurrency_key": "number"},
    "a rate": {"rate_limit": "500/s"},
    "fairness": {"limit": 2, "fair_key": "number"},
    "asyncio": {"loop": "asyncio"},
}


@pytest.mark.parametrize("what", OPTIONS)
async def test_options_of_a_call_hold_for_its_jobs(app: App, tasks: SampleTasks, what: str) -> None:
    double: Any = tasks.double.options(**OPTIONS[what])
    async with working(app, queues=QUEUES):
        run = await (double.map([1, 2, 3]) | tasks.total.s() | double.s()).astart()
        assert await run.aget(timeout=20) == 24


@pytest.mark.parametrize("lane", ["high", "low"])
async def test_jobs_are_on_the_lane_of_their_priority(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", lane: Any
) -> None:
    await tasks.double.options(priority=lane).map([1, 2]).astart()
    await tasks.double.options(priority=lane).s(1).astart()
    assert redis_client.xlen(getattr(app.queue("far"), lane)) == 3
    assert redis_client.xlen(app.queue("far").normal) == 0


async def test_jobs_wait_for_their_rate(app: App, tasks: SampleTasks) -> None:
    @app.task(name="rated", rate_limit="1/h")
    async def rated(number: int) -> int:
        return number

    async with working(app, queues=QUEUES):
        run = await rated.map([1, 2]).astart()

        async def is_held() -> bool:
            jobs: list[AsyncResult[Any]] = [
                app.result(f"{run.id}~0~{member}", queue="default") for member in (0, 1)
            ]
            return (await run.astatus()).done == 1 and JobState.HELD in [await job.astatus() for job in jobs]

        await until_async(is_held)
        assert await run.acancel()


@pytest.mark.parametrize("what", DECLARED)
async def test_options_of_a_declaration_hold_for_its_jobs(app: App, tasks: SampleTasks, what: str) -> None:
    running, most = 0, 0

    async def declared(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if what != "asyncio":
            await trio.sleep(0.01)
        running -= 1
        return number

    options: Any = DECLARED[what]
    one: Any = app.task(name="declared", **options)(declared)
    async with working(app, queues=QUEUES):
        run = await (one.map([4, 4, 4, 5]) | tasks.total.s() | one.s()).astart()
        assert await run.aget(timeout=20) == 17
    assert most <= {"a limit": 1, "a limit for each key": 2, "fairness": 2}.get(what, 4)


async def test_threads_and_bound_tasks_run_as_members(app: App, tasks: SampleTasks) -> None:
    @app.task(name="threaded")
    def threaded(number: int) -> int:
        return number + 1

    @app.task(name="bound", bind=True)
    async def bound(job: CurrentJob, number: int) -> str:
        return f"{job.task} {number} {'~' in job.id}"

    async with working(app, queues=QUEUES):
        run = await (threaded.s(1) | bound.s()).astart()
        assert await run.aget() == "bound 2 True"
        mapped = await threaded.chunks([1, 2, 3], 2).astart()
        assert await mapped.aget() == [2, 3, 4]


async def test_a_result_that_is_ignored_is_null_for_what_follows(app: App, tasks: SampleTasks) -> None:
    @app.task(name="is_none")
    async def is_none(value: int | None) -> bool:
        return value is None

    async with working(app, queues=QUEUES):
        run = await (tasks.double.options(ignore_result=True).s(1) | is_none.s()).astart()
        assert await run.aget()


async def test_an_expired_job_ends_the_run_unless_that_is_ignored(app: App, tasks: SampleTasks) -> None:
    late: Any = tasks.double.options(expires=0.05)
    failing = await (late.s(1) | tasks.double.s()).astart()
    going_on = await (late.options(ignore={"EXPIRED"}).s(1) >> tasks.add.s(1, 2)).astart()
    await trio.sleep(0.1)
    async with working(app, queues=QUEUES):
        with pytest.raises(WorkflowFailed) as caught:
            await failing.aget()
        assert caught.value.type == "Expired"
        assert await going_on.aget() == 3
    assert tasks.count("double") == 0


async def test_a_job_whose_key_another_one_has_is_rejected(app: App, tasks: SampleTasks) -> None:
    block: Any = tasks.block.options(key="order-7")
    async with working(app, queues=QUEUES):
        other = await block.adelay(1)
        await tasks.begun.wait()
        with pytest.raises(WorkflowFailed) as caught:
            await (await block.s(2).astart()).aget()
        assert (caught.value.type, caught.value.message) == ("Rejected", "another job has its key")
        run = await (block.options(ignore={"REJECTED"}).s(2) >> tasks.add.s(1, 2)).astart()
        assert await run.aget() == 3
        tasks.gate.set()
        assert await other.aget() == 1
        assert await (await block.s(4).astart()).aget() == 4


async def test_a_revoked_job_ends_the_run(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.block.s(1) | tasks.add.s(1)).astart()
        await tasks.begun.wait()
        assert await app.result(f"{run.id}~0", queue="default").arevoke()
        with pytest.raises(WorkflowFailed) as caught:
            await run.aget()
    assert caught.value.type == "Revoked"


async def test_a_job_is_retried_before_it_fails(app: App, tasks: SampleTasks) -> None:
    @app.task(name="flaky", max_retries=2, backoff=0.01)
    async def flaky(number: int) -> int:
        job = current_job()
        assert job is not None
        if job.attempt < 3:
            raise OSError(job.attempt)
        return job.attempt

    async with working(app, queues=QUEUES):
        assert await (await (flaky.s(0) | tasks.double.s()).astart()).aget(timeout=20) == 6


async def test_a_run_that_no_worker_reads_waits_for_one(app: App, tasks: SampleTasks) -> None:
    run = await tasks.double.s(1).astart()
    assert (await run.astatus()).active == 1
    assert await app.result(f"{run.id}~0", queue="far").astatus() is JobState.SENT
    async with working(app, queues=QUEUES):
        assert await run.aget() == 2
