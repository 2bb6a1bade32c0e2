"""Parked keys in workers: what Redis has of them, who releases them, and what operators see."""

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App
from celery5.errors import Misconfigured
from celery5.protocol.streams import parking
from celery5.streams import GroupNotEmpty, Stream, StreamEvents
from tests.redis.worker.workers import Lines, leftovers, start, until, until_async, working


class Order(msgspec.Struct):
    customer: str
    amount: int


class Shop:
    """A processor that fails at negative amounts until it is mended."""

    def __init__(self, app: App, partitions: int = 4) -> None:
        self.app = app
        self.orders: Stream[Order] = app.stream("orders", Order, by="customer", partitions=partitions)
        self.done: defaultdict[str, list[int]] = defaultdict(list)
        self.is_mended = False

        @app.processor(self.orders, then="park-key")
        async def bill(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                if order.amount < 0 and not self.is_mended:
                    raise ValueError(f"no amount: {order.amount}")
                self.done[order.customer].append(order.amount)

    async def send(self, *pairs: tuple[str, int]) -> None:
        await self.orders.asend(*[Order(customer, amount) for customer, amount in pairs])

    async def parked(self) -> dict[str, int]:
        return {one.key: one.records for one in await self.app.streams.parked_keys.aread("orders", "bill")}

    async def until_parked(self, parked: dict[str, int]) -> None:
        async def is_so() -> bool:
            return await self.parked() == parked

        await until_async(is_so)

    async def until_done(self) -> None:
        async def is_done() -> bool:
            (stream,) = await self.app.streams.ainfo("orders")
            return all(group.lag == 0 for group in stream.groups)

        await until_async(is_done)


async def test_keys_are_parked_through_restarts_until_they_are_released(
    app: App, redis_client: "redis.Redis"
) -> None:
    shop = Shop(app)
    await shop.send(*[(f"c{n % 10}", n) for n in range(50)], ("c3", -1), ("c7", -2), ("c3", 99), ("c1", 98))
    with Lines() as lines:
        async with working(app):
            await shop.until_parked({"c3": 2, "c7": 1})
            await until(lambda: 98 in shop.done["c1"])
            await shop.send(("c3", 100))
            await shop.until_parked({"c3": 3, "c7": 1})
        assert sorted(line["key"] for line in lines.of("key:parked")) == ["c3", "c7"]
    states = {one.key: one for one in await app.streams.parked_keys.aread("orders", "bill")}
    assert states["c3"].why == "ValueError('no amount: -1')"
    assert states["c3"].since > 1_700_000_000
    shop.is_mended = True
    async with working(app):
        await shop.send(("c3", 101))
        await shop.until_parked({"c3": 4, "c7": 1})
        assert await app.streams.parked_keys.arelease("orders", "bill", "c3") == 1
        await shop.until_parked({"c7": 1})
        await shop.send(("c3", 102))
        await until(lambda: shop.done["c3"][-1] == 102)
        assert await app.streams.parked_keys.adiscard("orders", "bill") == 1
        await shop.until_parked({})
        await shop.send(("c7", 103))
        await until(lambda: shop.done["c7"][-1:] == [103])
    assert shop.done["c3"] == [3, 13, 23, 33, 43, -1, 99, 100, 101, 102]
    assert shop.done["c7"] == [7, 17, 27, 37, 47, 103]
    assert [dead.record["amount"] async for dead in app.streams.dead_records.aread("orders", "bill")] == [-2]
    assert [key for key in leftovers(redis_client, app) if ":parked:" in key] == []
    assert redis_client.hgetall(shop.orders.keys.parked("bill")) == {b"records": b"0"}


async def test_a_key_stays_parked_when_its_partition_moves_and_while_it_is_resharded(app: App) -> None:
    shop = Shop(app, partitions=1)
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app)
        await shop.send(("ada", -1), ("bob", 2), ("ada", 3))
        await shop.until_parked({"ada": 2})
        two = await start(nursery, app)
        await app.streams.areshard("orders", 8)
        await shop.send(*[("ada", number) for number in range(4, 30)], ("bob", 5))
        await shop.until_parked({"ada": 28})
        one.scope.cancel()
        await one.ended.wait()
        shop.is_mended = True
        await shop.send(("ada", 30))
        await app.streams.parked_keys.arelease("orders", "bill")
        await shop.until_parked({})
        await shop.until_done()
        two.scope.cancel()
    assert shop.done == {"ada": [-1, *range(3, 31)], "bob": [2, 5]}


