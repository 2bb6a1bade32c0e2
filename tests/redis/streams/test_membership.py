"""Membership: the plan of a group against a reference, and what moves when a member comes or goes."""

import json
import math
import random
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import redis
import trio
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App
from celery5.broker.calls import streams as calls
from celery5.broker.driver import BlockingDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.drivers.opening_on_trio import open_parked, open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import StreamKeys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.logs.log import NullLog
from celery5.protocol.streams.groups import RenewedMembership
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.streams.group_member import GroupMember
from celery5.services.streams.outbox_relay import OutboxRelay
from celery5.services.streams.processor_calls import ProcessorCalls
from celery5.services.streams.processor_group import ProcessorGroup
from celery5.streams import StreamEvents
from tests.watched import watched

PLAN = (
    files("celery5.broker").joinpath("lua/lib/stream_group.lua").read_text()
    + """
local present, plan = cjson.decode(ARGV[1]), cjson.decode(ARGV[3])
local words = {}
for member, held in pairs(make_plan(present, tonumber(ARGV[2]), plan)) do
  for _, p in ipairs(held) do words[#words + 1] = {p, member} end
end
return cjson.encode(words)
"""
)
MEMBERS = st.sets(st.sampled_from([f"w{number}" for number in range(12)]), min_size=1)


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """A client of the shared server, for all examples."""
    with watched(server), redis.Redis.from_url(server.url) as client:
        yield client


def make_plan(client: "redis.Redis", members: set[str], total: int, plan: dict[int, str]) -> dict[int, str]:
    """Return what the script plans."""
    before = json.dumps({str(partition): member for partition, member in plan.items()})
    reply: Any = client.eval(PLAN, 0, json.dumps(sorted(members)), total, before)
    found = json.loads(reply)
    assert len(found) == len({partition for partition, _ in found})
    return dict(found)


def plan_in_python(members: set[str], total: int, plan: dict[int, str]) -> dict[int, str]:
    """Return what `make_plan` of lib/stream_group.lua plans: its twin."""
    held = {member: [p for p in range(total) if plan.get(p) == member] for member in members}
    free = [p for p in range(total) if plan.get(p) not in members]
    order = sorted(members, key=lambda member: (-len(held[member]), member))
    share, rest = divmod(total, len(members))
    quotas = {member: share + (place < rest) for place, member in enumerate(order)}
    for member in order:
        while len(held[member]) > quotas[member]:
            free.append(held[member].pop())
    for member in order:
        while len(held[member]) < quotas[member]:
            held[member].append(free.pop())
    return {p: member for member, owned in held.items() for p in owned}


def count_moves(members: set[str], total: int, plan: dict[int, str]) -> int:
    """Return how many partitions must get another member: the reference.

    The largest shares are given to those who hold most already, and whoever holds more than its share gives the rest.
    """
    held = sorted((list(plan.values()).count(member) for member in members), reverse=True)
    share, rest = divmod(total, len(members))
    quotas = [share + (place < rest) for place in range(len(members))]
    return total - sum(min(count, quota) for count, quota in zip(held, quotas, strict=True))


@given(st.integers(1, 70), st.lists(MEMBERS, min_size=1, max_size=6))
def test_a_plan_is_fair_and_moves_no_more_than_it_must(
    client: "redis.Redis", total: int, generations: list[set[str]]
) -> None:
    plan: dict[int, str] = {}
    for members in generations:
        before, plan = plan, make_plan(client, members, total, plan)
        assert plan == plan_in_python(members, total, before)
        assert plan.keys() == set(range(total))
        shares = [list(plan.values()).count(member) for member in members]
        assert sum(shares) == total
        assert max(shares) - min(shares) <= 1
        moved = sum(before.get(partition) != member for partition, member in plan.items())
        assert moved == count_moves(members, total, before)
        assert make_plan(client, members, total, plan) == plan


@given(st.integers(1, 20), st.integers(1, 30), MEMBERS)
def test_more_or_fewer_partitions_keep_the_plan_fair(
    client: "redis.Redis", before: int, after: int, members: set[str]
) -> None:
    plan = make_plan(client, members, after, make_plan(client, members, before, {}))
    shares = [list(plan.values()).count(member) for member in members]
    assert plan.keys() == set(range(after))
    assert max(shares) - min(shares) <= 1


# ---- one partition, members that are made up


class Group:
    """A group whose members the test plays."""

    def __init__(self, redis: BlockingDriver, keys: StreamKeys) -> None:
        self.redis = redis
        self.keys = keys

    def renew(
        self, member: str, *, lease: float = 30.0, incarnation: str = "", joins: bool = False
    ) -> RenewedMembership:
        """Renew the membership of a member, whose incarnation is `<member>:1` by default."""
        membership = self.redis.perform(
            calls.renew_membership(
                *(self.keys, "bill"),
                member=member,
                incarnation=incarnation or f"{member}:1",
                lease=lease,
                is_joining=joins,
                start="0-0",
                partitions=4,
            )
        )
        assert membership is not None
        return membership

    def owned(self, membership: RenewedMembership) -> set[int]:
        """Return the partitions that are owned."""
        return {partition.partition for partition in membership.assigned if partition.is_owned}

    def deaths(self, client: "redis.Redis") -> list[int]:
        """Return how many have died at each partition."""
        found: list[Any] = [client.hget(self.keys.partition("bill", number), "deaths") for number in range(4)]
        return [int(deaths or 0) for deaths in found]


