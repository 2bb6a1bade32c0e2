"""Trio driver, storm: a hundred tasks on one connection to a real server, cancelled at random."""

import random

import pytest
import redis as blocking
import trio
import trio.lowlevel

from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, incr, raw


@pytest.fixture(params=["unix", "tcp"])
async def link(request: pytest.FixtureRequest, server: EmbeddedServer, nursery: trio.Nursery) -> TrioRedis:
    """A running connection, straight to the socket or over TCP."""
    url = server.url
    if request.param == "tcp":
        proxy = FaultyProxy(str(server.socket))
        await nursery.start(proxy.run)
        url = proxy.url
    redis = TrioRedis(endpoint=Endpoint.from_url(url), timing=Timing())
    await nursery.start(redis.run)
    return redis


async def test_a_hundred_tasks_get_their_own_replies_while_others_are_cancelled(
    link: TrioRedis, redis_client: blocking.Redis, app_name: str
) -> None:
    sure: set[str] = set()
    unsure: set[str] = set()

    async def call_often(task: int) -> None:
        for turn in range(40):
            token = f"{app_name}:{task}:{turn}"
            limit = random.choice((0, 0.0005, 0.002, 60, 60))
            with trio.move_on_after(limit) as scope:
                if turn % 4 == 0:
                    unsure.add(token)
                    assert await link.perform(incr(token)) == 1
                    sure.add(token)
                elif turn % 4 == 1:
                    assert await link.perform_all([raw("ECHO", token), get("none")]) == [token.encode(), None]
                else:
                    assert await link.perform(raw("ECHO", token)) == token.encode()
            if scope.cancelled_caught and random.random() < 0.3:
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for task in range(100):
            nursery.start_soon(call_often, task)
    counted = redis_client.mget(sorted(unsure))
    for token, count in zip(sorted(unsure), counted, strict=True):
        assert count == b"1" if token in sure else count in (None, b"1")
    redis_client.delete(*unsure)
    statistics = link.statistics()
    assert statistics.connects == 1
    assert statistics.unsent == 0
    assert statistics.batches < statistics.commands
    assert await link.perform(raw("ECHO", "last")) == b"last"
    assert link.statistics().inflight == 0


async def test_calls_made_at_the_same_time_share_one_write(link: TrioRedis) -> None:
    before = link.statistics()
    async with trio.open_nursery() as nursery:
        for n in range(100):
            nursery.start_soon(link.perform, raw("ECHO", n))
    after = link.statistics()
    assert after.commands - before.commands == 100
    assert after.batches - before.batches <= 3


async def test_large_and_small_values_mix(link: TrioRedis, app_name: str) -> None:
    async def roundtrip(task: int) -> None:
        value = bytes([task]) * random.choice((1, 1000, 100_000, 2_000_000))
        await link.perform(raw("SET", f"{app_name}:{task}", value, "EX", 60))
        assert await link.perform(raw("GETDEL", f"{app_name}:{task}")) == value

    async with trio.open_nursery() as nursery:
        for task in range(30):
            nursery.start_soon(roundtrip, task)


@pytest.mark.parametrize("last_write", [1, 2], ids=["sending-itself", "through-the-writer"])
async def test_a_cancelled_caller_does_not_send_what_it_had_not_sent(
    link: TrioRedis, app_name: str, last_write: int
) -> None:
    # After a write of one command a caller sends by itself, after one of several it leaves that to the writer.
    await link.perform_all([raw("ECHO", n) for n in range(last_write)])
    for _ in range(20):
        with trio.CancelScope() as scope:
            scope.cancel()
            await link.perform(incr(app_name))
        assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.perform, incr(app_name))
        nursery.cancel_scope.cancel()
    assert await link.perform(get(app_name)) is None
