"""Replies to renewals that are lost: a member that does not know what it owns holds nothing up."""

from random import Random
from typing import Any, TypeVar

import pytest
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import streams as calls
from celery5.broker.driver import BlockingDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import StreamKeys
from celery5.errors import BrokerUnavailable
from celery5.protocol.streams.groups import RenewedMembership
from celery5.streams import StreamEvents
from tests.redis.streams.test_membership import make_member
from tests.redis.worker.workers import until, until_async

T = TypeVar("T")
PARTITIONS = 5


class Member:
    """A member that does what a worker does with the replies that it gets, and knows only those."""

    def __init__(self, redis: BlockingDriver, keys: StreamKeys, name: str) -> None:
        self.redis = redis
        self.keys = keys
        self.name = name
        self.is_new = True
        self.known: set[int] = set()

    def renew(self) -> RenewedMembership:
        """Renew the membership; the reply is not looked at."""
        membership = self.redis.perform(
            calls.renew_membership(
                *(self.keys, "bill"),
                member=self.name,
                incarnation=f"{self.name}:1",
                lease=30.0,
                is_joining=self.is_new,
                start="0-0",
                partitions=PARTITIONS,
            )
        )
        assert membership is not None
        return membership

    def apply(self, membership: RenewedMembership) -> None:
        """Begin what is owned, and give back what is assigned to others."""
        self.is_new = False
        assigned = {partition.partition for partition in membership.assigned}
        yielded = {*(self.known - assigned), *(set(membership.claimed) - self.known)}
        self.known = {partition.partition for partition in membership.assigned if partition.is_owned}
        if yielded:
            self.redis.perform(
                calls.release_partitions(
                    *(self.keys, "bill"),
                    member=self.name,
                    incarnation=f"{self.name}:1",
                    partitions=sorted(yielded),
                )
            )

    def leave(self) -> None:
        """Leave the group."""
        self.redis.perform(
            calls.leave_group(self.keys, "bill", member=self.name, incarnation=f"{self.name}:1")
        )


@pytest.mark.parametrize("seed", range(40))
def test_each_partition_gets_an_owner_that_knows_it_whatever_replies_were_lost(
    seed: int, app: App, url: str
) -> None:
    random, redis = Random(seed), open_blocking(Endpoint.from_url(url))
    keys, members, count = app.keys.for_stream("orders"), list[Member](), 0
    try:
        for _ in range(40):
            match random.choice(["join", "leave", "renew", "renew", "renew"]):
                case "join" if len(members) < 4:
                    members.append(Member(redis, keys, f"m{count}"))
                    members[-1].renew()  # whether it hears of it or not
                    count += 1
                case "leave" if len(members) > 1:
                    members.pop(random.randrange(len(members))).leave()
                case _ if members:
                    member = random.choice(members)
                    membership = member.renew()
                    if random.random() < 0.4:
                        member.apply(membership)
                case _:
                    pass
        members = members or [Member(redis, keys, "last")]
        for _ in range(4):
            for member in members:
                member.apply(member.renew())
        assert sorted(number for member in members for number in member.known) == list(range(PARTITIONS))
    finally:
        redis.close()


class LossyDriver:
    """A driver that loses the replies to renewals while `is_losing`."""

    def __init__(self, redis: TrioRedis) -> None:
        self.redis: Any = redis
        self.is_losing = False
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.redis, name)

    async def perform(self, call: Call[T]) -> T:
        """Perform one call."""
        reply: T = await self.redis.perform(call)
        if self.is_losing and call.script is calls.RENEW_MEMBERSHIP:
            self.lost += 1
            raise BrokerUnavailable("the reply is lost", maybe_done=True)
        return reply


async def test_a_member_yields_what_it_never_heard_that_it_owns(
    url: str, app_name: str, nursery: trio.Nursery
) -> None:
    app, endpoint = App(app_name, broker=url), Endpoint.from_url(url)
    numbers, found = app.stream("numbers", int, by=str, partitions=2), list[int]()

    @app.processor(numbers)
    async def collect(events: StreamEvents[int]) -> None:
        async for number in events.records():
            found.append(number)

    (processor,) = app.streams.processors
    driver = TrioRedis(endpoint=endpoint)
    await nursery.start(driver.run)
    lossy, members = LossyDriver(driver), list[Any]()

    async def owners(*names: str) -> bool:
        for member in members:
            member.renew_now()
        (state,) = await app.streams.ainfo()
        owned = sorted(partition.owner for partition in state.groups[0].partitions)
        return owned == [f"{name}:1" for name in names]

    async with trio.open_nursery() as running:

        async def join(name: str, redis: Any) -> trio.CancelScope:
            scope = trio.CancelScope()
            member = make_member(app, processor, redis, name)
            members.append(member)

            async def run(*, task_status: trio.TaskStatus[None]) -> None:
                with scope:
                    await member.run(task_status=task_status)

            await running.start(run)
            return scope

        await join("a", lossy)
        second = await join("b", driver)
        await until_async(lambda: owners("a", "b"))
        lossy.is_losing = True
        second.cancel()
        await until_async(lambda: owners("a", "a"))  # and a does not know it
        await until(lambda: lossy.lost > 2)
        await join("c", driver)
        lossy.is_losing = False
        await until_async(lambda: owners("a", "c"))
        await numbers.asend(*range(50))
        await until(lambda: sorted(found) == list(range(50)))
        running.cancel_scope.cancel()
