"""Imposed: limits from outside and suspensions hold for all workers as soon as these hear of it, and outlive them."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, Misconfigured, RetryPolicy, agather
from celery5.broker.call import Call
from celery5.broker.calls import limits
from celery5.errors import UnknownTask
from celery5.events.event import Event
from celery5.health import BreakerPolicy
from celery5.processes.router import ROUTER
from celery5.protocol.limits import Suspension
from celery5.tasks import Task
from tests.redis.limits.test_limits import assert_in_time
from tests.redis.worker.workers import Lines, entries, start, until, until_async, working


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose workers have room for many."""
    policy = RetryPolicy(max_retries=2, backoff=0.01, jitter=False)
    one = App(app_name, broker=url, lease=2.0, concurrency=20, cpu_slots=4, retry_policy=policy)
    yield one
    one.perform(Call(("DEL", one.keys.limits, one.keys.suspended), int))
    one.close()


async def are(sent: list[AsyncResult[None]], state: JobState) -> bool:
    """Whether all are in that state."""
    return all([await job.astatus() is state for job in sent])


async def suspend(app: App, task: Task[..., Any], **said: str) -> None:
    """Suspend a task, and wait until the worker has heard of it: what it reads before that may begin."""
    with Lines() as lines:
        assert await app.limits.asuspend(task, **said)
        await until(lambda: bool(lines.of("task:suspended")))


async def test_a_suspended_task_is_held_and_goes_on_when_it_is_resumed(app: App) -> None:
    done: list[int] = []

    @app.task
    async def mail(n: int) -> None:
        done.append(n)

    @app.task
    async def other() -> None:
        pass

    async with working(app):
        await suspend(app, mail, why="the provider is down", by="ann")
        sent = await app.asend_many([mail.s(n) for n in range(20)])
        await until_async(lambda: are(sent, JobState.HELD), within=30)
        await (await other.adelay()).aget(timeout=30)
        assert done == []
        told = (await app.limits.alist())[mail.name]
        assert (told.suspended, told.why, told.suspended_by) == (True, "the provider is down", "ann")
        assert await app.limits.aresume(mail)
        await agather(sent)
        assert not await app.limits.aresume(mail)
    assert done == list(range(20))


async def test_a_scheduled_job_of_a_suspended_task_is_held_when_it_falls_due(app: App) -> None:
    done: list[int] = []

    @app.task
    async def mail(n: int) -> None:
        done.append(n)

    async with working(app):
        await suspend(app, mail)
        later = [await mail.options(countdown=0.05 * n).adelay(n) for n in range(1, 4)]
        await until_async(lambda: are(later, JobState.HELD), within=30)
        assert done == []
        assert await app.limits.aresume(mail)
        await agather(later)
    assert sorted(done) == [1, 2, 3]


async def test_what_a_worker_had_read_and_not_begun_is_held_too(app: App) -> None:
    go, begun = trio.Event(), 0

    @app.task
    async def slow() -> None:
        nonlocal begun
        begun += 1
        await go.wait()

    @app.task
    async def quick() -> None:
        pass

    async with working(app):
        await agather(await app.asend_many([quick.s() for _ in range(200)]))  # so that many are read ahead
        sent = await app.asend_many([slow.s() for _ in range(60)])
        await until(lambda: begun == 20)
        await app.limits.asuspend(slow)
        await until_async(lambda: _held(app, 40))
        go.set()
        await trio.sleep(0.2)
        assert begun == 20
        await app.limits.aresume(slow)
        await agather(sent)


async def _held(app: App, count: int) -> bool:
    return (await app.ainfo()).queues["default"].held >= count


async def test_a_suspension_outlives_workers(app: App) -> None:
    ran = trio.Event()

    @app.task
    async def mail() -> None:
        ran.set()

    await app.limits.asuspend(mail)
    sent = await mail.adelay()
    # Each begins with a job that waits: it must not be let in before it is known that it may not.
    for _ in range(8):
        async with working(app):
            await until_async(lambda: are([sent], JobState.HELD), within=30)
    assert not ran.is_set()
    await app.limits.aresume(mail)
    async with working(app):
        await sent.aget(timeout=30)


