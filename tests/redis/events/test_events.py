"""Events: each subscriber's job for each event, over a real Router and a real worker."""

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
import trio

from celery5 import App, AsyncResult, JobState, Misconfigured, current_job
from celery5.broker.keys import EVENTS
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.protocol.job.job import derive_job_id
from tests.redis.worker.workers import start, until, until_async


def shop(app_name: str, url: str, **settings: Any) -> App:
    """An application."""
    return App(app_name, broker=url, **settings)


def _id() -> str:
    job = current_job()
    return "" if job is None else job.id


def left(client: Any, app: App) -> int:
    """Events that no Router has ended."""
    count: int = client.xlen(app.queue(EVENTS).stream)
    return count


async def test_every_subscriber_of_an_event_gets_one_job_with_the_fields_it_takes(
    url: str, app_name: str, redis_client: Any
) -> None:
    app = shop(app_name, url)
    had: list[tuple[Any, ...]] = []

    @app.event
    class UserRegistered(Event):
        user_id: UUID
        email: str
        plan: str = "free"

    @UserRegistered.subscribe
    @app.task
    async def welcome(user_id: UUID, email: str) -> None:
        had.append(("welcome", user_id, email, _id()))

    @UserRegistered.subscribe(queue="slow", max_retries=0)
    @app.task
    def count(**fields: object) -> None:
        had.append(("count", sorted(fields.items())))

    user = uuid4()
    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routing = await start(nursery, app, page=ROUTER)
        sent = await UserRegistered.adelay(user_id=user, email="a@b.c")
        await until(lambda: len(had) == 2)
        await working.stop()
        await routing.stop()
    assert sent.event.endswith("UserRegistered")
    assert sorted(had, key=lambda item: str(item[0])) == [
        ("count", [("email", "a@b.c"), ("plan", "free"), ("user_id", str(user))]),
        ("welcome", user, "a@b.c", derive_job_id(sent.id, app.name, welcome.name)),
    ]
    assert left(redis_client, app) == 0
    assert not redis_client.hgetall(app.queue(EVENTS).jobs)


async def test_events_in_bulk_all_arrive(url: str, app_name: str, redis_client: Any) -> None:
    app, had = shop(app_name, url), list[int]()

    @app.event
    class Counted(Event):
        number: int

    @Counted.subscribe
    @app.task
    async def note(number: int) -> None:
        had.append(number)

    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routers = [await start(nursery, app, page=ROUTER) for _ in range(3)]
        made: list[Any] = [Counted(number=n) for n in range(1000)]
        sent = await app.events.asend(made)
        await until(lambda: len(had) >= 1000, within=60)
        await until(lambda: left(redis_client, app) == 0)
        for router in (working, *routers):
            await router.stop()
    assert len({job.id for job in sent}) == 1000
    assert sorted(had) == list(range(1000))


async def test_versions_are_apart_unless_a_subscription_takes_several(url: str, app_name: str) -> None:
    app, had = shop(app_name, url), list[tuple[str, Any]]()

    @app.event(name="Placed")
    class PlacedBefore(Event):
        order: int

    @app.event(name="Placed", version=2)
    class Placed(Event):
        order: int
        shop: str

    @PlacedBefore.subscribe
    @app.task
    async def old(order: int) -> None:
        had.append(("old", order))

    @Placed.subscribe
    @app.task
    async def new(order: int, shop: str) -> None:
        had.append(("new", order))

    @Placed.subscribe(versions=(1, 2))
    @app.task
    async def both(order: int, shop: str = "main") -> None:
        had.append((shop, order))

    assert app.events["Placed"] is Placed
    async with trio.open_nursery() as nursery:
        each = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        await PlacedBefore.adelay(order=1)
        await Placed.adelay(order=2, shop="north")
        await until(lambda: len(had) == 4)
        for router in each:
            await router.stop()
    assert sorted(had) == [("main", 1), ("new", 2), ("north", 2), ("old", 1)]


async def test_event_without_subscribers_waits_for_a_later_one(
    url: str, app_name: str, redis_client: Any
) -> None:
    producer = shop(app_name, url)

    @producer.event(name="Paid")
    class Paid(Event):
        order: int

    consumer, had = shop(app_name, url), list[int]()

    @consumer.event(name="Paid")
    class PaidToo(Event):
        order: int

    async with trio.open_nursery() as nursery:
        routing = await start(nursery, producer, page=ROUTER)
        for order in range(3):
            await Paid.adelay(order=order)
        await until(lambda: redis_client.xlen(producer.keys.kept_events("Paid 1")) == 3)
        (state,) = await producer.events.astate()
        assert (state.event, state.version, state.kept, state.unclaimed) == ("Paid", 1, 3, 3)
        assert 86_000_000 < redis_client.pttl(producer.keys.kept_events("Paid 1")) <= 86_400_000
        working = await start(nursery, consumer)
        await working.stop()
        assert redis_client.xlen(producer.keys.kept_events("Paid 1")) == 3, "it has not subscribed"

        @PaidToo.subscribe
        @consumer.task
        async def note(order: int) -> None:
            had.append(order)

        working = await start(nursery, consumer)
        await until(lambda: len(had) == 3)
        await until_async(lambda: _none_kept(producer))
        await working.stop()
        await routing.stop()
    assert sorted(had) == [0, 1, 2]


async def _none_kept(app: App) -> bool:
    return all(state.kept == 0 for state in await app.events.astate())


