"""Schedules: periodic tasks over a real server: fired once, managed while all runs, declared by code that changes."""

import json
import random
import signal
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.errors import Misconfigured
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.scheduling.declaration import Periodic, every
from celery5.protocol.scheduling.periodic import Misfire, make_fire_job_id
from celery5.scheduling.schedules import ScheduleState
from tests.redis.commands.staff import Staff
from tests.redis.scheduling.test_scheduler import employed
from tests.redis.worker.workers import Lines, start, until, until_async, working


def sent(client: "redis.Redis", app: App, queue: str = "default") -> list[str]:
    """The ids of all jobs on a queue's stream, as they came."""
    entries: Any = client.xrange(app.queue(queue).stream)
    return [json.loads(fields[b"job"])["id"] for _, fields in entries]


def nothing(app: App, **said: Any) -> Any:
    """A task that does nothing."""

    async def nothing(*_args: int) -> None:
        pass

    return app.task(name="nothing", **said)(nothing)


def kept(app: App) -> dict[str, ScheduleState]:
    return {schedule.name: schedule for schedule in app.schedule.list()}


async def akept(app: App) -> dict[str, ScheduleState]:
    return {schedule.name: schedule for schedule in await app.schedule.alist()}


def test_a_declared_schedule_that_nobody_has_taken_up_is_listed_if_asked_for(app: App) -> None:
    nothing(app, schedule="0 3 * * *")
    app.schedule(app.tasks["nothing"].s(1, 2, 3), every(60), name="often")
    assert app.schedule.list() == []
    app.schedule.add(app.tasks["nothing"].s(), every(3600), name="often")
    listed = app.schedule.list(with_declared=True)
    assert [(schedule.name, schedule.state, schedule.origin) for schedule in listed] == [
        ("nothing", "declared", "code"),
        ("often", "active", "runtime"),
    ]
    assert app.schedule.show("nothing") == listed[0]
    with pytest.raises(Misconfigured, match="no schedule 'nobody'; there are: often"):
        app.schedule.show("nobody")
    app.schedule(app.tasks["nothing"].s(at="x"), every(60), name="wrong")
    assert app.schedule.list(with_declared=True) == listed, "one that is wrong hides no other"


# ---- I6


@pytest.mark.timeout(300)
def test_fire_times_are_published_once_when_schedulers_are_killed(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    app, dice = staff.app, random.Random(6)
    nap = app.tasks["nap"]
    schedulers = [employed(staff, lease=1) for _ in range(3)]
    for n in range(25):
        app.schedule.add(nap.s(0), every(0.05), name=f"s{n}")
    limit = time.monotonic() + 8
    while time.monotonic() < limit:
        first, second = dice.sample(range(3), 2)
        schedulers[first].signal(signal.SIGKILL)
        schedulers[first].wait()
        schedulers[second].signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.1, 0.5))
        schedulers[second].signal(signal.SIGCONT)
        schedulers[first] = employed(staff, lease=1)
    for scheduler in schedulers:
        scheduler.signal(signal.SIGTERM)
        assert scheduler.wait() == 0
    ids, fires = Counter(sent(redis_client, app)), 0
    for name, state in kept(app).items():
        assert state.last is not None
        last, begun = round(state.last * 1000), round(state.last * 1000) - 50 * (state.fired - 1)
        times = range(begun, last + 50, 50)
        assert state.missed == state.skipped == 0
        assert [ids.pop(make_fire_job_id(app.name, name, at), 0) for at in times] == [1] * len(times), name
        fires += len(times)
    assert not ids  # nor is there any job that is of no fire time
    assert fires >= 3000


async def test_a_trip_that_is_made_twice_fires_once(app: App, redis_client: "redis.Redis") -> None:
    from celery5.broker.calls import scheduling as scheduling_calls
    from celery5.protocol.scheduling import periodic
    from celery5.scheduling.schedules import make_fired_job, read_schedules

    task = nothing(app)
    await app.schedule.aadd(task.s(), every(0.01), name="fast")
    ((schedule, record),) = await read_schedules(app, await app.connections.get_async_driver())
    await trio.sleep(0.03)
    after = periodic.record_trigger(schedule, "job")
    jobs = [make_fired_job(schedule.of, "job", 1.0)]
    queue = app.queue("default")
    call = scheduling_calls.fire_schedule(
        app.keys,
        queue,
        "fast",
        expected_state=record,
        new_state=periodic.encode_schedule(after),
        next_look=1,
        jobs=jobs,
    )
    assert [await app.aperform(call) for _ in range(3)] == [True, True, True]
    assert sent(redis_client, app) == ["job"]
    other = periodic.encode_schedule(periodic.record_trigger(schedule, "other"))
    late = scheduling_calls.fire_schedule(
        app.keys, queue, "fast", expected_state=record, new_state=other, next_look=1, jobs=jobs
    )
    assert not await app.aperform(late)
    assert sent(redis_client, app) == ["job"]


