"""Sent twice: what an outbox sends again, since its worker died on the way, runs once, however long ago it ended."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import trio

from celery5 import App, first
from celery5.broker.calls import workflows as calls
from celery5.broker.keys import QueueKeys
from celery5.errors import WorkflowCancelled, WorkflowFailed
from celery5.logs.log import Log
from celery5.services.process.wake_ups import WakeUps
from celery5.services.workflows import run_progress
from celery5.workflows import RunState, StepFailure, WorkflowRun
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


async def send_and_die(app: App, keys: QueueKeys) -> int:
    """Do what a worker does that dies when it has sent what is in an outbox. Returns how many entries it leaves."""
    driver = await app.connections.get_async_driver()
    await driver.perform(calls.create_outbox(keys))
    entries = await driver.perform(calls.read_outbox(keys, "dead", count=100))
    await app.asend_jobs([run_progress._make_job(entry.fields) for entry in entries])
    return len(entries)


async def take_over(
    app: App, keys: QueueKeys, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let another worker do what a dead one has left, when what is remembered of the ids of jobs is forgotten."""
    for key in redis_client.scan_iter("*~*"):
        redis_client.delete(key)
    monkeypatch.setattr(run_progress, "STALE_AFTER", 0.0)
    async with working(app, queues=QUEUES):
        await until(lambda: not redis_client.xlen(keys.run_outbox))
        await until_async(lambda: nothing_else_waits(app))


async def nothing_else_waits(app: App) -> bool:
    """Whether there is no job but one that blocks."""
    return sum([(await app.ainfo(queue)).unfinished for queue in QUEUES]) <= 1


JOBS: dict[str, Callable[[SampleTasks], Workflow[Any]]] = {
    "at a time": lambda t: t.add.options(countdown=0.01).s(1, 2),
    "with a key": lambda t: t.add.options(key="order-7").s(1, 2),
    "kept from others by its key": lambda t: t.add.options(key="order-8", unique_for=0.01).s(1, 2),
    "members at a time": lambda t: t.add.options(countdown=0.01).starmap([(1, 2)]),
}


