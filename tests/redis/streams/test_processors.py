"""Processors in a worker: what they see, in which order, and what they leave behind."""

from collections import defaultdict
from typing import Any

import msgspec
import pytest
import redis
import trio
import trio.lowlevel

from celery5 import App, Event, RetryPolicy
from celery5.errors import Misconfigured, StreamFull
from celery5.processes.router import ROUTER
from celery5.streams import GroupIsLive, Keep, StreamEvents
from tests.redis.worker.workers import Lines, start, until, until_async, working


class Order(msgspec.Struct):
    order_id: int
    amount: int


def orders_of(app: App, **options: Any) -> Any:
    return app.stream("orders", Order, by="order_id", **{"partitions": 4, **options})


def make_orders(count: int, keys: int = 7) -> list[Order]:
    """Records of some keys, whose amounts count up in the order of sending."""
    return [Order(number % keys, number) for number in range(count)]


class Seen:
    """What processors have seen, by key."""

    def __init__(self) -> None:
        self.amounts = defaultdict[int, list[int]](list)

    def add(self, order: Order) -> None:
        self.amounts[order.order_id].append(order.amount)

    @property
    def count(self) -> int:
        return sum(map(len, self.amounts.values()))

    @property
    def is_ordered(self) -> bool:
        return all(amounts == sorted(amounts) for amounts in self.amounts.values())


async def lag(app: App, group: str) -> int:
    (stream,) = [candidate for candidate in await app.streams.ainfo() if candidate.stream == "orders"]
    return next((candidate.lag for candidate in stream.groups if candidate.group == group), -1)


async def test_a_processor_sees_each_record_once_and_those_of_a_key_in_their_order(app: App) -> None:
    orders, seen = orders_of(app), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    before = await orders.asend(*make_orders(300))
    async with working(app):
        await orders.asend(*make_orders(300))
        await until(lambda: seen.count >= 600)
        await until_async(lambda: _is_zero(app, "bill"))
    assert seen.count == 600
    assert len(set(before)) == 300
    assert sorted(seen.amounts[3]) == sorted([*range(3, 300, 7)] * 2)
    assert all(len(amounts) == len(set(amounts)) * 2 for amounts in seen.amounts.values())


async def _is_zero(app: App, group: str) -> bool:
    return await lag(app, group) == 0


async def test_the_ids_number_the_records_of_each_partition(app: App) -> None:
    orders = orders_of(app)
    ids = await orders.asend(*make_orders(50))
    by_partition = defaultdict[int, list[int]](list)
    for partition, record_id in ids:
        by_partition[partition].append(int(record_id.partition("-")[2]))
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in by_partition.values())


async def test_what_is_in_hand_when_the_worker_stops_is_finished(app: App) -> None:
    orders = orders_of(app, partitions=1)
    begun, done = list[int](), list[int]()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            begun.append(order.amount)
            if order.amount == 0:
                await until(lambda: events._feed.is_stopping)
                await trio.sleep(0.01)  # an end without a grace period would come in between
            done.append(order.amount)

    await orders.asend(*make_orders(100, keys=1))
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app)
        await until(lambda: begun == [0])
        await one.stop()
    assert begun == done
    assert len(done) < 100
    async with working(app):
        await until(lambda: done[-1] == 99)
    assert begun == done == list(range(100))


async def test_record_beyond_the_grace_period_is_cancelled_and_processed_again(app: App) -> None:
    orders = orders_of(app, partitions=1)
    begun, done = list[int](), list[int]()

    @app.processor(orders, grace_period=0.1)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            begun.append(order.amount)
            if begun.count(2) == 1:
                await trio.sleep_forever()
            done.append(order.amount)

    await orders.asend(*make_orders(4, keys=1))
    async with working(app):
        await until(lambda: begun == [0, 1, 2])
    assert done == [0, 1]
    async with working(app):
        await until(lambda: done == [0, 1, 2, 3])
    assert begun == [0, 1, 2, 2, 3]


