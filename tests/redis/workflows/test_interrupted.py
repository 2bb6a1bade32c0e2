"""A script that stops after every step loses nothing: what is left is noted, and the next call goes on."""

from typing import Any

import pytest
import redis

from celery5 import App, group
from celery5.broker.calls import workflows as calls
from celery5.workflows.compiler import compile_workflow
from celery5.workflows.staging import NewRun, stage
from tests.redis.workflows.sample_tasks import SampleTasks

STEPS = [1, 2, 7]


async def start_in_steps(app: App, workflow: Any, steps: int) -> int:
    """Start a run by calls of so many steps each; return how many calls it took."""
    redis_driver = await app.connections.get_async_driver()
    compiled = compile_workflow(workflow.tree)
    keys = app.queue(compiled.plan.home)
    record = await stage(redis_driver, keys, compiled, NewRun(run_id="run-1", name="run", life=60.0))
    assert record is not None
    reply = await redis_driver.perform(calls.advance(keys, [record], ttl=60.0, steps=steps))
    count = 1
    while reply.left:
        reply = await redis_driver.perform(calls.advance(keys, ttl=60.0, steps=steps))
        count += 1
        assert count < 5000, "it does not come to an end"
    return count


@pytest.mark.parametrize("steps", STEPS)
async def test_all_members_of_a_map_are_sent_whatever_a_call_may_do(
    app: App, redis_client: "redis.Redis", steps: int
) -> None:
    tasks = SampleTasks(app)
    count = await start_in_steps(app, tasks.double.map(range(40)), steps)
    assert redis_client.xlen(app.queue("far").stream) == 40
    assert count >= 40 // steps


@pytest.mark.parametrize("steps", STEPS)
async def test_all_branches_of_a_wide_group_are_sent_whatever_a_call_may_do(
    app: App, redis_client: "redis.Redis", steps: int
) -> None:
    tasks = SampleTasks(app)
    await start_in_steps(app, group(tasks.add.s(number, 1) for number in range(250)), steps)
    assert redis_client.xlen(app.queue("default").stream) == 250
    members = redis_client.hkeys(app.queue("default").jobs)
    assert len(set(members)) == 250


async def test_a_record_that_comes_twice_counts_once(app: App) -> None:
    tasks = SampleTasks(app)
    await start_in_steps(app, tasks.double.map(range(3)), 10)
    driver, keys = await app.connections.get_async_driver(), app.queue("far")
    record = calls.pack_record("members", "run-1~0", [0, 2], ["0", "4"])
    for _ in range(2):
        await driver.perform(calls.advance(keys, [record, record], ttl=60.0))
    assert await driver.perform(calls.read_run(keys, "run-1", ["state", "done"])) == {
        "state": b"live",
        "done": b"2",
    }


async def test_a_portion_that_is_published_twice_is_there_once(app: App) -> None:
    driver, keys = await app.connections.get_async_driver(), app.queue("far")
    portions = [
        calls.stage_items(keys, "run-1", 0, 0, [b"1", b"2"]),
        calls.stage_items(keys, "run-1", 0, 2, [b"3"]),
    ]
    assert [await driver.perform(portion) for portion in portions * 2] == [2, 3, 3, 3]
    assert await driver.perform(calls.stage_items(keys, "run-1", 0, 5, [b"6"])) == -2
