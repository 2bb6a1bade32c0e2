"""Heartbeats: all workers of a queue notice that a lease has lapsed, and not all of them at the same time."""

from collections.abc import Sequence
from typing import Any

import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.services.process.lease import LAPSE_DELAY, Heartbeat, Lease

LAPSE_IN = 1.0
"""Seconds until the lease of another worker lapses, as every reply says."""


class Beats:
    """A Redis that notes when heartbeats come."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.began = trio.current_time()
        self.times: list[float] = []

    async def perform(self, _call: Call[Any], /) -> Any:
        raise NotImplementedError

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        await trio.lowlevel.checkpoint()
        self.times.append(trio.current_time())
        lapse_in = LAPSE_IN if trio.current_time() == self.began else None
        return [
            HeartbeatReply(alive=True, lapsed=0, due_in=None, lapse_in=lapse_in, workers=self.workers)
            for _ in calls
        ]


async def run_heartbeats(count: int) -> list[float]:
    """Return when each of so many workers has noticed that another one's lease has lapsed."""
    redis, keys = Beats(count), Keys("shop").for_queue("mail")
    async with trio.open_nursery() as nursery:
        for number in range(count):
            heartbeat = Heartbeat(
                redis=redis,
                sidecar=None,
                consumed=[keys],
                lease=Lease(seconds=60),
                log=NullLog(),
                worker=f"w{number}",
                heartbeat_listeners=[],
            )
            nursery.start_soon(heartbeat.run)
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    return [time - redis.began for time in redis.times if time > redis.began]


async def test_a_lapsed_lease_is_noticed_at_once_by_a_single_worker(autojump_clock: MockClock) -> None:
    (noticed,) = await run_heartbeats(1)
    assert LAPSE_IN + LAPSE_DELAY <= noticed < LAPSE_IN + LAPSE_DELAY + 0.002


async def test_a_thousand_workers_spread_what_they_do_about_a_lapsed_lease(autojump_clock: MockClock) -> None:
    noticed = sorted(await run_heartbeats(1000))
    assert len(noticed) == 1000
    assert noticed[0] < LAPSE_IN + LAPSE_DELAY + 0.1, "somebody does it at once"
    assert noticed[-1] < LAPSE_IN + LAPSE_DELAY + 1.1
    in_a_tenth = [sum(begin <= time < begin + 0.1 for time in noticed) for begin in noticed[::50]]
    assert max(in_a_tenth) < 200
