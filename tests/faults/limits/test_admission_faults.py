"""Gates under faults: connections are cut, servers refuse; no more run than may, each job once, no slot is left
(I8)."""

import asyncio
import random
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, agather
from celery5.limits import Limit
from celery5.tasks import CurrentJob
from tests.faults.connections.proxy import FaultyProxy
from tests.gate_leaks import gate_leaks
from tests.redis.worker.workers import Lines, start, until, until_async


@pytest.mark.parametrize("seed", range(2))
async def test_connection_faults_lose_and_double_no_slot(
    proxy: FaultyProxy, url: str, app_name: str, redis_client: "redis.Redis", nursery: trio.Nursery, seed: int
) -> None:
    chance = random.Random(seed)
    behind, producer = App(app_name, broker=proxy.url, concurrency=8), App(app_name, broker=url)
    runs, now, most = Counter[int](), Counter[str](), Counter[str]()

    async def count(n: int, key: str) -> int:
        runs[n] += 1
        now[key] += 1
        most[key] = max(most[key], now[key])
        await trio.sleep(0.002)
        now[key] -= 1
        return n

    for app in (behind, producer):
        app.task(limit=2, concurrency_key="key", fair_key="key", name="count")(count)
    faults = (
        lambda: proxy.cut_reply("XREADGROUP", after=chance.choice([0, 1, 30, 300])),
        lambda: proxy.cut_reply("EVALSHA", after=chance.choice([0, 1, 2])),
        lambda: proxy.answer("EVALSHA", "LOADING Redis is loading the dataset in memory"),
        lambda: proxy.answer("EVALSHA", "OOM command not allowed when used memory > 'maxmemory'."),
        proxy.cut_all,
    )
    workers = [await start(nursery, behind) for _ in range(2)]
    sent = await producer.asend_many([producer.signature("count", n, f"k{n % 3}") for n in range(250)])
    for turn in range(40):
        if len(proxy.rules) < 3:  # faults that nothing has met yet
            chance.choice(faults)()
        await trio.sleep(chance.random() * 0.03)
        if turn % 20 == 10:
            await workers.pop(0).stop()
            proxy.rules.clear()  # who is refused when it joins does not begin
            workers.append(await start(nursery, behind))
    proxy.rules.clear()
    assert await agather(sent, timeout=60) == list(range(250))
    for worker in workers:
        await worker.stop()
    keys = behind.queue("default")
    assert (runs, max(most.values())) == (dict.fromkeys(range(250), 1), 2)
    assert gate_leaks(redis_client, keys) == []
    assert not redis_client.exists(keys.slots, keys.slot_counts, keys.limited_counts)


class Overlap:
    """How often a job ran, and how many of its runs at once."""

    def __init__(self) -> None:
        self.runs = self.now = self.most = 0
        self.ended: list[str] = []

    @contextmanager
    def run(self) -> Generator[None]:
        self.runs += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
            self.ended.append("returned")
        except (trio.Cancelled, asyncio.CancelledError):
            self.ended.append("cancelled")
            raise
        finally:
            self.now -= 1


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
@pytest.mark.parametrize("continues", [False, True])
async def test_limited_job_of_an_isolated_worker_ends_with_its_lease(
    proxy: FaultyProxy, url: str, app_name: str, nursery: trio.Nursery, loop: Any, continues: bool
) -> None:
    """The limit is 1: the second worker begins the job only after it has ended on the first one."""
    overlap, second = Overlap(), trio.Event()
    cut_off, other = App(app_name, broker=proxy.url, lease=1.5), App(app_name, broker=url, lease=1.5)

    async def first_run() -> str:
        with overlap.run():
            await (trio.sleep if loop == "trio" else asyncio.sleep)(30 if not continues else 4)
        return "first"

    async def second_run() -> str:
        with overlap.run():
            second.set()
        return "second"

    option: Any = {"limit": 1, "continue_without_lease": continues}
    cut_off.task(name="alone", loop=loop, **option)(first_run)
    other.task(name="alone", **option)(second_run)
    worker = await start(nursery, cut_off)
    sent = await other.signature("alone").adelay()
    await until(lambda: overlap.runs == 1)
    await start(nursery, other)
    with Lines() as lines:
        proxy.stall()
        with trio.fail_after(60):
            await second.wait()
        assert await sent.aget(timeout=30) == "second"
        assert overlap.most == (2 if continues else 1)
        if continues:
            await until(lambda: "returned" in overlap.ended[1:])
        said = [line for line in lines.of("job:interrupted") if "lease" in str(line.get("why"))]
        assert len(said) == (0 if continues else 1)
    proxy.resume()
    await until(lambda: overlap.now == 0)
    assert (overlap.runs, str(await sent.astatus())) == (2, "SUCCESS")
    await worker.stop()


