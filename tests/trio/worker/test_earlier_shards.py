"""Shards of an earlier number: a worker reads them if they hold jobs, whenever the jobs come."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.protocol.observability.queue_depth import QueueDepth
from celery5.services.process.reloader import ConfigurationChanged, NextIncarnation
from celery5.services.worker.earlier_shards import EarlierShards

KEYS = Keys("shop")


class Redis:
    """A Redis with some queues, and how far behind each of them is."""

    def __init__(self, depths: dict[str, QueueDepth]) -> None:
        self.depths = depths
        self.looks = 0

    async def perform(self, _call: Call[Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        return sorted(self.depths)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        await trio.lowlevel.checkpoint()
        return [
            next(depth for name, depth in self.depths.items() if KEYS.for_queue(name).stream in call.words)
            for call in calls
        ]


def depth(*, waiting: int = 0, runs: int = 0) -> QueueDepth:
    return QueueDepth(waiting=waiting, oldest=None, dead=0, runs=runs)


async def find(
    redis: Redis, *, earlier: set[str] | None = None, has_shards: bool = True, seconds: float = 0.5
) -> set[str] | None:
    """Return the shards that a worker of `mails` reads in its next incarnation; None if it goes on as it is."""
    earlier, following = earlier or set(), NextIncarnation()
    watch = EarlierShards(
        redis=redis,
        keys=KEYS,
        consumed=[KEYS.for_queue(name) for name in ("mails", *earlier)],
        earlier_shards=earlier,
        has_shards=has_shards,
        lease_seconds=1.0,
        next_incarnation=following,
        log=NullLog(),
    )
    with trio.move_on_after(seconds):
        with pytest.raises(ConfigurationChanged):
            await watch.run()
        assert following.is_due
        return earlier
    return None


@pytest.mark.parametrize("held", [depth(waiting=1), depth(runs=1)])
async def test_a_shard_with_jobs_or_runs_is_read(autojump_clock: MockClock, held: QueueDepth) -> None:
    redis = Redis(
        {"mails": depth(waiting=1), "mails#1": depth(), "mails#2": held, "other#1": depth(waiting=1)}
    )
    assert await find(redis) == {"mails#2"}


async def test_a_worker_goes_on_looking_while_there_are_shards(autojump_clock: MockClock) -> None:
    redis = Redis({"mails": depth(), "mails#1": depth()})
    assert await find(redis, seconds=10) is None
    assert redis.looks == 4
    assert await find(redis, has_shards=False, seconds=10) is None
    assert redis.looks == 5, "there never were any: one look at the start"
    assert await find(redis, has_shards=False, earlier={"mails#1"}, seconds=10) is None
    assert redis.looks == 9, "those who still send to some may send to others"


async def test_what_was_found_before_is_read_on(autojump_clock: MockClock) -> None:
    redis = Redis({"mails": depth(), "mails#1": depth(waiting=1), "mails#2": depth(waiting=1)})
    assert await find(redis, earlier={"mails#1"}) == {"mails#1", "mails#2"}
