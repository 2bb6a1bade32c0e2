"""Limits: jobs of a limited task wait in Redis and run as soon as a slot is free, in order, on live workers."""

import itertools
import time
from collections.abc import Iterator

import pytest
import redis
import trio

from celery5 import App, JobState, RetryPolicy, agather
from celery5.bootsteps.boot import BootGraph, Step
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.limits import Limit, Range, Rate
from celery5.logs.log import Log
from celery5.processes.process_parts import Incarnation
from celery5.processes.worker import WorkerOptions, make_incarnation_values
from celery5.processes.worker_parts import WorkerParts
from celery5.protocol.job.states import Priority
from celery5.services.process.reloader import NextIncarnation
from celery5.services.worker.consumer import Consumer
from celery5.wiring import build
from tests.night import NIGHTLY
from tests.redis.worker.workers import Lines, entries, held, start, until, until_async, working


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose workers have room for many."""
    policy = RetryPolicy(max_retries=2, backoff=0.01, jitter=False)
    one = App(app_name, broker=url, lease=1.0, concurrency=20, cpu_slots=4, retry_policy=policy)
    yield one
    one.close()


class Crowd:
    """Who runs now, how many did at most, and in which order they began."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.order: list[int] = []
        self.times: list[float] = []

    async def pass_by(self, n: int, seconds: float = 0.01) -> int:
        self.order.append(n)
        self.times.append(time.time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await trio.sleep(seconds)
        finally:
            self.now -= 1
        return n


async def test_no_more_run_at_once_than_may_in_the_order_they_were_sent(
    app: App, redis_client: "redis.Redis"
) -> None:
    crowd = Crowd()

    @app.task(limit=1)
    async def one(n: int) -> int:
        return await crowd.pass_by(n)

    async with working(app):
        sent = await app.asend_many([one.s(n) for n in range(50)])
        assert await agather(sent) == list(range(50))
    assert (crowd.most, crowd.order) == (1, list(range(50)))


async def test_a_limit_holds_for_all_workers_together(app: App) -> None:
    crowd = Crowd()

    @app.task(limit=3)
    async def some(n: int) -> int:
        return await crowd.pass_by(n)

    async with trio.open_nursery() as nursery:
        three = [await start(nursery, app) for _ in range(3)]
        sent = await app.asend_many([some.s(n) for n in range(90)])
        await agather(sent)
        for worker in three:
            await worker.stop()
    assert crowd.most == 3


async def test_a_limit_per_worker_holds_for_each(app: App) -> None:
    crowd = Crowd()

    @app.task(limit=Limit(2, per="worker"))
    async def some(n: int) -> int:
        return await crowd.pass_by(n, 0.02)

    async with trio.open_nursery() as nursery:
        three = [await start(nursery, app) for _ in range(3)]
        await agather(await app.asend_many([some.s(n) for n in range(60)]))
        for worker in three:
            await worker.stop()
    assert 4 <= crowd.most <= 6


async def test_a_limit_per_key_holds_for_each_key(app: App) -> None:
    crowds = {name: Crowd() for name in ("ann", "bob c", "100%")}

    @app.task(limit=1, concurrency_key="customer")
    async def charge(customer: str, n: int) -> int:
        return await crowds[customer].pass_by(n)

    async with trio.open_nursery() as nursery:
        two = [await start(nursery, app) for _ in range(2)]
        jobs = [charge.s(name, n) for n in range(20) for name in crowds]
        await agather(await app.asend_many(jobs))
        for worker in two:
            await worker.stop()
    for crowd in crowds.values():
        assert (crowd.most, crowd.order) == (1, list(range(20)))
    times = [time for crowd in crowds.values() for time in crowd.times]
    assert min(b - a for a, b in itertools.pairwise(sorted(times))) < 0.01  # those of different keys overlap


async def test_who_waits_is_held_in_redis_and_not_by_the_worker(
    app: App, redis_client: "redis.Redis"
) -> None:
    go = trio.Event()

    @app.task(limit=1)
    async def one() -> None:
        await go.wait()

    async with working(app):
        sent = await app.asend_many([one.s() for _ in range(30)])
        await until_async(lambda: _is(sent[-1], JobState.HELD))
        assert sum(held(redis_client, app).values()) == 1
        assert [await job.astatus() for job in sent].count(JobState.HELD) == 29
        go.set()
        await agather(sent)


class Parts:
    """The parts of a worker that are looked at here."""

    def __init__(self, *, steps: tuple[Step, ...], consumer: Consumer) -> None:
        self.boot = BootGraph(steps=steps)
        self.consumer = consumer


async def test_stopping_worker_begins_no_job_that_its_limit_holds(app: App) -> None:
    begun, go, log = list[int](), trio.Event(), Log(worker="w", app=app.name)

    @app.task(limit=1)
    async def one(n: int) -> None:
        begun.append(n)
        await go.wait()

    incarnation = Incarnation("w", log, trio.Event(), NextIncarnation())
    parts = build(Parts, WorkerParts, *make_incarnation_values(app, WorkerOptions(), incarnation))
    async with trio.open_nursery() as nursery:
        await nursery.start(parts.boot.run)
        sent = await app.asend_many([one.s(n) for n in range(3)])
        await until_async(lambda: _is(sent[-1], JobState.HELD))
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await until(lambda: parts.consumer.is_stopping)
            go.set()
    log.finish()
    assert begun == [0]
    assert [await job.astatus() for job in sent] == [JobState.SUCCESS, JobState.HELD, JobState.HELD]


async def _is(result: object, state: JobState) -> bool:
    return await result.astatus() is state  # type: ignore[attr-defined]


async def test_the_next_one_begins_at_once_though_thousands_stand_on_the_stream(app: App) -> None:
    app.configure(lease=60.0)  # or a machine that stands still has the first one run twice
    crowd, go, so_far, begun = Crowd(), trio.Event(), 0, list[int]()

    @app.task(limit=1)
    async def one(n: int) -> int:
        begun.append(so_far)
        await go.wait()
        return await crowd.pass_by(n, 0.01)

    @app.task
    async def other() -> None:
        nonlocal so_far
        so_far += 1
        await trio.sleep(0.02)

    async with working(app):
        first = await app.asend_many([one.s(n) for n in range(10)])
        await until(lambda: len(begun) == 1)
        others = await app.asend_many([other.s() for _ in range(4000)])
        begun[0] = so_far  # those that went by while they were sent do not count
        go.set()
        await agather(first)
        await agather(others)
    # What the worker had in hand may go before. Behind the others the second one would be after all of them.
    passed = [after - before for before, after in itertools.pairwise(begun)]
    assert max(passed) < 2000, passed
    assert crowd.order == list(range(10))


async def test_a_rate_is_never_exceeded_and_used_to_the_full(app: App) -> None:
    app.configure(lease=120.0)  # nobody is let through by a beat
    crowd, sent = Crowd(), time.time()

    @app.task(limit=1, rate_limit="10/1s")
    async def mail(n: int) -> int:
        return await crowd.pass_by(n, 0.3)

    async with trio.open_nursery() as nursery:
        two = [await start(nursery, app) for _ in range(2)]
        await agather(await app.asend_many([mail.s(n) for n in range(35)]))
        for worker in two:
            await worker.stop()
    assert_in_time(crowd.times, most=10, since=sent)
    assert max(crowd.times) - sent < 30
    assert crowd.most > 1  # a limit does not count where there is a rate


def assert_in_time(begins: list[float], *, most: int, since: float) -> None:
    """None began before a rate of so many in a second, used from `since` on, had room for it. The time between two
    begins says nothing: who was let through may begin a moment later, and the next one at once."""
    assert all(at - since >= n // most for n, at in enumerate(sorted(begins)))


async def test_a_job_that_missed_the_moment_of_its_rate_is_no_attempt_and_no_warning(app: App) -> None:
    slack = Rate("2/s").slack

    @app.task(rate_limit="2/s")
    async def mail(n: int) -> int:
        time.sleep(slack * 2)  # noqa: ASYNC251  the other one was let through with it, and cannot begin meanwhile
        return n

    with Lines() as lines:
        sent = await app.asend_many([mail.s(n) for n in range(2)])
        async with working(app) as worker:
            await agather(sent, timeout=30)
            (stats,) = await app.control.asend("stats")
            await worker.stop()
    assert lines.of("job:rate-limited")
    assert {(line["state"], line["level"]) for line in lines.of("job")} == {("SUCCESS", "info")}
    assert stats.answer["jobs"] == {"SUCCESS": 2}


async def test_a_rate_per_worker_is_each_ones_own(app: App) -> None:
    crowd = Crowd()

    @app.task(rate_limit=Rate("5/10s", per="worker"))
    async def mail(n: int) -> int:
        return await crowd.pass_by(n)

    async with trio.open_nursery() as nursery:
        two = [await start(nursery, app) for _ in range(2)]
        sent = await app.asend_many([mail.s(n) for n in range(20)])
        await until(lambda: len(crowd.times) == 10)
        await trio.sleep(0.3)
        assert len(crowd.times) == 10
        for job in sent:
            await job.arevoke()
        for worker in two:
            await worker.stop()


async def test_the_limit_0_rejects(app: App, redis_client: "redis.Redis") -> None:
    @app.task(limit=0)
    async def never() -> None:
        raise AssertionError

    async with working(app):
        sent = await never.adelay()
        await until_async(lambda: _is(sent, JobState.DEAD))
    (dead,) = entries(redis_client, app.queue("default").dead)
    assert b'"reason":"rejected-by-limit"' in dead[b"document"]
    assert b"the limit of" in dead[b"document"]


async def test_a_computed_limit_follows_its_function(app: App) -> None:
    crowd, most = Crowd(), 1

    @app.task(limit=Range(1, 4, compute=lambda: most))
    async def some(n: int) -> int:
        return await crowd.pass_by(n, 0.05)

    async with working(app):
        sent = await app.asend_many([some.s(n) for n in range(60)])
        await until(lambda: len(crowd.order) > 3)
        assert crowd.most == 1
        most = 100
        await agather(sent)
    assert crowd.most == 4


async def test_a_function_that_fails_is_told_of_once_for_each_fault(app: App) -> None:
    asked, faults = 0, [OSError("a"), OSError("b"), OSError("c"), KeyError("d"), None, OSError("e")]
    answers = iter(faults)

    def compute() -> int:
        nonlocal asked
        asked += 1
        fault = next(answers, None)
        if fault is not None:
            raise fault
        return 3

    @app.task(limit=Range(1, 4, compute=compute))
    async def some() -> None: ...

    with Lines() as lines:
        async with working(app):
            await until(lambda: asked > 6)
    assert [line["why"] for line in lines.of("limit:compute-failed")] == [
        "OSError: a",
        "KeyError: 'd'",
        "OSError: e",
    ]


async def test_a_small_tenant_is_not_delayed_by_a_large_one(
    own_server: EmbeddedServer, app_name: str
) -> None:
    """One that has sent a hundred thousand jobs, before; by day thirty thousand."""
    app = App(app_name, broker=own_server.url, concurrency=20)
    done: list[str] = []

    @app.task(fair_key="tenant", ignore_result=True)
    async def work(tenant: str) -> None:
        await trio.sleep(0.02)
        done.append(tenant)

    for _ in range(10 if NIGHTLY else 3):
        await app.asend_many([work.s("large") for _ in range(10_000)])
    async with working(app):
        await until(lambda: len(done) > 20)
        before = done.count("large")
        await app.asend_many([work.s("small") for _ in range(10)])
        await until(lambda: done.count("small") == 10)
        meanwhile = done.count("large") - before
    app.close()
    assert meanwhile < 3000  # those in hand, and one for each of ours


@pytest.mark.parametrize("priority", ["normal", "high", "low"])
async def test_a_job_that_takes_turns_waits_in_its_line_from_the_start(app: App, priority: Priority) -> None:
    @app.task(fair_key="tenant")
    async def work(tenant: str) -> str:
        return tenant

    sent = [await work.options(priority=priority, expires=600).adelay("ann") for _ in range(3)]
    assert [await result.astatus() for result in sent] == [JobState.HELD] * 3
    job = work.options(priority=priority).job("bob")
    again = [(await app.asend_jobs([job]))[0] for _ in range(3)]  # once, however often
    gone = await work.options(priority=priority, expires=0.01).adelay("ann")
    assert await sent[1].arevoke()
    await trio.sleep(0.02)  # before anybody could run it, its time is over
    async with working(app):
        assert await agather([sent[0], sent[2], *again]) == ["ann", "ann", "bob", "bob", "bob"]
        await until_async(lambda: _is(gone, JobState.EXPIRED))
    assert await sent[1].astatus() is JobState.REVOKED


async def test_jobs_of_one_tenant_run_in_the_order_they_were_sent_the_urgent_ones_first(app: App) -> None:
    done: list[int] = []

    @app.task(fair_key="tenant", limit=1)
    async def work(tenant: str, n: int) -> None:
        done.append(n)

    sent = [await work.options(priority="low").adelay("ann", 4), await work.adelay("ann", 1)]
    sent += await app.asend_many([work.s("ann", 2), work.s("ann", 3)])
    sent.append(await work.options(priority="high").adelay("ann", 0))
    async with working(app):
        await agather(sent)
    assert done == [0, 1, 2, 3, 4]


async def test_an_idle_gate_costs_no_commands(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url, lease=10.0, concurrency=5)
    go = trio.Event()

    @app.task(limit=1)
    async def one() -> None:
        await go.wait()

    with redis.Redis.from_url(own_server.url) as client:
        async with working(app):
            sent = await app.asend_many([one.s() for _ in range(100)])
            await until_async(lambda: _is(sent[-1], JobState.HELD))
            await trio.sleep(0.2)
            before, since = trips(client), trio.current_time()
            await trio.sleep(3)
            made, beats = trips(client) - before, 1 + (trio.current_time() - since) * 3 / 10.0
            go.set()
            await agather(sent)
    app.close()
    # Each beat renews the lease, asks what is imposed, and whether anybody may go on.
    assert made <= 4 * beats


def trips(client: "redis.Redis") -> int:
    """How many trips were made to the server so far: scripts and reads."""
    told = client.info("commandstats")
    return sum(told.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "xreadgroup"))


async def test_limited_tasks_with_waiting_jobs_take_turns_at_the_slots_of_their_kind(
    url: str, app_name: str
) -> None:
    app, order = App(app_name, broker=url, concurrency=2), list[str]()

    @app.task(limit=5)
    async def many() -> None:
        order.append("many")
        await trio.sleep(0.15)  # longer than what is read ahead

    @app.task(limit=5)
    async def few() -> None:
        order.append("few")
        await trio.sleep(0.15)

    sent = await app.asend_many([many.s()] * 50 + [few.s()] * 8)
    async with working(app):
        await agather(sent, timeout=60)
    assert order.index("few") < 20, order
    assert "many" in order[-20:], order
    app.close()
