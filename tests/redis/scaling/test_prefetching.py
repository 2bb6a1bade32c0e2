"""Prefetching: short jobs are read many at a time, long ones one for one, so that other workers get their share."""

import threading
import time

import pytest
import redis
import trio

from celery5 import App, JobState, agather, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.scaling.prefetch import HORIZON
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import held, start, until, working


@pytest.fixture
def app(url: str, app_name: str) -> App:
    """An application whose workers run two jobs at once."""
    return App(app_name, broker=url, lease=1.0, concurrency=2, cpu_slots=2)


async def test_long_jobs_are_shared_and_no_worker_holds_one_that_it_does_not_run(
    app: App, redis_client: "redis.Redis"
) -> None:
    go, running = trio.Event(), 0

    @app.task
    async def long() -> None:
        nonlocal running
        running += 1
        await go.wait()

    async with trio.open_nursery() as nursery:
        two = [await start(nursery, app) for _ in range(2)]
        sent = await app.asend_many([long.s() for _ in range(6)])
        await until(lambda: running == 4)
        await trio.sleep(0.2)  # time enough to read one too many
        assert sorted(held(redis_client, app).values()) == [2, 2]
        assert running == 4
        go.set()
        await agather(sent)
        for worker in two:
            await worker.stop()


async def test_long_jobs_after_many_short_ones_are_given_back_for_others(
    app: App, redis_client: "redis.Redis"
) -> None:
    go, running, taken = trio.Event(), 0, 0

    @app.task
    async def job(long: bool) -> None:
        nonlocal running, taken
        if long:
            running += 1
            taken = max(taken, *held(redis_client, app).values())  # before it has given any back
            await go.wait()

    async with trio.open_nursery() as nursery:
        first = await start(nursery, app)
        await agather(await app.asend_many([job.s(False) for _ in range(600)]))
        sent = await app.asend_many([job.s(True) for _ in range(40)])
        await until(lambda: running == 2)
        assert taken > 2  # it took them for short ones
        second = await start(nursery, app)
        await until(lambda: running == 4)
        await until(lambda: sorted(held(redis_client, app).values()) == [2, 2])
        go.set()
        await agather(sent)
        await first.stop()
        await second.stop()


def counted(client: "redis.Redis") -> dict[str, int]:
    """How often each command was called on this server so far."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}


def on_the_wire(counts: dict[str, int]) -> int:
    """Commands that came over a connection and not out of a script, as far as they are a worker's."""
    return sum(counts.get(name, 0) for name in ("evalsha", "eval", "xreadgroup", "ping"))


def test_many_short_jobs_cost_few_trips(own_staff: Staff, own_server: EmbeddedServer) -> None:
    app = own_staff.app
    sent = [result for _ in range(10) for result in app.send_many([app.signature("nap", 0.0)] * 300)]
    with redis.Redis.from_url(own_server.url) as client:
        before = on_the_wire(counted(client))
        own_staff.start("--burst", ready=0).wait(30)
        trips = on_the_wire(counted(client)) - before
    assert len(gather(sent, timeout=30)) == 3000
    assert trips / 3000 <= 0.2


async def test_a_queue_with_little_room_does_not_slow_the_reading_of_another(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, cpu_slots=2)

    @app.task
    async def short() -> None: ...

    @app.task(queue="threads")
    def blocking() -> None: ...

    with redis.Redis.from_url(own_server.url) as client:
        async with working(app):
            await (await short.adelay()).aget()  # how long a job takes is known from now on
            before = counted(client)["xreadgroup"]
            sent = [result for _ in range(5) for result in await app.asend_many([short.s()] * 200)]
            await agather(sent)
            reads = counted(client)["xreadgroup"] - before
    assert reads / len(sent) <= 0.2


async def test_queues_that_share_little_room_take_turns(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url, cpu_slots=1)
    order: list[str] = []

    def blocking(queue: str) -> None:
        order.append(queue)
        time.sleep(HORIZON)  # or else all of them are read ahead

    tasks = [app.task(name=queue, queue=queue)(blocking) for queue in "abc"]
    sent = [result for task in tasks for result in await app.asend_many([task.s(task.name)] * 2)]
    async with working(app):
        await agather(sent)
    assert {*order[:3]} == {*order[3:]} == {*"abc"}


def test_an_idle_worker_sends_less_than_one_command_a_second(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    own_staff.start()
    with redis.Redis.from_url(own_server.url) as client:
        wait_until(lambda: counted(client).get("xreadgroup", 0) >= 1)
        before, since = counted(client), time.monotonic()
        trio.run(trio.sleep, 6)
        after, seconds = counted(client), time.monotonic() - since
    ours = {name: after[name] - before.get(name, 0) for name in after if name != "info"}
    inside = (
        "time",
        "zscore",
        "zadd",
        "zrem",
        "set",
        "zcount",
        "zrange",
        "exists",
        "xinfo|consumers",
        "xinfo|groups",
        "xpending",
        "zcard",
        "hkeys",
        "hgetall",
        "get",
        *("hlen", "llen", "pexpire", "pttl", "xlen", "zrangebyscore", "zremrangebyscore"),
    )  # what renew_lease.lua, list_overrides.lua and announce_code.lua call: one command of ours each
    sent = sum(count for name, count in ours.items() if name not in inside)
    assert sent <= seconds, {name: count for name, count in ours.items() if count and name not in inside}


async def test_async_jobs_behind_jobs_for_threads_do_not_wait_for_a_thread(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, concurrency=5, cpu_slots=2, grace_period=1.0)
    go = threading.Event()

    @app.task
    def heavy() -> None:
        go.wait(30)

    @app.task
    async def light(n: int) -> int:
        return n

    slow = await app.asend_many([heavy.s() for _ in range(40)])
    quick = await app.asend_many([light.s(n) for n in range(30)])
    try:
        async with working(app):
            try:
                assert await agather(quick, timeout=30) == list(range(30))
                # So it goes on: what comes later does not wait, either.
                assert await (await light.adelay(7)).aget(timeout=30) == 7
                assert sum([await result.astatus() is JobState.SUCCESS for result in slow]) == 0
            finally:
                go.set()
            assert not any(await agather(slow, timeout=30))
    finally:
        go.set()


async def test_what_a_full_worker_looked_behind_is_run_by_one_that_has_room(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, concurrency=5, cpu_slots=1, grace_period=1.0)
    go, running = threading.Event(), 0

    @app.task
    def heavy() -> None:
        nonlocal running
        running += 1
        go.wait(120)

    @app.task
    async def light() -> None: ...

    async with trio.open_nursery() as nursery:
        first = await start(nursery, app)
        try:
            slow = await app.asend_many([heavy.s() for _ in range(4)])
            assert await agather(await app.asend_many([light.s()] * 3), timeout=30) == [None] * 3
            others = [await start(nursery, app) for _ in range(3)]
            await until(lambda: running == 4)
        finally:
            go.set()
        assert not any(await agather(slow, timeout=30))
        for worker in (first, *others):
            await worker.stop()
