"""The driver for tests of processors: it processes as a worker does, in virtual time and without Redis."""

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import msgspec
import pytest
import trio
import trio.lowlevel

from celery5 import App, RetryPolicy
from celery5.errors import Misconfigured
from celery5.streams import Stream, StreamEvents
from celery5.testing import virtual_loop
from celery5.testing.streams import ProcessorDriver


class Order(msgspec.Struct):
    order_id: int
    amount: int


class Shop:
    """An application whose processor counts, sends and charges; what it has handled is noted."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop")
        self.orders: Stream[Order] = self.app.stream("orders", Order, by="order_id", partitions=2)
        self.totals: Stream[Any] = self.app.stream("totals", dict, by=lambda total: total["key"])
        self.handled = list[int]()
        self.on_order: Callable[[Order], Awaitable[None]] = self.ignore

        @self.app.task
        async def charge(amount: int) -> str:
            return f"{amount} charged"

        @self.app.processor(self.orders, into=self.totals, **options)
        async def total(events: StreamEvents[Order]) -> None:
            async for order in events.records():
                self.handled.append(order.amount)
                key = str(order.order_id)
                value = await events.state.get(key, 0) + order.amount
                events.state.set(key, value)
                events.send({"key": key, "total": value})
                events.job(charge.s(order.amount))
                await self.on_order(order)

        self.charge, self.total = charge, total

    async def ignore(self, order: Order) -> None:
        """Do nothing more."""

    def drive(self, **options: Any) -> ProcessorDriver[Order]:
        return ProcessorDriver(self.app, self.total, **options)


def test_what_is_fed_is_processed_and_what_it_produces_is_there() -> None:
    shop = Shop()
    with shop.drive() as driver:
        ids = driver.feed(Order(1, 10), Order(2, 20), Order(1, 5))
        assert ids[0].partition == ids[2].partition
        assert sorted(total["total"] for total in driver.sent(shop.totals)) == [10, 15, 20]
        assert driver.state == {"1": 15, "2": 20}
        assert sorted(job.arguments["amount"] for job in driver.jobs.jobs_of(shop.charge)) == [5, 10, 20]
        assert "10 charged" in driver.jobs.run()
        assert sorted(order.amount for order in driver.committed) == [5, 10, 20]
        assert driver.uncommitted == [] == driver.dead


def test_after_a_crash_what_was_not_committed_is_handled_again_and_counts_once() -> None:
    shop = Shop()
    with shop.drive() as driver:
        driver.feed(Order(1, 10))
        driver.feed(Order(1, 20), Order(1, 30), commit=False)
        assert shop.handled == [10, 20, 30]
        assert driver.state == {"1": 10}
        assert [order.amount for order in driver.uncommitted] == [20, 30]
        driver.crash()
        assert shop.handled[3:] == [20, 30]
        driver.commit()
        assert shop.handled[3:] == [20, 30]
        assert driver.state == {"1": 60}
        assert [total["total"] for total in driver.sent(shop.totals)] == [10, 30, 60]
        assert len(driver.jobs.jobs) == 3


def test_a_record_in_hand_is_finished_by_a_rebalance_and_handled_again_after_a_crash() -> None:
    shop = Shop()

    async def take_ten_seconds(order: Order) -> None:
        await trio.sleep(10)

    shop.on_order = take_ten_seconds
    with shop.drive() as driver:
        driver.feed(Order(1, 1), Order(1, 2), Order(1, 3))
        driver.rebalance()
        assert shop.handled == [1, 2]
        assert [order.amount for order in driver.committed] == [1]
        driver.crash()
        assert shop.handled == [1, 2, 2]
        driver.advance(20.1)
        assert shop.handled == [1, 2, 2, 3]
        assert driver.state == {"1": 6}


def test_what_outlasts_the_grace_period_of_a_rebalance_is_handled_again() -> None:
    shop = Shop(grace_period=5)

    async def take_ten_seconds(order: Order) -> None:
        await trio.sleep(10)

    shop.on_order = take_ten_seconds
    with shop.drive() as driver:
        before = driver.now
        driver.feed(Order(1, 1))
        driver.rebalance()
        assert driver.now == before + 5
        assert shop.handled == [1, 1]
        assert driver.committed == []


def test_only_the_partitions_that_crash_begin_again() -> None:
    shop = Shop()
    with shop.drive() as driver:
        ids = driver.feed(*(Order(number, number) for number in range(20)), commit=False)
        before = len(shop.handled)
        driver.crash(1)
        again = shop.handled[before:]
        assert again == [number for number, (partition, _) in enumerate(ids) if partition == 1]
        assert 0 < len(again) < 20


def test_an_hour_of_virtual_time_takes_no_time_and_retries_come_in_their_time() -> None:
    shop, attempts = Shop(on_error=RetryPolicy(max_retries=3, backoff=600, jitter=False)), list[float]()
    begun = monotonic()
    with shop.drive() as driver:

        async def fail_twice(order: Order) -> None:
            attempts.append(driver.now)
            if len(attempts) < 3:
                raise ValueError("not yet")

        shop.on_order = fail_twice
        driver.feed(Order(1, 1), Order(1, 2))
        assert shop.handled == [1]
        driver.advance(600)
        assert shop.handled == [1, 1]
        driver.advance(3600)
        assert shop.handled == [1, 1, 1, 2]
        assert [at - attempts[0] for at in attempts] == [0, 600, 1800, 1800]
        assert driver.state == {"1": 3}
    assert monotonic() - begun < 10


def test_failures_quarantine_a_partition_until_that_is_ended_or_make_dead_records() -> None:
    shop = Shop()

    async def refuse(order: Order) -> None:
        if order.amount < 0:
            raise ValueError("negative")

    shop.on_order = refuse
    with shop.drive() as driver:
        (bad, _) = driver.feed(Order(1, -1), Order(1, 2))
        assert list(driver.quarantined) == [bad.partition]
        assert "negative" in driver.quarantined[bad.partition]
        driver.crash()
        driver.advance(3600)
        assert shop.handled == [-1]
        shop.on_order = shop.ignore
        driver.end_quarantine()
        driver.commit()
        assert driver.quarantined == {}
        assert driver.state == {"1": 1}
    shop = Shop(then="ignore")
    shop.on_order = refuse
    with shop.drive() as driver:
        driver.feed(Order(1, -1), Order(1, 2))
        (dead,) = driver.dead
        assert (dead.record, dead.attempts) == (Order(1, -1), 1)
        assert "negative" in dead.error
        assert driver.state == {"1": 2}
        assert [order.amount for order in driver.committed] == [2]


def test_record_that_kills_workers_is_isolated_then_given_up() -> None:
    shop = Shop(then="ignore")

    async def hang(order: Order) -> None:
        if order.amount == 2:
            await trio.sleep_forever()

    shop.on_order = hang
    with shop.drive(max_deliveries=2) as driver:
        driver.feed(Order(1, 1), Order(1, 2), Order(1, 3))
        driver.crash()
        driver.crash()
        driver.commit()
        assert [dead.record.amount for dead in driver.dead] == [2]
        assert shop.handled == [1, 2, 2, 3]


def test_commits_happen_in_their_time_and_when_enough_is_done() -> None:
    shop = Shop(commit_within=5, commit_every=3)
    with shop.drive() as driver:
        driver.feed(Order(1, 1), Order(1, 2), commit=False)
        driver.advance(4)
        assert driver.committed == []
        driver.advance(1)
        assert len(driver.committed) == 2
        driver.feed(*(Order(1, amount) for amount in range(7)), commit=False)
        assert len(driver.committed) == 8
        assert len(shop.handled) == 9


def test_records_have_the_times_that_they_are_fed_with_and_else_the_virtual_time() -> None:
    shop = Shop()
    with shop.drive(start_time=1000) as driver:
        (one,) = driver.feed(Order(1, 1), times=[5_000])
        driver.advance(10)
        (two,) = driver.feed(Order(1, 2))
        assert (one.id, two.id) == ("5000-1", "1010000-2")
        with pytest.raises(ValueError, match="never decrease"):
            driver.feed(Order(1, 3), times=[7])


def test_batches_are_collected_in_virtual_time() -> None:
    app, sizes = App("shop"), list[int]()
    orders = app.stream("orders", Order, by="order_id", partitions=1)

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for batch in events.take(10, within=2).records():
            sizes.append(len(batch))

    with ProcessorDriver(app, bill) as driver:
        driver.feed(*(Order(1, amount) for amount in range(25)))
        assert sizes == [10, 10]
        driver.advance(2)
        assert sizes == [10, 10, 5]


def test_what_is_no_processor_is_refused() -> None:
    shop = Shop()

    async def other(events: StreamEvents[Order]) -> None: ...

    with pytest.raises(Misconfigured, match="other is no processor of shop"):
        ProcessorDriver(shop.app, other)


async def test_a_driver_works_in_an_asynchronous_test_and_beside_another() -> None:
    shop, other = Shop(), Shop()
    with shop.drive() as driver, other.drive() as second:
        driver.feed(Order(1, 10))
        await trio.lowlevel.checkpoint()
        second.feed(Order(1, 20))
        assert (driver.state, second.state) == ({"1": 10}, {"1": 20})


def test_a_processor_that_never_waits_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    shop, is_over = Shop(), False

    async def spin(order: Order) -> None:
        while not is_over:
            await trio.lowlevel.checkpoint()

    shop.on_order = spin
    monkeypatch.setattr(virtual_loop, "STEP_LIMIT", 0.2)
    with shop.drive() as driver:
        with pytest.raises(TimeoutError, match="has not come to a wait"):
            driver.feed(Order(1, 10))
        is_over = True


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("commit_every", [1, 5, 20])
@pytest.mark.parametrize("place", [0, 1, 4, 7, 19, 20, 33])
def test_a_record_that_kills_its_owner_is_given_up_after_three_deaths_wherever_it_is(
    place: int, commit_every: int, concurrency: int
) -> None:
    shop = Shop(then="ignore", commit_every=commit_every, concurrency=concurrency)

    async def die(order: Order) -> None:
        if order.amount == place:
            deaths.append(place)
            await trio.sleep_forever()

    shop.on_order, deaths, crashes = die, list[int](), 0
    with shop.drive() as driver:
        driver.feed(*(Order(1, amount) for amount in range(40)), commit=False)
        while len(deaths) > crashes:
            crashes += 1
            driver.crash()
            driver.advance(1)
        assert crashes == 3
        assert [dead.record.amount for dead in driver.dead] == [place]
        assert set(shop.handled) == set(range(40))
        for _ in range(3):
            driver.crash()
            driver.advance(1)
        assert [dead.record.amount for dead in driver.dead] == [place]
