"""What subscribes to a stream: tasks, Data Sinks and health checks."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.errors import Misconfigured
from celery5.health import HealthCheck
from celery5.results import FileSink, ResultDocument
from celery5.streams import Record, Stream
from celery5.testing.streams import ProcessorDriver
from tests.redis.worker.workers import until, until_async, working


class Order(Record):
    order_id: int
    amount: int


@dataclass
class Customer:
    name: str


async def count_dead(app: App, group: str) -> int:
    (stream,) = await app.streams.ainfo("orders")
    return next(candidate.dead for candidate in stream.groups if candidate.group == group)


async def test_a_task_gets_each_record_as_a_job(app: App) -> None:
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=3)
    charged, logged = list[Order](), list[int]()

    @orders.subscribe
    @app.task(name="shop.charge")
    async def charge(order: Order) -> None:
        charged.append(order)

    @orders.subscribe(start="latest", name="audit")
    @app.task(name="shop.log")
    def log(order: Order) -> None:
        logged.append(order.amount)

    await orders.asend(*[Order(order_id=n, amount=n) for n in range(20)])
    async with working(app):
        await until(lambda: len(charged) == 20)
        await orders.asend(Order(order_id=5, amount=99))
        await until(lambda: logged == [99])
    assert sorted(order.amount for order in charged) == [*range(20), 99]
    assert {order.order_id for order in charged} == set(range(20))


async def test_documents_without_a_class_are_what_was_sent(app: App) -> None:
    customers = app.stream("customers", by=lambda customer: customer["name"], partitions=2)
    seen = list[dict[str, Any]]()

    @customers.subscribe
    @app.task
    async def welcome(customer: dict[str, Any]) -> None:
        seen.append(customer)

    await customers.asend({"name": "ada", "tags": [1, None, "x"]}, {"name": "bob"})
    plain = app.stream("plain", partitions=1)
    bodies = list[Any]()

    @app.processor(plain)
    async def collect(events: Any) -> None:
        async for body in events.records():
            bodies.append(body)

    await plain.asend(Customer("eve"), "text", 7, None, [1, {"a": True}])
    async with working(app):
        await until(lambda: len(seen) == 2 and len(bodies) == 5)
    assert sorted(seen, key=str) == [{"name": "ada", "tags": [1, None, "x"]}, {"name": "bob"}]
    assert bodies == [{"name": "eve"}, "text", 7, None, [1, {"a": True}]]


async def test_record_that_a_task_refuses_becomes_a_dead_record(app: App) -> None:
    orders = app.stream("orders", partitions=1)
    seen = list[int]()

    @orders.subscribe
    @app.task(name="shop.take")
    async def take(order: int) -> None:
        seen.append(order)

    await orders.asend(1, "no number", 2)
    async with working(app):
        await until(lambda: seen == [1, 2])

        async def is_dead() -> bool:
            return await count_dead(app, "shop.take") == 1

        await until_async(is_dead)


class Shelf:
    """A sink on Trio, which fails at first."""

    name = "shelf"
    batch = 4

    def __init__(self) -> None:
        self.documents: list[ResultDocument] = []
        self.failures = 1

    async def write(self, documents: Sequence[ResultDocument], /) -> None:
        await trio.lowlevel.checkpoint()
        if self.failures:
            self.failures -= 1
            raise OSError("the shelf is full")
        assert len(documents) <= 4
        self.documents += documents


async def test_a_sink_gets_records_as_documents(app: App, tmp_path: Path) -> None:
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=1)
    shelf, path = Shelf(), tmp_path / "orders.jsonl"
    orders.subscribe(shelf)
    orders.subscribe(FileSink(str(path)))
    ids = await orders.asend(*[Order(order_id=1, amount=n) for n in range(10)])
    async with working(app):
        await until(lambda: len(shelf.documents) == 10)
        await until(lambda: path.exists() and len(path.read_text().splitlines()) == 10)
    assert [document.value["amount"] for document in shelf.documents] == list(range(10))
    assert [document.id for document in shelf.documents] == [f"orders:0:{entry_id.id}" for entry_id in ids]
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["value"], first["queue"], first["state"]) == (
        {"order_id": 1, "amount": 0},
        "orders",
        "SUCCESS",
    )
    assert first["sent"] == first["finished"] == int(ids[0].id.partition("-")[0]) / 1000


class Picky:
    """A sink that refuses some documents."""

    name = "picky"
    batch = 4
    timeout = 0.3
    retry = RetryPolicy(max_retries=1, backoff=0.02)

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.hangs = 0
        self.go_on = threading.Event()

    def write(self, documents: Sequence[ResultDocument], /) -> None:
        values = [document.value for document in documents]
        if "poison" in values:
            raise ValueError("poison")
        if "hang" in values and not self.hangs:
            self.hangs += 1
            self.go_on.wait(20)
            raise OSError("too late")
        self.values += values


async def test_one_bad_document_of_a_batch_becomes_a_dead_record_and_no_other_one(app: App) -> None:
    orders, sink = app.stream("orders", partitions=1), Picky()
    orders.subscribe(sink)
    await orders.asend(1, 2, "poison", 3, 4, 5, 6)
    async with working(app):
        await until(lambda: set(sink.values) == {1, 2, 3, 4, 5, 6})

        async def is_dead() -> bool:
            return await count_dead(app, "picky") == 1

        await until_async(is_dead)


async def test_a_sink_in_a_thread_has_its_limit_of_time(app: App) -> None:
    orders, sink = app.stream("orders", partitions=1), Picky()
    orders.subscribe(sink)
    await orders.asend(1, "hang", 2)
    async with working(app):
        await until(lambda: set(sink.values) == {1, "hang", 2})
        sink.go_on.set()
    assert sink.hangs == 1


async def test_a_health_check_reports_what_records_say(app: App) -> None:
    readings = app.stream("readings", partitions=1)
    furnace = app.health_check.add(HealthCheck("furnace", states=("hot", "warm")))
    oven = HealthCheck("oven", states=("hot", "warm"))

    @readings.subscribe_check(furnace, start="earliest")
    async def judge(reading: float) -> str:
        return "hot" if reading > 100 else "warm"

    @readings.subscribe_check(oven, start="earliest")
    def is_cool(reading: float) -> bool:
        return reading < 50

    async with working(app):
        await readings.asend(20.0)
        await until(lambda: (furnace.state, oven.state) == ("warm", "warm"))
        await readings.asend(170.0)
        await until(lambda: (furnace.state, oven.state) == ("hot", "hot"))


def test_what_cannot_subscribe_is_one_clear_line(app: App) -> None:
    orders: Stream[Order] = app.stream("orders", Order)
    check = HealthCheck("furnace")

    @app.task(name="shop.two")
    async def two(a: int, b: int) -> None: ...

    judge: Any = two.function
    with pytest.raises(
        Misconfigured, match=r"^stream orders: 7 cannot subscribe: give a task or a sink; for a"
    ):
        orders.subscribe(7)
    with pytest.raises(
        Misconfigured, match=r"^task shop\.two, which subscribes to stream orders: it is called w"
    ):
        orders.subscribe(two)
    with pytest.raises(Misconfigured, match=r"^health check furnace of stream orders: it is called with one"):
        orders.subscribe_check(check)(judge)
    with pytest.raises(Misconfigured, match=r"^stream orders: 'furnace' is no health check$"):
        orders.subscribe_check("furnace")(judge)

    @orders.subscribe
    @app.task(name="shop.one")
    async def one(order: Order) -> None: ...

    with pytest.raises(Misconfigured, match=r"two processors of stream orders are named 'shop\.one'"):
        orders.subscribe(one)
    assert [processor.name for processor in app.streams.processors] == ["shop.one"]


def test_jobs_are_committed_with_their_records() -> None:
    app = App("subscribers")
    orders: Stream[Order] = app.stream("orders", Order, by="order_id", partitions=2)

    @orders.subscribe
    @app.task(name="shop.charge")
    async def charge(order: Order) -> None: ...

    orders.subscribe(Shelf())
    orders.subscribe_check(HealthCheck("furnace"))(lambda order: None)
    charging, shelving, checking = app.streams.processors
    assert [(processor.then, processor.start) for processor in app.streams.processors] == [
        ("ignore", "earliest"),
        ("ignore", "earliest"),
        ("ignore", "latest"),
    ]
    assert (shelving.name, checking.name) == ("shelf", "check-furnace")
    with ProcessorDriver(app, charging.function) as driver:
        driver.feed(Order(order_id=1, amount=1), Order(order_id=2, amount=2), commit=False)
        assert driver.jobs.jobs == []
        driver.crash()
        driver.advance(5)
        driver.commit()
        assert sorted(job.arguments["order"].amount for job in driver.jobs.jobs_of(charge)) == [1, 2]
