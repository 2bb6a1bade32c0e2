"""The scripts of groups: who owns what, and what an earlier owner can still do."""

import time
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
import redis as redis_py

from celery5 import App
from celery5.broker.calls import streams as calls
from celery5.broker.calls.streams import RecordToAppend
from celery5.broker.driver import BlockingDriver
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import StreamKeys
from celery5.protocol.streams.groups import Appended, Commit, RefusedAppend, RenewedMembership, StaleMap

GROUP = "bill"


@pytest.fixture
def redis(url: str) -> Iterator[BlockingDriver]:
    driver = open_blocking(Endpoint.from_url(url))
    yield driver
    driver.close()


@pytest.fixture
def keys(app: App) -> StreamKeys:
    return app.keys.for_stream("orders")


def append(
    redis: BlockingDriver, keys: StreamKeys, *partitions: int, version: int = 1, **options: Any
) -> Any:
    records = [RecordToAppend(partition, ("=json", "{}")) for partition in partitions]
    settings: dict[str, Any] = {"partitions": 4, "most": 100, "full": "refuse", **options}
    return redis.perform(calls.append(keys, records, version=version, **settings))


def renew(
    redis: BlockingDriver,
    keys: StreamKeys,
    member: str,
    *,
    joins: bool = False,
    lease: float = 30,
    incarnation: str = "",
) -> RenewedMembership:
    call = calls.renew_membership(
        *(keys, GROUP),
        member=member,
        incarnation=incarnation or f"{member}:1",
        lease=lease,
        is_joining=joins,
        start="0-0",
        partitions=4,
    )
    membership = redis.perform(call)
    assert membership is not None
    return membership


def now_ms(client: Any) -> float:
    seconds, microseconds = client.time()
    return float(seconds * 1000 + microseconds / 1000)


def owned(membership: RenewedMembership) -> set[int]:
    return {partition.partition for partition in membership.assigned if partition.is_owned}


def test_a_producer_without_the_map_gets_it_and_one_with_an_old_one_is_told(
    redis: BlockingDriver, keys: StreamKeys
) -> None:
    stale = append(redis, keys, 0, version=0)
    assert isinstance(stale, StaleMap)
    assert stale.map.partitions == 4
    assert isinstance(append(redis, keys, 0, version=stale.map.version), Appended)
    redis.perform(calls.reshard(keys, 8))
    moved = append(redis, keys, 0, version=stale.map.version)
    assert isinstance(moved, StaleMap)
    assert moved.map.partitions == 8


def test_a_sending_that_is_repeated_after_a_lost_reply_appends_once(
    redis: BlockingDriver, keys: StreamKeys
) -> None:
    append(redis, keys, 0, version=0)
    first = append(redis, keys, 0, 1, 1, nonce="n")
    assert append(redis, keys, 0, 1, 1, nonce="n") == first
    assert redis.perform(calls.count_records(keys, 1)) == 2
    assert append(redis, keys, 0, 1, 1, nonce="m") != first


def test_a_repeated_record_of_an_outbox_is_skipped(redis: BlockingDriver, keys: StreamKeys) -> None:
    append(redis, keys, 0, version=0)

    def relay(*origins: str) -> Appended:
        records = [RecordToAppend(0, ("=json", "{}"), origin=origin) for origin in origins]
        call = calls.append(
            keys, records, version=1, partitions=4, most=9, full="refuse", source="other:bill:3"
        )
        reply = redis.perform(call)
        assert isinstance(reply, Appended)
        return reply

    relay("5-0", "5-1")
    assert [bool(record_id) for _, record_id in relay("5-0", "5-1", "6-0").ids] == [False, False, True]
    assert redis.perform(calls.count_records(keys, 0)) == 3


def test_times_never_decrease_in_a_partition(redis: BlockingDriver, keys: StreamKeys) -> None:
    append(redis, keys, 0, version=0)
    records = [RecordToAppend(0, ("=json", "{}"), time=time) for time in (1000, 2000, 1500)]
    call = calls.append(keys, records, version=1, partitions=4, most=9, full="refuse")
    refused = redis.perform(call)
    assert isinstance(refused, RefusedAppend)
    assert "older than the last one of its partition 0" in refused.why
    assert redis.perform(calls.count_records(keys, 0)) == 0


