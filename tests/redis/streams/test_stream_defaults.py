"""What streams and processors do when nothing is said: each default is one that somebody's code relies on."""

from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.streams import Record, Stream, StreamEvents
from tests.redis.worker.workers import start, until, until_async, working


class Order(Record):
    customer: str
    number: int


@pytest.fixture
def own_app(own_server: EmbeddedServer, app_name: str) -> Any:
    """An application on a server of the test's own, whose counters nobody else moves."""
    app = App(app_name, broker=own_server.url)
    yield app
    app.close()


async def test_a_stream_has_sixteen_partitions_and_keys_are_spread_over_all(
    app: App, redis_client: "redis.Redis"
) -> None:
    orders = app.stream("orders", Order, by="customer")
    await orders.asend(*[Order(customer=f"c{n}", number=n) for n in range(400)])
    (info,) = await app.streams.ainfo()
    lengths = [int(redis_client.xlen(orders.keys.log(n))) for n in range(17)]
    assert info.partitions == 16
    assert all(lengths[:16])
    assert lengths[16] == 0


async def test_a_record_is_json_that_any_program_reads(app: App, redis_client: "redis.Redis") -> None:
    orders = app.stream("orders", Order)
    ((partition, _),) = await orders.asend(Order(customer="ada", number=1))
    ((_, fields),) = redis_client.xrange(orders.keys.log(partition))  # type: ignore[misc]
    assert fields == {b"=json": b'{"customer":"ada","number":1}'}


def test_a_partition_keeps_the_last_fifty_thousand_records(app: App, redis_client: "redis.Redis") -> None:
    orders = app.stream("orders", Order, partitions=1)
    for _ in orders.send_many(Order(customer="", number=n) for n in range(50_400)):
        pass
    kept: Any = redis_client.xlen(orders.keys.log(0))
    assert 50_000 <= kept < 50_400


