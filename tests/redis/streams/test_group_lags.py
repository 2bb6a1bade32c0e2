"""How far groups are behind, as /metrics, info and doctor tell it."""

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from celery5 import App
from celery5.broker.call import Call
from celery5.doctor.host_checks import HostChecks
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.observability.exposition import format_exposition
from celery5.services.streams.group_lags import GroupLags
from celery5.streams import Keep, StreamEvents
from celery5.streams.processor import Processor
from tests.redis.worker.workers import until_async, working


class Order(msgspec.Struct):
    order_id: int


def bill_of(app: App, **options: Any) -> Any:
    """A stream with a processor that does nothing."""
    orders = app.stream("orders", Order, by="order_id", **{"partitions": 4, **options})

    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for _ in events.records():
            pass

    return orders


async def lag(app: App) -> int:
    (state,) = await app.streams.ainfo("orders")
    return state.groups[0].lag if state.groups else -1


async def _is_done(app: App) -> bool:
    return await lag(app) == 0


async def process_all(app: App) -> None:
    async with working(app):
        await until_async(lambda: _is_done(app))


def lags_of(app: App, redis: Any, *, is_measuring: bool = True) -> GroupLags:
    processors: tuple[Processor[Any], ...] = app.streams.processors
    return GroupLags(
        redis=redis, processors=processors, is_measuring=is_measuring, log=Log(worker="w", app="shop")
    )


def shown(lags: GroupLags) -> bytes:
    return format_exposition(list(lags.metric_families()))


async def test_the_metrics_tell_lag_owners_and_quarantines(app: App) -> None:
    orders = bill_of(app)
    await orders.asend(*map(Order, range(20)))
    await process_all(app)
    await orders.asend(*map(Order, range(5)))
    await app.streams.aset_quarantine("orders", "bill", 2, "a look")
    lags = lags_of(app, await app.connections.get_async_driver())
    async with trio.open_nursery() as nursery:
        await nursery.start(lags.run)
        await until_async(lambda: _shows(lags, b'celery5_stream_lag_records{stream="orders",group="bill"} 5'))
        found = shown(lags)
        nursery.cancel_scope.cancel()
    labels = b'{stream="orders",group="bill"'
    assert b"celery5_stream_members" + labels + b"} 0" in found
    assert b"celery5_stream_partitions" + labels + b',state="quarantined"} 1' in found
    assert b"celery5_stream_partitions" + labels + b',state="unowned"} 3' in found
    assert b"celery5_stream_dead_records" + labels + b"} 0" in found
    assert shown(lags).strip() in (b"", b"# EOF")


async def _shows(lags: GroupLags, text: bytes) -> bool:
    return text in shown(lags)


class Counting:
    """A driver that counts calls; with `is_away` the broker cannot be reached."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.calls = 0
        self.is_away = False

    async def perform(self, call: Call[Any]) -> Any:
        self.calls += 1
        if self.is_away:
            raise BrokerUnavailable("away")
        return await self._driver.perform(call)

    async def perform_all(self, calls: Any) -> list[Any]:
        return [await self.perform(call) for call in calls]


class Canned:
    """Replies as of a group of 200 partitions, without a server."""

    async def perform(self, call: Call[Any]) -> Any:
        if call.words[0] == "XLEN":
            return 0
        rows = [[n, b"1-9", b"1-2", b"1-3", 7, b"", 0, 0, b"", b"", 0, b"", 0, 0] for n in range(64)]
        return call.decode([200, 5000, [], rows, 0, 0])


@pytest.mark.parametrize("is_measuring", [True, False])
async def test_lag_is_measured_every_two_seconds_with_a_status_port_only(
    app: App, autojump_clock: MockClock, is_measuring: bool
) -> None:
    bill_of(app)
    redis = Counting(Canned())
    with trio.move_on_after(600):
        await lags_of(app, redis, is_measuring=is_measuring).run()
    assert redis.calls <= 0.55 * 600
    assert bool(redis.calls) == is_measuring


async def test_a_broker_that_is_away_leaves_no_old_numbers(app: App, autojump_clock: MockClock) -> None:
    bill_of(app)
    redis = Counting(Canned())
    lags = lags_of(app, redis)
    async with trio.open_nursery() as nursery:
        await nursery.start(lags.run)
        await trio.sleep(1)
        assert b"celery5_stream_lag_records" in shown(lags)
        redis.is_away = True
        await trio.sleep(15)
        assert b"celery5_stream" not in shown(lags)
        nursery.cancel_scope.cancel()


async def examine(app: App) -> tuple[str, str]:
    found = await trio.to_thread.run_sync(HostChecks({}).check_streams, app)
    return found.state, found.summary


async def test_the_doctor_sees_what_stands_still(app: App) -> None:
    assert await examine(app) == ("ok", "none")
    orders = bill_of(app, keep=Keep(records=50), partitions=1)
    await orders.asend(*map(Order, range(5)))
    await process_all(app)
    assert await examine(app) == ("ok", "1, with 1 group; 0 records not done")
    await orders.asend(Order(1))
    assert await examine(app) == ("warn", "records wait, and no worker runs: orders:bill 1")
    await app.streams.aset_quarantine("orders", "bill", 0, "a look")
    assert await examine(app) == ("fail", "quarantined: orders:bill partition 0")
    await orders.asend(*[Order(1)] * 49)
    assert await examine(app) == ("fail", "full, more records are refused: orders:bill partition 0")
    await app.streams.areset("orders", "bill", "latest")
    assert (await examine(app))[0] == "ok"


async def test_the_doctor_sees_records_that_were_dropped(app: App) -> None:
    orders = bill_of(app, keep=Keep(records=100, full="drop"), partitions=1)
    await orders.asend(Order(1))
    await process_all(app)
    for _ in range(10):
        await orders.asend(*[Order(1)] * 100)
    state, summary = await examine(app)
    assert state == "fail"
    assert summary.startswith("records were dropped unread: orders:bill ")