def test_a_commit_of_an_earlier_owner_changes_nothing(redis: BlockingDriver, keys: StreamKeys) -> None:
    append(redis, keys, 0, version=0)
    ids = [record_id for _, record_id in append(redis, keys, 0, 0, 0).ids]
    before = next(
        partition for partition in renew(redis, keys, "a", joins=True).assigned if partition.partition == 0
    )
    redis.perform(calls.leave_group(keys, GROUP, member="a", incarnation="a:1"))
    after = next(
        partition for partition in renew(redis, keys, "b", joins=True).assigned if partition.partition == 0
    )
    assert after.epoch == before.epoch + 1
    late = Commit(
        0, before.epoch, before.cursor, ids[1], outputs=[b"late"], state={"a": b"1"}, name="a", number=1
    )
    assert redis.perform(calls.commit(keys, GROUP, "a:1", [late])) == (False,)
    assert redis.perform(calls.commit(keys, GROUP, "b:1", [late])) == (False,)
    mine = Commit(0, after.epoch, after.cursor, ids[0], outputs=[b"mine"], name="b", number=1)
    assert redis.perform(calls.commit(keys, GROUP, "b:1", [mine])) == (True,)
    outbox = redis.perform(calls.read_outbox(keys, GROUP, 0, count=9))
    assert [fields[1] for _, fields in outbox] == [b"mine"]
    assert redis.perform(calls.get_state(keys, GROUP, ["a"])) == [None]


def test_a_commit_of_a_record_that_the_log_never_had_changes_nothing(
    redis: BlockingDriver, keys: StreamKeys, redis_client: "redis_py.Redis"
) -> None:
    """Two primaries that are cut off from each other give the same place in a log to different records."""
    append(redis, keys, 0, version=0)
    (_, first), *_ = append(redis, keys, 0).ids
    time.sleep(0.01)  # the next ids begin with a later millisecond
    ids = [first, *(record_id for _, record_id in append(redis, keys, 0, 0).ids)]
    one = next(
        partition for partition in renew(redis, keys, "a", joins=True).assigned if partition.partition == 0
    )
    ms, _, number = ids[1].partition("-")
    commit = Commit(0, one.epoch, one.cursor, "", outputs=[b"out"], name="a", number=1)
    between = f"{int(ms) - 1}-{first.partition('-')[2]}"
    for foreign in (between, f"{int(ms) - 1}-{number}", f"{int(ms) + 1}-{number}", f"{int(ms) + 1000}-9"):
        call = calls.commit(keys, GROUP, "a:1", [msgspec.structs.replace(commit, new_cursor=foreign)])
        assert redis.perform(call) == (False,)
    assert redis.perform(calls.read_outbox(keys, GROUP, 0, count=9)) == []
    cast("Any", redis_client).xtrim(keys.log(0), minid=ids[2], approximate=False)
    assert redis.perform(
        calls.commit(keys, GROUP, "a:1", [msgspec.structs.replace(commit, new_cursor=ids[1])])
    ) == (True,)
    cast("Any", redis_client).xtrim(keys.log(0), maxlen=0, approximate=False)
    last = msgspec.structs.replace(commit, cursor=ids[1], new_cursor=ids[2], number=2)
    assert redis.perform(calls.commit(keys, GROUP, "a:1", [last])) == (True,)


def test_a_commit_may_be_repeated_and_is_done_once(redis: BlockingDriver, keys: StreamKeys) -> None:
    append(redis, keys, 0, version=0)
    ids = [record_id for _, record_id in append(redis, keys, 0, 0).ids]
    one = next(
        partition for partition in renew(redis, keys, "a", joins=True).assigned if partition.partition == 0
    )
    first = Commit(
        0,
        one.epoch,
        one.cursor,
        ids[0],
        [b"out"],
        {"a": b"1", "b": b"2"},
        [("id", ids[0], "error", "no")],
        (),
        "a",
        1,
    )
    for _ in range(3):
        assert redis.perform(calls.commit(keys, GROUP, "a:1", [first])) == (True,)
    assert len(redis.perform(calls.read_outbox(keys, GROUP, 0, count=9))) == 1
    second = Commit(0, one.epoch, ids[0], ids[1], (), {"a": None}, name="a", number=2)
    assert redis.perform(calls.commit(keys, GROUP, "a:1", [second])) == (True,)
    assert redis.perform(calls.commit(keys, GROUP, "a:1", [first])) == (False,)
    assert redis.perform(calls.get_state(keys, GROUP, ["a", "b"])) == [None, b"2"]


