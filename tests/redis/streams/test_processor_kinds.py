"""Processors on asyncio and in threads: they keep every promise of those on Trio."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.errors import Misconfigured
from celery5.streams import BlockingEvents, Keep, Stream, StreamEvents, Tumbling
from tests.redis.worker.workers import start, until, until_async, working

KINDS = ("trio", "asyncio", "thread")
Handle = Callable[["Order"], Any]


class Order(msgspec.Struct):
    order_id: int
    amount: int


class Shop:
    """A processor of each kind that does the same: it adds up, and sends each sum."""

    def __init__(self, app: App, kind: str, handle: Handle, **options: Any) -> None:
        self.app = app
        self.orders: Stream[Order] = app.stream(
            "orders", Order, by="order_id", partitions=options.pop("partitions", 2), keep=Keep(records=5000)
        )
        self.sums: Stream[Order] = app.stream("sums", Order, by="order_id", partitions=1)
        self.handled: defaultdict[int, list[int]] = defaultdict(list)
        self.threads: set[str] = set()
        self._handle = handle
        if kind == "asyncio":
            options["loop"] = "asyncio"
        declare: Any = app.processor(self.orders, into=self.sums, name="add", **options)
        declare(self._make_blocking() if kind == "thread" else self._make_async())

    def _note(self, order: Order) -> None:
        self.threads.add(threading.current_thread().name)
        self.handled[order.order_id].append(order.amount)

    def _make_async(self) -> Any:
        async def add(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                self._note(order)
                total = await events.state.get(str(order.order_id), 0) + order.amount
                events.state.set(str(order.order_id), total)
                events.send(Order(order.order_id, total))
                result = self._handle(order)
                if result is not None:
                    await result

        return add

    def _make_blocking(self) -> Any:
        def add(events: BlockingEvents[Order]) -> None:
            for order in events.records():
                self._note(order)
                total = events.state.get(str(order.order_id), 0) + order.amount
                events.state.set(str(order.order_id), total)
                events.send(Order(order.order_id, total))
                self._handle(order)

        return add

    @property
    def count(self) -> int:
        return sum(map(len, self.handled.values()))

    async def list_sums(self) -> dict[int, list[int]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        async for stored in self.app.streams.aread("sums", "earliest"):
            order = msgspec.convert(stored.record, Order)
            found[order.order_id].append(order.amount)
        return found

    async def count_sums(self) -> int:
        streams = await self.app.streams.ainfo()
        return next((stream.records for stream in streams if stream.stream == "sums"), 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_records_come_in_order_and_their_outputs_once(app: App, kind: str) -> None:
    shop = Shop(app, kind, lambda _: None)
    await shop.orders.asend(*[Order(n % 5, n) for n in range(1000)])
    async with working(app):

        async def are_all_sent() -> bool:
            return await shop.count_sums() == 1000

        await until_async(are_all_sent)
    assert shop.handled == {key: list(range(key, 1000, 5)) for key in range(5)}
    assert (await shop.list_sums())[3][-1] == sum(range(3, 1000, 5))
    own = {"trio": {"MainThread"}, "asyncio": {"celery5-asyncio"}}
    assert shop.threads == own.get(kind, shop.threads)
    assert (kind == "thread") == (shop.threads.isdisjoint({"MainThread", "celery5-asyncio"}))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failing_record_is_tried_again_in_its_place(app: App, kind: str) -> None:
    failures = [1, 1]

    def handle(order: Order) -> None:
        if order.amount == 3 and failures:
            failures.pop()
            raise ValueError("not yet")

    shop = Shop(app, kind, handle, partitions=1, on_error=RetryPolicy(max_retries=5, backoff=0.01))
    await shop.orders.asend(*[Order(1, n) for n in range(10)])
    async with working(app):

        async def are_all_sent() -> bool:
            return await shop.count_sums() == 10

        await until_async(are_all_sent)
    assert shop.handled[1] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9]
    assert (await shop.list_sums())[1] == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]


@pytest.mark.parametrize("kind", ["asyncio", "thread"])
async def test_stopping_worker_finishes_records_in_hand_and_begins_no_more(app: App, kind: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def wait() -> None:
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    def handle(_: Order) -> Any:
        begun.set()
        return go_on.wait(20) and None if kind == "thread" else wait()

    shop = Shop(app, kind, handle, partitions=1)
    await shop.orders.asend(*[Order(1, n) for n in range(50)])
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app)
        await until(begun.is_set)
        one.scope.cancel()
        go_on.set()
        await one.ended.wait()
    handled = list(shop.handled[1])
    assert 0 < len(handled) < 50
    async with working(app):
        await until(lambda: shop.count == 50)
    assert shop.handled[1] == list(range(50))


@pytest.mark.parametrize("kind", ["asyncio", "thread"])
async def test_thread_beyond_the_grace_period_is_left_and_its_record_comes_again(app: App, kind: str) -> None:
    begun, ended = threading.Event(), threading.Event()

    def handle(order: Order) -> Any:
        if order.amount == 2 and not begun.is_set():
            begun.set()
            return ended.wait(20) and None if kind == "thread" else asyncio.sleep(60)
        return None

    shop = Shop(app, kind, handle, partitions=1, grace_period=0.1)
    await shop.orders.asend(*[Order(1, n) for n in range(5)])
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app)
        await until(begun.is_set)
        one.scope.cancel()
        await one.ended.wait()
    ended.set()
    assert shop.handled[1] == [0, 1, 2]
    async with working(app):

        async def are_all_sent() -> bool:
            return await shop.count_sums() == 5

        await until_async(are_all_sent)
    assert shop.handled[1] == [0, 1, 2, 2, 3, 4]


async def test_a_record_is_committed_while_the_next_one_takes_its_time(app: App) -> None:
    go_on = threading.Event()

    def handle(order: Order) -> None:
        if order.amount == 1:
            go_on.wait(20)

    shop = Shop(app, "thread", handle, partitions=1)
    await shop.orders.asend(Order(1, 0), Order(1, 1))
    async with working(app):

        async def is_first_sent() -> bool:
            return await shop.count_sums() == 1

        await until_async(is_first_sent)
        go_on.set()


async def test_batches_and_windows_in_a_thread(app: App) -> None:
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=1)
    sizes, entries, counts = list[int](), list[str](), list[tuple[str, int]]()

    @app.processor(orders)
    def batches(events: BlockingEvents[Order]) -> None:
        for batch in events.take(7, within=0.1).records():
            sizes.append(len(batch))

    @app.processor(orders)
    def singles(events: BlockingEvents[Order]) -> None:
        for entry in events:
            entries.append(entry.id)

    @app.processor(orders)
    def minutes(events: BlockingEvents[Order]) -> None:
        for window in events.windows(Tumbling(60), initial=0, add=lambda count, _: count + 1):
            counts.append((window.key, window.value))

    start_ms = 1_700_000_000_000 // 60_000 * 60_000
    await orders.asend(*[Order(1, n) for n in range(20)], times=[start_ms + n * 10_000 for n in range(20)])
    async with working(app):
        await until(lambda: sum(sizes) == 20 and len(entries) == 20 and len(counts) == 3)
    assert max(sizes) <= 7
    assert counts == [("1", 6)] * 3


async def test_asyncio_may_give_up_waiting_for_a_record_and_ask_again(app: App) -> None:
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=1)
    seen, waits = list[int](), list[int]()

    @app.processor(orders, loop="asyncio")
    async def impatient(events: StreamEvents[Order]) -> None:
        records = events.records()
        while True:
            try:
                order = await asyncio.wait_for(anext(records), 0.02)
            except TimeoutError:
                waits.append(1)
                continue
            except StopAsyncIteration:
                return
            seen.append(order.amount)

    async with working(app):
        for number in range(30):
            await orders.asend(Order(1, number))
            if number % 10 == 0:
                await until(lambda: seen[-1:] == [number] and bool(waits))  # noqa: B023  awaited at once
                waits.clear()
        await until(lambda: len(seen) == 30)
    assert seen == list(range(30))


async def test_system_exit_in_a_processor_is_a_failure_of_its_record(app: App) -> None:
    def handle(order: Order) -> None:
        if order.amount == 1:
            raise SystemExit(3)

    shop = Shop(app, "thread", handle, partitions=1, then="ignore")
    await shop.orders.asend(*[Order(1, n) for n in range(3)])
    async with working(app):

        async def are_all_sent() -> bool:
            return await shop.count_sums() == 2

        await until_async(are_all_sent)
    assert shop.handled[1] == [0, 1, 2]


def test_a_declaration_that_makes_no_sense_is_one_clear_line(app: App) -> None:
    orders: Stream[Order] = app.stream("orders", Order, by="order_id")

    def plain(events: BlockingEvents[Order]) -> None: ...

    def generator(events: BlockingEvents[Order]) -> Any:
        yield 1

    declare: Any = app.processor
    with pytest.raises(Misconfigured, match="loop is 'twisted': give 'trio' or 'asyncio'"):
        declare(orders, loop="twisted")(plain)
    with pytest.raises(Misconfigured, match="is not async: loop='asyncio' is for async def"):
        declare(orders, loop="asyncio")(plain)
    with pytest.raises(Misconfigured, match="has a yield"):
        declare(orders)(generator)
    with pytest.raises(Misconfigured, match="is no function"):
        declare(orders)(3)
