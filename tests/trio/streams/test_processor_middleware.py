"""Middleware of processors: when it is called, in which order, and what it may change."""

import threading
from typing import Any

import msgspec
import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.errors import Misconfigured
from celery5.streams import (
    BlockingEvents,
    ProcessorMiddleware,
    RecordSkipped,
    Stream,
    StreamEntry,
    StreamEvents,
    Tumbling,
)
from celery5.testing.streams import ProcessorDriver

KINDS = ("trio", "asyncio", "thread")


class Order(msgspec.Struct):
    order_id: int
    amount: int


class Noting(ProcessorMiddleware[Order]):
    """Notes its calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def before(self, entry: StreamEntry[Order]) -> Any:
        self.calls.append(f"{self.name} before {entry.record.amount}")

    def after(self, entry: StreamEntry[Order]) -> None:
        self.calls.append(f"{self.name} after {entry.record.amount}")

    def on_error(self, entry: StreamEntry[Order], error: Exception) -> None:
        self.calls.append(f"{self.name} error {entry.record.amount}: {error}")

    def on_skip(self, entry: StreamEntry[Order], why: str) -> None:
        self.calls.append(f"{self.name} skip {entry.record.amount}: {why}")


class Waiting(Noting):
    """Notes its calls, and waits in each."""

    async def before(self, entry: StreamEntry[Order]) -> Any:
        await trio.lowlevel.checkpoint()
        super().before(entry)

    async def after(self, entry: StreamEntry[Order]) -> None:  # type: ignore[override]
        await trio.lowlevel.checkpoint()
        super().after(entry)


class Odd(ProcessorMiddleware[Order]):
    """Leaves out odd amounts, and halves the others."""

    def before(self, entry: StreamEntry[Order]) -> Order:
        order = entry.record
        if order.amount % 2:
            raise RecordSkipped("odd")
        return Order(order.order_id, order.amount // 2)


class Shop:
    """An application whose processor notes amounts, and fails at 6."""

    def __init__(self, middleware: list[Any], kind: str = "trio", **options: Any) -> None:
        self.app = App("shop")
        self.orders: Stream[Order] = self.app.stream("orders", Order, by="order_id", partitions=1)
        self.seen: list[int] = []
        self.threads: set[str] = set()
        if kind == "asyncio":
            options["loop"] = kind
        declare: Any = self.app.processor(self.orders, middleware=middleware, **options)
        self.function: Any = declare(self._process_in_thread() if kind == "thread" else self._process())

    def _handle(self, order: Order) -> None:
        self.seen.append(order.amount)
        self.threads.add(threading.current_thread().name)
        if order.amount == 6:
            raise ValueError("six")

    def _process(self) -> Any:
        async def process(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                self._handle(order)

        return process

    def _process_in_thread(self) -> Any:
        def process(events: BlockingEvents[Order]) -> None:
            for order in events.records():
                self._handle(order)

        return process

    def drive(self, *amounts: int) -> ProcessorDriver[Order]:
        """Feed records to the processor; return what is there then."""
        with ProcessorDriver(self.app, self.function) as driver:
            driver.feed(*[Order(1, amount) for amount in amounts])
            driver.advance(60)
        return driver


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_called_around_each_record_in_the_order_that_the_docs_say(kind: str) -> None:
    calls = list[str]()
    shop = Shop([Noting("outer", calls), Noting("inner", calls)], kind)
    shop.drive(1, 2)
    assert calls == [
        "outer before 1",
        "inner before 1",
        "inner after 1",
        "outer after 1",
        "outer before 2",
        "inner before 2",
        "inner after 2",
        "outer after 2",
    ]
    assert len(shop.threads) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_fails_is_an_error_at_each_attempt_and_is_skipped_in_the_end(kind: str) -> None:
    calls = list[str]()
    policy = RetryPolicy(max_retries=1, backoff=1, jitter=False)
    driver = Shop([Noting("m", calls)], kind, on_error=policy, then="ignore").drive(6, 2)
    assert calls == [
        "m before 6",
        "m error 6: six",
        "m before 6",
        "m error 6: six",
        "m skip 6: ValueError('six')",
        "m before 2",
        "m after 2",
    ]
    assert [dead.record.amount for dead in driver.dead] == [6]


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_left_out_or_replaced_and_count_as_processed(kind: str) -> None:
    calls = list[str]()
    shop = Shop([Noting("m", calls), Odd()], kind)
    driver = shop.drive(1, 4, 3, 8)
    assert shop.seen == [2, 4]
    assert [order.amount for order in driver.committed] == [1, 4, 3, 8]
    assert [call for call in calls if "skip" in call] == ["m skip 1: odd", "m skip 3: odd"]


def test_hooks_may_wait() -> None:
    calls = list[str]()
    Shop([Waiting("m", calls)]).drive(1, 2)
    assert calls == ["m before 1", "m after 1", "m before 2", "m after 2"]


def test_what_a_hook_raises_is_a_failure_of_the_record() -> None:
    class Strict(ProcessorMiddleware[Order]):
        def __init__(self, hook: str) -> None:
            setattr(self, hook, self.refuse)

        def refuse(self, entry: StreamEntry[Order], *_: object) -> None:
            if entry.record.amount in (3, 6):
                raise ValueError(f"not {entry.record.amount}")

    for hook in ("before", "after"):
        driver = Shop([Strict(hook)], then="ignore").drive(1, 3, 2)
        assert [(dead.record.amount, dead.error) for dead in driver.dead] == [(3, "ValueError('not 3')")]
        assert [order.amount for order in driver.committed] == [1, 2]
    driver = Shop([Strict("on_skip")], then="ignore").drive(6, 2)
    assert [dead.record.amount for dead in driver.dead] == [6]
    assert [order.amount for order in driver.committed] == [2]


def test_a_batch_has_only_what_is_not_left_out_and_hooks_for_each_record() -> None:
    calls, app, batches = list[str](), App("shop"), list[list[int]]()
    orders: Stream[Order] = app.stream("orders", Order, partitions=1)

    @app.processor(orders, middleware=[Noting("m", calls), Odd()])
    async def process(events: StreamEvents[Order]) -> None:
        async for batch in events.take(3, within=1).records():
            batches.append([order.amount for order in batch])

    with ProcessorDriver(app, process) as driver:
        driver.feed(*[Order(1, amount) for amount in (1, 2, 4, 3, 5, 7)])
        driver.advance(5)
        assert len(driver.committed) == 6
    assert batches == [[1, 2]]
    assert [call for call in calls if "after" in call] == ["m after 1", "m after 2"]


def test_windows_are_made_of_what_the_middleware_passes_on() -> None:
    app, values, calls = App("shop"), list[int](), list[str]()
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=1)

    @app.processor(orders, middleware=[Noting("m", calls), Odd()])
    async def process(events: StreamEvents[Order]) -> None:
        windows = events.windows(Tumbling(60), initial=0, add=lambda total, order: total + order.amount)
        async for window in windows:
            values.append(window.value)

    start = 1_700_000_000_000 // 60_000 * 60_000
    with ProcessorDriver(app, process) as driver:
        for number, amount in enumerate((2, 3, 4, 8)):
            driver.feed(Order(1, amount), times=[start + number * 20_000])
        driver.advance(1)
        assert len(driver.committed) == 4
    assert values == [3]
    assert [call for call in calls if "after" in call] == ["m after 1", "m after 2", "m after 4"]


def test_a_declaration_that_makes_no_sense_is_one_clear_line() -> None:
    with pytest.raises(
        Misconfigured, match="runs in a thread, and before of its middleware Waiting is `async"
    ):
        Shop([Waiting("m", [])], "thread")
    with pytest.raises(Misconfigured, match="is no middleware: give an object of a subclass"):
        Shop([Noting])
    app = App("shop")
    declare: Any = app.processor
    with pytest.raises(Misconfigured, match="give a list"):
        declare(app.stream("orders", Order), middleware=Odd())(Shop([]).function)
