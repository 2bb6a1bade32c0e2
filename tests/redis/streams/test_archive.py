"""Archives: what a full stream does not keep goes there, once, and groups that had not read it say so."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from celery5 import App
from celery5.broker.calls import streams as calls
from celery5.doctor.host_checks import HostChecks
from celery5.errors import Misconfigured, StreamFull
from celery5.logs.log import Log
from celery5.protocol.observability.exposition import format_exposition
from celery5.protocol.streams.groups import ArchivePortion
from celery5.services.streams import stream_archiver
from celery5.services.streams.stream_archives import StreamArchives
from celery5.streams import FileArchive, Keep, StoredRecord, StreamEvents
from tests.redis.worker.workers import Lines, start, until, until_async, working


class Order(msgspec.Struct):
    order_id: int
    amount: int


class Archived:
    """An archive in memory. It raises while it has an error."""

    def __init__(self) -> None:
        self.portions: list[tuple[int, list[StoredRecord]]] = []
        self.error: Exception | None = None
        self.tries: list[tuple[str, str]] = []

    async def __call__(self, stream: str, partition: int, entries: Sequence[StoredRecord]) -> None:
        assert stream == "orders"
        self.tries.append((entries[0].id, entries[-1].id))
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        self.portions.append((partition, list(entries)))

    @property
    def amounts(self) -> list[int]:
        return [entry.record["amount"] for _, entries in self.portions for entry in entries]


def orders_of(app: App, archive: Any, **options: Any) -> Any:
    keep = Keep(
        records=options.pop("records", 100), full="archive", archive=archive, age=options.pop("age", None)
    )
    return app.stream("orders", Order, by="order_id", **{"partitions": 1, **options}, keep=keep)


def make_orders(first: int, count: int) -> list[Order]:
    return [Order(1, number) for number in range(first, first + count)]


def bill_of(app: App, orders: Any, seen: list[int]) -> None:
    @app.processor(orders)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append(order.amount)  # noqa: PERF401  one by one


async def begin_group(app: App, orders: Any, group: str = "bill") -> None:
    """Have a group that has read nothing, and that nobody runs."""
    call = calls.renew_membership(
        *(orders.keys, group),
        member="gone",
        incarnation="gone",
        lease=0.001,
        is_joining=True,
        start="0-0",
        partitions=orders.partitions,
    )
    await app.aperform(call)


async def get_state(app: App) -> Any:
    (state,) = await app.streams.ainfo("orders")
    return state


async def is_archived(app: App) -> bool:
    return not (await get_state(app)).waiting_for_archive


async def test_archived_records_count_as_missed_by_a_slow_group(app: App, tmp_path: Path) -> None:
    archive, seen = FileArchive(tmp_path / "archive"), list[int]()
    orders = orders_of(app, archive)
    await begin_group(app, orders)
    ids = [place for first in range(0, 150, 50) for place in await orders.asend(*make_orders(first, 50))]
    state = await get_state(app)
    assert (state.records, state.archived, state.waiting_for_archive) == (100, 50, {0: 50})
    assert [
        (partition.lag, partition.archived, partition.lost) for partition in state.groups[0].partitions
    ] == [(150, 50, 0)]
    with Lines() as lines:
        async with working(app, processors=()):
            await until_async(lambda: is_archived(app))
            await until(lambda: bool(lines.of("archive:written")))
        bill_of(app, orders, seen)
        async with working(app):
            await until(lambda: len(seen) == 100)
            await until(lambda: bool(lines.of("partition:records-archived")))
        (line,) = lines.of("partition:records-archived")
        assert (line["records"], line["where"]) == (50, f"FileArchive('{tmp_path / 'archive'}')")
        assert lines.of("partition:records-lost") == []
    assert seen == list(range(50, 150))
    (file,) = (tmp_path / "archive").iterdir()
    assert file.name == f"orders.0.{ids[0].id}.{ids[49].id}.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert rows == [{"order_id": 1, "amount": number} for number in range(50)]
    state = await get_state(app)
    assert (state.archived, state.dropped, state.groups[0].partitions[0].archived) == (50, 0, 0)


async def test_each_record_is_processed_or_archived_while_all_runs(app: App) -> None:
    archive, seen = Archived(), list[int]()
    orders = orders_of(app, archive, partitions=4, records=20)

    @app.processor(orders, prefetch=5)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            seen.append(order.amount)
            if order.amount % 50 == 0:
                await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        workers = [await start(nursery, app, name=f"w{n}") for n in range(2)]
        for first in range(0, 2000, 10):
            while True:
                try:
                    await orders.asend(*[Order(n % 7, n) for n in range(first, first + 10)])
                    break
                except StreamFull:
                    await trio.sleep(0.01)
        await until_async(lambda: _is_settled(app))
        for worker in workers:
            await worker.stop()
    found = set(seen) | set(archive.amounts)
    assert found == set(range(2000))
    assert len(archive.amounts) == len(set(archive.amounts))
    assert (await get_state(app)).archived == len(archive.amounts) > 0


async def _is_settled(app: App) -> bool:
    state = await get_state(app)
    return state.groups[0].lag == 0 and not state.waiting_for_archive


async def test_a_full_archive_refuses_and_goes_on_when_it_works_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_archiver, "MAX_DELAY", 0.1)
    archive = Archived()
    orders = orders_of(app, archive)
    await begin_group(app, orders)
    archive.error = OSError("disk full")
    await orders.asend(*make_orders(0, 100))
    await orders.asend(*make_orders(100, 100))
    with pytest.raises(
        StreamFull, match="group bill has not read 100 records, and 100 wait for the archive; start"
    ):
        await orders.asend(Order(1, 200))
    with Lines() as lines:
        async with working(app):
            await until(lambda: len(archive.tries) > 3)
            failed = lines.of("archive:failed")
            assert "disk full" in failed[0]["why"]
            assert [line["level"] for line in failed if "level" in line][:2] in ([], ["error", "debug"])
            archive.error = None
            await until_async(lambda: is_archived(app))
            await until(lambda: len(lines.of("archive:recovered")) == 1)
    assert len(set(archive.tries)) == 1  # a portion that failed has the same records again
    assert archive.amounts == list(range(100))
    await orders.asend(Order(1, 200))


async def test_a_portion_of_a_dead_worker_comes_again_with_the_same_records(app: App, tmp_path: Path) -> None:
    orders = orders_of(app, FileArchive(tmp_path), records=1000)
    await begin_group(app, orders)
    for number in range(0, 1100, 100):
        await orders.asend(*make_orders(number, 100))

    async def claim(worker: str, lease: float = 60) -> ArchivePortion | None:
        call = calls.claim_archived(orders.keys, worker, lease=lease, most=500, most_bytes=1 << 20)
        return (await app.aperform(call)).portion

    async def settle(
        worker: str, portion: ArchivePortion, outcome: str = "archived", delay: float = 0
    ) -> bool:
        return await app.aperform(calls.settle_archived(orders.keys, worker, portion, outcome, delay=delay))

    first = await claim("one", lease=0.001)
    assert first is not None
    assert len(first.entries) == 100
    await orders.asend(*make_orders(1100, 200))
    again = await claim("two")
    assert again is not None
    assert (again.last, again.entries) == (first.last, first.entries)
    # Only one has it: the first one neither removes nor keeps it any longer, and a third one gets nothing.
    assert not await settle("one", first)
    assert not await settle("one", first, "renewed", 60)
    assert await claim("three") is None
    assert await settle("two", again, "renewed", 60)
    assert await settle("two", again)
    assert not await settle("two", again)
    rest = await claim("three")
    assert rest is not None
    assert len(rest.entries) == 200
    assert await settle("three", rest, "failed", 60)
    assert await claim("two") is None
    assert (await get_state(app)).waiting_for_archive == {0: 200}


async def test_all_partitions_have_their_turn_and_a_portion_has_a_bound(app: App) -> None:
    orders = orders_of(app, Archived(), partitions=3, records=60)
    await begin_group(app, orders)
    for _ in range(2):
        await orders.asend(*[Order(key, key) for key in range(60)], *[Order(key, key) for key in range(60)])
    seen, before = list[int](), -1
    for worker in "abc":
        call = calls.claim_archived(orders.keys, worker, lease=60, most=3, most_bytes=1 << 20, before=before)
        portion = (await app.aperform(call)).portion
        assert portion is not None
        assert len(portion.entries) == 3
        seen.append(portion.partition)
        before = portion.partition
        await app.aperform(calls.settle_archived(orders.keys, worker, portion, "archived"))
    assert seen == [0, 1, 2]
    small = calls.claim_archived(orders.keys, "a", lease=60, most=500, most_bytes=40, before=before)
    claim = await app.aperform(small)
    assert claim.portion is not None
    assert (claim.portion.partition, len(claim.portion.entries)) == (0, 1)


async def test_a_worker_that_stops_lets_its_archive_end(app: App) -> None:
    began, done = trio.Event(), list[int]()

    async def keep_slowly(stream: str, partition: int, entries: Sequence[StoredRecord]) -> None:
        began.set()
        await trio.sleep(0.3)
        done.append(len(entries))

    orders = orders_of(app, keep_slowly)
    await begin_group(app, orders)
    for first in (0, 50, 100):
        await orders.asend(*make_orders(first, 50))
    async with working(app):
        await began.wait()
    assert done == [50]
    assert await is_archived(app)


async def test_a_plain_function_archives_in_a_thread_and_metrics_count(app: App) -> None:
    got = list[int]()

    def keep(stream: str, partition: int, entries: Sequence[StoredRecord]) -> None:
        got.extend(entry.record["amount"] for entry in entries)

    orders = orders_of(app, keep)
    await begin_group(app, orders)
    for first in (0, 50, 100):
        await orders.asend(*make_orders(first, 50))
    archives = StreamArchives(
        redis=await app.connections.get_async_driver(),
        archived_streams=[orders],
        worker="w",
        log=Log(worker="w", app="shop"),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(archives.run)
        await until_async(lambda: is_archived(app))
        nursery.cancel_scope.cancel()
    assert got == list(range(50))
    text = format_exposition(list(archives.metric_families())).decode()
    assert 'celery5_stream_archived_records_total{stream="orders"} 50' in text
    assert 'celery5_stream_archive_failures_total{stream="orders"} 0' in text


async def test_the_doctor_says_when_an_archive_is_behind(app: App) -> None:
    orders = orders_of(app, Archived())
    await begin_group(app, orders)
    await orders.asend(*make_orders(0, 100))

    async def check() -> tuple[str, str]:
        finding = await trio.to_thread.run_sync(HostChecks({}).check_streams, app)
        return finding.state, finding.summary

    await orders.asend(*make_orders(100, 50))
    state, text = await check()
    assert (state, text) == ("warn", "records were archived unread: orders:bill 50")
    await orders.asend(*make_orders(150, 1))
    state, text = await check()
    assert (state, text.partition(": ")[2]) == ("warn", "orders partition 0 51 of 100")
    await orders.asend(*make_orders(151, 49))
    state, text = await check()
    assert (state, text) == ("fail", "full, more records are refused: orders:bill partition 0")


async def test_what_all_have_read_goes_by_age_without_the_archive(app: App) -> None:
    archive, seen = Archived(), list[int]()
    orders = orders_of(app, archive, age=3600, records=1000)
    bill_of(app, orders, seen)
    await begin_group(app, orders)
    old = make_orders(0, 300)
    await orders.asend(*old[:200], times=[1_000_000_000_000] * 200)
    async with working(app):
        await until(lambda: len(seen) == 200)
        await until_async(lambda: _is_settled(app))
    await orders.asend(*old[200:], times=[1_000_000_000_001] * 100)
    await orders.asend(Order(1, 300))
    async with working(app):
        await until(lambda: len(seen) == 301)
    assert seen == list(range(301))
    assert archive.portions == []


@pytest.mark.parametrize("policy", ["archive", "drop"])
async def test_resharded_stream_continues_past_missing_records(app: App, policy: str) -> None:
    archive, seen = Archived(), list[int]()
    orders = (
        orders_of(app, archive, partitions=2, records=20)
        if policy == "archive"
        else app.stream("orders", Order, by="order_id", partitions=2, keep=Keep(records=20, full="drop"))
    )
    bill_of(app, orders, seen)
    await begin_group(app, orders)
    await orders.asend(*[Order(n, n) for n in range(30)])
    await app.streams.areshard("orders", 3)
    for first in range(100, 100 + 15 * 40, 15):
        while True:
            try:
                await orders.asend(*[Order(n, n) for n in range(first, first + 15)])
                break
            except StreamFull:
                async with working(app, processors=()):
                    await until_async(lambda: is_archived(app))
    async with working(app):
        await until_async(lambda: _is_settled(app))
    assert set(seen) & set(range(600, 700))


async def test_records_lost_before_a_change_of_policy_are_not_counted_as_archived(app: App) -> None:
    dropping = app.stream("orders", Order, by="order_id", partitions=1, keep=Keep(records=100, full="drop"))
    await begin_group(app, dropping)
    for first in range(0, 1000, 100):
        await dropping.asend(*make_orders(first, 100))
    lost = (await get_state(app)).groups[0].partitions[0].lost
    assert lost > 0
    other = App(app.name, broker=app.settings.broker)
    archive = Archived()
    orders = orders_of(other, archive)
    for first in range(1000, 1200, 50):
        try:
            await orders.asend(*make_orders(first, 50))
        except StreamFull:
            async with working(other):
                await until_async(lambda: is_archived(other))
    state = await get_state(app)
    (partition,) = state.groups[0].partitions
    assert (partition.lost, partition.archived) == (lost, state.archived)
    assert state.archived > 0
    other.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"full": "archive"}, "go together"),
        ({"archive": print}, "go together"),
        ({"full": "archive", "archive": "/var/archive"}, "give FileArchive"),
        ({"full": "archive", "archive": lambda stream: None}, "it must take the stream's name"),
        ({"full": "keep"}, "give refuse, drop or archive"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(options: dict[str, Any], why: str) -> None:
    with pytest.raises(Misconfigured, match=why):
        Keep(**options)


def test_a_portion_that_comes_again_replaces_its_file(tmp_path: Path) -> None:
    archive = FileArchive(tmp_path / "a" / "b", private=True)
    entries = [StoredRecord(3, f"5-{n}", {"n": n}) for n in range(3)]
    name = "a/../b" + "é" * 190
    archive(name, 3, entries)
    (file,) = (tmp_path / "a" / "b").iterdir()
    written = file.read_bytes()
    archive(name, 3, entries)
    assert list((tmp_path / "a" / "b").iterdir()) == [file]
    assert file.read_bytes() == written
    assert file.stat().st_mode & 0o777 == 0o600
    assert gzip.decompress(written) == b'{"n":0}\n{"n":1}\n{"n":2}\n'
