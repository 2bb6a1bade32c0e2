"""Events, fenced: a Router does nothing to an event that another one has, and forgets nothing that may come again
(I7)."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import events as trips
from celery5.broker.calls import jobs, leases
from celery5.broker.calls.events import EventOutcome
from celery5.broker.calls.jobs import Entry
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import EVENTS, GROUP, QueueKeys
from celery5.events.event import Event
from celery5.logs.log import Log
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.protocol.job.job import DEDUPLICATION_GRACE
from celery5.services.events.event_ingestion import EventIngestion
from celery5.services.process.lease import Lease
from celery5.services.process.lease import now as clock
from tests.redis.worker.workers import leftovers, working


class Frozen(Exception):
    """Whoever has no lease would wait for ever."""


class Judged(Lease):
    """A lease that says at once when it does not last."""

    async def wait_until_valid(self) -> None:
        if not self.is_valid():
            raise Frozen


class Way:
    """The way to the broker. Whoever asks for the registry is frozen beyond its lease, if it is to be."""

    def __init__(self, app: App, lease: Lease) -> None:
        self._redis = RemoteRedis(app, "default")
        self._lease = lease
        self.freezes = False

    async def perform(self, call: Call[Any], /) -> Any:
        if self.freezes:
            self._lease.expires_at = 0.0
        return await self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return await self._redis.perform_all(calls)


class Desk:
    """One Router's ingestion of an application's events; and another Router, `r2`, which does nothing."""

    def __init__(self, app: App, client: "redis.Redis", event: Any) -> None:
        self.app, self.client, self.event = app, client, event
        self.keys: QueueKeys = app.queue(EVENTS)
        self.lease = Judged(seconds=1000.0)
        self.lease.mark_renewed(clock())
        self.way = Way(app, self.lease)
        self.ingestion = EventIngestion(
            redis=self.way,
            reader=self.way,  # type: ignore[arg-type]
            consumed=[self.keys],
            read_block=1.0,
            worker="r1",
            keys=app.keys,
            lease=self.lease,
            log=Log(worker="r1", app=app.name),
            clock=time.time,
            event_actions=SimpleNamespace(actions={}),  # type: ignore[arg-type]
            event_retention=60.0,
            message_limit=1024 * 1024,
            broker_router=self.way,
            find_broker=lambda _app, _queue: "default",
        )

    async def read(self, count: int = 1) -> list[Entry]:
        """Events that `r1` has read."""
        for router in ("r1", "r2"):
            await self.way.perform(leases.join_queue(self.keys, router, lease=1000.0))
        await self.app.events.asend([self.event(order=n) for n in range(count)])
        driver = BlockingRedis(self.app.connections.endpoint)
        found = driver.perform(jobs.read_jobs([self.keys], "r1", count=count, block_seconds=0.001))
        driver.close()
        return found

    def pass_on(self, entry: Entry) -> None:
        """It is `r2`'s from now on."""
        self.client.xclaim(self.keys.stream, GROUP, "r2", 0, [entry.id])

    def remembered(self) -> list[int]:
        """For how many ms jobs are remembered."""
        looked: Any = self.client
        return [looked.pttl(key) for key in looked.keys(self.app.queue("default").unique_window("*"))]


@asynccontextmanager
async def desk(url: str, app_name: str, client: "redis.Redis") -> AsyncGenerator[Desk, None]:
    """An application whose event has a subscriber."""
    app = App(app_name, broker=url)

    @app.event(name="Placed")
    class Placed(Event):
        order: int

    @Placed.subscribe
    @app.task
    async def ship(order: int) -> None: ...

    async with working(app):
        pass
    one = Desk(app, client, Placed)
    try:
        yield one
    finally:
        client.delete(*leftovers(client, app))
        app.close()


async def test_jobs_of_an_event_are_kept_while_a_router_may_have_it(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async with desk(url, app_name, redis_client) as one:
        (entry,) = await one.read()
        one.pass_on(entry)
        await one.ingestion.route([entry])
        assert [lifetime > 10 * DEDUPLICATION_GRACE * 1000 for lifetime in one.remembered()] == [True]
        one.client.xclaim(one.keys.stream, GROUP, "r1", 0, [entry.id])
        await one.ingestion.route([entry])
        assert [lifetime <= DEDUPLICATION_GRACE * 1000 for lifetime in one.remembered()] == [True]
        assert redis_client.xlen(one.app.queue("default").stream) == 1


async def test_router_frozen_while_it_reads_subscriptions_publishes_nothing(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async with desk(url, app_name, redis_client) as one:
        entries = await one.read()
        one.way.freezes = True
        with pytest.raises(Frozen):
            await one.ingestion.route(entries)
        assert redis_client.xlen(one.app.queue("default").stream) == 0


async def test_only_the_router_that_has_an_event_ends_it(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async with desk(url, app_name, redis_client) as one:
        (entry,) = await one.read()
        known = await one.way.perform(trips.get_subscribers(one.app.keys, b""))

        async def end(router: str, verb: str, state: bytes) -> list[int]:
            ending = EventOutcome(verb, entry.id, "", "Placed\n1", entry.message)
            call = trips.finish_events(
                one.app.keys, one.keys, router, [ending], known_state=state, retention=60.0
            )
            answer: list[int] = await one.way.perform(call)
            return answer

        for verb in ("done", "keep", "bury"):
            assert await end("r2", verb, known.state) == [0]
        assert await end("r1", "keep", b"an older one") == [-1]
        assert redis_client.xlen(one.keys.stream) == 1
        assert await end("r1", "keep", known.state) == [1]
        assert await end("r1", "keep", known.state) == [0]
        assert redis_client.xlen(one.keys.stream) == 0
        assert redis_client.xlen(one.app.keys.kept_events("Placed\n1")) == 1


async def test_of_what_nobody_wants_so_many_are_kept_and_no_more(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trips, "MAX_KEPT_EVENTS", 100)
    async with desk(url, app_name, redis_client) as one:
        found = await one.read(600)
        known = await one.way.perform(trips.get_subscribers(one.app.keys, b""))
        endings = [EventOutcome("keep", entry.id, "", "Placed\n1", entry.message) for entry in found]
        await one.way.perform(
            trips.finish_events(
                one.app.keys, one.keys, "r1", endings, known_state=known.state, retention=60.0
            )
        )
        assert (
            100 <= redis_client.xlen(one.app.keys.kept_events("Placed\n1")) <= 300
        )  # Redis trims by the hundred
