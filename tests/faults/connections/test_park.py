"""Park: blocking reads are cancelled at random and cut at will, and no message is ever lost on the way to its
reader."""

import hashlib
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import redis as blocking
import trio

from celery5.broker.call import Call, Script, script_call
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from celery5.errors import BrokerReplied, BrokerUnavailable
from tests.faults.conftest import BRISK, OpenLink
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import raw, until

TIMING = msgspec.structs.replace(BRISK, reply=0.3)


class Parked:
    """A parked link, what it told of its connections, and the stream it reads."""

    def __init__(self, redis: ParkedRedis, stream: str) -> None:
        self.redis = redis
        self.stream = stream
        self.connections = 0

    def connected(self) -> None:
        """A handshake succeeded."""
        self.connections += 1

    def read(self, *, block: float = 5.0, after: str = ">", count: int = 10) -> Call[list[bytes]]:
        """Read the next entries: their ids."""
        words: tuple[str | int, ...] = ("XREADGROUP", "GROUP", "g", "me", "COUNT", count)
        if block:
            words = (*words, "BLOCK", int(block * 1000))
        return Call((*words, "STREAMS", self.stream, after), _ids, blocks=block)


async def add_then_cancel(parked: Parked, control: TrioRedis, scope: trio.CancelScope) -> None:
    """While somebody reads: there is an entry, and before it has come its reader is cancelled."""
    await trio.sleep(0.02)
    await control.perform(raw("XADD", parked.stream, "*", "n", 1))
    scope.cancel()


def _ids(reply: Any) -> list[bytes]:
    return [entry[0] for _stream, entries in reply or () for entry in entries]


@pytest.fixture
async def control(open_link: OpenLink, url: str, app_name: str) -> AsyncIterator[TrioRedis]:
    """The connection that unblocks; it creates the stream."""
    link = await open_link(url=url)
    await link.perform(raw("XGROUP", "CREATE", app_name, "g", "0", "MKSTREAM"))
    yield link
    await link.perform(raw("DEL", app_name))


@pytest.fixture
async def parked(proxy: FaultyProxy, control: TrioRedis, app_name: str, nursery: trio.Nursery) -> Parked:
    """A parked link through the proxy."""
    redis = ParkedRedis(
        endpoint=Endpoint.from_url(proxy.url),
        control=control,
        timing=TIMING,
        on_connected=lambda: one.connected(),
    )
    one = Parked(redis, app_name)
    await nursery.start(redis.run)
    return one


async def test_a_cancelled_read_ends_at_once_and_takes_nothing_with_it(
    parked: Parked, control: TrioRedis
) -> None:
    start = trio.current_time()
    with trio.move_on_after(0.05) as scope:
        await parked.redis.perform(parked.read(block=60))
    assert scope.cancelled_caught
    assert trio.current_time() - start < 30
    await control.perform(raw("XADD", parked.stream, "*", "n", 1))
    ids = await parked.redis.perform(parked.read())
    assert len(ids) == 1


async def test_a_cancelled_read_that_already_has_messages_returns_them(
    parked: Parked, control: TrioRedis, proxy: FaultyProxy
) -> None:
    proxy.delay = 0.05
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add_then_cancel, parked, control, scope)
            ids = await parked.redis.perform(parked.read())
            assert len(ids) == 1
            with pytest.raises(trio.Cancelled):
                await trio.lowlevel.checkpoint_if_cancelled()
    proxy.delay = 0


async def test_what_comes_is_taken_before_the_caller_goes_on(parked: Parked, control: TrioRedis) -> None:
    steps: list[list[bytes]] = []
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            steps.append(await parked.redis.perform(parked.read(), steps.append))

        nursery.start_soon(read)
        await control.perform(raw("XADD", parked.stream, "*", "n", 1))
    first, then = steps
    assert first == then
    assert len(steps) == 2


async def test_what_comes_to_one_who_was_cancelled_is_taken_all_the_same(
    parked: Parked, control: TrioRedis, proxy: FaultyProxy
) -> None:
    proxy.delay = 0.05
    taken: list[list[bytes]] = []
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add_then_cancel, parked, control, scope)
            await parked.redis.perform(parked.read(), taken.append)
    assert [len(ids) for ids in taken] == [1]
    proxy.delay = 0


async def test_nothing_and_a_refusal_are_not_taken(parked: Parked) -> None:
    taken: list[list[bytes]] = []
    assert await parked.redis.perform(parked.read(block=0.01), taken.append) == []
    with pytest.raises(BrokerReplied, match="NOGROUP"):
        await parked.redis.perform(
            Call(("XREADGROUP", "GROUP", "none", "me", "STREAMS", parked.stream, ">"), _ids), taken.append
        )
    assert taken == []


