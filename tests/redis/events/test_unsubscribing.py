"""Unsubscribing: a subscription is taken back at once and for good, whatever workers declare, and allowed again."""

from typing import Any

import trio

from celery5 import App
from celery5.broker.calls import events as trips
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.protocol.events.messages import encode
from tests.redis.worker.workers import start, until


async def test_a_subscription_is_taken_back_at_once_and_others_go_on(url: str, app_name: str) -> None:
    app, had = App(app_name, broker=url), list[tuple[str, int]]()

    @app.event
    class Counted(Event):
        number: int

    @Counted.subscribe
    @app.task
    async def one(number: int) -> None:
        had.append(("one", number))

    @Counted.subscribe
    @app.task
    async def other(number: int) -> None:
        had.append(("other", number))

    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routing = await start(nursery, app, page=ROUTER)
        await Counted.adelay(number=1)
        await until(lambda: sorted(had) == [("one", 1), ("other", 1)])

        name = next(iter(app.events))
        assert await trio.to_thread.run_sync(Counted.unsubscribe, one)
        assert not await app.events.aunsubscribe(name, one.name)  # there is none any more
        await Counted.adelay(number=2)
        await until(lambda: ("other", 2) in had)
        # For good: a worker that begins again declares it, and it stays away.
        await working.stop()
        working = await start(nursery, app)
        await Counted.adelay(number=3)
        await until(lambda: ("other", 3) in had)
        (state,) = await app.events.astate()
        assert [subscriber.task for subscriber in state.subscribers] == [other.name]

        assert await app.events.aresubscribe(name, one.name)
        assert not await app.events.aresubscribe(name, one.name)
        await working.stop()
        working = await start(nursery, app)
        await Counted.adelay(number=4)
        await until(lambda: ("one", 4) in had and ("other", 4) in had)
        await working.stop()
        await routing.stop()
    assert [record for record in sorted(had) if record[0] == "one"] == [("one", 1), ("one", 4)]


async def test_what_only_a_subscription_wanted_that_was_taken_back_is_kept(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, had = App(app_name, broker=url), list[int]()

    @app.event
    class Counted(Event):
        number: int

    @Counted.subscribe
    @app.task
    async def one(number: int) -> None:
        had.append(number)

    name = next(iter(app.events))
    assert not await app.events.aunsubscribe(
        name, one.name
    )  # before any worker has declared it: it holds all the same
    async with trio.open_nursery() as nursery:
        routing = await start(nursery, app, page=ROUTER)
        working = await start(nursery, app)
        await Counted.adelay(number=1)
        await until(lambda: redis_client.xlen(app.keys.kept_events(f"{name} 1")) == 1)
        await working.stop()
        working = await start(nursery, app)  # it does not catch up with what it does not get
        await until(lambda: redis_client.xlen(app.keys.kept_events(f"{name} 1")) == 1)
        assert await app.events.aresubscribe(name, one.name)
        await working.stop()
        working = await start(nursery, app)
        await until(lambda: had == [1])
        await working.stop()
        await routing.stop()


def test_withdrawn_subscription_is_forgotten_when_nobody_declares_it(
    url: str, app_name: str, redis_client: Any
) -> None:
    app = App(app_name, broker=url, subscription_ttl=1)

    @app.event
    class Counted(Event):
        number: int

    @Counted.subscribe
    @app.task
    def one(number: int) -> None: ...

    (subscription,) = app.events.group_subscriptions()[app_name]
    redis, keys = open_blocking(Endpoint.from_url(url), max_connections=1), Keys(app_name)

    def declared(lasts: float) -> trips.DeclarationResult:
        named = [(subscription.name, encode(subscription))]
        return redis.perform(trips.declare_subscriptions(keys, named, [], ttl=lasts, catch_up=0))

    assert declared(60).changed == 1
    before = redis.perform(trips.get_subscribers(keys, b"")).state
    assert Counted.unsubscribe(one)
    after = redis.perform(trips.get_subscribers(keys, before))
    assert (after.entries, after.state != before) == ({}, True)  # Routers hear of it with the next event
    assert declared(60) == trips.DeclarationResult(0, 0, (subscription.name,))
    redis_client.zadd(keys.subscription_deadlines, {subscription.name: 1})  # a week without a declaration
    assert redis.perform(trips.get_subscribers(keys, b"")).retired == (subscription.name,)
    assert declared(60).changed == 1
    app.close()
    redis.close()