def test_a_partition_waits_for_its_owner_to_give_it_back(redis: BlockingDriver, keys: StreamKeys) -> None:
    assert owned(renew(redis, keys, "a", joins=True)) == {0, 1, 2, 3}
    second = renew(redis, keys, "b", joins=True)
    assert len(second.assigned) == 2
    assert owned(second) == set()
    leaving = [partition.partition for partition in second.assigned]
    assert {partition.partition for partition in renew(redis, keys, "a").assigned}.isdisjoint(leaving)
    call = calls.release_partitions(keys, GROUP, member="a", incarnation="a:1", partitions=leaving)
    assert redis.perform(call) == 2
    assert owned(renew(redis, keys, "b")) == set(leaving)


def test_a_member_that_let_its_own_lease_lapse_judges_nobody(
    redis: BlockingDriver, keys: StreamKeys, redis_client: Any
) -> None:
    renew(redis, keys, "a", joins=True)
    renew(redis, keys, "b", joins=True)
    # The leases end at once: with short ones, that of the first might end before the second joins, who would judge it.
    lapsed = now_ms(redis_client) - 1
    redis_client.zadd(keys.members(GROUP), {"a": lapsed, "b": lapsed}, xx=True)
    assert renew(redis, keys, "a").members == 2


def test_a_new_incarnation_of_a_name_ends_the_earlier_one(redis: BlockingDriver, keys: StreamKeys) -> None:
    renew(redis, keys, "a", joins=True)
    assert owned(renew(redis, keys, "a", joins=True, incarnation="a:2")) == {0, 1, 2, 3}
    call = calls.renew_membership(
        *(keys, GROUP), member="a", incarnation="a:1", lease=30, is_joining=False, start="0-0", partitions=4
    )
    assert redis.perform(call) is None


def test_a_named_member_keeps_its_share_during_its_absence(redis: BlockingDriver, keys: StreamKeys) -> None:
    renew(redis, keys, "a", joins=True)
    renew(redis, keys, "b", joins=True)
    share = {partition.partition for partition in renew(redis, keys, "a").assigned}
    redis.perform(calls.leave_group(keys, GROUP, member="a", incarnation="a:1", absence=30))
    assert {partition.partition for partition in renew(redis, keys, "b").assigned}.isdisjoint(share)
    assert owned(renew(redis, keys, "a", joins=True, incarnation="a:2")) == share
    redis.perform(calls.leave_group(keys, GROUP, member="a", incarnation="a:2"))
    assert owned(renew(redis, keys, "b")) >= share


def test_the_deaths_of_owners_are_counted_until_the_cursor_moves(
    redis: BlockingDriver, keys: StreamKeys
) -> None:
    append(redis, keys, 0, version=0)
    ids = [record_id for _, record_id in append(redis, keys, 0).ids]
    for deaths in range(3):
        one = next(
            partition
            for partition in renew(redis, keys, "a", joins=True).assigned
            if partition.partition == 0
        )
        assert one.deaths == deaths
        redis.perform(calls.leave_group(keys, GROUP, member="a", incarnation="a:1", has_died=True))
    one = next(
        partition for partition in renew(redis, keys, "a", joins=True).assigned if partition.partition == 0
    )
    assert redis.perform(
        calls.commit(keys, GROUP, "a:1", [Commit(0, one.epoch, one.cursor, ids[0], name="a", number=1)])
    ) == (True,)
    redis.perform(calls.leave_group(keys, GROUP, member="a", incarnation="a:1"))
    one = next(
        partition for partition in renew(redis, keys, "a", joins=True).assigned if partition.partition == 0
    )
    assert one.deaths == 0