async def test_outputs_jobs_and_state_are_there_once_though_a_record_was_processed_twice(app: App) -> None:
    orders = orders_of(app, partitions=2)
    totals = app.stream("totals", dict, by=lambda total: total["key"], partitions=2)
    charged, failures = list[int](), 0

    @app.task
    async def charge(amount: int) -> None:
        charged.append(amount)

    @app.processor(orders, into=totals, on_error=RetryPolicy(max_retries=5, backoff=0))
    async def total(events: StreamEvents[Order]) -> None:
        nonlocal failures
        async for order in events.records():
            key = str(order.order_id)
            value = await events.state.get(key, 0) + order.amount
            events.state.set(key, value)
            events.send({"key": key, "total": value})
            events.job(charge.s(order.amount))
            if order.amount % 10 == 0 and failures < 5:
                failures += 1
                raise ValueError("once more")

    sums = list[tuple[str, int]]()

    @app.processor(totals)
    async def collect(events: StreamEvents[Any]) -> None:
        async for record in events.records():
            sums.append((record["key"], record["total"]))

    await orders.asend(*make_orders(60, keys=3))
    async with working(app):
        await until(lambda: len(sums) >= 60 and len(charged) >= 60)
        await until_async(lambda: _is_zero(app, "total"))
    assert failures == 5
    assert sorted(charged) == list(range(60))
    expected = {str(key): [sum(range(key, last + 1, 3)) for last in range(key, 60, 3)] for key in range(3)}
    assert {key: [value for name, value in sums if name == key] for key in expected} == expected


async def test_an_event_of_a_processor_reaches_its_subscribers_once(app: App) -> None:
    orders, told, failures = orders_of(app, partitions=1), list[int](), 0

    @app.event(name="billed")
    class Billed(Event):
        amount: int

    @Billed.subscribe
    @app.task(name="tell")
    async def tell(amount: int) -> None:
        told.append(amount)

    @app.processor(orders, on_error=RetryPolicy(max_retries=1, backoff=0))
    async def bill(events: StreamEvents[Order]) -> None:
        nonlocal failures
        async for order in events.records():
            events.event(Billed(amount=order.amount))
            if order.amount == 3 and not failures:
                failures += 1
                raise ValueError("once more")

    await orders.asend(*make_orders(10))
    async with working(app), working(app, page=ROUTER):
        await until(lambda: len(told) >= 10)
        await until_async(lambda: _is_zero(app, "bill"))
    assert sorted(told) == list(range(10))


async def test_members_share_the_partitions_and_a_new_one_moves_only_what_it_must(app: App) -> None:
    orders, seen = orders_of(app, partitions=8), Seen()

    @app.processor(orders, absence=0)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async def owners() -> dict[int, str]:
        (state,) = await app.streams.ainfo()
        return {
            partition.partition: partition.owner for group in state.groups for partition in group.partitions
        }

    async def is_shared(members: int) -> bool:
        names = list((await owners()).values())
        shares = sorted(names.count(name) for name in set(names))
        return "" not in names and len(shares) == members and shares[-1] - shares[0] <= 1

    await orders.asend(*make_orders(10))
    async with trio.open_nursery() as nursery:
        first = await start(nursery, app, name="one")
        await until_async(lambda: is_shared(1))
        before = await owners()
        second = await start(nursery, app, name="two")
        await until_async(lambda: is_shared(2))
        after = await owners()
        assert sum(before[partition] != after[partition] for partition in before) == 4
        await orders.asend(*make_orders(200))
        await until(lambda: seen.count == 210)
        await second.stop()
        await until_async(lambda: is_shared(1))
        await orders.asend(*make_orders(200))
        await until(lambda: seen.count == 410)
        await first.stop()


async def test_more_members_than_partitions_leave_some_idle(app: App) -> None:
    orders, seen = orders_of(app, partitions=1), Seen()

    @app.processor(orders, absence=0)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async with trio.open_nursery() as nursery:
        members = [await start(nursery, app, name=name) for name in ("one", "two", "three")]
        await orders.asend(*make_orders(30))
        await until(lambda: seen.count == 30)
        for member in members:
            await orders.asend(*make_orders(30))
            await member.stop()
    assert seen.count >= 90


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_batches_have_at_most_so_many_records_and_are_acknowledged_as_a_whole(
    app: App, concurrency: int
) -> None:
    orders, sizes, seen = orders_of(app, partitions=2), list[int](), Seen()

    @app.processor(orders, concurrency=concurrency)
    async def bill(events: StreamEvents[Order]) -> None:
        async for batch in events.take(40, within=0.05).records():
            sizes.append(len(batch))
            for order in batch:
                seen.add(order)

    await orders.asend(*make_orders(500, keys=20))
    async with working(app):
        await until(lambda: seen.count == 500)
        await until_async(lambda: _is_zero(app, "bill"))
    assert max(sizes) <= 40
    assert seen.is_ordered


