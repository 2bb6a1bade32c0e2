"""Due jobs: of a thousand idle workers a few ask Redis for a job that falls due, and it is moved when it is due."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.calls.jobs import PromotedJobs
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.services.process.lease import Lease
from celery5.services.process.wake_ups import WakeUps
from celery5.services.worker.due_jobs import Mover
from celery5.services.workflows.run_progress import RunProgress

MAIL = Keys("shop").for_queue("mail")


class DueJob:
    """A Redis with a job that is due at a time, and perhaps one more; it counts who asks."""

    def __init__(self, due: float, next_due: float | None = None) -> None:
        self.due: float | None = due
        self.next_due = next_due
        self.moved_at: float | None = None
        self.asked = 0

    async def perform(self, _call: Call[Any], /) -> Any:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        if self.due is None:
            return PromotedJobs(0, None, 0)
        if self.due > trio.current_time():
            return PromotedJobs(0, self.due - trio.current_time(), 0)
        self.moved_at = trio.current_time()
        self.due, self.next_due = self.next_due, None
        return PromotedJobs(1, None if self.due is None else self.due - self.moved_at, 0)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        return [await self.perform(call) for call in calls]


def make_movers(redis: DueJob, count: int, *, lease: float = 10.0) -> list[Mover]:
    movers = []
    for number in range(count):
        wake_ups = WakeUps(draw=random.Random(number).random)
        wake_ups.on_heartbeat(MAIL, make_beat(count))
        movers.append(
            Mover(
                redis=redis,
                consumed=[MAIL],
                run_progress=RunProgress(results_ttl=60.0),
                lease=Lease(seconds=lease),
                wake_ups=wake_ups,
                log=NullLog(),
            )
        )
    return movers


def make_beat(workers: int, due_in: float | None = None) -> HeartbeatReply:
    return HeartbeatReply(alive=True, lapsed=0, due_in=due_in, workers=workers)


@pytest.mark.parametrize("workers", [1, 8, 1000])
async def test_a_few_of_many_workers_ask_for_a_job_that_was_just_scheduled(
    autojump_clock: MockClock, workers: int
) -> None:
    redis = DueJob(due := trio.current_time() + 5)
    movers = make_movers(redis, workers)
    async with trio.open_nursery() as nursery:
        for mover in movers:
            await nursery.start(mover.run)
        await trio.testing.wait_all_tasks_blocked()
        redis.asked = 0
        for mover in movers:
            mover._due.clear()  # as if the job had been scheduled after they had asked
            mover.on_message(MAIL.wake.encode(), b"5000")
        await trio.sleep(20)
        nursery.cancel_scope.cancel()
    assert redis.moved_at is not None
    assert redis.moved_at - due < 0.01
    assert workers < 10 or redis.asked < 60


@pytest.mark.parametrize("workers", [1, 8, 1000])
async def test_a_due_job_that_no_worker_has_moved_is_found_by_the_next_heartbeat(
    autojump_clock: MockClock, workers: int
) -> None:
    redis = DueJob(trio.current_time() + 1)
    (mover,) = make_movers(redis, 1)
    mover._wake_ups.on_heartbeat(MAIL, make_beat(workers))
    async with trio.open_nursery() as nursery:
        await nursery.start(mover.run)
        await trio.sleep(0.5)
        mover._due.clear()  # it has not answered
        await trio.sleep(1)
        mover.on_heartbeat(MAIL, make_beat(workers, due_in=0.0))
        await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert redis.moved_at is not None


async def test_a_job_that_is_due_much_later_is_left_to_a_later_heartbeat(autojump_clock: MockClock) -> None:
    redis = DueJob(trio.current_time() + 3600)
    movers = make_movers(redis, 1000)
    for mover in movers:
        for _ in range(1000):  # an hour of heartbeats
            mover.on_heartbeat(MAIL, make_beat(1000, due_in=1800.0))
        assert not mover._due
        mover.on_heartbeat(MAIL, make_beat(1000, due_in=2.0))
    assert 1 <= sum(bool(mover._due) for mover in movers) <= 30


async def test_the_worker_that_has_moved_a_job_moves_the_next_one(autojump_clock: MockClock) -> None:
    redis = DueJob(trio.current_time() + 1, trio.current_time() + 4)
    (mover,) = make_movers(redis, 1)
    async with trio.open_nursery() as nursery:
        await nursery.start(mover.run)
        await trio.sleep(0.5)
        mover._wake_ups = WakeUps(draw=lambda: 1.0)  # it answers nothing that all of them hear
        mover._wake_ups.on_heartbeat(MAIL, make_beat(1000))
        await trio.sleep(5)
        nursery.cancel_scope.cancel()
    assert redis.due is None
    assert redis.moved_at == 4