async def test_what_a_script_gives_that_the_server_did_not_know_is_taken_once(
    parked: Parked, control: TrioRedis, app_name: str
) -> None:
    body = f"return {{{{'{app_name}', {{{{'1-0', {{}}}}}}}}}}"
    script = Script("given", body, hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest())
    taken: list[list[bytes]] = []
    for _ in range(2):
        await parked.redis.perform(script_call(script, (), (), _ids), taken.append)
    assert taken == [[b"1-0"]] * 2


async def test_a_read_in_a_scope_that_is_cancelled_already_is_not_sent(
    parked: Parked, proxy: FaultyProxy
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await parked.redis.perform(parked.read())
    assert scope.cancelled_caught
    assert proxy.seen[b"XREADGROUP"] == 0


async def test_a_loop_of_empty_reads_can_be_cancelled(parked: Parked) -> None:
    with trio.move_on_after(0.1) as scope:
        while True:
            await parked.redis.perform(parked.read(block=0.01))
    assert scope.cancelled_caught


async def test_the_reply_of_a_blocking_read_is_due_after_the_time_it_may_block(
    parked: Parked, proxy: FaultyProxy
) -> None:
    # Longer than any reply may take: the time at the server does not count.
    assert await parked.redis.perform(parked.read(block=TIMING.reply * 1.2)) == []
    proxy.stall()
    start = trio.current_time()
    with pytest.raises(BrokerUnavailable, match="gave no answer") as caught:
        await parked.redis.perform(parked.read(block=0.1))
    assert caught.value.maybe_done
    assert TIMING.reply < trio.current_time() - start < TIMING.reply + 30


async def test_a_cancelled_read_whose_connection_is_cut_raises_the_cancellation(
    parked: Parked, proxy: FaultyProxy
) -> None:
    async def cancel_then_cut() -> None:
        await until(lambda: proxy.seen[b"XREADGROUP"] == 1)
        proxy.stall()
        scope.cancel()
        await trio.sleep(0.02)
        proxy.cut_all()
        proxy.resume()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel_then_cut)
            await parked.redis.perform(parked.read())
    assert scope.cancelled_caught
    await until(lambda: parked.redis.connected)


async def test_without_the_control_connection_a_cancelled_read_ends_by_its_own_time(
    without_control: ParkedRedis, parked: Parked
) -> None:
    start = trio.current_time()
    with trio.move_on_after(0.02) as scope:
        await without_control.perform(parked.read(block=0.2))
    assert scope.cancelled_caught
    assert 0.1 < trio.current_time() - start < 30


@pytest.fixture
async def without_control(url: str, nursery: trio.Nursery, proxy: FaultyProxy) -> ParkedRedis:
    """A parked link whose control connection was closed."""
    control = TrioRedis(endpoint=Endpoint.from_url(url), timing=BRISK)
    async with trio.open_nursery() as inner:
        await inner.start(control.run)
        inner.cancel_scope.cancel()
    redis = ParkedRedis(endpoint=Endpoint.from_url(url), control=control, timing=BRISK)
    await nursery.start(redis.run)
    return redis


async def test_two_readers_take_turns(parked: Parked, control: TrioRedis) -> None:
    got: list[list[bytes]] = []

    async def read() -> None:
        got.append(await parked.redis.perform(parked.read(count=1)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(read)
        await control.perform_all([raw("XADD", parked.stream, "*", "n", n) for n in range(2)])
    assert sorted(map(len, got)) == [1, 1]


async def test_cancelling_blocking_reads_at_random_never_strands_a_message(
    parked: Parked, control: TrioRedis, redis_client: blocking.Redis
) -> None:
    """What the server counts as delivered was returned to a caller, every single entry (I1)."""
    taken: set[bytes] = set()
    cancelled = late = 0
    added = 300

    async def produce() -> None:
        for n in range(added):
            await control.perform(raw("XADD", parked.stream, "*", "n", n))
            await trio.sleep(random.uniform(0, 0.003))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        with trio.fail_after(30):
            while len(taken) < added or cancelled <= 20:
                with trio.move_on_after(random.uniform(0, 0.006)) as scope:
                    ids = await parked.redis.perform(parked.read(count=3))
                    assert not taken.intersection(ids)
                    taken.update(ids)
                    late += scope.cancel_called
                cancelled += scope.cancelled_caught
                pending = await control.perform(raw("XPENDING", parked.stream, "g"))
                assert pending[0] == len(taken)
    assert redis_client.xlen(parked.stream) == added


async def test_reads_lost_with_a_connection_are_pending_on_the_next_one(
    parked: Parked, control: TrioRedis, proxy: FaultyProxy
) -> None:
    assert parked.connections == 1
    proxy.cut_reply("XREADGROUP", after=20)
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(BrokerUnavailable) as caught:
                await parked.redis.perform(parked.read())
            assert caught.value.maybe_done

        nursery.start_soon(read)
        await until(lambda: proxy.seen[b"XREADGROUP"] == 1)
        await control.perform(raw("XADD", parked.stream, "*", "n", 1))
    await until(lambda: parked.connections == 2)
    ids = await parked.redis.perform(parked.read(block=0, after="0"))
    assert len(ids) == 1