async def test_a_record_that_fails_stops_its_partition_alone_and_is_not_tried_again(app: App) -> None:
    orders, seen = app.stream("orders", Order, by="customer", partitions=2), list[tuple[str, int]]()
    first, second = sorted({orders.find_partition(Order(customer=c, number=0)): c for c in "abcdef"}.items())

    @app.processor(orders)
    async def total(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append((order.customer, order.number))
            if order == Order(customer=first[1], number=1):
                raise ValueError("it fails")

    async with working(app):
        for number in range(3):
            await orders.asend(*[Order(customer=order[1], number=number) for order in (first, second)])

        async def is_stopped() -> bool:
            (info,) = await app.streams.ainfo()
            return any(
                partition.condition == "quarantined" for lag in info.groups for partition in lag.partitions
            )

        await until_async(is_stopped)
        await until(lambda: (second[1], 2) in seen)
    assert [number for customer, number in seen if customer == first[1]] == [0, 1]


async def test_a_worker_reads_some_hundred_records_of_a_partition_ahead(
    own_app: App, own_server: EmbeddedServer
) -> None:
    orders, waiting, done = own_app.stream("orders", Order, partitions=1), trio.Event(), trio.Event()
    size, count, began = 2_000, 3_000, list[int]()

    @own_app.processor(orders, grace_period=0.1)
    async def total(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            began.append(order.number)
            await waiting.wait()
            if order.number == count - 1:
                done.set()

    for _ in range(count // 100):
        await orders.asend(*[Order(customer="x" * size, number=n) for n in range(100)])
    with redis.Redis.from_url(own_server.url) as client:
        before = _get_output(client)
        async with working(own_app):
            await until(lambda: bool(began))
            await _wait_until_still(client)
            ahead = (_get_output(client) - before) / size
    assert 200 < ahead < 1_000


def _get_output(client: "redis.Redis") -> int:
    info: Any = client.info("stats")
    return int(info["total_net_output_bytes"])


async def _wait_until_still(client: "redis.Redis") -> None:
    """Wait until the server has sent little for a second: what is sent now and then is much less than records."""
    before = _get_output(client)
    while True:
        await trio.sleep(1)
        now = _get_output(client)
        if now - before < 50_000:
            return
        before = now


async def test_a_record_that_has_begun_may_end_when_its_worker_stops(app: App) -> None:
    orders, began, ended = app.stream("orders", Order, partitions=1), trio.Event(), list[int]()

    @app.processor(orders)
    async def total(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            began.set()
            await trio.sleep(1)
            ended.append(order.number)

    async with working(app):
        await orders.asend(Order(customer="ada", number=1))
        with trio.fail_after(30):
            await began.wait()
    assert ended == [1]
    (info,) = await app.streams.ainfo()
    assert [group.lag for group in info.groups] == [0]


async def test_a_silent_member_keeps_its_partitions_for_ten_seconds(
    own_app: App, own_server: EmbeddedServer
) -> None:
    orders = own_app.stream("orders", Order, partitions=1)

    @own_app.processor(orders)
    async def total(events: StreamEvents[Order]) -> None:
        async for _ in events.records():
            pass

    with redis.Redis.from_url(own_server.url) as client:
        async with working(own_app):
            await until(lambda: bool(client.zcard(orders.keys.members("total"))))
            found: Any = client.zrange(orders.keys.members("total"), 0, 0, withscores=True)
            now: Any = client.time()
    ((_, ends),) = found
    assert 3 < ends / 1000 - (now[0] + now[1] / 1e6) <= 10  # it is renewed each third of that


def _declare(app: App, partitions: int) -> tuple[Stream[Order], list[Order]]:
    """Return a stream with keys, and what its processor has seen."""
    orders, seen = app.stream("orders", Order, by="customer", partitions=partitions), list[Order]()

    @app.processor(orders)
    async def total(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append(order)

    return orders, seen


def _find_customers(orders: Stream[Order], partitions: int) -> list[str]:
    """Return a customer for each partition."""
    found: dict[int, str] = {}
    for number in range(100 * partitions):
        found.setdefault(orders.find_partition(Order(customer=f"c{number}", number=0)), f"c{number}")
    return [found[number] for number in range(partitions)]


async def test_a_partition_is_read_at_once_while_records_of_another_are_waited_for(app: App) -> None:
    orders, seen = _declare(app, 2)
    customer, _ = _find_customers(orders, 2)
    for first in range(0, 6_000, 200):
        await orders.asend(*[Order(customer=customer, number=first + n) for n in range(200)])
    async with working(app):
        # More than is read ahead: who waited for the end of the read of the other one would need a minute.
        await until(lambda: len(seen) == 6_000, within=25)


async def test_one_read_waits_for_all_partitions(own_app: App, own_server: EmbeddedServer) -> None:
    orders, seen = _declare(own_app, 64)
    customers = _find_customers(orders, 64)
    with redis.Redis.from_url(own_server.url) as client:
        async with working(own_app):

            async def is_owner_of_all() -> bool:
                (info,) = await own_app.streams.ainfo()
                return [all(partition.owner for partition in lag.partitions) for lag in info.groups] == [True]

            await until_async(is_owner_of_all)
            await until(lambda: _count_blocked(client) == 2)  # beside it, that of jobs
            await orders.asend(*[Order(customer=customer, number=1) for customer in customers])
            await until(lambda: len(seen) == 64)


def _count_blocked(client: "redis.Redis") -> int:
    info: Any = client.info("clients")
    return int(info["blocked_clients"])


@pytest.fixture
def slow_app(url: str, app_name: str) -> Any:
    """An application whose workers look for changes of a group, unasked, each 200 seconds only."""
    app = App(app_name, broker=url, lease=600)
    yield app
    app.close()


async def test_partitions_go_to_a_worker_that_comes_at_once_and_are_free_when_it_ends(slow_app: App) -> None:
    orders, seen = _declare(slow_app, 8)
    records = [Order(customer=customer, number=1) for customer in _find_customers(orders, 8)]

    async def is_shared(members: int) -> bool:
        (info,) = await slow_app.streams.ainfo()
        owners = [partition.owner for lag in info.groups for partition in lag.partitions]
        return "" not in owners and len(set(owners)) == members

    async with trio.open_nursery() as nursery:
        first = await start(nursery, slow_app)
        await until_async(lambda: is_shared(1))
        second = await start(nursery, slow_app)
        await until_async(lambda: is_shared(2))
        await second.stop()
        await until_async(lambda: is_shared(1))
        await orders.asend(*records)
        await until(lambda: len(seen) == 8)
        await first.stop()
    await slow_app.streams.aseek("orders", "total", "earliest")  # it is refused while there is a member