async def test_a_batch_waits_for_more_records_until_it_is_full_or_its_time_is_over(app: App) -> None:
    orders, sizes = orders_of(app, partitions=1), list[int]()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for batch in events.take(3, within=20).records():
            sizes.append(len(batch))

    @app.processor(orders)
    async def book(events: StreamEvents[Order]) -> None:
        async for _ in events.take(3, within=0.1).records():
            booked.set()

    booked = trio.Event()
    async with working(app):
        await orders.asend(*make_orders(1))
        with trio.fail_after(30):
            await booked.wait()
        assert sizes == []
        for order in make_orders(2):
            await orders.asend(order)
        await until(lambda: bool(sizes))
    assert sizes == [3]


async def test_a_record_is_acknowledged_when_the_next_one_is_asked_for_and_not_before(app: App) -> None:
    orders, release, seen = orders_of(app, partitions=2), trio.Event(), list[int]()
    slow, quick = sorted({orders.find_partition(Order(key, 0)): key for key in range(20)}.items())

    @app.processor(orders, absence=0)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append(order.order_id)
            if order.order_id == slow[1]:
                await release.wait()

    async def get_lags() -> list[int]:
        (stream,) = await app.streams.ainfo()
        return [partition.lag for group in stream.groups for partition in group.partitions]

    async def is_at(*lags: int) -> bool:
        return await get_lags() == list(lags)

    async with working(app):
        await orders.asend(Order(slow[1], 1))
        await until(lambda: seen == [slow[1]])
        await orders.asend(Order(quick[1], 2))
        await until_async(
            lambda: is_at(1, 0)
        )  # what was in hand earlier would have been acknowledged earlier
        release.set()
        await until_async(lambda: is_at(0, 0))
    assert seen == [slow[1], quick[1]]


async def test_records_of_other_keys_go_on_while_one_is_slow_and_each_key_keeps_its_order(app: App) -> None:
    orders, seen, release = orders_of(app, partitions=1), Seen(), trio.Event()

    @app.processor(orders, concurrency=8, commit_every=100)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            if order.amount == 0:
                await release.wait()
            seen.add(order)

    await orders.asend(*make_orders(60, keys=20))
    async with working(app):
        await until(lambda: seen.count >= 40)
        assert seen.amounts[0] == []
        release.set()
        await until(lambda: seen.count == 60)
        await until_async(lambda: _is_zero(app, "bill"))
    assert seen.is_ordered


async def test_what_was_done_ahead_of_a_slow_record_is_not_done_again(app: App) -> None:
    orders, seen = orders_of(app, partitions=1), Seen()
    stuck = True

    @app.processor(orders, concurrency=8, commit_every=100, grace_period=0.1)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            if order.amount == 0 and stuck:
                await trio.sleep_forever()
            seen.add(order)

    await orders.asend(*make_orders(60, keys=20))
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app)
        await until(lambda: seen.count >= 40)
        await one.stop()
    stuck, before = False, seen.count
    async with working(app):
        await until(lambda: seen.count == 60)
        await until_async(lambda: _is_zero(app, "bill"))
    assert before < 60
    assert seen.count == 60
    assert seen.is_ordered


