"""When the sentinels are asked for another primary, while a reply is late or now and then, and what follows."""

from collections.abc import AsyncIterator
from random import Random

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.connection import link
from celery5.broker.connection.link import LATE_REPLY, PRIMARY_CHECK_INTERVAL
from celery5.broker.connection.transport import Transport
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from tests.trio.connections.echo_peer import EchoPeer

ENDPOINT = Endpoint.from_url("redis+sentinel://watcher/shop")
GET: Call[object] = Call(("GET", "a"), lambda reply: reply, repeatable=True)


class Hanging(EchoPeer):
    """A sentinel, which names `primary`, and the servers, none of which answers a GET unless `hangs` is false."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery, Random(0))
        self.primary: bytes | None = b"old"
        self.quorum = b"+OK\r\n"
        self.hangs = True
        self.dialled: list[tuple[str, float]] = []

    async def connect(self, endpoint: Endpoint) -> Transport:
        """A new connection to any of them."""
        self.dialled.append((endpoint.host, trio.current_time()))
        return await super().connect(endpoint)

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0] == b"GET" and self.hangs:
            return b""
        if command[0] != b"SENTINEL":
            return super()._answer(command)
        if command[1] == b"CKQUORUM":
            return self.quorum
        if self.primary is None:
            return b"-ERR busy\r\n"
        return b"*2\r\n$%d\r\n%b\r\n$4\r\n6379\r\n" % (len(self.primary), self.primary)

    async def _dribble(self, stream: trio.abc.Stream, data: bytes) -> None:
        if data:
            await stream.send_all(data)


@pytest.fixture
async def peer(nursery: trio.Nursery) -> AsyncIterator[Hanging]:
    """A primary `old`, to which a test connects."""
    yield Hanging(nursery)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("blocks", [0.0, 5.0])
async def test_another_primary_is_connected_to_when_a_reply_is_a_second_late(
    autojump_clock: MockClock,
    nursery: trio.Nursery,
    peer: Hanging,
    monkeypatch: pytest.MonkeyPatch,
    blocks: float,
) -> None:
    monkeypatch.setattr(link, "PRIMARY_CHECK_INTERVAL", float("inf"))  # for this reason only
    control = TrioRedis(endpoint=ENDPOINT, connect=peer.connect)
    redis = ParkedRedis(endpoint=ENDPOINT, control=control, connect=peer.connect) if blocks else control
    await nursery.start(redis.run)
    peer.dialled.clear()
    peer.primary, sent = b"new", trio.current_time()
    nursery.start_soon(redis.perform, Call(GET.words, GET.decode, repeatable=True, blocks=blocks))
    await trio.sleep(blocks + 3 * LATE_REPLY)
    host, first = peer.dialled[0]
    assert host == "watcher"
    assert "new" in dict(peer.dialled)
    assert blocks + LATE_REPLY <= first - sent < blocks + 2 * LATE_REPLY + 0.1


@pytest.mark.parametrize("primary", [b"old", None])
async def test_a_late_reply_is_awaited_where_the_sentinels_name_no_other_primary(
    autojump_clock: MockClock, nursery: trio.Nursery, peer: Hanging, primary: bytes | None
) -> None:
    redis = TrioRedis(endpoint=ENDPOINT, connect=peer.connect)
    await nursery.start(redis.run)
    peer.dialled.clear()
    peer.primary = primary
    nursery.start_soon(redis.perform, GET)
    await trio.sleep(5)
    assert {host for host, _ in peer.dialled} == {"watcher"}


@pytest.mark.parametrize("has_quorum", [True, False])
async def test_a_primary_that_answers_is_left_when_sentinels_with_a_quorum_name_another(
    autojump_clock: MockClock, nursery: trio.Nursery, peer: Hanging, has_quorum: bool
) -> None:
    """It may be cut off from them and not from us."""
    redis = TrioRedis(endpoint=ENDPOINT, connect=peer.connect)
    await nursery.start(redis.run)
    peer.dialled.clear()
    peer.hangs, peer.primary = False, b"new"
    if not has_quorum:
        peer.quorum = b"-NOQUORUM 1 usable Sentinels. Not enough available Sentinels.\r\n"
    for _ in range(round(1.5 * PRIMARY_CHECK_INTERVAL) + 2):
        await redis.perform(GET)
        await trio.sleep(1)
    assert ("new" in dict(peer.dialled)) is has_quorum


async def test_all_connections_of_a_process_leave_a_primary_together(
    autojump_clock: MockClock, nursery: trio.Nursery, peer: Hanging
) -> None:
    """What was read from one server must not be settled on another."""
    links = [TrioRedis(endpoint=ENDPOINT, connect=peer.connect) for _ in range(4)]
    for redis in links:
        await nursery.start(redis.run)
    peer.dialled.clear()
    peer.hangs, peer.primary = False, b"new"
    await trio.sleep(1.5 * PRIMARY_CHECK_INTERVAL + LATE_REPLY + 1)
    times = [at for host, at in peer.dialled if host == "new"]
    assert len(times) == len(links)
    assert max(times) - min(times) < 0.5 < LATE_REPLY
