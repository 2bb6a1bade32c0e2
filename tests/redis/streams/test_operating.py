"""What operators do with streams and their groups: read, reset, forget, and see to dead records."""

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import trio

from celery5 import App
from celery5.errors import Misconfigured, StreamFull
from celery5.streams import (
    DeadRecordQuery,
    GroupIsLive,
    GroupNotEmpty,
    Keep,
    Record,
    StoredRecord,
    StreamEvents,
)
from celery5.streams.codec import make_codec
from tests.redis.worker.workers import until, until_async, working


class Order(msgspec.Struct):
    order_id: int
    amount: int


class Reading(Record, primitive=True):
    name: str
    at: int
    value: float
    is_valid: bool
    raw: bytes


def orders_of(app: App, **options: Any) -> Any:
    return app.stream("orders", Order, by="order_id", **{"partitions": 4, **options})


def make_orders(count: int, keys: int = 7) -> list[Order]:
    """Records of some keys, whose amounts count up in the order of sending."""
    return [Order(number % keys, number) for number in range(count)]


async def read_all(app: App, *words: Any, **options: Any) -> list[StoredRecord]:
    return [stored async for stored in app.streams.aread("orders", *words, **options)]


async def get_lag(app: App, group: str = "bill") -> int:
    (state,) = await app.streams.ainfo("orders")
    return next((candidate.lag for candidate in state.groups if candidate.group == group), -1)


async def process_all(app: App) -> None:
    async with working(app):
        await until_async(lambda: _is_done(app))


async def _is_done(app: App) -> bool:
    return await get_lag(app) == 0


def count_records(app: App, orders: Any, **options: Any) -> Any:
    """A processor that counts the orders of each key in its state, and gives up those that divide by ten."""

    @app.processor(orders, **{"then": "ignore", **options})
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            if order.amount % 10 == 0:
                raise ValueError(f"no amount: {order.amount}")
            key = str(order.order_id)
            events.state.set(key, await events.state.get(key, 0) + 1)

    return bill


async def test_records_are_read_without_a_group_those_of_a_partition_in_order(app: App) -> None:
    orders = orders_of(app)
    sent = await orders.asend(*make_orders(1500))
    found = await read_all(app, "earliest")
    by_partition = defaultdict[int, list[str]](list)
    for stored in found:
        by_partition[stored.partition].append(stored.id)
    expected = defaultdict[int, list[str]](list)
    for partition, record_id in sent:
        expected[partition].append(record_id)
    assert by_partition == expected
    assert [stored.time for stored in found] == sorted(stored.time for stored in found)
    assert {stored.record["amount"] for stored in found} == set(range(1500))
    assert (await app.streams.ainfo("orders"))[0].groups == ()


async def test_records_are_read_from_the_end_from_a_place_or_of_a_partition(app: App) -> None:
    orders = orders_of(app)
    times = list(range(1_000_000, 1_000_100))
    sent = await orders.asend(*make_orders(100), times=times)
    assert [stored.record["amount"] for stored in await read_all(app, limit=5)] == [95, 96, 97, 98, 99]
    assert [s.record["amount"] for s in await read_all(app, "1000090-0")] == list(range(90, 100))
    assert [s.record["amount"] for s in await read_all(app, "earliest", limit=3)] == [0, 1, 2]
    assert await read_all(app, "latest") == []
    partition, record_id = sent[50]
    found = await read_all(app, record_id, partition=partition, limit=1)
    assert [(record.id, record.record["amount"]) for record in found] == [(record_id, 50)]
    assert {record.partition for record in await read_all(app, "earliest", partition=partition)} == {
        partition
    }


async def test_native_fields_have_their_types_where_the_class_is_known(app: App, app_name: str) -> None:
    readings = app.stream("orders", Reading, by="name", partitions=1)
    reading = Reading(name="a", at=1, value=2.5, is_valid=True, raw=b"\xff")
    await readings.asend(reading)
    (stored,) = await read_all(app, "earliest")
    assert stored.record == {"name": "a", "at": 1, "value": 2.5, "is_valid": True, "raw": "/w=="}
    (stored,) = await read_all(app, limit=1)
    assert readings.codec.parse(msgspec.json.encode(stored.record)) == reading
    other = App(app_name, broker=app.settings.broker)
    (stored,) = await read_all(other, "earliest")
    assert (stored.record["at"], stored.record["is_valid"]) == ("1", "true")
    other.close()