# ---- declared in code


async def test_a_declared_task_runs_by_the_clock_with_its_arguments(app: App) -> None:
    ran: list[tuple[int, ...]] = []

    @app.task(schedule=Periodic(0.1, args=[1]))
    async def tick(number: int) -> None:
        ran.append((number,))

    @app.task
    async def add(a: int, b: int) -> None:
        ran.append((a, b))

    app.schedule(add.s(2, 3), every(0.1), name="sums")
    async with trio.open_nursery() as nursery, working(app):
        one = await start(nursery, app, page=SCHEDULER)
        await until(lambda: ran.count((1,)) >= 3 and ran.count((2, 3)) >= 3)
        await one.stop()
    found = await akept(app)
    assert set(found) == {tick.name, "sums"}
    assert found["sums"].fired >= 3
    assert found["sums"].origin == "code"


async def test_what_the_settings_declare_runs_too(app: App) -> None:
    ran: list[int] = []

    @app.task(name="note")
    async def note(number: int) -> None:
        ran.append(number)

    app.configure(
        schedules={
            "often": {"task": "note", "every": 0.1, "args": [7], "overlap": "skip"},
            "yearly": {"task": "note", "cron": "@yearly", "timezone": "Europe/Berlin", "args": [8]},
        }
    )
    async with trio.open_nursery() as nursery, working(app):
        one = await start(nursery, app, page=SCHEDULER)
        await until(lambda: ran.count(7) >= 2)
        await one.stop()
    found = await akept(app)
    assert {schedule.origin for schedule in found.values()} == {"configuration"}
    assert found["yearly"].when == "cron @yearly Europe/Berlin"


async def test_a_changed_definition_replaces_the_old_one_and_a_removed_one_is_retired(
    app: App, redis_client: "redis.Redis"
) -> None:
    def version(spans: dict[str, float]) -> App:
        code = App(app.name, broker=app.settings.broker, lease=0.3)
        task = nothing(code)
        for name, span in spans.items():
            code.schedule(task.s(), span, name=name)
        return code

    async with trio.open_nursery() as nursery:
        old = await start(nursery, version({"stays": 0.1, "changes": 0.1, "goes": 0.1}), page=SCHEDULER)

        async def fired() -> bool:
            return all(schedule.fired for schedule in (await akept(app)).values())

        await until_async(fired)
        new = await start(nursery, version({"stays": 0.1, "changes": 60, "comes": 0.1}), page=SCHEDULER)
        between = await akept(app)
        assert {schedule.state for schedule in between.values()} == {"active"}  # the old code still lives
        assert set(between) == {"stays", "changes", "goes", "comes"}
        assert between["changes"].when == "every 60 s"
        assert between["changes"].fired > 0
        assert between["changes"].last is not None
        await old.stop()

        async def retired() -> bool:
            return (await akept(app))["goes"].state == "retired"

        await until_async(retired)
        after = await akept(app)
        assert after["goes"].fired >= between["goes"].fired
        assert {name for name, schedule in after.items() if schedule.state == "active"} == {
            "stays",
            "changes",
            "comes",
        }
        # An old Scheduler that begins again while the new one lives, with the version of its code, changes nothing.
        await new.stop()
        back = await start(nursery, version({"goes": 0.1}), page=SCHEDULER)
        again = (await akept(app))["goes"]
        assert (again.state, again.fired >= after["goes"].fired) == ("active", True)
        await back.stop()


async def test_an_old_scheduler_does_not_undo_what_a_newer_version_declares(app: App) -> None:
    def version(number: int, span: float, *names: str) -> App:
        code = App(app.name, broker=app.settings.broker, lease=0.3, schedules_version=number)
        task = nothing(code)
        for name in names:
            code.schedule(task.s(), span, name=name)
        return code

    async with trio.open_nursery() as nursery:
        new = await start(nursery, version(2, 60, "both", "new"), page=SCHEDULER)
        await new.stop()
        old = await start(nursery, version(1, 0.1, "both"), page=SCHEDULER)
        await trio.sleep(1.5)  # several leases, in which it could have done so
        found = await akept(app)
        assert {name: (schedule.state, schedule.when) for name, schedule in found.items()} == {
            "both": ("active", "every 60 s"),
            "new": ("active", "every 60 s"),
        }
        await old.stop()