async def test_what_is_parked_is_seen_and_a_group_with_it_is_not_forgotten(
    app: App, redis_client: "redis.Redis"
) -> None:
    shop = Shop(app)
    await shop.send(("ada", -1), ("ada", 2))
    async with working(app):
        await shop.until_parked({"ada": 2})
        await shop.until_done()
    (stream,) = await app.streams.ainfo("orders")
    assert (stream.groups[0].parked_keys, stream.groups[0].parked_records) == (1, 2)
    with pytest.raises(GroupNotEmpty, match="0 dead and 2 parked records"):
        await app.streams.aforget("orders", "bill")
    with pytest.raises(
        Misconfigured, match=r"has not parked key 'eve': celery5 stream parked orders bill shows"
    ):
        await app.streams.parked_keys.arelease("orders", "bill", "eve")
    with pytest.raises(Misconfigured, match="stream orders has no group 'bil'; did you mean 'bill'"):
        await app.streams.parked_keys.aread("orders", "bil")
    shop.is_mended = True
    await app.streams.areset("orders", "bill")  # all is read again, also what was parked
    assert await shop.parked() == {}
    async with working(app):
        await until(lambda: shop.done["ada"] == [-1, 2])
    await shop.send(("ada", 3))
    shop.is_mended = False
    await shop.send(("ada", -4))
    async with working(app):
        await shop.until_parked({"ada": 1})
    await app.streams.aforget("orders", "bill", force=True)
    assert [key for key in leftovers(redis_client, app) if ":parked" in key] == []


async def test_a_failure_when_too_much_is_parked_quarantines_the_partition(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.streams.parking.MAX_PARKED_KEYS", 2)
    assert parking.MAX_PARKED_KEYS == 1000
    shop = Shop(app, partitions=1)
    await shop.send(("a", -1), ("b", -2), ("c", -3), ("d", 4))
    async with working(app):

        async def is_quarantined() -> bool:
            (stream,) = await app.streams.ainfo("orders")
            return bool(stream.groups and stream.groups[0].partitions[0].condition)

        await until_async(is_quarantined)
    assert await shop.parked() == {"a": 1, "b": 1}
    assert shop.done == {}


async def test_a_record_that_cannot_be_read_has_no_key_and_becomes_a_dead_one(
    app: App, redis_client: "redis.Redis"
) -> None:
    shop = Shop(app, partitions=1)
    await shop.send(("a", 1))
    looked: Any = redis_client
    looked.xadd(shop.orders.keys.log(0), {"=json": "{"})
    await shop.send(("a", 2))
    async with working(app):
        await until(lambda: shop.done["a"] == [1, 2])
    assert await shop.parked() == {}
    (stream,) = await app.streams.ainfo("orders")
    assert stream.groups[0].dead == 1


async def test_what_other_programs_write_there_harms_nothing(app: App, redis_client: "redis.Redis") -> None:
    shop = Shop(app, partitions=1)
    keys, looked = shop.orders.keys, redis_client
    await shop.send(("a", 1))
    async with working(app):
        await until(lambda: shop.done["a"] == [1])
    client: Any = looked
    client.hset(
        keys.parked("bill"), mapping={"key:x": "release", "key:y": "\xff", "z": "1", "records": "many"}
    )
    client.xadd(f"{keys.parked_log_prefix}bill:x", {"a": "b"})
    await shop.send(("a", 2))
    async with working(app):
        await until(lambda: shop.done["a"] == [1, 2])

        async def is_gone() -> bool:
            return "x" not in await shop.parked()

        await until_async(is_gone)