async def test_failing_record_is_retried_then_quarantines_its_partition(
    app: App,
) -> None:
    orders, seen, attempts = orders_of(app, partitions=2), Seen(), list[int]()

    @app.processor(orders, on_error=RetryPolicy(max_retries=2, backoff=0))
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            if order.amount == 5:
                attempts.append(order.amount)
                if len(attempts) <= 3:
                    raise ValueError("no such order")
            seen.add(order)

    ids = await orders.asend(*make_orders(40, keys=20))
    bad = ids[5].partition

    async def condition() -> str:
        (state,) = await app.streams.ainfo()
        return next(
            (
                partition.why
                for partition in state.groups[0].partitions
                if partition.partition == bad and partition.condition
            ),
            "",
        )

    async def is_quarantined() -> bool:
        return bool(await condition())

    with Lines() as lines:
        async with working(app):
            await until_async(is_quarantined)
            others = sum(partition != bad for partition, _ in ids)
            await until(lambda: seen.count >= others)
        assert "no such order" in await condition()
        async with working(app):  # a restart does not forget it
            assert await is_quarantined()
            assert attempts == [5, 5, 5]
            assert await app.streams.aset_quarantine("orders", "bill", bad)
            await until(lambda: seen.count == 40)
        assert len(lines.of("partition:quarantined")) == 1
    assert seen.is_ordered


async def test_an_ignored_record_becomes_a_dead_one_and_the_next_ones_go_on(
    app: App, redis_client: Any
) -> None:
    orders, seen = orders_of(app, partitions=1), Seen()

    @app.processor(orders, then="ignore")
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            if order.amount == 5:
                raise ValueError("no such order")
            seen.add(order)

    ids = await orders.asend(*make_orders(10))
    async with working(app):
        await until(lambda: seen.count == 9)
        await until_async(lambda: _is_zero(app, "bill"))
    ((_, dead),) = redis_client.xrange(orders.keys.dead("bill"))
    assert dead[b"id"].decode() == ids[5].id
    assert b"no such order" in dead[b"error"]


async def test_nothing_that_a_group_has_not_read_is_trimmed(app: App) -> None:
    orders, seen = orders_of(app, partitions=1, keep=Keep(records=200)), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async with working(app):
        await orders.asend(Order(1, -1))
        await until(lambda: seen.count == 1)
        await until_async(lambda: _is_zero(app, "bill"))
    await orders.asend(*make_orders(200))
    with pytest.raises(
        StreamFull, match=r"^partition 0 of stream orders is full: group bill has not read 200 "
    ):
        await orders.asend(Order(1, 200))
    async with working(app):
        await until(lambda: seen.count == 201)
        await until_async(lambda: _is_zero(app, "bill"))
        await orders.asend(*make_orders(150))
        await until(lambda: seen.count == 351)


async def test_old_records_go_when_all_groups_have_read_them_and_not_before(
    app: App, redis_client: Any
) -> None:
    orders, seen = orders_of(app, partitions=1, keep=Keep(age=3600)), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async with working(app):
        await orders.asend(Order(1, -1), times=[1_000_000_000_000])
        await until(lambda: seen.count == 1)
        await until_async(lambda: _is_zero(app, "bill"))
    old = make_orders(1000, keys=1)
    await orders.asend(*old, times=[1_000_000_000_001] * len(old))
    await orders.asend(Order(1, 1000))
    assert redis_client.xlen(orders.keys.log(0)) >= 1001
    async with working(app):
        await until_async(lambda: _is_zero(app, "bill"))
    await orders.asend(Order(1, 1001))
    assert redis_client.xlen(orders.keys.log(0)) < 200  # whole nodes of the stream go
    assert seen.count == 1002


async def test_with_drop_the_oldest_go_and_the_processor_says_how_many(app: App) -> None:
    orders, seen = orders_of(app, partitions=1, keep=Keep(records=200, full="drop")), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async with working(app):
        await orders.asend(Order(1, -1))
        await until(lambda: seen.count == 1)
        await until_async(lambda: _is_zero(app, "bill"))
    for first in range(0, 2000, 200):
        await orders.asend(*[Order(1, first + number) for number in range(200)])
    with Lines() as lines:
        async with working(app):
            await until_async(lambda: _is_zero(app, "bill"))
        (line,) = lines.of("partition:records-lost")
    assert seen.count + line["records"] == 2001
    assert seen.amounts[1][-1] == 1999