async def test_an_imposed_limit_beats_that_of_the_task_until_it_is_lifted(app: App) -> None:
    now = most = 0

    @app.task(limit=6)
    async def some() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await trio.sleep(0.02)
        now -= 1

    async with trio.open_nursery() as nursery:
        two = [await start(nursery, app) for _ in range(2)]
        await app.limits.aset(some, 2)
        await trio.sleep(0.1)
        await agather(await app.asend_many([some.s() for _ in range(40)]))
        assert most == 2
        await app.limits.alift(some)
        await trio.sleep(0.1)
        await agather(await app.asend_many([some.s() for _ in range(60)]))
        assert most == 6
        for worker in two:
            await worker.stop()


async def test_what_runs_already_counts_when_a_limit_is_imposed(app: App) -> None:
    go, begun = trio.Event(), 0

    @app.task
    async def some() -> None:
        nonlocal begun
        begun += 1
        await go.wait()

    async with working(app):
        first = await app.asend_many([some.s() for _ in range(3)])
        await until(lambda: begun == 3)
        await app.limits.aset(some, 3)
        await trio.sleep(0.1)
        sent = await app.asend_many([some.s() for _ in range(5)])
        await until_async(lambda: are(sent, JobState.HELD), within=30)
        assert begun == 3
        go.set()
        await agather([*first, *sent])


async def test_a_limit_that_is_raised_lets_others_in_at_once(app: App) -> None:
    go, begun = trio.Event(), 0

    @app.task(limit=1)
    async def some() -> None:
        nonlocal begun
        begun += 1
        await go.wait()

    async with working(app):
        sent = await app.asend_many([some.s() for _ in range(10)])
        await until(lambda: begun == 1)
        await app.limits.aset(some, 5)
        await until(lambda: begun == 5, within=30)
        go.set()
        await agather(sent)


async def test_the_imposed_limit_0_rejects_what_waits_and_what_comes(
    app: App, redis_client: "redis.Redis"
) -> None:
    go = trio.Event()

    @app.task(limit=1)
    async def some() -> None:
        await go.wait()

    async with working(app):
        sent = await app.asend_many([some.s() for _ in range(10)])
        await until_async(lambda: are(sent[1:], JobState.HELD))
        await app.limits.aset(some, 0)
        await until_async(lambda: are(sent[1:], JobState.DEAD))
        late = await some.adelay()
        await until_async(lambda: are([late], JobState.DEAD))
        go.set()
        await sent[0].aget(timeout=30)
    dead = entries(redis_client, app.queue("default").dead)
    assert all(b'"reason":"rejected-by-limit"' in dead_job[b"document"] for dead_job in dead)


async def test_of_a_suspended_task_nothing_is_rejected(app: App) -> None:
    @app.task(limit=0)
    async def never() -> None:
        pass

    await app.limits.asuspend(never)
    async with working(app):
        sent = await never.adelay()
        await until_async(lambda: are([sent], JobState.HELD), within=30)
        await app.limits.aresume(never)
        await until_async(lambda: are([sent], JobState.DEAD))


async def test_an_imposed_rate_holds(app: App) -> None:
    times: list[float] = []

    @app.task
    async def mail() -> None:
        times.append(time.time())

    await app.limits.aset(mail, "5/1s")  # before there is a worker, so that it knows when it begins
    async with working(app):
        since = time.time()
        await agather(await app.asend_many([mail.s() for _ in range(17)]))
    assert_in_time(times, most=5, since=since)


async def test_a_breaker_suspends_its_task_for_all_workers_if_so_set(url: str, app_name: str) -> None:
    policy = BreakerPolicy(threshold=2, reset=0.5)
    app = App(
        app_name,
        broker=url,
        lease=2.0,
        breaker=policy,
        retry_policy={"max_retries": 0},
        breaker_suspends=True,
    )
    works = False

    @app.task
    async def shaky() -> None:
        if not works:
            raise OSError("away")

    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            two = [await start(nursery, app) for _ in range(2)]
            failing = await app.asend_many([shaky.s() for _ in range(4)])
            await until(lambda: len(lines.of("task:suspended")) >= 2)
            works = True
            sent = await app.asend_many([shaky.s() for _ in range(6)])
            await agather(sent)
            for worker in two:
                await worker.stop()
    assert "away" in lines.of("task:suspended")[0]["why"]
    assert lines.of("task:resumed")
    assert failing
    assert await app.limits.alist() == {}
    app.close()