async def test_who_is_not_to_catch_up_gets_what_comes_after(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, had = shop(app_name, url, event_catch_up=False), list[int]()

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    async with trio.open_nursery() as nursery:
        routing = await start(nursery, app, page=ROUTER)
        await Paid.adelay(order=1)
        await until(lambda: redis_client.xlen(app.keys.kept_events("Paid 1")) == 1)

        @Paid.subscribe
        @app.task
        async def note(order: int) -> None:
            had.append(order)

        working = await start(nursery, app)
        await Paid.adelay(order=2)
        await until(lambda: had == [2])
        await working.stop()
        await routing.stop()


async def test_with_a_retention_of_0_nothing_is_kept_and_all_is_counted(
    url: str, app_name: str, redis_client: Any
) -> None:
    app = shop(app_name, url, event_retention=0)

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    async with trio.open_nursery() as nursery:
        routing = await start(nursery, app, page=ROUTER)
        await Paid.adelay(order=1)
        await until(lambda: redis_client.hgetall(app.keys.unclaimed_events) == {b"Paid 1": b"1"})
        await routing.stop()
    assert not redis_client.exists(app.keys.kept_events("Paid 1"))


async def test_a_subscription_outlives_its_workers_and_is_retired_in_time(
    url: str, app_name: str, redis_client: Any
) -> None:
    app = shop(app_name, url, subscription_ttl=1.0)

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    @Paid.subscribe
    @app.task
    async def note(order: int) -> None: ...

    stream = app.queue("default").stream
    async with trio.open_nursery() as nursery:
        routing = await start(nursery, app, page=ROUTER)
        working = await start(nursery, app)
        await trio.sleep(1.2)  # it declares it again meanwhile
        await working.stop()
        await Paid.adelay(order=1)
        await until(lambda: redis_client.xlen(stream) == 1)
        await trio.sleep(1.1)
        await Paid.adelay(order=2)
        await until(lambda: redis_client.xlen(app.keys.kept_events("Paid 1")) == 1)
        await routing.stop()
    assert redis_client.xlen(stream) == 1
    redis_client.delete(app.keys.queues)


async def test_an_application_subscribes_to_anothers_events(url: str, app_name: str) -> None:
    one, other = shop(app_name, url), shop(f"{app_name}-mail", url)
    had: list[int] = []

    @one.event(name="shop.Paid")
    class Paid(Event):
        order: int

    @other.event(name="shop.Paid", of=one.name)
    class ShopPaid(Event):
        order: int

    @ShopPaid.subscribe(queue="letters")
    @other.task
    async def note(order: int) -> None:
        had.append(order)

    with pytest.raises(Misconfigured, match="it is sent there"):
        await ShopPaid.adelay(order=1)
    async with trio.open_nursery() as nursery:
        each = [await start(nursery, one, page=ROUTER), await start(nursery, other, queues=("letters",))]
        await Paid.adelay(order=7)
        await until(lambda: had == [7])
        (state,) = await one.events.astate()
        assert [(who.app, who.queue) for who in state.subscribers] == [(other.name, "letters")]
        for one_of in each:
            await one_of.stop()


async def test_a_subscriber_that_fails_has_retries_and_a_dead_letter_of_its_own(
    url: str, app_name: str
) -> None:
    app, tries = shop(app_name, url), list[str]()

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    @Paid.subscribe
    @app.task(max_retries=1, backoff=0.01)
    async def fails(order: int) -> None:
        tries.append("fails")
        raise ValueError("no")

    @Paid.subscribe
    @app.task
    async def works(order: int) -> str:
        tries.append("works")
        return "done"

    async with trio.open_nursery() as nursery:
        each = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        sent = await Paid.adelay(order=7)
        dead: AsyncResult[Any] = app.result(derive_job_id(sent.id, app.name, fails.name))
        done: AsyncResult[Any] = app.result(derive_job_id(sent.id, app.name, works.name))
        assert await done.aget(timeout=30) == "done"
        await until_async(lambda: _is(dead, JobState.DEAD))
        for router in each:
            await router.stop()
    assert sorted(tries) == ["fails", "fails", "works"]


async def _is(result: Any, state: JobState) -> bool:
    return bool(await result.astatus() is state)


async def test_message_that_is_no_event_becomes_a_dead_letter(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, had = shop(app_name, url), list[int]()

    @app.event(name="Paid")
    class Paid(Event):
        order: int

    @Paid.subscribe
    @app.task
    async def note(order: int) -> None:
        had.append(order)

    events = app.queue(EVENTS)
    bad = [b"", b"{", b'{"v":9,"id":"a","event":"Paid"}', b'{"v":1,"id":"a","event":""}', b"[" * 2000]
    for message in bad:
        redis_client.xadd(events.stream, {"job": message})
    redis_client.xadd(events.stream, {"other": "field"})
    unknown = {"v": 1, "id": "e-1", "event": "Paid", "fields": {"order": 1, "new": [1]}, "colour": "red"}
    redis_client.xadd(events.stream, {"job": json.dumps(unknown)})
    async with trio.open_nursery() as nursery:
        each = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        await until(lambda: had == [1])
        await until(lambda: left(redis_client, app) == 0)
        for router in each:
            await router.stop()
    assert redis_client.xlen(events.dead) == len(bad) + 1
    redis_client.delete(events.dead)