class GroupModel:
    """What `renew_membership.lua` decides: the plan, and who owns each of four partitions."""

    def __init__(self) -> None:
        self.members: set[str] = set()
        self.lapsed: set[str] = set()
        self.plan: dict[int, str] = {}
        self.planned_for: set[str] = set()
        self.owners: dict[int, str] = {}

    def renew(self, member: str) -> dict[int, bool]:
        """Return the partitions of a member that renews, and whether it owns them."""
        # One that is new, or has lapsed itself, judges no other.
        if member in self.members - self.lapsed:
            self.members -= self.lapsed
        self.lapsed.clear()
        self.members.add(member)
        if self.planned_for != self.members:
            self.plan = plan_in_python(self.members, 4, self.plan)
            self.planned_for = set(self.members)
        assigned = [p for p in range(4) if self.plan[p] == member]
        for p in assigned:
            if self.owners.get(p) not in self.members:
                self.owners[p] = member
        return {p: self.owners[p] == member for p in assigned}

    def release(self, member: str) -> list[int]:
        """Return the partitions that a member owns and another one is to have: it releases them."""
        released = [p for p, owner in self.owners.items() if owner == member and self.plan[p] != member]
        for p in released:
            del self.owners[p]
        return released


@pytest.fixture
def group(url: str, app_name: str) -> Iterator[Group]:
    """A group of a stream with four partitions."""
    driver = open_blocking(Endpoint.from_url(url))
    yield Group(driver, App(app_name).keys.for_stream("orders"))
    driver.close()


@pytest.mark.parametrize("seed", range(4))
def test_renewals_assign_partitions_as_the_model_in_python_does(
    group: Group, redis_client: "redis.Redis", seed: int
) -> None:
    dice, model, key = random.Random(seed), GroupModel(), group.keys.members("bill")
    for _ in range(60):
        member, act = dice.choice("abcde"), dice.choice(("renew", "renew", "release", "lapse"))
        if act == "renew":
            membership = group.renew(member, joins=member not in model.members)
            assigned = {partition.partition: partition.is_owned for partition in membership.assigned}
            assert assigned == model.renew(member)
            assert membership.members == len(model.members)
            # Who had lapsed has a moment to come back: here for as long as the test needs.
            redis_client.zadd(key, dict.fromkeys(model.members, (time.time() + 60) * 1000))
        elif act == "release" and (partitions := model.release(member)):
            group.redis.perform(
                calls.release_partitions(
                    group.keys, "bill", member=member, incarnation=f"{member}:1", partitions=partitions
                )
            )
        elif act == "lapse" and member in model.members:
            model.lapsed.add(member)
            redis_client.zadd(key, {member: 1})


def test_a_lease_is_renewed_for_a_member_only_and_for_the_right_incarnation(
    group: Group, redis_client: "redis.Redis"
) -> None:
    def renew(member: str, incarnation: str) -> bool:
        return group.redis.perform(
            calls.renew_member_lease(group.keys, "bill", member=member, incarnation=incarnation, lease=60.0)
        )

    group.renew("one", joins=True)
    before: Any = redis_client.zscore(group.keys.members("bill"), "one")
    owners = redis_client.hgetall(group.keys.partition("bill", 0))
    assert renew("one", "one:1")
    after: Any = redis_client.zscore(group.keys.members("bill"), "one")
    assert 29_000 < after - before < 32_000
    assert not renew("one", "one:0")
    assert not renew("two", "two:1")
    assert redis_client.zcard(group.keys.members("bill")) == 1
    assert redis_client.hgetall(group.keys.partition("bill", 0)) == owners


def test_a_member_hears_when_the_next_lease_of_another_ends(group: Group) -> None:
    assert group.renew("one", joins=True).lapse_in is None
    group.renew("two", lease=7.0, joins=True)
    lapse_in = group.renew("one").lapse_in
    assert lapse_in is not None
    assert 5.0 < lapse_in <= 7.0


def test_a_member_that_had_lapsed_itself_judges_nobody(group: Group, redis_client: "redis.Redis") -> None:
    group.renew("one", joins=True)
    group.renew("two", joins=True)
    group.owned(group.renew("one"))
    members = group.keys.members("bill")
    redis_client.zadd(members, {"one": 1, "two": 1})  # Redis was down for longer than a lease
    first = group.renew("one")
    assert first.members == 2
    assert first.lapse_in is not None
    assert 0 < first.lapse_in <= 2.0
    redis_client.zadd(members, {"two": 1})  # it has not come back
    assert group.renew("one").members == 1


