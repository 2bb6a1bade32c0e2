"""Worker under faults: connections are cut in the middle of replies, servers refuse; each job runs exactly once."""

import random
from collections import Counter

import pytest
import redis
import trio

from celery5 import App, TaskFailed, agather
from tests.faults.connections.proxy import FaultyProxy
from tests.redis.worker.workers import Lines, held, start, until, working


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_to_the_connections_each_job_runs_once(
    proxy: FaultyProxy, url: str, app_name: str, redis_client: "redis.Redis", seed: int
) -> None:
    chance = random.Random(seed)
    behind = App(app_name, broker=proxy.url, concurrency=8)
    runs: Counter[int] = Counter()

    @behind.task(name="count")
    async def count(n: int) -> int:
        runs[n] += 1
        if n % 5 == 0:
            await trio.sleep(0.005)
        return n

    producer = App(app_name, broker=url)
    producer.task(name="count")(count.function)
    faults = (
        lambda: proxy.cut_reply("XREADGROUP", after=chance.choice([0, 1, 30, 300])),
        lambda: proxy.cut_reply("EVALSHA", after=chance.choice([0, 1, 2])),
        lambda: proxy.answer("EVALSHA", "LOADING Redis is loading the dataset in memory"),
        lambda: proxy.answer("XREADGROUP", "MISCONF the disk is full"),
        lambda: proxy.answer("EVALSHA", "OOM command not allowed when used memory > 'maxmemory'."),
        proxy.cut_all,
    )
    async with working(behind):
        sent = await producer.asend_many([producer.signature("count", n) for n in range(3000)])
        for _ in range(60):
            if len(proxy.rules) < 3:  # faults that nothing has met yet
                chance.choice(faults)()
            await trio.sleep(chance.random() * 0.03)
        proxy.rules.clear()
        assert await agather(sent, timeout=30) == list(range(3000))
        await until(lambda: sum(held(redis_client, behind).values()) == 0)
    assert runs == dict.fromkeys(range(3000), 1)


async def test_an_error_raised_while_it_is_cancelled_is_not_the_jobs_failure(
    url: str, app_name: str, redis_client: "redis.Redis", nursery: trio.Nursery
) -> None:
    app = App(app_name, broker=url, grace_period=0.05, lease=1.0)
    attempts: list[str] = []
    go = False

    @app.task(max_retries=0)
    async def stubborn(kind: str) -> str:
        attempts.append(kind)
        if go:
            return kind
        try:
            await trio.sleep_forever()
        finally:
            if kind == "raises":
                raise ValueError("on the way out")
        return kind

    one = await start(nursery, app)
    sent = [await stubborn.adelay("raises"), await stubborn.adelay("ends")]
    await until(lambda: len(attempts) == 2)
    await one.stop()
    go = True
    async with working(app):
        assert await agather(sent) == ["raises", "ends"]
    nursery.cancel_scope.cancel()


async def test_a_job_that_fails_while_redis_is_away_keeps_its_outcome(
    proxy: FaultyProxy, url: str, app_name: str
) -> None:
    behind = App(app_name, broker=proxy.url, lease=0.6)
    began, go = trio.Event(), trio.Event()

    @behind.task(name="fail", max_retries=0)
    async def fail() -> None:
        began.set()
        await go.wait()
        raise ValueError("while nobody listened")

    producer = App(app_name, broker=url)
    producer.task(name="fail", max_retries=0)(fail.function)
    with Lines() as lines:
        async with working(behind):
            sent = await producer.signature("fail").adelay()
            with trio.fail_after(30):
                await began.wait()
            proxy.refuse()
            go.set()
            await trio.sleep(0.8)
            proxy.accept()
            with pytest.raises(TaskFailed, match="while nobody listened"):
                await sent.aget(timeout=30)
    assert len(lines.of("job")) == 1
    assert lines.of("worker:restarted") == []