@pytest.mark.parametrize("name", JOBS)
async def test_a_job_that_has_ended_is_not_sent_again(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run: WorkflowRun[Any] = await (JOBS[name](tasks) >> tasks.block.s(5)).astart()
    keys = app.queue(run.queue)
    assert await send_and_die(app, keys) == 1
    async with working(app, queues=QUEUES):
        await tasks.begun.wait()
        await take_over(app, keys, redis_client, monkeypatch)
        tasks.gate.set()
        assert await run.aget(20) == 5
    assert tasks.count("add") == 1


@pytest.mark.parametrize("has_ended", [True, False])
async def test_an_on_failure_job_is_sent_once_though_its_run_has_ended(
    app: App,
    tasks: SampleTasks,
    redis_client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    has_ended: bool,
) -> None:
    told: list[int] = []

    @app.task(name="tell_of", queue="far")
    async def tell_of(failures: list[StepFailure]) -> None:
        told.append(len(failures))

    async with working(app, queues=["default"]):
        run = await tasks.fail.s(1).astart(on_failure=tell_of)
        with pytest.raises(WorkflowFailed):
            await run.aget(20)
    keys = app.queue(run.queue)
    driver = await app.connections.get_async_driver()
    if has_ended:
        async with working(app, queues=QUEUES):
            await until(lambda: told == [1])
            await until_async(lambda: nothing_else_waits(app))
    record = calls.pack_record("end", f"{run.id}~0", "DEAD", "")  # its end comes again, too
    await driver.perform(calls.advance(keys, [record], ttl=60))
    await take_over(app, keys, redis_client, monkeypatch)
    assert told == [1]


async def test_a_job_of_a_run_that_has_stopped_is_not_sent(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    run: WorkflowRun[Any] = await tasks.add.options(key="order-9").s(1, 2).astart()
    keys = app.queue(run.queue)
    driver = await app.connections.get_async_driver()
    await driver.perform(calls.create_outbox(keys))
    entries = await driver.perform(calls.read_outbox(keys, "dead", count=100))
    await run.acancel()
    await take_over(app, keys, redis_client, monkeypatch)
    # Who was cut off then, and only slow, sends it now.
    await app.asend_jobs([run_progress._make_job(entry.fields) for entry in entries])
    async with working(app, queues=QUEUES):
        assert await (await tasks.double.s(4).astart()).aget(20) == 8
        await until_async(lambda: nothing_else_waits(app))
    assert (tasks.count("add"), (await run.astatus()).active) == (0, 0)


async def test_job_that_ran_unnoticed_is_undone_when_its_run_is_cancelled(
    app: App, tasks: SampleTasks, monkeypatch: pytest.MonkeyPatch, redis_client: "redis.Redis"
) -> None:
    @app.task(name="pay", undo=tasks.undo)
    async def pay(number: int) -> int:
        tasks.begun.set()
        with trio.CancelScope(shield=True):
            await tasks.gate.wait()
        return number

    run: WorkflowRun[Any] = await pay.options(key="order-11").s(4).astart()
    keys = app.queue(run.queue)
    assert await send_and_die(app, keys) == 1
    async with working(app, queues=QUEUES):
        await tasks.begun.wait()
        await run.acancel()
        monkeypatch.setattr(run_progress, "STALE_AFTER", 0.0)
        async with working(app, queues=QUEUES, name="second"):
            await until(lambda: not redis_client.xlen(keys.run_outbox))
            assert (await run.astatus()).state is RunState.CANCELLING
            tasks.gate.set()
            with pytest.raises(WorkflowCancelled):
                await run.aget(20)
    assert tasks.count("undo") == 1


async def test_what_has_lost_a_first_before_it_was_sent_is_not_sent(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    loser = tasks.add.options(key="order-10").s(1, 2)
    run: WorkflowRun[Any] = await (first(tasks.total.s([4]), loser) >> tasks.block.s(5)).astart()
    keys = app.queue(run.queue)
    driver = await app.connections.get_async_driver()
    await driver.perform(calls.create_outbox(keys))
    await driver.perform(calls.read_outbox(keys, "dead", count=100))
    async with working(app, queues=QUEUES):
        await tasks.begun.wait()
        await take_over(app, keys, redis_client, monkeypatch)
        tasks.gate.set()
        assert await run.aget(20) == 5
    assert (tasks.count("add"), (await run.astatus()).active) == (0, 0)


class CountedTrips:
    """A driver that counts the trips through it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.count = 0

    async def perform(self, call: Any) -> Any:
        self.count += 1
        return await self._driver.perform(call)

    async def perform_all(self, several: Any) -> Any:
        self.count += 1
        return await self._driver.perform_all(several)


async def test_jobs_of_a_dead_worker_are_recovered_in_few_calls(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    later: Any = tasks.add.options(countdown=600)
    for number in range(20):
        await later.s(number, 1).astart()
    stopped = [await later.s(number, 1).astart() for number in range(10)]
    await later.starmap([(number, 1) for number in range(20)]).astart()
    keys, driver = app.queue("default"), await app.connections.get_async_driver()
    await driver.perform(calls.create_outbox(keys))
    assert len(await driver.perform(calls.read_outbox(keys, "dead", count=100))) == 50
    for run in stopped:
        await run.acancel()
    monkeypatch.setattr(run_progress, "STALE_AFTER", 0.0)
    trips: Any = CountedTrips(driver)
    relay = run_progress.RunRelay(
        app=app,
        redis=trips,
        consumed=[keys],
        run_progress=run_progress.RunProgress(results_ttl=60.0),
        wake_ups=WakeUps(),
        worker="heir",
        log=Log(worker="heir", app=app.name),
    )
    await relay._send_stale(keys)
    # The entries, their runs, the bits of members, the plans of runs that have stopped; their ends; what is done.
    assert trips.count <= 6
    assert redis_client.zcard(keys.due) == 40
    await relay._send(keys)
    for run in stopped:
        assert (await run.astatus()).state is RunState.CANCELLED


async def test_the_key_of_a_step_is_free_when_its_workflow_takes_its_place(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    growing = tasks.grow.options(key="order-12")
    async with working(app, queues=QUEUES):
        for _ in range(2):
            assert await (await growing.s(2).astart()).aget(20) == [0, 2]


@pytest.mark.parametrize("options", [{"key": "order-13"}, {"countdown": 0.01}])
async def test_a_job_that_has_succeeded_is_not_sent_again_before_its_run_knows(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", options: dict[str, Any]
) -> None:
    run: WorkflowRun[Any] = await tasks.add.options(**options).s(1, 2).astart()
    keys = app.queue(run.queue)
    entries: Any = redis_client.xrange(keys.run_outbox)
    jobs = [
        run_progress._make_job({name.decode(): value for name, value in fields.items()})
        for _, fields in entries
    ]
    async with working(app, queues=QUEUES):
        assert await run.aget(20) == 3
        await app.asend_jobs(jobs)
        await until_async(lambda: nothing_else_waits(app))
    assert (len(jobs), tasks.count("add")) == (1, 1)
