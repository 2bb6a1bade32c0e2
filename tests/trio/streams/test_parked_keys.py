"""Parked keys, by the driver: what is set aside, what goes on, and in which order it comes back."""

from typing import Any

import msgspec
import pytest

from celery5 import App, RetryPolicy
from celery5.errors import Misconfigured
from celery5.protocol.streams.groups import Commit
from celery5.protocol.streams.parking import ParkedKey, ParkedKeysFound, ParkedRecord, ReleasedRecord
from celery5.services.streams.parking import ParkedKeys
from celery5.streams import BlockingEvents, Stream, StreamEvents
from celery5.testing.streams import ProcessorDriver

KINDS = ("trio", "asyncio", "thread")


class Order(msgspec.Struct):
    customer: str
    amount: int


class Shop:
    """A processor that adds up, and fails at negative amounts until it is mended."""

    def __init__(self, kind: str = "trio", **options: Any) -> None:
        self.app = App("shop")
        self.orders: Stream[Order] = self.app.stream("orders", Order, by="customer", partitions=1)
        self.sums: Stream[Order] = self.app.stream("sums", Order, by="customer", partitions=1)
        self.seen: list[tuple[str, int]] = []
        self.is_mended = False
        if kind == "asyncio":
            options["loop"] = kind
        declare: Any = self.app.processor(self.orders, into=self.sums, name="add", then="park-key", **options)
        self.function: Any = declare(self._make_blocking() if kind == "thread" else self._make_async())

    def handle(self, order: Order) -> None:
        self.seen.append((order.customer, order.amount))
        if order.amount < 0 and not self.is_mended:
            raise ValueError("negative")

    def _make_async(self) -> Any:
        async def add(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                events.send(order)
                self.handle(order)
                total = await events.state.get(order.customer, 0)
                events.state.set(order.customer, total + abs(order.amount))

        return add

    def _make_blocking(self) -> Any:
        def add(events: BlockingEvents[Order]) -> None:
            for order in events.records():
                events.send(order)
                self.handle(order)
                total = events.state.get(order.customer, 0)
                events.state.set(order.customer, total + abs(order.amount))

        return add

    def drive(self) -> ProcessorDriver[Order]:
        return ProcessorDriver(self.app, self.function)


def orders(*pairs: tuple[str, int]) -> list[Order]:
    return [Order(customer, amount) for customer, amount in pairs]


def amounts(records: list[Order]) -> list[int]:
    return [record.amount for record in records]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_waits_in_order_while_others_go_on_and_comes_back_in_order(kind: str, concurrency: int) -> None:
    shop = Shop(kind, concurrency=concurrency)
    with shop.drive() as driver:
        driver.feed(*orders(("ada", 1), ("ada", -2), ("bob", 3), ("ada", 4), ("eve", -5), ("bob", 6)))
        assert {key: amounts(parked) for key, parked in driver.parked.items()} == {
            "ada": [-2, 4],
            "eve": [-5],
        }
        assert amounts([output for output in driver.sent(shop.sums) if output.customer == "bob"]) == [3, 6]
        assert driver.state == {"ada": 1, "bob": 9}
        assert driver.uncommitted == []
        assert driver.quarantined == {}
        shop.is_mended = True
        driver.feed(*orders(("ada", 7)))
        assert amounts(driver.parked["ada"]) == [-2, 4, 7]
        driver.release("ada")
        driver.feed(*orders(("ada", 8)))
        assert amounts([output for output in driver.sent(shop.sums) if output.customer == "ada"]) == [
            1,
            -2,
            4,
            7,
            8,
        ]
        assert list(driver.parked) == ["eve"]
        driver.release()
        assert driver.parked == {}
        assert driver.state == {"ada": 22, "bob": 9, "eve": 5}
        assert driver.dead == []


def test_it_is_parked_after_its_retries() -> None:
    shop = Shop(on_error=RetryPolicy(max_retries=2, backoff=1, jitter=False))
    with shop.drive() as driver:
        driver.feed(*orders(("ada", -1), ("ada", 2), ("bob", 3)))
        assert driver.parked == {}
        driver.advance(10)
        assert [record for record in shop.seen if record[0] == "ada"] == [("ada", -1)] * 3
        assert amounts(driver.parked["ada"]) == [-1, 2]
        assert driver.state == {"bob": 3}


def test_one_that_fails_again_stays_with_what_is_behind_it() -> None:
    shop = Shop()
    with shop.drive() as driver:
        driver.feed(*orders(("ada", -1), ("ada", 2), ("ada", -3), ("ada", 4)))
        driver.release("ada")
        assert amounts(driver.parked["ada"]) == [-1, 2, -3, 4]
        shop.handle = lambda order: None if order.amount != -3 else shop.fail()  # type: ignore[attr-defined,method-assign]
        shop.fail = lambda: (_ for _ in ()).throw(ValueError("still"))  # type: ignore[attr-defined]
        driver.release("ada")
        assert amounts(driver.parked["ada"]) == [-3, 4]
        assert amounts(driver.sent(shop.sums)) == [-1, 2]
        driver.feed(*orders(("ada", 5)))
        assert amounts(driver.parked["ada"]) == [-3, 4, 5]


def test_what_is_discarded_becomes_dead_records_and_the_key_goes_on() -> None:
    shop = Shop()
    with shop.drive() as driver:
        driver.feed(*orders(("ada", -1), ("ada", 2)))
        driver.release("ada", discard=True)
        assert [dead.record.amount for dead in driver.dead] == [-1, 2]
        driver.feed(*orders(("ada", 3)))
        assert amounts(driver.sent(shop.sums)) == [3]
        assert driver.parked == {}


def test_a_crash_and_a_rebalance_lose_and_double_nothing() -> None:
    shop = Shop()
    with shop.drive() as driver:
        driver.feed(*orders(("ada", -1), ("bob", 2), ("ada", 3)), commit=False)
        driver.crash()
        driver.feed(*orders(("ada", 4)))
        driver.rebalance()
        driver.feed(*orders(("ada", 5)), commit=False)
        driver.crash()
        driver.advance(5)
        assert amounts(driver.parked["ada"]) == [-1, 3, 4, 5]
        shop.is_mended = True
        driver.release("ada")
        driver.crash()
        driver.advance(5)
        driver.commit()
        assert amounts([output for output in driver.sent(shop.sums) if output.customer == "ada"]) == [
            -1,
            3,
            4,
            5,
        ]
        assert driver.state == {"ada": 13, "bob": 2}


def test_a_batch_that_fails_is_taken_one_by_one_and_parks_only_the_key_at_fault() -> None:
    app, taken = App("shop"), list[list[int]]()
    stream: Stream[Order] = app.stream("orders", Order, by="customer", partitions=1)

    @app.processor(stream, then="park-key")
    async def add(events: StreamEvents[Order]) -> None:
        async for batch in events.take(10, within=0.5).records():
            taken.append(amounts(batch))
            if any(order.amount < 0 for order in batch):
                raise ValueError("negative")

    with ProcessorDriver(app, add) as driver:
        driver.feed(*orders(("ada", 1), ("bob", -2), ("ada", 3), ("bob", 4), ("eve", 5)))
        driver.advance(5)
        driver.feed(*orders(("bob", 6), ("ada", 7), ("eve", 8)))
        driver.advance(5)
        assert {key: amounts(parked) for key, parked in driver.parked.items()} == {"bob": [-2, 4, 6]}
        assert taken[0] == [1, -2, 3, 4, 5]
        assert taken[1:4] == [[1], [-2], [3]]
        assert taken[-1] == [7, 8]
        driver.release(discard=True)
        driver.advance(5)
        assert [dead.record.amount for dead in driver.dead] == [-2, 4, 6]


def test_records_without_keys_cannot_be_parked() -> None:
    app = App("shop")
    declare: Any = app.processor
    with pytest.raises(
        Misconfigured, match=r"then='park-key' needs records with keys: declare stream plain with"
    ):
        declare(app.stream("plain", Order), then="park-key")(Shop().function)


def test_a_list_that_was_read_before_a_commit_revives_no_release() -> None:
    released = ParkedKeysFound({b"a": ParkedKey("first", 1, "release")}, 3)
    parked = ParkedKeys(0, released, 1)
    parked.note_released(b"a")
    parked.change(b"a", ParkedKey("again", 1))
    parked.begin_update()
    parked.update(released, 1)
    assert parked.find_due() == []
    parked.note_commit(
        Commit(
            *(0, 1, "0-0", "0-0"),
            parked=[ParkedRecord(b"a", ParkedKey("again", 1))],
            released=[ReleasedRecord(b"a", "1-1")],
        )
    )
    parked.begin_update()
    parked.update(released, 1)
    assert parked.find_due() == [b"a"]
    due = [ParkedKeys(number, released, 2).find_due() for number in range(2)]
    assert sorted(due) == [[], [b"a"]]  # of one partition alone
