"""Message Publisher: what waits goes out in order over one connection or several, and one queue's trouble is its
own."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import trio
import trio.lowlevel

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.health.health_check import HealthCheck
from celery5.logs.log import Log
from celery5.protocol.publisher.frames import make_job_message
from celery5.sending.bounded_queue import BacklogCapacity
from celery5.sending.messages_backlog import MemoryBacklog
from celery5.sending.publishing_checks import PublishingChecks
from celery5.services.publisher import message_publisher
from celery5.services.publisher.message_publisher import MessagePublisher, PublisherConnections
from celery5.services.publisher.messages_store import MessagesStore
from tests.redis.publisher.publishing import LONG, numbers
from tests.redis.worker.workers import Lines, until

pytestmark = pytest.mark.timeout(300)


class Press:
    """A Message Publisher over a store in memory, and the application whose jobs it publishes."""

    def __init__(self, app: App, *, most: int = 1, checks: tuple[HealthCheck, ...] = ()) -> None:
        log = Log(worker="w", app=app.name)
        self.app = app
        self.task: Any = app.tasks["number"]
        self.store = MessagesStore(
            broker="default", backlog=MemoryBacklog(capacity=BacklogCapacity(10**6, 10**9)), log=log
        )
        self.checks = PublishingChecks(checks=checks, keys=app.keys, log=log)
        self.publisher = MessagePublisher(
            store=self.store,
            keys=app.keys,
            connections=PublisherConnections(
                endpoint=app.connections.endpoint,
                timing=Timing(first_connect=float("inf")),
                name="press",
                on_link_event=lambda _event: None,
                min_count=1,
                max_count=most,
            ),
            own_checks=self.checks,
            drain_limit=5.0,
            log=log,
        )

    @asynccontextmanager
    async def up(self) -> AsyncGenerator["Press", None]:
        """It publishes while the block lasts."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.store.run)
            await nursery.start(self.checks.run)
            await nursery.start(self.publisher.run)
            yield self
            nursery.cancel_scope.cancel()

    async def put(self, count: int, queue: str = "default", first: int = 0) -> None:
        """Jobs with numbers on a queue."""
        task = self.task.options(queue=queue)
        await self.store.put([make_job_message(task.job(n)) for n in range(first, first + count)])


@pytest.fixture
def numbered(app: App) -> App:
    """An application with a task."""

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    return app


async def test_extra_connections_keep_the_order_and_end_when_idle(
    numbered: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_publisher, "IDLE_LIMIT", 0.5)
    monkeypatch.setattr(message_publisher, "GROW_AFTER", 0.001)
    press, seen = Press(numbered, most=4), set[int]()
    queues = [f"q{n}" for n in range(6)]
    async with press.up():
        for first in range(0, 1200, 300):
            for queue in queues:
                await press.put(300, queue, first)
            await trio.lowlevel.checkpoint()
        with trio.fail_after(LONG):
            while press.store.has_work:
                seen.add(len(press.publisher._open))
                await trio.sleep(0.001)
        assert 1 < max(seen) <= 4
        await until(lambda: len(press.publisher._open) == 1, within=LONG)
    for queue in queues:
        assert numbers(numbered, queue) == list(range(1200))


async def test_one_connection_is_all_unless_more_are_allowed(
    numbered: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_publisher, "GROW_AFTER", 0.001)
    press = Press(numbered)
    async with press.up():
        for queue in ("a", "b", "c"):
            await press.put(1000, queue)
        await until(lambda: press.store.published == 3000, within=LONG)
        assert len(press.publisher._open) == 1


async def test_a_queue_that_redis_refuses_stays_and_holds_up_no_other(
    numbered: App, redis_client: "redis.Redis"
) -> None:
    press, wrong = Press(numbered), numbered.queue("wrong").stream
    redis_client.set(wrong, "no stream", ex=60)
    async with press.up():
        await press.put(3, "wrong")
        await press.put(3, "right")
        await until(lambda: numbers(numbered, "right") == [0, 1, 2], within=LONG)
        redis_client.delete(wrong)
        await until(lambda: press.store.published == 6, within=LONG)
        assert numbers(numbered, "wrong") == [0, 1, 2]


async def test_of_what_is_refused_for_several_reasons_each_is_told_once(
    numbered: App, redis_client: "redis.Redis"
) -> None:
    press, one, other = Press(numbered), numbered.queue("one"), numbered.queue("other")
    redis_client.set(one.stream, "no stream", ex=120)
    redis_client.set(other.jobs, "no hash", ex=120)

    def failures() -> float:
        (found,) = [
            family for family in press.publisher.metric_families() if family.name.endswith("failures_total")
        ]
        return sum(sample.value for sample in found.samples)

    with Lines() as lines:
        async with press.up():
            await press.put(1, "one")
            await press.put(1, "other")
            await until(lambda: failures() >= 12, within=LONG)
            redis_client.delete(one.stream, other.jobs)
            await until(lambda: press.store.published == 2, within=LONG)
    told = [line["why"] for line in lines.of("publisher:refused")]
    assert len(lines.of("publisher:resumed")) == 1
    assert len(told) == len(set(told)) == 2


async def test_each_check_has_a_breaker_and_one_that_is_open_keeps_everything_back(numbered: App) -> None:
    states = {"bank": "unhealthy", "post": "healthy"}
    checks = tuple(
        HealthCheck(name, lambda name=name: states[name], period=0.05, allowed={"unhealthy": 2})  # type: ignore[misc]
        for name in states
    )
    press = Press(numbered, checks=checks)
    with Lines() as lines:
        async with press.up():
            await until(lambda: not press.checks.all_closed, within=LONG)
            await press.put(5)
            await trio.sleep(0.3)
            assert press.store.published == 0
            assert {name: bool(why) for name, why in press.checks.conditions().items()} == {
                "publisher bank": True,
                "publisher post": False,
            }
            states["bank"] = "healthy"
            await until(lambda: numbers(numbered) == [0, 1, 2, 3, 4], within=LONG)
            assert press.checks.all_closed
        assert [line["breaker"] for line in lines.of("breaker:tripped")][:1] == ["publisher bank"]


async def test_a_check_that_fails_itself_keeps_nothing_back(numbered: App) -> None:
    def broken() -> bool:
        raise RuntimeError("no idea")

    press = Press(numbered, checks=(HealthCheck("broken", broken, period=0.02, allowed={"unhealthy": 0}),))
    with Lines() as lines:
        async with press.up():
            await press.put(1)
            await until(lambda: press.store.published == 1, within=LONG)
            await until(lambda: bool(lines.of("health:check-failed")), within=LONG)


async def test_the_brokers_breaker_opens_while_it_is_away_and_closes_when_it_is_back(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task(name="number")
    async def number(n: int) -> int:
        return n

    press = Press(app)
    own_server.kill()
    async with press.up():
        await press.put(3)
        await until(lambda: bool(press.publisher.conditions()["publisher broker-default"]), within=LONG)
        assert press.store.published == 0
        await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: press.store.published == 3, within=LONG)
        assert numbers(app) == [0, 1, 2]
    app.close()
