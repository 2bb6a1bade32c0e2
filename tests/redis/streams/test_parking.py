"""Parked keys in workers: what Redis has of them, who releases them, and what operators see."""

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import streams as calls
from celery5.errors import Misconfigured
from celery5.protocol.streams import parking
from celery5.protocol.streams.groups import Commit
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
        return {
            parked_key.key: parked_key.records
            for parked_key in await self.app.streams.parked_keys.aread("orders", "bill")
        }

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
    states = {
        parked_key.key: parked_key for parked_key in await app.streams.parked_keys.aread("orders", "bill")
    }
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
        await shop.send(("zoe", -1), ("eve", 2), ("zoe", 3))
        await shop.until_parked({"zoe": 2})
        two = await start(nursery, app)
        await app.streams.areshard("orders", 8)
        await shop.send(*[("zoe", number) for number in range(4, 30)], ("eve", 5))
        await shop.until_parked({"zoe": 28})
        one.scope.cancel()
        await one.ended.wait()
        shop.is_mended = True
        await shop.send(("zoe", 30))
        await app.streams.parked_keys.arelease("orders", "bill")
        await shop.until_parked({})
        await shop.until_done()
        two.scope.cancel()
    assert shop.done == {"zoe": [-1, *range(3, 31)], "eve": [2, 5]}


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
        keys.parked("bill"),
        mapping={"key:x": "release", "tries:x": "y", "key:y": "\xff", "z": "1", "records": "many"},
    )
    client.xadd(f"{keys.parked_log_prefix}bill:x", {"a": "b"})
    await shop.send(("a", 2))
    async with working(app):
        await until(lambda: shop.done["a"] == [1, 2])

        async def is_gone() -> bool:
            return "x" not in await shop.parked()

        await until_async(is_gone)


