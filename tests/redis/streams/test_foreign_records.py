"""Foreign records: what the class of one member cannot read goes to members with another version of that class."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import redis
import trio

from celery5 import App
from celery5.streams import StreamEvents
from tests.redis.worker.workers import LEASE, Lines, until, until_async, working


class OldOrder(msgspec.Struct):
    order_id: int
    amount: int


class NewOrder(msgspec.Struct):
    order_id: int
    amount: str


class Group:
    """Workers with two versions of the class of a stream, each with a processor of the same name."""

    def __init__(self, name: str, url: str, kind: str, grace: float, **options: Any) -> None:
        self.seen = defaultdict[int, list[tuple[str, object]]](list)
        self.old, self.new = (
            App(name, broker=url, lease=LEASE, grace_period=2, unknown_record_grace=grace) for _ in range(2)
        )
        self.streams = {
            app: app.stream("orders", record, by="order_id", partitions=4)
            for app, record in ((self.old, OldOrder), (self.new, NewOrder))
        }
        for app, version in ((self.old, "old"), (self.new, "new")):
            self.declare(app, version, kind, options)

    def declare(self, app: App, version: str, kind: Any, options: dict[str, Any]) -> None:
        """Declare the processor in one version of the code."""
        if kind == "thread":

            def bill(events: Any) -> None:
                for order in events.records():
                    self.seen[order.order_id].append((version, order.amount))

            app.processor(self.streams[app], name="bill", **options)(bill)
            return

        async def abill(events: StreamEvents[Any]) -> None:
            async for order in events.records():
                self.seen[order.order_id].append((version, order.amount))

        app.processor(self.streams[app], name="bill", loop=kind, **options)(abill)

    async def send(self, app: App, record: Any, count: int) -> None:
        """Append records of eight keys, numbered from where the last ones ended."""
        start = sum(map(len, self.seen.values()))
        make = int if record is OldOrder else str
        await self.streams[app].asend(*[record(n % 8, make(start + n)) for n in range(count)])

    @property
    def count(self) -> int:
        """How many records were processed."""
        return sum(map(len, self.seen.values()))

    async def count_lag(self) -> int:
        """Return how many records are not done."""
        (stream,) = await self.new.streams.ainfo()
        return sum(group.lag for group in stream.groups)


@pytest.fixture
def make_group(url: str, app_name: str) -> Iterator[Any]:
    made: list[Group] = []

    def make(kind: str = "trio", grace: float = 20.0, **options: Any) -> Group:
        made.append(Group(app_name, url, kind, grace, **options))
        return made[-1]

    yield make
    for group in made:
        group.old.close()
        group.new.close()


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_records_of_a_new_class_go_to_members_that_can_read_them(make_group: Any, kind: str) -> None:
    group = make_group(kind)
    with Lines() as lines:
        async with working(group.old, name="old"), working(group.new, name="new"):
            await group.send(group.new, NewOrder, 80)
            await until(lambda: group.count >= 80)
            await until_async(lambda: has_no_lag(group))
    assert {version for seen in group.seen.values() for version, _ in seen} == {"new"}
    for seen in group.seen.values():
        assert [int(amount) for _, amount in seen] == sorted({int(amount) for _, amount in seen})
    assert lines.of("record:unreadable"), "the old member owned some of the partitions"
    assert not lines.of("partition:quarantined")


async def has_no_lag(group: Group) -> bool:
    """Return whether all records are done."""
    return await group.count_lag() == 0


async def test_records_wait_for_a_member_that_can_read_them(make_group: Any) -> None:
    group = make_group()
    async with working(group.old, name="old"):
        await group.send(group.old, OldOrder, 16)
        await until(lambda: group.count == 16)
        with Lines() as lines:
            await group.send(group.new, NewOrder, 16)
            await until(lambda: bool(lines.of("record:unreadable")))
            async with working(group.new, name="new"):
                await until(lambda: group.count >= 32)
                await until_async(lambda: has_no_lag(group))
            assert not lines.of("partition:quarantined")
    for seen in group.seen.values():
        assert [int(str(amount)) for _, amount in seen] == sorted(int(str(amount)) for _, amount in seen)
        assert [version for version, _ in seen] == ["old", "old", "new", "new"]


@pytest.mark.parametrize("then", ["quarantine", "ignore"])
async def test_a_record_that_no_member_can_read_fails_after_the_grace_period(
    make_group: Any, redis_client: "redis.Redis", then: str
) -> None:
    group = make_group(grace=1.5, then=then)
    keys = group.new.streams["orders"].keys
    async with working(group.old, name="old"), working(group.new, name="new"):
        await group.send(group.old, OldOrder, 8)
        with Lines() as lines:
            began = trio.current_time()
            redis_client.xadd(keys.log(1), {"=json": b'{"order_id": "none"}'}, id="*")
            await until(lambda: bool(lines.of("record:failed")))
            assert 1.5 <= trio.current_time() - began < 8
            name = "partition:quarantined" if then == "quarantine" else "record:failed"
            await until(lambda: bool(lines.of(name)))