async def test_a_schedule_moves_to_another_queue_with_its_history(app: App) -> None:
    def version(queue: str) -> App:
        code = App(app.name, broker=app.settings.broker)
        code.schedule(nothing(code, queue=queue).s(), 0.05, name="moves")
        return code

    async with trio.open_nursery() as nursery:
        one = await start(nursery, version("default"), page=SCHEDULER)

        async def fired() -> bool:
            return (await app.schedule.ashow("moves")).fired >= 2

        await until_async(fired)
        before = await app.schedule.ashow("moves")
        two = await start(nursery, version("elsewhere"), page=SCHEDULER)
        after = await app.schedule.ashow("moves")
        assert (after.queue, after.fired >= before.fired) == ("elsewhere", True)
        assert len(await app.schedule.alist()) == 1
        await one.stop()
        await two.stop()


# ---- managed while all runs


async def test_schedules_are_managed_while_all_runs(app: App, redis_client: "redis.Redis") -> None:
    task = nothing(app)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        await app.schedule.aadd(task.s(1), every(0.05), name="often")
        await until(lambda: len(sent(redis_client, app)) >= 3)  # it was told: nothing is polled
        paused = await app.schedule.apause("often")
        assert (paused.state, paused.next) == ("paused", None)
        count = len(sent(redis_client, app))
        await trio.sleep(0.3)
        assert len(sent(redis_client, app)) == count
        changed = await app.schedule.achange("often", every(0.1))
        assert (changed.state, changed.when, changed.fired) == ("paused", "every 0.1 s", paused.fired)
        by_hand = await app.schedule.atrigger("often")
        assert sent(redis_client, app)[-1] == by_hand.id
        resumed = await app.schedule.aresume("often")
        assert (resumed.state, resumed.triggered, resumed.missed) == ("active", 1, 0)
        await until(lambda: len(sent(redis_client, app)) >= count + 3)
        with pytest.raises(Misconfigured, match="is there already"):
            await app.schedule.aadd(task.s(), 5, name="often")
        await app.schedule.aremove("often")
        count = len(sent(redis_client, app))
        await trio.sleep(0.2)
        assert len(sent(redis_client, app)) == count
        with pytest.raises(Misconfigured, match="no schedule 'often'"):
            await app.schedule.ashow("often")
        await one.stop()
    assert redis_client.exists(app.keys.schedules("default"), app.keys.schedule_times("default")) == 0


def test_schedules_are_managed_in_plain_python(app: App) -> None:
    task = nothing(app)
    added = app.schedule.add(task.s(), {"cron": "0 3 * * *"}, name="nightly", misfire="skip", jitter=60)
    assert (added.state, added.origin, added.misfire.policy) == ("active", "runtime", "skip")
    assert app.schedule.pause("nightly").state == "paused"
    assert app.schedule.resume("nightly").state == "active"
    assert app.schedule.trigger("nightly").status().name == "SENT"
    assert [schedule.name for schedule in app.schedule.list()] == ["nightly"]
    assert app.schedule.remove("nightly").triggered == 1
    for when, said in (("0 0 30 2 *", "would never fire"), ("soon", "crontab")):
        with pytest.raises(Misconfigured, match=said):
            app.schedule.add(task.s(), when)
    with pytest.raises(Misconfigured, match="Unexpected"):
        app.schedule.add(task.s(), 5, overlaps="skip")


async def test_schedule_fires_at_its_new_times_at_once_when_they_are_changed(
    app: App, redis_client: "redis.Redis"
) -> None:
    task = nothing(app)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        await app.schedule.aadd(task.s(), "@yearly", name="often")
        changed = await app.schedule.achange("often", every(0.05))
        assert (changed.when, changed.origin) == ("every 0.05 s", "runtime")
        await until(lambda: len(sent(redis_client, app)) >= 2)
        yearly = await app.schedule.achange("often", {"cron": "0 3 1 1 *", "timezone": "Europe/Berlin"})
        assert (yearly.fired >= 2, yearly.when) == (True, "cron 0 3 1 1 * Europe/Berlin")
        await one.stop()


