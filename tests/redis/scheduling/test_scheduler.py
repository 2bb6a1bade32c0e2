"""Scheduler: the process itself: it comes up, says that it is there, does what it is told, and ends."""

import signal
import sys
from pathlib import Path
from typing import Any, cast

import redis
import trio

from celery5 import App
from celery5.broker.calls import cluster
from celery5.health import HealthCheck
from celery5.health.health_check import CheckContext, CheckFunction
from celery5.processes import scheduler
from tests.redis.commands.staff import _TARGET, Employee, Staff, wait_until
from tests.redis.worker.workers import Lines, start, until, until_async, working


def employed(staff: Staff, *flags: str, **settings: Any) -> Employee:
    """A Scheduler in its own process, once it is up."""
    one = staff.launch([sys.executable, "-m", "celery5", *_TARGET, "scheduler", "start", *flags], **settings)
    wait_until(lambda: bool(one.lines("scheduler:started")) or one.process.poll() is not None)
    assert one.process.poll() is None, one.output.read_text()
    return one


async def living(app: App) -> tuple[str, ...]:
    """The Schedulers that live."""
    return await app.aperform(cluster.list_live_processes(app.keys, "scheduler"))


async def test_schedulers_say_that_they_live_and_one_that_ends_says_so(app: App) -> None:
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER, name="one")
        two = await start(nursery, app, page=scheduler.SCHEDULER, name="two")
        assert [process.rpartition(":")[0] for process in await living(app)] == ["one", "two"]
        await one.stop()
        assert [process.rpartition(":")[0] for process in await living(app)] == ["two"]
        await two.stop()
    assert await living(app) == ()


async def test_it_does_what_it_is_told_by_its_inbox(app: App) -> None:
    async with trio.open_nursery() as nursery:
        with Lines() as lines:
            one = await start(nursery, app, page=scheduler.SCHEDULER, name="clock")
            (pong,) = await app.control.aping(to="clock")
            assert pong.ok
            assert pong.answer["kind"] == "scheduler"
            (stats,) = await app.control.asend("stats", to="clock")
            assert stats.answer["steps"]["presence"] == {"state": "up"}
            (refused,) = await app.control.asend("active", to="clock")
            assert "not known here" in refused.why
            (told,) = await app.control.asend("shutdown", to="clock")
            assert told.ok
            with trio.fail_after(30):
                await one.done.wait()
        assert lines.of("scheduler:boot-started")
        await one.stop()


def test_killed_process_is_listed_as_lost_for_an_hour(staff: Staff, redis_client: "redis.Redis") -> None:
    key = staff.app.keys.live_processes("scheduler")
    orderly, killed = employed(staff, lease=1), employed(staff, lease=1)
    assert redis_client.zcard(key) == 2
    orderly.signal(signal.SIGTERM)
    assert orderly.wait() == 0
    assert redis_client.zcard(key) == 1
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: staff.app.perform(cluster.list_live_processes(staff.app.keys, "scheduler")) == ())
    assert len(staff.app.perform(cluster.list_lost_processes(staff.app.keys, "scheduler"))) == 1
    assert 0 < cast("Any", redis_client.pttl(key)) <= 3_700_000


async def test_a_queue_that_only_schedules_publish_to_is_known(app: App) -> None:
    task = app.task(name="nothing")(_nothing)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        await app.schedule.aadd(task.options(queue="nights").s(), 0.05, name="often")

        async def known() -> bool:
            state = (await app.ainfo()).queues.get("nights")
            return state is not None and state.waiting > 0

        await until_async(known)
        await one.stop()


async def test_a_queue_that_a_schedule_was_triggered_for_is_known(app: App) -> None:
    task = app.task(name="nothing")(_nothing)
    await app.schedule.aadd(task.options(queue="nights").s(), 3600, name="often")
    assert "nights" not in (await app.ainfo()).queues
    await app.schedule.atrigger("often")
    assert (await app.ainfo()).queues["nights"].waiting == 1


async def test_it_lives_through_a_redis_that_forgets_it(app: App, redis_client: "redis.Redis") -> None:
    app.configure(lease=0.3)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        redis_client.delete(app.keys.live_processes("scheduler"))

        async def back() -> bool:
            return len(await living(app)) == 1

        await until_async(back)
        await one.stop()


async def test_workers_learn_of_expired_checks_with_and_without_scheduler(
    url: str, app_name: str, tmp_path: Path
) -> None:
    app = App(app_name, broker=url, keys=str(tmp_path / "keys"), own_checks=False)
    looks: list[float] = []

    @app.health_check(period=0.4)
    async def bank() -> bool:
        looks.append(trio.current_time())
        return True

    app.task(name="nothing")(_nothing)
    app.control.keyring.get_signer()

    async def told() -> int:
        (stats,) = await app.control.asend("stats", to="w")
        return int(stats.answer["commands"].get("done", 0))

    async with working(app, name="w"), trio.open_nursery() as nursery:
        schedulers = [await start(nursery, app, page=scheduler.SCHEDULER, name=f"s{n}") for n in range(3)]
        before, asked = await told(), trio.current_time()
        await trio.sleep(4)
        # One command in each period, whoever of the three sends it; besides, there is our own.
        orders, periods = await told() - before - 1, (trio.current_time() - asked) / 0.4
        assert 3 <= orders <= periods + 1
        assert sum(asked < look for look in looks) <= orders + 2  # the timer does not look as well
        for process in schedulers:
            await process.stop()
        count = len(looks)
        await until(lambda: len(looks) >= count + 3)
    app.close()


async def test_without_an_inbox_nobody_is_told_and_the_timer_looks(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(inbox=False)
    looks: list[float] = []

    @app.health_check(period=0.1)
    async def bank() -> bool:
        looks.append(trio.current_time())
        return True

    app.task(name="nothing")(_nothing)
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        await until(lambda: len(looks) >= 4)
        assert not redis_client.exists(app.keys.check_notice("bank"), app.keys.inbox("w"))
        await one.stop()


class Probe(HealthCheck):
    """A check of one worker that nobody has subscribed to."""

    looks = 0

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        del function, context
        self.looks += 1
        return True


async def test_a_local_check_without_functions_runs_by_the_timer_and_is_not_announced(
    app: App, redis_client: "redis.Redis"
) -> None:
    probe, shared = Probe("probe", period=0.2), Probe("shared", period=0.2, scope="global")
    app.task(name="nothing", checks=[probe, shared])(_nothing)
    announced: set[str] = set()

    def has_looked() -> bool:
        names = ("probe", "shared")
        announced.update(name for name in names if redis_client.exists(app.keys.check_notice(name)))
        return probe.looks >= 5 and "shared" in announced

    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        await until(has_looked)
        await one.stop()
    assert announced == {"shared"}


async def _nothing() -> None:
    pass
