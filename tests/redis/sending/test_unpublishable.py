"""Unpublishable: a job fails while Redis is away, and its retry is kept, run by the same worker, or given up."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import trio

from celery5 import App, BrokerUnavailable, JobState, RetryPolicy, TaskFailed, current_job
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.retry_policy import (
    UnpublishableChoice,
    UnpublishableFallback,
    UnpublishableRetry,
)
from tests.redis.worker.workers import Lines, until, until_async, working

KINDS = ["trio", "asyncio", "thread"]


class Shop:
    """An application whose one task notes its attempts, waits until it may go on, and fails at first."""

    def __init__(self, app: App, kind: str) -> None:
        self.app = app
        self.attempts: list[int] = []
        self.fails = 2
        self.may_end = trio.Event()

        async def flaky() -> int:
            await self.may_end.wait()
            return self.attempt()

        def threaded() -> int:
            trio.from_thread.run(self.may_end.wait)
            return self.attempt()

        async def on_asyncio() -> int:
            while not self.may_end.is_set():
                await asyncio.sleep(0.01)
            return self.attempt()

        bodies: dict[str, Any] = {"trio": flaky, "asyncio": on_asyncio, "thread": threaded}
        loop: Any = "asyncio" if kind == "asyncio" else "trio"
        self.task: Any = app.task(name="flaky", loop=loop)(bodies[kind])

    def attempt(self) -> int:
        """One attempt: it fails for the first `fails` times."""
        job = current_job()
        assert job is not None
        self.attempts.append(job.attempt)
        if len(self.attempts) <= self.fails:
            raise ValueError(f"attempt {job.attempt}")
        return job.attempt


@pytest.fixture
def apps(own_server: EmbeddedServer, app_name: str) -> Iterator[Any]:
    """Makes applications with quick retries, on a server that forgets nothing when it is killed."""
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("appendfsync", "always")
    made: list[App] = []

    def make(how: UnpublishableChoice | UnpublishableFallback | None, **more: Any) -> App:
        policy = RetryPolicy(max_retries=3, backoff=more.pop("backoff", 0.05), jitter=False)
        app = App(app_name, broker=own_server.url, when_unpublishable=how, retry_policy=policy, **more)
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


async def kill(server: EmbeddedServer) -> None:
    """Kill the server, and give its clients time to hear of it."""
    await trio.to_thread.run_sync(server.kill)
    await trio.sleep(0.1)


async def revive(server: EmbeddedServer) -> None:
    """Start it again."""
    await trio.to_thread.run_sync(server.revive)


async def fails_without(server: EmbeddedServer, shop: Shop, *, after: float = 0.0) -> Any:
    """Send a job, kill the server while it runs, and let its first attempt fail, so many seconds after. Gives it."""
    sent = await shop.task.adelay()
    await until_async(lambda: _is(sent, JobState.EXECUTING))
    await kill(server)
    await trio.sleep(after)
    shop.may_end.set()
    await until(lambda: shop.attempts[:1] == [1])
    return sent


async def _is(sent: Any, state: JobState) -> bool:
    with suppress(BrokerUnavailable):
        return await sent.astatus() is state
    return False


@pytest.mark.parametrize("kind", KINDS)
async def test_local_retry_runs_in_the_same_worker_during_an_outage(
    apps: Any, own_server: EmbeddedServer, kind: str
) -> None:
    shop = Shop(apps("local"), kind)
    with Lines() as lines:
        async with working(shop.app):
            sent = await fails_without(own_server, shop)
            await until(lambda: shop.attempts == [1, 2, 3])
            await revive(own_server)
            assert await sent.aget(timeout=30) == 3
    assert shop.attempts == [1, 2, 3]
    with redis.Redis.from_url(own_server.url) as client:
        keys = shop.app.queue("default")
        assert [client.xlen(keys.stream), client.zcard(keys.due), client.hlen(keys.jobs)] == [0, 0, 0]
    assert len(lines.of("results:retried-locally")) == 2


async def test_local_gives_the_retry_back_to_redis_when_that_returns_before_its_time(
    apps: Any, own_server: EmbeddedServer
) -> None:
    shop = Shop(apps("local", backoff=60.0), "trio")
    async with working(shop.app):
        sent = await fails_without(own_server, shop)
        await trio.sleep(0.3)
        await revive(own_server)
        await until_async(lambda: _is(sent, JobState.RETRY))
    with redis.Redis.from_url(own_server.url) as client:
        seconds, _ = client.time()
        due: Any = client.zscore(shop.app.queue("default").due, sent.id)
        assert 50 < due / 1000 - seconds < 60.5


async def test_local_begins_nothing_without_a_lease_that_lasts(apps: Any, own_server: EmbeddedServer) -> None:
    """A worker without a lease that lasts begins nothing: what it has waits for Redis, and runs on afterwards."""
    shop = Shop(apps("local", lease=0.6), "trio")
    async with working(shop.app):
        sent = await fails_without(own_server, shop, after=0.7)
        await trio.sleep(0.5)
        assert shop.attempts == [1]
        await revive(own_server)
        assert await sent.aget(timeout=30) == 3
    assert shop.attempts == [1, 2, 3]


async def test_local_leaves_nothing_behind_when_the_worker_stops(
    apps: Any, own_server: EmbeddedServer
) -> None:
    shop = Shop(apps("local", backoff=60.0), "trio")
    async with working(shop.app) as worker:
        sent = await fails_without(own_server, shop)
        await trio.sleep(0.3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.stop)
            await trio.sleep(0.3)
            await revive(own_server)
    assert await sent.astatus() is JobState.RETRY


async def test_abandoned_job_dies_when_redis_is_back(apps: Any, own_server: EmbeddedServer) -> None:
    shop = Shop(apps("abandon"), "trio")
    async with working(shop.app):
        sent = await fails_without(own_server, shop)
        await trio.sleep(0.3)
        await revive(own_server)
        with pytest.raises(TaskFailed, match="attempt 1") as caught:
            await sent.aget(timeout=30)
    assert (caught.value.reason, caught.value.type, caught.value.attempt) == ("abandoned", "ValueError", 1)
    assert await sent.astatus() is JobState.DEAD
    assert shop.attempts == [1]


async def test_a_function_chooses_what_becomes_of_a_retry(apps: Any, own_server: EmbeddedServer) -> None:
    chosen: list[UnpublishableRetry] = []

    def choose(retry: UnpublishableRetry) -> UnpublishableChoice:
        chosen.append(retry)
        return "abandon"

    shop = Shop(apps(choose), "trio")
    async with working(shop.app):
        sent = await fails_without(own_server, shop)
        await until(lambda: bool(chosen))
        await revive(own_server)
        with pytest.raises(TaskFailed, match="attempt 1"):
            await sent.aget(timeout=30)
    assert [(retry.id, retry.attempt, retry.error_type) for retry in chosen] == [(sent.id, 1, "ValueError")]
    assert shop.attempts == [1]


@pytest.mark.parametrize("how", ["local", "abandon"])
async def test_what_redis_cost_a_job_is_no_attempt_whatever_the_setting(
    apps: Any, own_server: EmbeddedServer, how: str
) -> None:
    app: App = apps(how)
    may_end, attempts = trio.Event(), list[int]()

    @app.task
    async def sender() -> int:
        await may_end.wait()
        job = current_job()
        assert job is not None
        attempts.append(job.attempt)
        await sender.options(countdown=3600).adelay()
        return job.attempt

    async with working(app):
        sent = await sender.adelay()
        await until_async(lambda: _is(sent, JobState.EXECUTING))
        await kill(own_server)
        may_end.set()
        await until(lambda: attempts == [1])
        await trio.sleep(0.3)
        await revive(own_server)
        assert await sent.aget(timeout=30) == 1
    assert set(attempts) == {1}


async def test_by_default_the_retry_is_kept_and_published_when_redis_is_back(
    apps: Any, own_server: EmbeddedServer
) -> None:
    shop = Shop(apps(None), "trio")
    async with working(shop.app):
        sent = await fails_without(own_server, shop)
        await trio.sleep(0.3)
        assert shop.attempts == [1]
        await revive(own_server)
        assert await sent.aget(timeout=30) == 3
    assert shop.attempts == [1, 2, 3]
