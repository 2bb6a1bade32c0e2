"""Starting: what starts runs besides a call, and what the jobs of runs cost in bytes."""

from typing import Any

import pytest
import redis

from celery5 import App, chain
from celery5.processes.scheduler import SCHEDULER
from celery5.workflows import Flow, RunState
from tests.redis.memory import stored_bytes
from tests.redis.worker.workers import entries, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


async def test_a_schedule_starts_runs(app: App, tasks: SampleTasks) -> None:
    @app.workflow(schedule=0.2)
    def often(flow: Flow) -> int:
        return flow.call(tasks.double, 3)

    async with working(app, page=SCHEDULER), working(app, queues=QUEUES):

        async def has_run_twice() -> bool:
            runs = await app.workflows.alist_runs()
            return sum(run.state is RunState.SUCCESS for run in runs) >= 2

        await until_async(has_run_twice)
    assert tasks.count("double") >= 2


@pytest.mark.parametrize("nodes", [2, 200])
@pytest.mark.parametrize("run_id", ["a", "x" * 64])
def test_a_message_is_at_most_96_bytes_longer_than_that_of_a_job_alone(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", nodes: int, run_id: str
) -> None:
    far: Any = tasks.add.options(queue="a-queue-of-20-chars.")
    alone = len(far.job(1, 2).message)
    workflow = (
        chain(far.s(1, 2), *(tasks.add.s(1) for _ in range(nodes - 1)))
        if nodes == 2
        else far.starmap([(1, 2)] * nodes)
    )
    workflow.start(id=run_id)
    sent = [fields[b"job"] for fields in entries(redis_client, app.queue("a-queue-of-20-chars.").stream)]
    assert sent
    assert max(map(len, sent)) <= alone + 96


async def test_a_small_member_takes_at_most_64_bytes_of_redis(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    before = stored_bytes(redis_client, app)
    run = await tasks.double.map(range(20_000), at_once=100).astart()
    published = stored_bytes(redis_client, app) - before
    assert published / 20_000 <= 64
    async with working(app, queues=QUEUES):
        await run.aget(timeout=60)
        ended = stored_bytes(redis_client, app) - before
    assert ended / 20_000 <= 64
