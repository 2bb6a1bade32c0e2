"""Settling: an outcome goes to Redis in the turn after its job has ended; no timer and no batch is waited for."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from celery5 import App
from celery5.broker.call import Call
from celery5.logs.log import NullLog
from celery5.protocol.job.delivery import Delivery, make_settlement
from celery5.protocol.job.messages import Command
from celery5.protocol.job.verdict import Complete
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RecentJobs
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.process.lease import Lease
from celery5.services.worker.result_publisher import (
    BATCH,
    ResultPublisher,
    UnpublishableRetries,
)
from celery5.services.workflows.run_progress import RunProgress
from tests.redis.scripts.test_settled_at_once import make_admission

TURNS = 2
"""Turns of the loop from a job's end until the call is made: in the first its executor goes on, in the second the
publisher has its turn."""


class SlowRedis:
    """A connection whose replies come when the test says so. It counts the outcomes of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.reply = trio.Event()

    def begin(self, _call: Call[Any]) -> None:
        """Nothing is sent before the publisher's turn: there are other jobs."""

    async def perform(self, call: Call[Any]) -> int:
        count = cast("int", call.words[2]) - 8  # settle.lua has eight keys, and one for each outcome
        self.calls.append(count)
        await self.reply.wait()
        return count


@dataclass
class Desk:
    """A Result Publisher with jobs in flight, and the outcomes that it settles."""

    redis: SlowRedis
    results: InternalResultsQueue
    in_flight: InFlightJobs
    deliveries: list[Delivery]

    def end(self, count: int) -> None:
        """End so many jobs, all in this turn of the loop."""
        for delivery in self.deliveries[:count]:
            settlement = make_settlement(Complete(b"1"), delivery, worker="me", ttl=60)
            self.results.put((delivery, settlement))
        del self.deliveries[:count]

    def reply(self) -> None:
        """Let the call that waits be answered, and those that follow wait."""
        replied, self.redis.reply = self.redis.reply, trio.Event()
        replied.set()


@pytest.fixture
async def desk(nursery: trio.Nursery, mock_clock: MockClock) -> AsyncIterator[Desk]:
    """The clock stands still: what waited for a time would wait for ever."""
    app, log = App("settling"), NullLog()
    in_flight, results, link = InFlightJobs(), InternalResultsQueue(), SlowRedis()
    isolated_jobs = IsolatedJobs(queues={}, in_flight=in_flight, max_deliveries=3)
    middleware = JobMiddleware(app=app, worker="me", log=log)
    publisher = ResultPublisher(
        worker="me",
        lease=Lease(seconds=60),
        consumed=[app.queue("default")],
        redis=cast("Any", link),
        results=results,
        in_flight=in_flight,
        recent=RecentJobs(recent_jobs=10),
        isolated_jobs=isolated_jobs,
        unpublishable_retries=UnpublishableRetries(
            when_unpublishable="backlog", queues={}, results=results, log=log, worker="me", results_ttl=60
        ),
        admission=make_admission(in_flight, isolated_jobs, log),
        admission_control=cast("Any", _NoAdmissionControl()),
        run_progress=RunProgress(results_ttl=60.0),
        job_middleware=middleware,
        log=log,
    )
    deliveries = [
        Delivery("default", b"%d-0" % n, b"", command=Command(v=1, id=f"job-{n}", task="t"), kind="trio")
        for n in range(2 * BATCH)
    ]
    for delivery in deliveries:
        in_flight.add(delivery)
    await nursery.start(publisher.run)
    await trio.testing.wait_all_tasks_blocked()
    yield Desk(link, results, in_flight, deliveries)
    link.reply.set()
    nursery.cancel_scope.cancel()


class _NoAdmissionControl:
    def on_capacity(self) -> None:
        """No job waits for admission."""


async def take_turns(count: int) -> None:
    """Let the loop turn so many times."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("count", [1, 2, 100, BATCH])
async def test_outcomes_go_to_redis_in_the_turn_after_their_jobs_end(desk: Desk, count: int) -> None:
    desk.end(count)
    await take_turns(TURNS)
    assert desk.redis.calls == [count]
    desk.reply()
    await take_turns(TURNS)
    assert desk.in_flight.settled_count == count


async def test_outcomes_of_jobs_that_end_during_a_call_go_as_soon_as_it_is_answered(desk: Desk) -> None:
    desk.end(1)
    await take_turns(TURNS)
    for _ in range(5):
        desk.end(19)
        await take_turns(TURNS)
    assert desk.redis.calls == [1]
    desk.reply()
    await take_turns(TURNS)
    assert desk.redis.calls == [1, 95]
    desk.reply()
    await take_turns(TURNS)
    assert desk.in_flight.settled_count == 96


async def test_a_job_that_ends_alone_does_not_wait_for_others_to_end(desk: Desk) -> None:
    for settled in range(1, 6):
        desk.end(1)
        await take_turns(TURNS)
        assert desk.redis.calls == [1] * settled
        desk.reply()
        await take_turns(TURNS)
        assert desk.in_flight.settled_count == settled
