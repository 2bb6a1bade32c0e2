"""Waiting in event loops: cancelled waits leave nothing behind, and the loop's own connections end with the loop."""

import asyncio
import threading

import pytest
import redis
import trio

from celery5.broker import ambient
from celery5.broker.colour import current_colour
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.waiting.on_asyncio import AsyncioResultWaiter
from celery5.broker.waiting.on_trio import TrioResultWaiter
from celery5.errors import BrokerUnavailable
from tests.redis.connections.colours import raw
from tests.redis.process.onlookers import clients, listeners, settle, until


@pytest.mark.one_server("it uses the waiter of one server")
def test_a_cancelled_asyncio_wait_leaves_no_subscription_and_no_task(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async def main() -> None:
        redis = AsyncioRedis(Endpoint.from_url(url))
        results = AsyncioResultWaiter(redis, Endpoint.from_url(url))
        other = asyncio.create_task(results.wait([f"{app_name}:other"], timeout=30))
        tasks = [asyncio.create_task(results.wait([f"{app_name}:{n}"], timeout=30)) for n in range(20)]
        await asyncio.to_thread(until, lambda: listeners(redis_client, f"{app_name}:19"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(
            until, lambda: not any(listeners(redis_client, f"{app_name}:{n}") for n in range(20))
        )
        settle(redis_client, f"{app_name}:other")
        assert await other == {f"{app_name}:other": b"done"}
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await results.aclose()
        await redis.aclose()

    asyncio.run(main())


async def test_a_cancelled_trio_wait_leaves_no_subscription(
    url: str, app_name: str, redis_client: "redis.Redis", nursery: trio.Nursery
) -> None:
    endpoint = Endpoint.from_url(url)
    redis = open_redis(endpoint=endpoint)
    await nursery.start(redis.run)
    results = TrioResultWaiter(redis)
    await nursery.start(results.run)

    async def wait(number: int) -> None:
        await results.wait([f"{app_name}:{number}"], timeout=30)

    async with trio.open_nursery() as waiters:
        for number in range(20):
            waiters.start_soon(wait, number)
        await trio.to_thread.run_sync(until, lambda: listeners(redis_client, f"{app_name}:19"))
        waiters.cancel_scope.cancel()
    await trio.to_thread.run_sync(
        until, lambda: not any(listeners(redis_client, f"{app_name}:{n}") for n in range(20))
    )


def test_the_colour_is_that_of_the_loop_and_none_in_its_threads() -> None:
    async def here() -> list[str | None]:
        colours: list[str | None] = [current_colour()]
        if colours[0] == "trio":
            colours.append(await trio.to_thread.run_sync(current_colour))
        else:
            colours.append(await asyncio.to_thread(current_colour))
        return colours

    assert current_colour() is None
    assert asyncio.run(here()) == ["asyncio", None]
    assert trio.run(here) == ["trio", None]


@pytest.mark.parametrize("colour", ["asyncio", "trio"])
def test_a_loop_has_one_driver_for_all_and_closes_it_at_its_end(
    colour: str, own_server: EmbeddedServer
) -> None:
    endpoint = Endpoint.from_url(own_server.url)

    async def main() -> None:
        redis, again = (
            await ambient.get_driver(endpoint),
            await ambient.get_driver(Endpoint.from_url(own_server.url)),
        )
        assert redis is again
        results, same = await ambient.get_result_waiter(endpoint), await ambient.get_result_waiter(endpoint)
        assert results is same
        assert await redis.perform(raw("SET", "k", "document")) == b"OK"
        assert await redis.perform_all([raw("GET", "k")] * 2) == [b"document"] * 2
        assert await results.wait(["k"], timeout=30) == {"k": b"document"}
        assert ours()

    with redis_of(own_server) as client:

        def ours() -> bool:
            return any(connection["name"].startswith("celery5") for connection in clients(client))

        for _ in range(2):
            if colour == "asyncio":
                asyncio.run(main())
            else:
                trio.run(main)
            until(lambda: not ours())


def redis_of(server: EmbeddedServer) -> "redis.Redis":
    """An onlooker's client."""
    return redis.Redis.from_url(server.url)


def test_two_asyncio_loops_have_a_driver_each(url: str) -> None:
    endpoint = Endpoint.from_url(url)
    drivers: list[object] = []

    async def main() -> None:
        driver = await ambient.get_driver(endpoint)
        drivers.append(driver)
        assert await driver.perform(raw("PING")) == b"PONG"

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    asyncio.run(main())
    thread.join(30)
    assert len({id(driver) for driver in drivers}) == 2


async def test_waiting_survives_a_missing_broker_and_finds_it_later(
    own_server: EmbeddedServer,
) -> None:
    endpoint = Endpoint.from_url(own_server.url)
    own_server.kill()
    with pytest.raises(BrokerUnavailable):
        await ambient.get_driver(endpoint)
    own_server.revive()
    redis = await ambient.get_driver(endpoint)
    assert await redis.perform(raw("PING")) == b"PONG"


async def test_tasks_that_come_at_once_share_the_driver_that_is_being_opened(url: str) -> None:
    endpoint = Endpoint.from_url(url)
    drivers: set[int] = set()

    async def one() -> None:
        drivers.add(id(await ambient.get_result_waiter(endpoint)))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one)
    assert len(drivers) == 1


async def test_a_lent_driver_is_used_by_all_and_given_back(
    url: str, app_name: str, redis_client: "redis.Redis", nursery: trio.Nursery
) -> None:
    endpoint = Endpoint.from_url(url)
    own = open_redis(endpoint=endpoint)
    await nursery.start(own.run)
    with ambient.lend_driver(endpoint, own):
        assert await ambient.get_driver(endpoint) is own
        settle(redis_client, app_name)
        assert await (await ambient.get_result_waiter(endpoint)).wait([app_name], timeout=30) == {
            app_name: b"done"
        }
    ambient_driver = await ambient.get_driver(endpoint)
    assert ambient_driver is not own
    assert await (await ambient.get_result_waiter(endpoint)).wait([app_name], timeout=30) == {
        app_name: b"done"
    }


def test_outside_of_any_loop_there_is_nothing_ambient() -> None:
    step = ambient.get_driver(Endpoint.from_url("unix:///nonexistent/none.sock"))
    with pytest.raises(RuntimeError, match="no event loop"):
        step.send(None)