async def test_a_new_group_starts_where_it_says(app: App) -> None:
    orders, early, late = orders_of(app), Seen(), Seen()

    @app.processor(orders, name="early")
    async def first(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            early.add(order)

    @app.processor(orders, name="late", start="latest")
    async def second(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            late.add(order)

    await orders.asend(*make_orders(20))
    async with working(app):
        await until(lambda: early.count == 20)
        await until_async(lambda: _is_zero(app, "late"))
        await orders.asend(*make_orders(20))
        await until(lambda: early.count == 40 and late.count == 20)


async def test_a_worker_runs_the_processors_that_it_is_told_to_run(app: App) -> None:
    orders, bills, audits = orders_of(app), Seen(), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            bills.add(order)

    @app.processor(orders)
    async def audit(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            audits.add(order)

    await orders.asend(*make_orders(20))
    async with working(app, processors=app.streams.parse_processors("audit")):
        await until(lambda: audits.count == 20)
        await until_async(lambda: _is_zero(app, "audit"))
    async with working(app, processors=app.streams.parse_processors("none")):
        (state,) = await app.streams.ainfo()
        assert [group.members for group in state.groups] == [()]
    assert bills.count == 0
    with pytest.raises(Misconfigured, match=r"^no processor 'bil' here; did you mean 'bill'"):
        app.streams.parse_processors("audit, bil")


async def test_seek_moves_a_group_that_nobody_runs_and_is_refused_while_members_live(app: App) -> None:
    orders, seen = orders_of(app, partitions=2), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    ids = await orders.asend(*make_orders(50))
    async with working(app):
        await until(lambda: seen.count == 50)
        await until_async(lambda: _is_zero(app, "bill"))
        with pytest.raises(GroupIsLive, match="1 member of group bill run"):
            await app.streams.aseek("orders", "bill", "earliest")
        await app.streams.aseek("orders", "bill", "earliest", force=True)
        await until(lambda: seen.count == 100)
        await until_async(lambda: _is_zero(app, "bill"))
    tenth = next(record for record in ids if record.partition == 0 and record.id.endswith("-10"))
    await app.streams.aseek("orders", "bill", tenth.id, partition=0)
    behind = sum(record.partition == 0 for record in ids) - 9
    assert await lag(app, "bill") == behind
    async with working(app):
        await until(lambda: seen.count == 100 + behind)
    with pytest.raises(Misconfigured, match="has no group 'bil'"):
        await app.streams.aseek("orders", "bil", "earliest")


async def test_each_key_keeps_its_order_while_the_number_of_partitions_changes(app: App) -> None:
    orders, seen = orders_of(app, partitions=2), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            await trio.lowlevel.checkpoint()
            seen.add(order)

    sent = 0
    async with working(app):
        for partitions in (8, 3, 6):
            for _ in range(5):
                await orders.asend(*[Order(number % 30, sent + number) for number in range(120)])
                sent += 120
            await app.streams.areshard("orders", partitions)
        await orders.asend(*[Order(number % 30, sent + number) for number in range(120)])
        await until(lambda: seen.count >= sent + 120)
        await until_async(lambda: _is_zero(app, "bill"))
    assert seen.count == sent + 120
    assert seen.is_ordered


async def test_a_new_group_reads_the_partitions_of_before_and_after_in_order(app: App) -> None:
    orders, seen = orders_of(app, partitions=2), Seen()
    await orders.asend(*make_orders(200, keys=30))
    await app.streams.areshard("orders", 5)
    await orders.asend(*[Order(number % 30, 1000 + number) for number in range(200)])

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    async with working(app):
        await until(lambda: seen.count == 400)
    assert seen.is_ordered


async def test_a_record_is_processed_again_whose_commit_redis_has_lost(
    app: App, redis_client: "redis.Redis"
) -> None:
    """As at a failover: the state of the partition is that before the commit, and its owner is the same."""
    orders, seen = orders_of(app, partitions=1), Seen()

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.add(order)

    client: Any = redis_client
    partition = app.keys.for_stream("orders").partition("bill", 0)
    async with working(app):
        await orders.asend(Order(1, 1))
        await until_async(lambda: is_read(app))
        before = client.hgetall(partition)
        await orders.asend(Order(1, 2))
        await until_async(lambda: is_read(app))
        with client.pipeline() as both:
            both.delete(partition)
            both.hset(partition, mapping=before)
            both.execute()
        await until(lambda: seen.amounts[1] == [1, 2, 2])
        await until_async(lambda: is_read(app))


async def is_read(app: App) -> bool:
    return await lag(app, "bill") == 0
