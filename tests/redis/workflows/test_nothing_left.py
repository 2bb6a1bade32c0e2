"""Nothing is left: when workers came and went, and runs have ended and expired, no key of them is there any more."""

from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.keys import GROUP
from celery5.errors import WorkflowCancelled, WorkflowFailed
from celery5.services.workflows import run_progress
from celery5.workflows import Flow, NodeState, RunState, WorkflowRun
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


def list_readers(app: App, client: "redis.Redis", queue: str = "default") -> list[bytes]:
    """Return the workers that the outbox of a queue knows."""
    return [consumer["name"] for consumer in client.xinfo_consumers(app.queue(queue).run_outbox, GROUP)]


async def test_the_outbox_forgets_workers_that_left(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    for number in range(3):
        async with working(app, queues=QUEUES, name=f"worker-{number}"):
            run = await (tasks.add.s(number, 1) | tasks.double.s() | tasks.add.s(1)).astart()
            assert await run.aget() == 2 * number + 3
            assert len(list_readers(app, redis_client)) == 1
        assert list_readers(app, redis_client) == []


async def test_the_outbox_forgets_workers_that_were_killed(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_progress, "STALE_AFTER", 0.2)
    outbox = app.queue("default").run_outbox
    async with working(app, queues=QUEUES):
        run = await (tasks.add.s(1, 1) | tasks.double.s()).astart()
        assert await run.aget() == 4
        for number in range(5):
            redis_client.xreadgroup(GROUP, f"killed-{number}", {outbox: ">"})
        # One of them has taken an entry that it did not perform.
        redis_client.xadd(outbox, {"unwatch": "some-run"})
        redis_client.xreadgroup(GROUP, "killed-5", {outbox: ">"})
        await until(lambda: len(list_readers(app, redis_client)) == 1)
        assert redis_client.xlen(outbox) == 0
    assert list_readers(app, redis_client) == []


def list_keys(app: App, client: "redis.Redis", run: WorkflowRun[Any]) -> dict[str, int]:
    """Return the keys of a run by what is behind its id, with their time to live in s; -1 for none."""
    own = app.queue(run.queue).run(run.id)
    found: Any = client.keys(own + "*")
    return {key.decode().removeprefix(own): client.ttl(key) for key in found}


@pytest.mark.parametrize("how", ["replayed", "purged", "retried"])
async def test_a_map_whose_members_failed_once_leaves_no_bitmap_of_that(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", how: str
) -> None:
    @app.workflow
    def order(flow: Flow) -> int:
        on_error: Any = "fail" if how == "retried" else "hold"
        need = 0.1 if how == "purged" else None
        flow.map(tasks.fail, [1, 2, 3], on_error=on_error, need=need)
        flow.wait_for("go")
        return flow.call(tasks.add, 1, 1)

    async with working(app, queues=QUEUES):
        run = await order.astart()
        if how == "retried":
            with pytest.raises(WorkflowFailed):
                await run.aget()
            tasks.is_broken = False
            await run.aretry()
        else:
            await until(lambda: redis_client.xlen(app.queue("default").dead) == 3)
            await until_async(lambda: has_state(run, RunState.HELD))
            tasks.is_broken = False
            await (app.dlq.areplay() if how == "replayed" else app.dlq.apurge())
        if how != "purged":
            await until_async(lambda: has_waiting(run))
            assert list_keys(app, redis_client, run).keys() <= {":0:items", ":0:done", ":0:r0", ""}
            assert await run.asignal("go")
            assert await run.aget() == 2
        else:
            with pytest.raises(WorkflowFailed):
                await run.aget()
        await until(lambda: min(list_keys(app, redis_client, run).values()) > 0)
        assert ":0:held" not in list_keys(app, redis_client, run)


async def test_a_purge_of_dead_letters_of_runs_that_ended_leaves_no_key_for_ever(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail.map([1, 2, 3], at_once=1).astart()
        with pytest.raises(WorkflowFailed):
            await run.aget()
        other = await tasks.fail.options(on_error="hold").map([1, 2, 3]).astart()
        await until_async(lambda: has_state(other, RunState.HELD))
        await other.acancel()
        with pytest.raises(WorkflowCancelled):
            await other.aget()
        assert (await app.dlq.apurge()).done == 4
        await until(lambda: not redis_client.exists(app.queue(run.queue).run_records))
        for ended in (run, other):
            times = list_keys(app, redis_client, ended)
            assert min(times.values()) > 0, times


async def has_state(run: WorkflowRun[Any], state: RunState) -> bool:
    """Return whether a run has a state, and all jobs of it have ended."""
    status = await run.astatus()
    return status.state is state and status.active == 0


async def has_waiting(run: WorkflowRun[Any]) -> bool:
    """Return whether a run waits for a signal."""
    return any(node.kind == "wait" and node.state is NodeState.WAITING for node in (await run.agraph()).nodes)
