"""Routers and Schedulers of several brokers: events, documents and schedules whose queues are on another broker."""

from typing import Any

import pytest
import redis
import trio

from celery5 import App, agather, every
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from tests.redis.events.sinking import Kept
from tests.redis.worker.workers import Lines, start, until, working


@pytest.fixture
def app(paired: App) -> App:
    """An application on two servers."""
    return paired


def subscribed(app: App, got: list[tuple[str, int]]) -> Any:
    """The event, to which a task on each broker is subscribed."""

    @app.event(name="ordered")
    class Ordered(Event):
        number: int

    @Ordered.subscribe
    @app.task(name="here", queue="near")
    async def here(number: int) -> None:
        got.append(("here", number))

    @Ordered.subscribe
    @app.task(name="there", queue="post")
    async def there(number: int) -> None:
        got.append(("there", number))

    del here, there
    return Ordered


async def test_an_event_reaches_its_subscribers_on_all_brokers(app: App) -> None:
    got = list[tuple[str, int]]()
    event = subscribed(app, got)
    async with working(app), working(app, page=ROUTER):
        for number in range(10):
            await event.adelay(number=number)
        await until(lambda: len(got) >= 20, within=30)
    assert sorted(got) == sorted((name, number) for name in ("here", "there") for number in range(10))


async def test_broker_outage_does_not_stop_events_to_the_others(app: App, own_server: EmbeddedServer) -> None:
    got = list[tuple[str, int]]()
    event = subscribed(app, got)
    with Lines() as lines:
        async with working(app), working(app, page=ROUTER):
            await event.adelay(number=0)
            await until(lambda: len(got) == 2, within=30)
            await trio.to_thread.run_sync(own_server.kill)
            for number in range(1, 6):
                await event.adelay(number=number)
                await until(lambda n=number: ("here", n) in got, within=30)  # type: ignore[misc]
            await trio.to_thread.run_sync(own_server.revive)
            await until(lambda: len(got) >= 12, within=40)
    told = [line["level"] for line in lines.of("events:delayed")]
    assert told == ["warning", *["debug"] * (len(told) - 1)]
    assert sorted(got) == sorted((name, number) for name in ("here", "there") for number in range(6))


async def test_a_sink_is_given_the_documents_of_all_brokers(app: App) -> None:
    kept = Kept()

    @app.task(name="here", queue="near", sinks=[kept])
    async def here(number: int) -> int:
        return number

    @app.task(name="there", queue="post", sinks=[kept])
    async def there(number: int) -> int:
        return number

    async with working(app), working(app, page=ROUTER):
        await agather(await app.asend_many([here.s(1), there.s(2)]), timeout=30)
        await until(lambda: len(kept.documents) == 2, within=40)
    assert sorted(kept.values) == [1, 2]


async def test_schedules_fire_on_the_broker_of_their_queue(app: App, second: "redis.Redis") -> None:
    got = list[str]()

    @app.task(name="here", queue="near", schedule=every(0.5))
    async def here() -> None:
        got.append("here")

    @app.task(name="there", queue="post", schedule=every(0.5))
    async def there() -> None:
        got.append("there")

    async with working(app), working(app, page=SCHEDULER):
        await until(lambda: got.count("here") >= 3 and got.count("there") >= 3, within=40)
        assert {schedule.name for schedule in await app.schedule.alist()} == {"here", "there"}
    assert second.exists(app.keys.schedules("post"))
    assert not second.exists(app.keys.schedules("near"))
    await app.schedule.aremove("here")
    await app.schedule.aremove("there")
    del here, there


async def test_a_broker_that_is_away_holds_up_no_schedule_of_another(
    app: App, own_server: EmbeddedServer
) -> None:
    got = list[str]()

    @app.task(name="here", queue="near", schedule=every(0.5))
    async def here() -> None:
        got.append("here")

    @app.task(name="there", queue="post", schedule=every(0.5))
    async def there() -> None:
        got.append("there")

    async with working(app, page=SCHEDULER):  # a new one waits until it is known to be on no other broker
        pass
    await trio.to_thread.run_sync(own_server.kill)
    async with trio.open_nursery() as nursery:
        with trio.fail_after(60):
            one = await start(nursery, app)
        clock = await start(nursery, app, page=SCHEDULER)
        await until(lambda: got.count("here") >= 3, within=40)
        await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: got.count("there") >= 2, within=60)
        await clock.stop()
        await one.stop()
    del here, there
