"""Schedules with which nothing can be done: they are told of, and hold up no others.

Floor: tests. Reads and writes: the keys of the test's application.
"""

import json
from datetime import UTC, datetime
from typing import Any

import redis
import trio

from celery5 import App
from celery5.processes.scheduler import SCHEDULER
from celery5.triggers import every
from tests.redis.test_schedules import akept, nothing, sent
from tests.redis.workers import Lines, start, until


async def test_a_queue_that_redis_refuses_holds_up_no_other(app: App, redis_client: "redis.Redis") -> None:
    task, key = nothing(app), app.queue("a").stream
    await app.schedule.aadd(task.options(queue="a").s(), every(0.05), name="refused")
    await app.schedule.aadd(task.options(queue="z").s(), every(0.05), name="good")
    redis_client.set(key, "no stream")
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER)
            await until(lambda: len(sent(redis_client, app, "z")) >= 3)
            await one.stop()
    redis_client.delete(key)
    assert {line["schedule"] for line in lines.of("schedule:stuck")} == {"refused"}


async def test_a_schedule_in_code_that_would_never_fire_is_told_of_and_holds_up_no_other(
    app: App, redis_client: "redis.Redis"
) -> None:
    task = nothing(app)
    app.schedule(task.s(), "0 0 31 2 *", name="never")
    app.schedule(task.s(), datetime(2020, 1, 1, tzinfo=UTC), name="once")
    app.schedule(task.s(), 0.05, name="good")
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER)
            await until(lambda: len(sent(redis_client, app)) >= 3)
            await one.stop()
    (never,) = lines.of("schedule:never")
    assert never["schedule"] == "never"
    assert "never fire" in never["hint"]


async def test_a_schedule_whose_message_cannot_be_read_holds_up_no_other(
    app: App, redis_client: "redis.Redis"
) -> None:
    task, key = nothing(app), app.keys.schedules("default")
    for name in ("good", "newer"):
        await app.schedule.aadd(task.s(), every(0.05), name=name)
    record: Any = redis_client.hget(key, "newer")
    said = json.loads(record)
    said["of"]["message"] = '{"v":9}'
    redis_client.hset(key, "newer", json.dumps(said))
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER)
            await until(lambda: len(sent(redis_client, app)) >= 3)
            await one.stop()
    (stuck,) = lines.of("schedule:stuck")
    assert stuck["schedule"] == "newer"
    assert (await akept(app))["newer"].fired == 0