def test_times_of_a_schedule_are_changed_only_where_that_lasts(app: App) -> None:
    task = nothing(app)
    app.schedule.add(task.s(), every(60), name="added")
    with pytest.raises(Misconfigured, match="no schedule 'aded'"):
        app.schedule.change("aded", 5)
    for when, said in (("0 0 30 2 *", "would never fire"), ("soon", "crontab")):
        with pytest.raises(Misconfigured, match=said):
            app.schedule.change("added", when)
    assert app.schedule.show("added").when == "every 60 s"


async def test_times_of_a_declared_schedule_are_changed_in_its_code(app: App) -> None:
    nothing(app, schedule="@yearly")
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        (declared,) = await app.schedule.alist()
        with pytest.raises(Misconfigured, match="declared in code: change it there"):
            await app.schedule.achange(declared.name, 5)
        assert (await app.schedule.ashow(declared.name)).when == declared.when
        await one.stop()


async def test_one_that_was_added_for_once_is_gone_when_it_has_fired(
    app: App, redis_client: "redis.Redis"
) -> None:
    task = nothing(app)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        await app.schedule.aadd(task.s(), datetime.now(UTC) + timedelta(seconds=0.2), name="once")
        await until(lambda: len(sent(redis_client, app)) == 1)
        await one.stop()
    assert await app.schedule.alist() == []


# ---- overlap, misfires


@pytest.mark.parametrize("overlap", ["skip", "queue"])
async def test_a_job_that_has_not_ended_holds_the_next_ones_up(app: App, overlap: str) -> None:
    running, most, ran, go_on = 0, 0, 0, trio.Event()

    @app.task(schedule=Periodic(0.1, overlap=overlap))  # type: ignore[arg-type]
    async def slow() -> None:
        nonlocal running, most, ran
        running, ran = running + 1, ran + 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    async with trio.open_nursery() as nursery, working(app):
        one = await start(nursery, app, page=SCHEDULER)

        async def skipped() -> bool:
            return (await app.schedule.ashow(slow.name)).skipped >= 2

        await until_async(skipped)
        await until(lambda: ran >= 1)
        assert (ran, most) == (1, 1)
        waits = (await app.schedule.ashow(slow.name)).waiting is not None
        assert waits is (overlap == "queue")
        go_on.set()
        await until(lambda: ran >= 3)
        await one.stop()


async def test_what_nobody_published_in_time_is_told_and_counted(
    app: App, redis_client: "redis.Redis"
) -> None:
    task = nothing(app)
    await app.schedule.aadd(task.s(), every(0.1), name="often", misfire=Misfire("skip", after=0.25))
    await trio.sleep(1.0)
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER)
            await until(lambda: bool(lines.of("schedule:missed")))
            await one.stop()
    state = await app.schedule.ashow("often")
    assert state.missed >= 5
    assert lines.of("schedule:missed")[0]["count"] >= 5
    ids = sent(redis_client, app)
    assert len(ids) == len(set(ids)) == state.fired


async def test_a_task_with_a_key_has_one_live_job_whatever_the_clock_says(
    app: App, redis_client: "redis.Redis"
) -> None:
    task = nothing(app)
    await app.schedule.aadd(task.options(key="one").s(), every(0.05), name="keyed")
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)

        async def several() -> bool:
            return (await app.schedule.ashow("keyed")).fired >= 4

        await until_async(several)
        await one.stop()
    assert len(sent(redis_client, app)) == 1


async def test_jobs_of_a_schedule_have_their_priority(app: App, redis_client: "redis.Redis") -> None:
    task, queue = nothing(app), app.queue("default")
    await app.schedule.aadd(task.options(priority="high").s(), every(0.05), name="urgent")
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        await until(lambda: redis_client.xlen(queue.high) >= 2)
        await one.stop()
        async with working(app):
            await until(lambda: redis_client.xlen(queue.high) == 0)
    assert sent(redis_client, app) == []


async def test_schedules_fire_again_soon_after_redis_was_away(app: App, redis_client: "redis.Redis") -> None:
    task = nothing(app)
    await app.schedule.aadd(task.s(), every(0.1), name="often")
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=SCHEDULER)
        await until(lambda: len(sent(redis_client, app)) >= 2)
        for connection in redis_client.client_list():
            if connection["name"].startswith("celery5:"):
                redis_client.client_kill_filter(_id=connection["id"])
        count = len(sent(redis_client, app))
        await until(lambda: len(sent(redis_client, app)) >= count + 3)
        await one.stop()
    ids = sent(redis_client, app)
    assert len(ids) == len(set(ids))