async def test_a_job_that_was_cancelled_with_the_lease_costs_no_attempt(
    proxy: FaultyProxy, url: str, app_name: str, nursery: trio.Nursery
) -> None:
    attempts: list[int] = []
    app, producer = App(app_name, broker=proxy.url, lease=1.5), App(app_name, broker=url)

    async def alone(job: CurrentJob) -> int:
        attempts.append(job.attempt)
        if len(attempts) == 1:
            await trio.sleep_forever()
        return job.attempt

    for application in (app, producer):
        application.task(name="alone", bind=True, limit=1, max_retries=0)(alone)
    await start(nursery, app)
    sent = await producer.signature("alone").adelay()
    await until(lambda: len(attempts) == 1)
    with Lines() as lines:
        proxy.stall()
        await until(lambda: bool(lines.of("job:interrupted")))
        proxy.resume()
        assert await sent.aget(timeout=30) == 1
    assert attempts == [1, 1]


async def test_a_job_with_a_limit_per_worker_goes_on_without_the_lease(
    proxy: FaultyProxy, url: str, app_name: str, nursery: trio.Nursery
) -> None:
    app, producer = App(app_name, broker=proxy.url, lease=1.0), App(app_name, broker=url)
    seen: list[str] = []

    async def mine() -> None:
        seen.append("began")
        await trio.sleep(2.5)
        seen.append("went on")

    for application in (app, producer):
        application.task(name="mine", limit=Limit(1, per="worker"))(mine)
    worker = await start(nursery, app)
    await producer.signature("mine").adelay()
    await until(lambda: seen == ["began"])
    proxy.stall()
    await until(lambda: "went on" in seen)
    proxy.resume()
    await worker.stop()


async def test_a_waiting_job_whose_admission_was_lost_runs_after_a_heartbeat(
    proxy: FaultyProxy, url: str, app_name: str, nursery: trio.Nursery
) -> None:
    """It is the first one on the lane of admitted jobs, of which the worker learns by its heartbeat."""
    app, producer = App(app_name, broker=proxy.url, lease=3, read_block=30), App(app_name, broker=url)
    may_end, ended = trio.Event(), list[int]()

    async def alone(number: int) -> None:
        if number == 1:
            await may_end.wait()
            proxy.cut_reply("EVALSHA", after=0)  # to what settles this job and admits the next one
        ended.append(number)

    for application in (app, producer):
        application.task(name="alone", limit=1)(alone)
    with Lines() as lines:
        worker = await start(nursery, app)
        await (await producer.signature("alone", 0).adelay()).aget(
            timeout=30
        )  # its connection knows all scripts
        await producer.signature("alone", 1).adelay()
        second = await producer.signature("alone", 2).adelay()
        await until_async(lambda: is_held(second))
        may_end.set()
        await until(lambda: ended == [0, 1, 2], within=15)
        await until(lambda: bool(lines.of("consumer:jobs-recovered")))
    await worker.stop()


async def is_held(result: AsyncResult[Any]) -> bool:
    return str(await result.astatus()) == "HELD"
