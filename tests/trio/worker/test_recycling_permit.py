"""Recycling under a Controller: a worker waits for the permit to end, unless its Controller never answers."""

from typing import Any, cast

import trio
from trio.testing import MockClock

from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import NullLog
from celery5.protocol.observability.job_tally import JobTally
from celery5.protocol.process.recycling import RecyclingLimits
from celery5.services.health.vitals import ProcessStatus
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.recycling import SUCCESSOR_TIMEOUT, Recycling, RestartMode

LIMIT = 2**20


class Redis:
    """A server that has one answer to all questions about the permit, or cannot be reached."""

    def __init__(self) -> None:
        self.permit: bytes | None = None
        self.is_reachable = True
        self.turn_left = 0  # ms for which another worker has the turn

    async def perform(self, call: Call[Any]) -> Any:
        await trio.lowlevel.checkpoint()
        if not self.is_reachable:
            raise BrokerUnavailable("away")
        if call.words[0] == "GET":
            return call.decode(self.permit)
        is_lease = call.script is not None and call.script.name == "acquire_lease"
        return call.decode([self.turn_left, 0] if is_lease else 1)


class Reader:
    """A consumer that can be told to stop."""

    stopped_at = 0.0

    def stop_reading(self) -> None:
        self.stopped_at = trio.current_time()


class Worker:
    """A worker that is over its limit of memory after its first job."""

    def __init__(self, *, is_spare: bool = False) -> None:
        self.redis, self.reader, self.stop = Redis(), Reader(), trio.Event()
        self.tally = JobTally()
        self.restart_mode = RestartMode(is_requested=True, asks_controller=True, is_spare=is_spare)
        self.status = ProcessStatus()
        self.begun_at = 0.0
        self.recycling = Recycling(
            redis=cast("Any", self.redis),
            consumer=cast("Consumer", self.reader),
            in_flight=InFlightJobs(),
            tally=self.tally,
            recycle_at=RecyclingLimits(memory=LIMIT),
            restart_mode=self.restart_mode,
            keys=Keys("shop"),
            recycling_name="w",
            process_status=self.status,
            systemd=SystemdNotify(address=None),
            stop_requested=self.stop,
            resource_slots=ResourceSlots(),
            log=NullLog(),
            memory=lambda: LIMIT if self.tally.tallies else 0,
        )

    async def begin(self, nursery: trio.Nursery) -> None:
        """Bring it to its limit."""
        await nursery.start(self.recycling.run)
        self.begun_at = trio.current_time()
        self.tally.count_unstarted("default", "hoard", "SUCCESS")
        await trio.sleep(2)


async def test_worker_whose_controller_never_answers_is_recycled_after_a_minute(
    autojump_clock: MockClock,
) -> None:
    worker = Worker()
    async with trio.open_nursery() as nursery:
        await worker.begin(nursery)
        assert "; waits for a successor: it takes 1.0 MiB" in worker.status.format_summary()
        await worker.stop.wait()
        assert SUCCESSOR_TIMEOUT <= worker.reader.stopped_at - worker.begun_at <= SUCCESSOR_TIMEOUT + 5
        assert worker.restart_mode.is_due
        nursery.cancel_scope.cancel()


async def test_worker_waits_as_long_as_its_controller_answers_or_redis_is_away(
    autojump_clock: MockClock,
) -> None:
    worker = Worker()
    async with trio.open_nursery() as nursery:
        await worker.begin(nursery)
        worker.redis.permit = b"wait"
        await trio.sleep(1000)
        worker.redis.permit = None
        await trio.sleep(SUCCESSOR_TIMEOUT / 2)
        worker.redis.permit = b"wait"
        await trio.sleep(1000)
        worker.redis.is_reachable = False
        await trio.sleep(1000)
        assert not worker.reader.stopped_at
        worker.redis.is_reachable, worker.redis.permit = True, b"granted"
        await worker.stop.wait()
        assert "; recycling: it takes 1.0 MiB" in worker.status.format_summary()
        nursery.cancel_scope.cancel()


async def test_spare_at_its_limit_that_is_needed_no_more_waits_for_no_turn(autojump_clock: MockClock) -> None:
    spare = Worker(is_spare=True)
    spare.redis.turn_left = 30_000
    async with trio.open_nursery() as nursery:
        await spare.begin(nursery)
        await trio.sleep(5)
        assert not spare.reader.stopped_at
        spare.redis.permit, permitted_at = b"granted", trio.current_time()
        await spare.stop.wait()
        assert spare.reader.stopped_at - permitted_at < 2
        nursery.cancel_scope.cancel()