async def test_a_stream_that_is_followed_yields_what_comes_later(app: App) -> None:
    orders = orders_of(app)
    await orders.asend(*make_orders(20))
    seen = list[int]()

    async def follow() -> None:
        async for stored in app.streams.aread("orders", limit=2, follow=True):
            seen.append(stored.record["amount"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await until(lambda: len(seen) == 2)
        await orders.asend(*make_orders(600))
        await until(lambda: len(seen) == 602)
        nursery.cancel_scope.cancel()
    assert sorted(seen[2:]) == list(range(600))


async def test_what_cannot_be_read_is_told_in_a_line(app: App) -> None:
    orders = orders_of(app)
    await orders.asend(Order(1, 1))
    with pytest.raises(Misconfigured, match=r"no stream 'order': .* did you mean 'orders'"):
        async for _ in app.streams.aread("order", "earliest"):
            pass
    with pytest.raises(Misconfigured, match="stream orders has no partition 4: it has 0 to 3"):
        await read_all(app, "earliest", partition=4)
    with pytest.raises(Misconfigured, match="start is 'yesterday'"):
        await read_all(app, "yesterday")
    with pytest.raises(Misconfigured, match="give a limit"):
        await read_all(app)


async def test_a_reset_begins_anew_and_forgets_what_it_is_told_to(app: App) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    await orders.asend(*(Order(number, 1) for number in range(30)))
    await process_all(app)
    assert await _state(app) == 30
    await app.streams.aset_quarantine("orders", "bill", 2, "a look")
    assert set(await app.streams.areset("orders", "bill")) == {0, 1, 2, 3}
    (state,) = await app.streams.ainfo("orders")
    assert [(partition.condition, partition.since) for partition in state.groups[0].partitions] == [
        ("", 0.0)
    ] * 4
    await process_all(app)
    assert await _state(app) == 60
    await app.streams.areset("orders", "bill", state=True)
    assert await _state(app) == 0
    await process_all(app)
    assert await _state(app) == 30
    await app.streams.areset("orders", "bill", "latest")
    assert await get_lag(app) == 0


async def _state(app: App) -> int:
    from celery5.broker.calls import streams as calls

    redis = await app.connections.get_async_driver()
    names = [str(number) for number in range(30)]
    values = await redis.perform(calls.get_state(app.keys.for_stream("orders"), "bill", names))
    return sum(int(value) for value in values if value is not None)


async def test_group_with_live_members_is_reset_only_by_force_and_not_forgotten(app: App) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    await orders.asend(*(Order(number, 1) for number in range(8)))
    async with working(app):
        await until_async(lambda: _is_done(app))
        with pytest.raises(GroupIsLive, match="1 member of group bill runs"):
            await app.streams.areset("orders", "bill")
        with pytest.raises(GroupIsLive, match="1 member of group bill runs: stop them first"):
            await app.streams.aforget("orders", "bill", force=True)
        await app.streams.areset("orders", "bill", force=True, state=True)
        await until_async(lambda: _counted(app, 8))
    with pytest.raises(Misconfigured, match="no group 'bil'; did you mean 'bill'"):
        await app.streams.areset("orders", "bil")
    with pytest.raises(Misconfigured, match="no stream 'order'"):
        await app.streams.aforget("order", "bill")


async def _counted(app: App, count: int) -> bool:
    return await _state(app) == count


async def test_a_forgotten_group_leaves_no_key_and_holds_back_no_trimming(
    app: App, redis_client: Any
) -> None:
    orders = orders_of(app, partitions=150, keep=Keep(records=5))
    count_records(app, orders)
    await orders.asend(*(Order(number, number) for number in range(300)))
    await process_all(app)
    with pytest.raises(
        GroupNotEmpty, match="0 outputs that are not delivered and 30 dead and 0 parked records"
    ):
        await app.streams.aforget("orders", "bill")
    with pytest.raises(StreamFull):
        await orders.asend(*[Order(1, 1)] * 50)
    await app.streams.aforget("orders", "bill", force=True)
    (state,) = await app.streams.ainfo("orders")
    assert state.groups == ()
    tag = orders.keys.map.removesuffix(":map")
    left = [key.decode().removeprefix(tag) for key in redis_client.scan_iter(match=f"{tag}*")]
    assert [key for key in left if ":bill" in key] == []
    await orders.asend(*[Order(1, 1)] * 50)
    with pytest.raises(Misconfigured, match="has no group 'bill'; it has none"):
        await app.streams.aforget("orders", "bill")


async def test_dead_records_are_read_replayed_and_purged(app: App) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    sent = await orders.asend(*make_orders(40))
    await process_all(app)
    records = app.streams.dead_records
    dead = [dead_record async for dead_record in records.aread("orders", "bill")]
    assert sorted(dead_record.record["amount"] for dead_record in dead) == [0, 10, 20, 30]
    assert {(dead_record.partition, dead_record.id) for dead_record in dead} == {
        tuple(sent[number]) for number in (0, 10, 20, 30)
    }
    assert all(
        "no amount" in dead_record.error and "ValueError" in dead_record.traceback for dead_record in dead
    )
    assert all(
        (dead_record.attempts, dead_record.group, dead_record.stream) == (1, "bill", "orders")
        for dead_record in dead
    )
    assert (await app.streams.ainfo("orders"))[0].groups[0].dead == 4

    one = DeadRecordQuery(error="no amount: 10")
    assert (await records.areplay("orders", "bill", one, dry_run=True)).matched == 1
    tally = await records.areplay("orders", "bill", one)
    assert (tally.matched, tally.done, tally.left) == (1, 1, {})
    partition = next(partition for number, (partition, _) in enumerate(sent) if number == 10)
    last = (await read_all(app, "earliest", partition=partition))[-1]
    assert last.record == {"order_id": 3, "amount": 10}
    assert len([dead_record async for dead_record in records.aread("orders", "bill")]) == 3

    entry = dead[0].entry
    assert (await records.apurge("orders", "bill", DeadRecordQuery(entries=[entry]))).done <= 1
    assert (await records.apurge("orders", "bill", DeadRecordQuery(older_than=3600))).matched == 0
    assert (await records.apurge("orders", "bill")).done >= 2
    assert [dead_record async for dead_record in records.aread("orders", "bill")] == []


async def test_a_replay_that_is_made_twice_appends_each_record_once(app: App) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    await orders.asend(*(Order(number, 10 * number) for number in range(50)))
    await process_all(app)
    records = app.streams.dead_records
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(records.areplay, "orders", "bill")
    assert len(await read_all(app, "earliest")) == 100


async def test_a_dead_record_that_the_class_does_not_read_stays_dead(app: App, app_name: str) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    other = App(app_name, broker=app.settings.broker)
    documents = other.stream("orders", by=lambda body: body["order_id"])
    await documents.asend({"order_id": 1, "amount": "none"}, {"order_id": 1, "amount": 7})
    await process_all(app)
    tally = await app.streams.dead_records.areplay("orders", "bill")
    assert (tally.matched, tally.done) == (1, 0)
    assert "amount" in next(iter(tally.left.values()))
    (dead,) = [dead_record async for dead_record in app.streams.dead_records.aread("orders", "bill")]
    assert dead.record == {"order_id": 1, "amount": "none"}
    other.close()


async def test_quarantines_say_since_when(app: App) -> None:
    orders = orders_of(app)
    count_records(app, orders)
    await orders.asend(Order(1, 1))
    await process_all(app)
    await app.streams.aset_quarantine("orders", "bill", 1, "a look")
    (state,) = await app.streams.ainfo("orders")
    (found,) = [partition for partition in state.groups[0].partitions if partition.condition]
    assert (found.partition, found.why, found.since > 1_700_000_000) == (1, "a look", True)


class Reversed:
    """An encoding of the user's own."""

    name = "reversed"

    def dumps(self, value: Any) -> bytes:
        return msgspec.json.encode(value)[::-1]

    def loads(self, raw: bytes) -> Any:
        return msgspec.json.decode(raw[::-1])


async def test_records_in_an_encoding_of_ones_own_are_shown_as_they_are_and_dead_ones_too(app: App) -> None:
    numbers = app.stream("numbers", dict, by=lambda record: record["k"], partitions=1, codec=Reversed())

    @app.processor(numbers, name="refuse", then="ignore")
    async def refuse(events: StreamEvents[dict[str, int]]) -> None:
        async for record in events.records():
            raise ValueError(record)

    async def all_dead() -> bool:
        return len([dead async for dead in dead_records.aread("numbers", "refuse")]) == 2

    dead_records = app.streams.dead_records
    await numbers.asend({"k": 1}, {"k": 2})
    assert [stored.record async for stored in app.streams.aread("numbers", "earliest")] == [
        {"k": 1},
        {"k": 2},
    ]
    assert [stored.record async for stored in app.streams.aread("numbers", limit=1)] == [{"k": 2}]
    async with working(app):
        await until_async(all_dead)
    assert [dead.record async for dead in dead_records.aread("numbers", "refuse")] == [{"k": 1}, {"k": 2}]
    assert (await dead_records.areplay("numbers", "refuse")).done == 2


async def test_an_encoding_is_read_when_a_producer_has_declared_it_and_no_other_one(
    app: App, url: str, redis_client: Any
) -> None:
    orders, seen = orders_of(app, partitions=1), list[int]()

    @app.processor(orders, then="ignore", start="earliest")
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append(order.amount)

    async def is_given_up() -> bool:
        return len([dead async for dead in app.streams.dead_records.aread("orders", "bill")]) == 1

    async with working(app):  # with the codec of before, while a producer has the next one
        await orders.asend(Order(1, 0))
        await until(lambda: seen == [0])
        for amount, codec in enumerate(("msgpack+gzip", "json+gzip", "msgpack"), 1):
            later = App(app.name, broker=url)
            await orders_of(later, partitions=1, codec=codec).asend(Order(1, amount))
            later.close()
            await until(lambda: seen[-1] == amount)  # noqa: B023  it is awaited here
        lz4: Any = make_codec(Order, codec="msgpack+lz4").encode(Order(1, 9))
        redis_client.xadd(orders.keys.log(0), {lz4[0]: lz4[1]})
        await until_async(is_given_up)
    (dead,) = [dead async for dead in app.streams.dead_records.aread("orders", "bill")]
    assert "encoded as 'msgpack+lz4', which this stream has never declared" in dead.error
    assert dead.record == {str(lz4[0], "ascii"): lz4[1].decode(errors="backslashreplace")}
    other = App(app.name, broker=url)  # which does not declare the stream
    shown = [stored.record async for stored in other.streams.aread("orders", "earliest")]
    other.close()
    assert [record.get("amount") for record in shown] == [0, 1, 2, 3, None]
    assert seen == [0, 1, 2, 3]
