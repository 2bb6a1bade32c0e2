"""Heartbeats: all workers of a queue notice that a lease has lapsed, and not all of them at the same time.

Idle workers of a queue with many send few heartbeats, and are as soon to begin a job.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.protocol.process.wake_ups import get_next_tick
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
                counted_jobs=None,
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


LEASE = 9.0


class Jobs:
    """The jobs of a worker."""

    def __init__(self) -> None:
        self.held = self.settled_count = 0

    def __len__(self) -> int:
        return self.held


class Redis:
    """A Redis that notes when heartbeats come, and for how long they renew the lease."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.beats: list[tuple[float, float]] = []
        # Who gets a job while the call of an idle worker is under way.
        self.comes_with_idle: Jobs | None = None

    async def perform(self, _call: Call[Any], /) -> Any:
        raise NotImplementedError

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        await trio.lowlevel.checkpoint()
        *_, usual, _group, idle = calls[0].words
        self.beats.append((trio.current_time(), float(idle or usual) / 1000))
        if idle and self.comes_with_idle is not None:
            self.comes_with_idle.held = 1
        return [HeartbeatReply(alive=True, lapsed=0, due_in=None, workers=self.workers)]


class Worker:
    """A worker of a queue with so many, whose clock is Trio's; its jobs count unless it is said otherwise."""

    def __init__(self, workers: int, monkeypatch: pytest.MonkeyPatch, *, counts_jobs: bool = True) -> None:
        monkeypatch.setattr("celery5.services.process.lease.now", trio.current_time)
        self.redis, self.lease, self.jobs = Redis(workers), Lease(seconds=LEASE), Jobs()
        self.heartbeat = Heartbeat(
            redis=self.redis,
            sidecar=None,
            consumed=[Keys("shop").for_queue("mail")],
            lease=self.lease,
            log=NullLog(),
            worker="w",
            heartbeat_listeners=[],
            counted_jobs=self.jobs if counts_jobs else None,
        )

    async def count_beats(self, seconds: float) -> int:
        """Return how many heartbeats it sends in this time."""
        before = len(self.redis.beats)
        await trio.sleep(seconds)
        return len(self.redis.beats) - before


async def test_an_idle_worker_of_many_sends_few_heartbeats(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(1000, monkeypatch)
    await nursery.start(worker.heartbeat.run)
    await trio.sleep(LEASE * 3 + 1)
    await trio.sleep(LEASE)
    assert worker.lease.idle_interval == 60
    assert 49 <= await worker.count_beats(3000) <= 51
    assert worker.redis.beats[-1][1] == 180
    times = [at for at, _ in worker.redis.beats]
    assert max(after - before for before, after in pairwise(times)) < 61, (
        "its lease in Redis lasts for longer"
    )
    ticks = (get_next_tick(at - 1, 15) for at in times[-40:])
    assert all(abs(at - tick) < 0.01 for at, tick in zip(times[-40:], ticks, strict=True)), "with other calls"
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("workers", "counts_jobs"), [(1, True), (10, True), (1000, False)])
async def test_few_workers_and_those_with_processors_send_three_heartbeats_a_lease(
    autojump_clock: MockClock,
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    counts_jobs: bool,
) -> None:
    worker = Worker(workers, monkeypatch, counts_jobs=counts_jobs)
    await nursery.start(worker.heartbeat.run)
    await trio.sleep(LEASE * 4)
    assert await worker.count_beats(100 * LEASE) >= 299
    assert {seconds for _, seconds in worker.redis.beats} == {LEASE}
    assert worker.lease.is_valid()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_job", [True, False])
async def test_a_worker_with_jobs_sends_three_heartbeats_a_lease(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, has_job: bool
) -> None:
    worker = Worker(1000, monkeypatch)
    worker.jobs.held = int(has_job)
    await nursery.start(worker.heartbeat.run)
    for _ in range(20):
        worker.jobs.settled_count += not has_job  # one has come and gone
        assert 2 <= await worker.count_beats(LEASE) <= 4
    assert {seconds for _, seconds in worker.redis.beats} == {LEASE}
    nursery.cancel_scope.cancel()