def test_an_owner_that_dies_where_nothing_is_to_do_is_no_death_at_a_record(
    group: Group, redis_client: "redis.Redis"
) -> None:
    group.renew("one", joins=True)
    redis_client.xadd(group.keys.log(2), {"=json": "1"}, id="5-1")
    group.redis.perform(
        calls.leave_group(group.keys, "bill", member="one", incarnation="one:1", has_died=True)
    )
    assert group.deaths(redis_client) == [0, 0, 1, 0]
    group.renew("two", joins=True)
    group.renew("two", incarnation="two:2", joins=True)  # the first one was killed, with its sidecar
    assert group.deaths(redis_client) == [0, 0, 2, 0]
    again = group.renew("two", incarnation="two:3", joins=True)
    assert group.deaths(redis_client) == [0, 0, 2, 0]  # it had not tried the record
    (epoch,) = [partition.epoch for partition in again.assigned if partition.partition == 2]
    trial = calls.begin_trial(group.keys, "bill", 2, incarnation="two:3", epoch=epoch)
    assert group.redis.perform(trial)
    group.renew("two", incarnation="two:4", joins=True)
    assert group.deaths(redis_client) == [0, 0, 3, 0]
    assert not group.redis.perform(trial)


def test_the_share_of_one_who_is_absent_is_kept_and_then_goes_to_the_others(
    group: Group, redis_client: "redis.Redis"
) -> None:
    group.renew("one", joins=True)
    group.renew("two", joins=True)
    share = {partition.partition for partition in group.renew("one").assigned}
    assert len(share) == 2
    group.redis.perform(
        calls.leave_group(group.keys, "bill", member="one", incarnation="one:1", absence=20.0)
    )
    kept = group.renew("two")
    assert kept.members == 2
    assert kept.lapse_in is not None
    assert 18.0 < kept.lapse_in <= 20.0
    assert share.isdisjoint(partition.partition for partition in kept.assigned)
    redis_client.zadd(group.keys.members("bill"), {"one": 1})  # it does not come back
    assert group.owned(group.renew("two")) == {0, 1, 2, 3}
    assert group.deaths(redis_client) == [0, 0, 0, 0]


def test_released_partition_is_acquired_after_any_number_of_waits(group: Group) -> None:
    group.renew("one", joins=True)
    share = {partition.partition for partition in group.renew("two", joins=True).assigned}
    assert len(share) == 2
    for _ in range(100):
        assert group.owned(group.renew("two")) == set()
    group.redis.perform(
        calls.release_partitions(
            group.keys, "bill", member="one", incarnation="one:1", partitions=sorted(share)
        )
    )
    assert group.owned(group.renew("two")) == share


# ---- many members in one process


async def test_one_who_joins_sixteen_moves_its_share_of_256_partitions_and_no_other(
    url: str, app_name: str, nursery: trio.Nursery
) -> None:
    app, endpoint = App(app_name, broker=url), Endpoint.from_url(url)
    numbers = app.stream("numbers", int, partitions=256)

    @app.processor(numbers)
    async def count(events: StreamEvents[int]) -> None:
        async for _ in events.records():
            pass

    (processor,) = app.streams.processors
    members: list[ProcessorGroup] = []
    driver = open_redis(endpoint=endpoint)
    await nursery.start(driver.run)

    async def join(number: int) -> None:
        members.append(make_member(app, processor, driver, f"m{number:02}"))
        await running.start(members[-1].run)

    async def get_owners() -> dict[int, str]:
        (state,) = await app.streams.ainfo()
        return {partition.partition: partition.owner for partition in state.groups[0].partitions}

    async def settle(count: int) -> dict[int, str]:
        """Return the owners when `count` members have fair shares. Each hears of each change."""
        with trio.fail_after(60):
            while True:
                for member in members:
                    member.renew_now()
                owners = await get_owners()
                shares = [list(owners.values()).count(f"m{number:02}:1") for number in range(count)]
                if sum(shares) == 256 and max(shares) - min(shares) <= 1:
                    return owners
                await trio.sleep(0.05)

    async with trio.open_nursery() as running:
        for number in range(16):
            await join(number)
        before = await settle(16)
        await join(16)
        after = await settle(17)
        running.cancel_scope.cancel()
    moved = [partition for partition in before if before[partition] != after[partition]]
    assert 0 < len(moved) <= math.ceil(256 / 17)
    assert {after[partition] for partition in moved} == {"m16:1"}


def make_member(app: App, processor: Any, driver: TrioRedis, name: str) -> ProcessorGroup:
    """Return a member of the group of a processor."""
    return ProcessorGroup(
        processor=processor,
        member=GroupMember(
            name=name, incarnation=f"{name}:1", lease=30.0, is_named=False, grace_period=1.0, max_deliveries=3
        ),
        redis=driver,
        reader=open_parked(control=driver, name=name),
        relay=OutboxRelay(
            keys=processor.stream.keys,
            group=processor.name,
            streams=app.streams,
            send_jobs=app.asend_jobs,
            redis=driver,
            log=NullLog(),
        ),
        processor_calls=ProcessorCalls(processor=processor, asyncio_runner=AsyncioRunner()),
        trials=trio.Lock(),
        log=NullLog(),
    )
