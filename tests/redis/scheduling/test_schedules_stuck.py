"""Schedules with which nothing can be done: they are told of, and hold up no others."""

import json
from datetime import UTC, datetime
from typing import Any

import redis
import trio
from msgspec.structs import replace

from celery5 import App
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.logs.log import Log
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.process.liveness import Heartbeats
from celery5.protocol.scheduling import periodic
from celery5.protocol.scheduling.declaration import every
from celery5.scheduling.schedules import make_fired_job, read_schedules
from celery5.services.scheduling.declarations import RETIREMENT_GRACE_LEASES, ScheduleDeclarations
from celery5.services.scheduling.timetable import SCHEDULES_PER_CALL
from tests.redis.scheduling.test_schedules import akept, nothing, sent
from tests.redis.worker.workers import Lines, start, until, until_async


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


async def test_schedules_that_cannot_be_read_hold_up_no_others_however_many_they_are(
    app: App, redis_client: "redis.Redis"
) -> None:
    await app.schedule.aadd(nothing(app).s(), every(0.05), name="good")
    schedules, times = app.keys.schedules("default"), app.keys.schedule_times("default")
    names = [f"spoilt-{number}" for number in range(3 * SCHEDULES_PER_CALL)]
    redis_client.hset(schedules, mapping=dict.fromkeys(names, "{'v': 1"))
    redis_client.zadd(times, dict.fromkeys(names, 0))
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER)
            await until(lambda: len(sent(redis_client, app)) >= 3)
            await one.stop()
    assert lines.of("schedule:stuck")
    assert redis_client.zcount(times, 0, 0) == len(names), "another Scheduler may be able to read them"
    redis_client.hdel(schedules, *names)
    redis_client.zrem(times, *names)


async def test_known_or_ended_job_is_not_published_by_its_schedule_again(
    app: App, redis_client: "redis.Redis"
) -> None:
    queue = app.queue("default")
    await app.schedule.aadd(nothing(app).s(), every(3600), name="s")
    ((schedule, record),) = await read_schedules(app, await app.connections.get_async_driver())

    async def fired(before: bytes, number: int) -> bytes:
        after = periodic.encode_schedule(replace(schedule, fired=number))
        jobs = [make_fired_job(schedule.of, "job", 1.0)]
        trip = scheduling_calls.fire_schedule(
            app.keys, queue, "s", expected_state=before, new_state=after, next_look=None, jobs=jobs
        )
        assert await app.aperform(trip)
        return after

    record = await fired(await fired(record, 1), 2)
    assert sent(redis_client, app) == ["job"]
    redis_client.delete(queue.stream, queue.jobs)
    redis_client.set(queue.result("job"), "{}", px=10_000)
    await fired(record, 3)
    assert sent(redis_client, app) == []


async def test_undeclared_schedule_is_retired_after_all_processes_reported(
    app: App,
) -> None:
    code = App(app.name, broker=app.settings.broker)
    code.schedule(nothing(code).s(), 3600, name="goes")

    def scheduler(of: App, name: str) -> ScheduleDeclarations:
        way, log = RemoteRedis(of, "default"), Log(worker=name, app=of.name)
        return ScheduleDeclarations(
            redis=way, app=of, keys=of.keys, worker=name, lease_seconds=1000.0, log=log, other_brokers={}
        )

    async def state() -> str:
        return (await akept(app))["goes"].state

    one, two = scheduler(code, "one"), scheduler(app, "two")
    await one.declare()
    await trio.sleep(0.002)  # of equal versions the one that began later counts
    await two.declare()
    two.set_live_schedulers(("one", "two"))
    await two.retire_undeclared()
    two._lease = 0.0
    await two.retire_undeclared()
    assert await state() == "active", "one of those who live declares it"
    two._lease = 1000.0
    two.set_live_schedulers(("two",))
    await two.retire_undeclared()
    await two.retire_undeclared()
    assert await state() == "active", "whoever declared it may be starting again"
    two._lease = 0.0
    two.set_live_schedulers(("three", "two"))
    await two.retire_undeclared()
    assert await state() == "active", "three has not said yet what it declares"
    two.set_live_schedulers(("two",))
    await two.retire_undeclared()
    assert await state() == "retired"
    for name in ("one", "two"):
        await app.aperform(scheduling_calls.withdraw_declaration(app.keys, name))
    code.close()


async def test_an_outage_is_no_time_in_which_nobody_declared_a_schedule(app: App) -> None:
    """All leases lapse in it, so the first Scheduler that is heard again sees no other."""
    code, lease = App(app.name, broker=app.settings.broker), 0.3
    code.schedule(nothing(code).s(), 3600, name="goes")

    def scheduler(of: App, name: str) -> ScheduleDeclarations:
        way, log = RemoteRedis(of, "default"), Log(worker=name, app=of.name)
        return ScheduleDeclarations(
            redis=way, app=of, keys=of.keys, worker=name, lease_seconds=lease, log=log, other_brokers={}
        )

    async def state() -> str:
        return (await akept(app))["goes"].state

    one, two = scheduler(code, "one"), scheduler(app, "two")
    await one.declare()
    await trio.sleep(0.002)
    await two.declare()
    for _ in range(3):
        two.set_live_schedulers(("two",))
        await two.renew_declaration()
        await two.retire_undeclared()
        assert await state() == "active", "one may be heard in a moment"
        await trio.sleep(RETIREMENT_GRACE_LEASES * lease + 0.1)  # Redis is silent

    two._heartbeats = Heartbeats(lease=1000.0)  # no pause of a busy machine counts as an outage

    async def retired() -> bool:
        await trio.sleep(lease / 10)
        two.set_live_schedulers(("two",))
        await two.renew_declaration()
        await two.retire_undeclared()
        return await state() == "retired"

    await until_async(retired)
    for name in ("one", "two"):
        await app.aperform(scheduling_calls.withdraw_declaration(app.keys, name))
    code.close()


async def test_schedule_that_never_fires_is_logged_and_blocks_no_other(
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
    (never,) = lines.of("schedule:fire-time-not-found")
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