async def test_an_idle_worker_renews_its_lease_at_once_before_it_begins_a_job(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(1000, monkeypatch)
    await nursery.start(worker.heartbeat.run)
    await trio.sleep(LEASE * 4)
    assert not worker.lease.is_valid(), "what it may not rely on"
    assert worker.lease.is_held, "what others see"
    worker.jobs.held, came_at = 1, trio.current_time()
    await worker.lease.confirm()
    assert worker.redis.beats[-1] == (came_at, LEASE)
    assert trio.current_time() - came_at < 0.001
    assert worker.lease.is_valid()
    assert worker.lease.idle_interval == 0
    nursery.cancel_scope.cancel()


async def test_a_job_that_comes_during_an_idle_heartbeat_has_the_lease_shortened_at_once(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(1000, monkeypatch)
    worker.redis.comes_with_idle = worker.jobs
    await nursery.start(worker.heartbeat.run)
    await trio.sleep(LEASE * 4)
    (long_at,) = [at for at, seconds in worker.redis.beats if seconds > LEASE]
    after = next((at, seconds) for at, seconds in worker.redis.beats if at >= long_at and seconds == LEASE)
    assert after[0] - long_at < 0.001
    nursery.cancel_scope.cancel()


async def test_an_idle_lease_is_held_for_three_intervals_and_no_longer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Worker(1000, monkeypatch).lease
    lease.mark_idle(trio.current_time(), 30)
    await trio.sleep(89)
    assert lease.is_held
    await trio.sleep(2)
    assert not lease.is_held
    lease.mark_idle(trio.current_time(), 30)
    lease.mark_renewed(trio.current_time())
    await trio.sleep(LEASE + 1)
    assert not lease.is_held, "the renewal has shortened it in Redis"
    lease.mark_idle(trio.current_time(), 30)
    lease.mark_lost("others have taken its jobs")
    assert not lease.is_held


class SidecarReports:
    """Notes in how many seconds each heartbeat says that the next one comes."""

    def __init__(self) -> None:
        self.intervals: list[float] = []

    def report_beat(self, _worker: str, _queues: tuple[str, ...], interval: float, /) -> bool:
        self.intervals.append(interval)
        return True


class SeveralQueues(Redis):
    """A Redis with two queues: one with many workers, and one with few."""

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        many, few = (
            await super().perform_all(calls[:1]),
            HeartbeatReply(alive=True, lapsed=0, due_in=None, workers=3),
        )
        return [*many, few]


@pytest.mark.parametrize("reads_few", [True, False])
async def test_a_worker_that_reads_a_queue_of_few_workers_sends_as_many_heartbeats_as_they(
    autojump_clock: MockClock, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, reads_few: bool
) -> None:
    monkeypatch.setattr("celery5.services.process.lease.now", trio.current_time)
    sidecar, redis = SidecarReports(), (SeveralQueues if reads_few else Redis)(1000)
    heartbeat = Heartbeat(
        redis=redis,
        sidecar=sidecar,
        consumed=[Keys("shop").for_queue(name) for name in (("mail", "few") if reads_few else ("mail",))],
        lease=Lease(seconds=LEASE),
        log=NullLog(),
        worker="w",
        heartbeat_listeners=[],
        counted_jobs=Jobs(),
    )
    await nursery.start(heartbeat.run)
    await trio.sleep(LEASE * 10)
    assert ({seconds for _, seconds in redis.beats} == {LEASE}) == reads_few
    assert sidecar.intervals[0] == LEASE / 3
    assert (set(sidecar.intervals) == {LEASE / 3}) == reads_few, (
        "its sidecar knows when to expect the next one"
    )
    nursery.cancel_scope.cancel()