class Slow:
    """A processor that fails until it is mended, and then sends each record on, slowly."""

    def __init__(self, app: App, partitions: int, pause: float) -> None:
        self.app = app
        self.orders: Stream[Order] = app.stream("orders", Order, by="customer", partitions=partitions)
        self.done: Stream[Order] = app.stream("done", Order, by="customer", partitions=1)
        self.is_mended = False

        @app.processor(self.orders, into=self.done, then="park-key")
        async def bill(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                if not self.is_mended:
                    raise ValueError("broken")
                await trio.sleep(pause)
                events.send(order)

    async def read(self) -> list[int]:
        return [record.record["amount"] async for record in self.app.streams.aread("done", "earliest")]

    async def count_parked(self) -> int:
        streams = await self.app.streams.ainfo()
        return sum(
            group.parked_records for stream in streams for group in stream.groups if stream.stream == "orders"
        )

    async def until_parked(self, low: int, high: int) -> None:
        async def is_so() -> bool:
            return low <= await self.count_parked() <= high

        await until_async(is_so)

    async def park(self, customer: str, count: int) -> None:
        """Park so many records, and release them."""
        await self.orders.asend(*[Order(customer, number) for number in range(count)])
        await self.until_parked(count, count)
        self.is_mended = True
        await self.app.streams.parked_keys.arelease("orders", "bill")


async def test_a_release_goes_on_in_another_partition_after_a_reshard_and_doubles_nothing(app: App) -> None:
    slow = Slow(app, 1, 0.02)
    async with working(app):
        await slow.park("zoe", 60)  # in partition 3 of 8
        await slow.until_parked(1, 50)
        await app.streams.areshard("orders", 8)
        await slow.orders.asend(*[Order("zoe", number) for number in range(60, 80)])

        async def is_done() -> bool:
            return 79 in await slow.read()

        await until_async(is_done)
    assert await slow.read() == list(range(80))
    assert await slow.count_parked() == 0


async def test_a_stop_waits_for_the_record_in_hand_and_not_for_the_rest_of_a_release(app: App) -> None:
    slow = Slow(app, 1, 0.05)
    async with working(app):
        await slow.park("ada", 90)
        await slow.until_parked(1, 88)
        before = await slow.count_parked()
    assert before - await slow.count_parked() < 10


async def test_orderly_restarts_do_not_end_a_release(app: App) -> None:
    slow = Slow(app, 1, 0.002)
    async with working(app):
        await slow.park("ada", 1200)
    for _ in range(5):
        async with working(app):
            left = await slow.count_parked()
            await slow.until_parked(0, max(0, left - 3))
    async with working(app):
        await slow.until_parked(0, 0)
    assert await slow.read() == list(range(1200))


async def test_a_record_with_which_owners_begin_in_vain_stays_parked(app: App, redis_client: Any) -> None:
    slow = Slow(app, 1, 0.0)
    async with working(app):
        await slow.orders.asend(Order("ada", 1))
        await slow.until_parked(1, 1)
        slow.is_mended = True
        redis_client.hset(slow.orders.keys.parked("bill"), "tries:ada", app.settings.max_deliveries)
        looked = redis_client.hget(slow.orders.keys.parked("bill"), "key:ada")
        redis_client.hset(slow.orders.keys.parked("bill"), "key:ada", looked.replace(b"-", b"release", 1))

        async def is_kept() -> bool:
            (one,) = await app.streams.parked_keys.aread("orders", "bill")
            return one.why == "3 owners have not got its first record done" and not one.action

        await until_async(is_kept)
        assert await slow.count_parked() == 1
        await app.streams.parked_keys.arelease("orders", "bill", "ada")  # which tries again
        await slow.until_parked(0, 0)
    assert await slow.read() == [1]


async def test_what_is_discarded_during_its_release_is_not_processed(app: App) -> None:
    slow = Slow(app, 1, 0.1)
    async with working(app):
        await slow.park("ada", 20)
        await slow.until_parked(1, 18)
        await app.streams.parked_keys.adiscard("orders", "bill")
        await slow.until_parked(0, 0)
        (orders,) = [stream for stream in await app.streams.ainfo() if stream.stream == "orders"]
    assert len(await slow.read()) + orders.groups[0].dead == 20
    assert orders.groups[0].dead > 5


async def test_too_many_records_of_a_parked_key_quarantine_its_partition(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.streams.parking.MAX_PARKED_RECORDS", 5)
    shop = Shop(app, partitions=1)
    await shop.send(("a", -1), *[("a", number) for number in range(40)], ("b", 1))
    async with working(app):

        async def is_quarantined() -> bool:
            (stream,) = await app.streams.ainfo("orders")
            return bool(stream.groups and stream.groups[0].partitions[0].condition)

        await until_async(is_quarantined)
    assert await shop.parked() == {"a": 5}
    shop.is_mended = True
    await app.streams.parked_keys.adiscard("orders", "bill")
    await app.streams.aset_quarantine("orders", "bill", 0)
    async with working(app):
        await until(lambda: shop.done["b"] == [1])
    assert shop.done["a"] == list(range(4, 40))


async def test_an_owner_that_was_replaced_parks_and_releases_nothing(app: App) -> None:
    slow = Slow(app, 1, 0.01)
    async with working(app):
        await slow.orders.asend(Order("ada", 1), Order("ada", 2))
        await slow.until_parked(2, 2)
    keys = slow.orders.keys
    ((entry, _), _) = await app.aperform(calls.read_parked(keys, "bill", b"ada", count=9))
    late = Commit(
        *(0, 1, "9-9", "9-9"),
        outputs=[b"x"],
        name="ff",
        number=1,
        parked=[parking.ParkedRecord(b"eve", parking.ParkedKey("late", 1), ("id", b"1-1"))],
        released=[parking.ReleasedRecord(b"ada", entry.decode())],
    )
    assert await app.aperform(calls.commit(keys, "bill", "nobody", [late])) == (False,)
    assert {
        parked_key.key: parked_key.records
        for parked_key in await app.streams.parked_keys.aread("orders", "bill")
    } == {"ada": 2}
