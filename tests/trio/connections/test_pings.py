"""Pings of silent connections: as soon as before, together with other calls of the process, and no more than needed."""

from collections.abc import AsyncIterator
from itertools import pairwise
from random import Random

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.connection.push import PushRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.protocol.process.wake_ups import get_next_tick
from tests.trio.connections.echo_peer import EchoPeer

ENDPOINT = Endpoint.from_url("redis://server")
GET: Call[object] = Call(("GET", "a"), lambda reply: reply, repeatable=True)
IDLE_PING = Timing().idle_ping


class Server(EchoPeer):
    """A server that notes when pings come."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery, Random(0))
        self.pings: list[float] = []

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0] == b"PING":
            self.pings.append(trio.current_time())
        return super()._answer(command)

    async def _dribble(self, stream: trio.abc.Stream, data: bytes) -> None:
        await trio.sleep(0.002)
        if data:
            await stream.send_all(data)


@pytest.fixture
async def server(nursery: trio.Nursery) -> AsyncIterator[Server]:
    """A server to connect to."""
    yield Server(nursery)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("begins_after", [0.5, 4.0, 7.0, 9.0, 11.0, 14.0])
async def test_pings_of_a_silent_connection_fall_in_with_the_ticks(
    autojump_clock: MockClock, nursery: trio.Nursery, server: Server, begins_after: float
) -> None:
    await trio.sleep_until(get_next_tick(trio.current_time(), IDLE_PING) + begins_after)
    await nursery.start(PushRedis(endpoint=ENDPOINT, on_message=print, connect=server.connect).run)
    connected = trio.current_time()
    await trio.sleep(20 * IDLE_PING)
    gaps = [after - before for before, after in pairwise([connected, *server.pings])]
    assert max(gaps) <= IDLE_PING + 0.001, "but for rounding"
    assert len(server.pings) <= 21
    for ping in server.pings[2:]:
        assert ping == pytest.approx(get_next_tick(ping - 1, IDLE_PING), abs=0.01)


async def test_a_connection_with_a_call_at_each_tick_needs_no_ping(
    autojump_clock: MockClock, nursery: trio.Nursery, server: Server
) -> None:
    redis = TrioRedis(endpoint=ENDPOINT, connect=server.connect)
    await nursery.start(redis.run)
    for _ in range(50):
        await trio.sleep_until(get_next_tick(trio.current_time(), IDLE_PING))
        await redis.perform(GET)
    assert len(server.pings) <= 1


async def test_a_connection_with_calls_now_and_then_needs_no_ping(
    autojump_clock: MockClock, nursery: trio.Nursery, server: Server
) -> None:
    redis = TrioRedis(endpoint=ENDPOINT, connect=server.connect)
    await nursery.start(redis.run)
    for _ in range(200):
        await trio.sleep(IDLE_PING / 4)
        await redis.perform(GET)
    assert not server.pings
