"""The asyncio driver alone: many tasks, and tasks that are cancelled at any moment."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import redis

from celery5.broker.call import Call, Script, script_call
from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerReplied, BrokerUnavailable
from tests.redis.connections.colours import raw
from tests.redis.process.onlookers import blocked, clients, until


def test_tasks_share_a_bounded_number_of_connections(own_server: EmbeddedServer) -> None:
    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(own_server.url), max_connections=3)
        answers = await asyncio.gather(*(driver.perform(raw("ECHO", number)) for number in range(300)))
        assert answers == [b"%d" % number for number in range(300)]
        assert len(clients(client, name="celery5-producer")) == 3
        await driver.aclose()

    with redis.Redis.from_url(own_server.url) as client:
        asyncio.run(main())
        until(lambda: not clients(client, name="celery5-producer"))


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_tasks_never_shift_the_replies_of_others(url: str, seed: int) -> None:
    chance = random.Random(seed)
    mixed: list[bytes] = []
    answered = 0

    async def talk(driver: AsyncioRedis, number: int) -> None:
        nonlocal answered
        answer = await driver.perform(raw("ECHO", number))
        answered += 1
        if answer != b"%d" % number:
            mixed.append(answer)

    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(url), max_connections=4)
        tasks = []
        for number in range(300):
            tasks.append(asyncio.create_task(talk(driver, number)))
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        # None of the places was lost on the way.
        await asyncio.gather(*(talk(driver, number) for number in range(20)))
        await driver.aclose()

    asyncio.run(main())
    assert not mixed
    assert answered >= 100


def test_the_connection_of_a_cancelled_call_is_closed(own_server: EmbeddedServer) -> None:
    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(own_server.url))
        parked = asyncio.create_task(driver.perform(raw("BLPOP", "list", 5, blocks=5)))
        while not blocked(client):
            await asyncio.sleep(0.005)
        parked.cancel()
        with suppress(asyncio.CancelledError):
            await parked
        assert await driver.perform(raw("PING")) == b"PONG"
        await asyncio.to_thread(until, lambda: len(clients(client, name="celery5-producer")) == 1)
        await driver.aclose()

    with redis.Redis.from_url(own_server.url) as client:
        asyncio.run(main())


def test_waiting_for_a_connection_has_an_end(url: str, app_name: str) -> None:
    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(url), timing=Timing(reply=0.2), max_connections=1)
        parked = asyncio.create_task(driver.perform(raw("BLPOP", app_name, 1, blocks=1)))
        await asyncio.sleep(0)
        with pytest.raises(BrokerUnavailable, match="busy") as busy:
            await driver.perform(raw("PING"))
        assert not busy.value.maybe_done
        await parked
        await driver.aclose()

    asyncio.run(main())


def again(*words: Any) -> Call[Any]:
    """A call of `words` that may be repeated, so that it is gathered with others."""
    return msgspec.structs.replace(raw(*words), repeatable=True)


def test_calls_of_many_tasks_leave_in_few_writes_while_all_connections_are_busy(
    own_server: EmbeddedServer,
) -> None:
    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(own_server.url), max_connections=2)
        await driver.perform(raw("PING"))
        before = client.info("stats")["total_reads_processed"]
        answers = await asyncio.gather(*(driver.perform(again("ECHO", number)) for number in range(200)))
        assert answers == [b"%d" % number for number in range(200)]
        assert client.info("stats")["total_reads_processed"] - before < 20
        await driver.aclose()

    with redis.Redis.from_url(own_server.url) as client:
        asyncio.run(main())


def test_each_of_the_gathered_calls_has_its_own_reply_or_error(
    own_server: EmbeddedServer, app_name: str
) -> None:
    """And one whose caller is cancelled takes none of them with it."""
    script = Script.of(app_name, f"return '{app_name}'")

    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(own_server.url), max_connections=1)
        first, cancelled = (asyncio.create_task(driver.perform(again("ECHO", word))) for word in ("a", "b"))
        refused = asyncio.create_task(driver.perform(again("INCR", f"{app_name}:text")))
        unknown = asyncio.create_task(
            driver.perform(script_call(script, (), (), bytes.decode, repeatable=True))
        )
        last = asyncio.create_task(driver.perform(again("ECHO", "c")))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert (await first, await unknown, await last) == (b"a", app_name, b"c")
        with pytest.raises(BrokerReplied, match="not an integer"):
            await refused
        assert cancelled.cancelled()
        assert len(clients(client, name="celery5-producer")) == 1
        await driver.aclose()

    with redis.Redis.from_url(own_server.url) as client:
        client.set(f"{app_name}:text", "x")
        asyncio.run(main())


def test_gathered_calls_go_by_themselves_when_the_task_that_sends_them_is_cancelled(
    url: str, app_name: str
) -> None:
    async def main() -> None:
        driver = AsyncioRedis(Endpoint.from_url(url), max_connections=1)
        parked = asyncio.create_task(driver.perform(raw("BLPOP", app_name, 0.3, blocks=0.3)))
        await asyncio.sleep(0)
        own = {parked, asyncio.current_task()}
        calls = [asyncio.create_task(driver.perform(again("ECHO", number))) for number in range(20)]
        await asyncio.sleep(0)
        (sender,) = asyncio.all_tasks() - own - {*calls}
        await asyncio.sleep(0)
        sender.cancel()
        assert await asyncio.gather(*calls) == [b"%d" % number for number in range(20)]
        await parked
        await driver.aclose()

    asyncio.run(main())