async def test_a_task_is_suspended_and_resumed_by_events(app: App) -> None:
    ran = trio.Event()

    @app.event
    class BankIsDown(Event):
        why: str

    @app.event
    class BankIsUp(Event):
        pass

    @app.task
    async def charge() -> None:
        ran.set()

    @BankIsDown.subscribe
    @app.task
    async def stop_charging(why: str) -> None:
        await app.limits.asuspend(charge, why=why, by="the bank")

    @BankIsUp.subscribe
    @app.task
    async def go_on_charging() -> None:
        await app.limits.aresume(charge)

    async with trio.open_nursery() as nursery:
        both = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        await BankIsDown.adelay(why="no answer")
        await until_async(lambda: is_suspended(app, charge.name), within=30)
        sent = await charge.adelay()
        await until_async(lambda: are([sent], JobState.HELD), within=30)
        assert not ran.is_set()
        await BankIsUp.adelay()
        await sent.aget(timeout=30)
        for worker in both:
            await worker.stop()


async def is_suspended(app: App, task: str) -> bool:
    """Whether a task is suspended."""
    told = (await app.limits.alist()).get(task)
    return told is not None and told.suspended and told.why == "no answer"


async def test_what_was_suspended_by_an_operator_is_not_resumed_by_a_breaker(url: str, app_name: str) -> None:
    policy = BreakerPolicy(threshold=1, reset=0.1)
    app = App(app_name, broker=url, breaker=policy, retry_policy={"max_retries": 0}, breaker_suspends=True)
    begun, update_block = trio.Event(), trio.Event()

    @app.task
    async def shaky() -> None:
        begun.set()
        await update_block.wait()
        raise OSError("away")

    with Lines() as lines:
        async with working(app):
            await shaky.adelay()
            await begun.wait()
            await app.limits.asuspend(shaky, by="ann")
            await until(lambda: bool(lines.of("task:suspended")))
            update_block.set()
            await until(lambda: bool(lines.of("breaker:tripped")))
            await app.limits.aset(shaky, 5)
            await until(lambda: bool(lines.of("task:limited")))  # whatever the breaker does it has done
            assert (await app.limits.alist())[shaky.name].suspended_by == "ann"
            assert not lines.of("task:resumed")
    await app.limits.aresume(shaky)
    await app.limits.alift(shaky)
    app.close()


def test_a_breaker_suspends_only_what_is_as_it_was_seen(app: App) -> None:
    def instead(what: str, before: str) -> bool:
        seen = Suspension(by=before) if before else None
        trip = limits.suspend_if_unchanged(app.keys, "mail", Suspension(by=what), seen)
        return app.perform(trip)

    assert instead("one", "")
    assert not instead("two", ""), "somebody else was first"
    assert not instead("two", "three")
    assert instead("two", "one")
    assert app.perform(limits.list_overrides(app.keys)).suspended == {"mail": Suspension(by="two")}


async def test_what_no_message_told_of_is_found_at_a_beat(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def mail() -> None:
        pass

    with Lines() as lines:
        async with working(app):
            redis_client.hset(app.keys.suspended, mail.name, msgspec.json.encode(Suspension(by="ann")))
            await until(lambda: bool(lines.of("task:suspended")))
            redis_client.delete(app.keys.suspended)
            await until(lambda: bool(lines.of("task:resumed")))


def test_what_makes_no_sense_is_refused(app: App) -> None:
    @app.task(name="mail")
    def mail() -> None: ...

    with pytest.raises(Misconfigured, match="rate '5'"):
        app.limits.set(mail, "5")
    with pytest.raises(Misconfigured, match="-1"):
        app.limits.set(mail, -1)
    with pytest.raises(UnknownTask, match="mial"):
        app.limits.suspend("mial")
    assert app.limits.suspend("mail")
    assert app.limits.list()["mail"].suspended
    assert app.limits.resume("mail")
    assert app.limits.set("mail", 3)
    assert app.limits.list()["mail"].limit == 3
    assert app.limits.lift("mail")
    assert app.limits.list() == {}
