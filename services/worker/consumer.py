"""Consumer: reads jobs, never more than there is room for, and hands each to the queue of its kind (C55)."""

import math
import time
from collections.abc import Mapping, Sequence

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.logs.log import Level, Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import Release
from celery5.protocol.scaling.prefetch import HORIZON
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import OutageLog, is_recoverable
from celery5.services.worker.capacity import QueueCapacity
from celery5.services.worker.intake import ReceivedJobs
from celery5.services.worker.lease import WorkerIdentity
from celery5.services.worker.reading import PassCapacity, QueueReads
from celery5.services.worker.resources import TaskResources

RETRY_INTERVAL = 0.1
"""Seconds between attempts while Redis is away."""
STALE_HORIZONS = 5.0
"""Horizons that a job may wait unstarted in this worker before it is given back for others to run."""
REREAD_GRACE = 1.0
"""Seconds beyond its time that a read may go on at a server that has not heard of the connection's end."""
SMALL_BATCH = 16
"""Jobs that are so few that whoever waits for them comes before the next read: to make that ready takes longer than to
run them, if they are short."""
SETTLE_TURNS = 2
"""Turns of the loop in which a job that never waits is run and settled: by its executor, and by the publisher."""
AUDIT_PAGE = 100
"""Jobs of its own that a worker looks through in one trip."""


class Consumer:
    """Reads for one worker. Stopping it gives back what has not been started."""

    _connects = 1
    _audit_at = math.inf
    _resting = False

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        redis: AsyncDriver,
        queue_reads: QueueReads,
        queue_capacity: QueueCapacity,
        received: ReceivedJobs,
        resources: TaskResources,
        admission: AdmissionState,
        log: Log,
    ) -> None:
        self._reader = queue_reads.reader
        self._redis = redis
        self._order = queue_reads.read_order
        self._reading = queue_reads.reading
        self._queues = resources.queues
        self._rooms = queue_capacity
        self._budget = resources.budget
        self._intake = received.intake
        self._unstarted = received.unstarted
        self._ledger = received.held.in_flight
        self._suspects = received.held.isolated_jobs
        self._turnstile = admission
        self._lease = identity.lease
        self._log = log
        self._waits = OutageLog(log, "consumer:interrupted", "consumer:resumed")
        self._worker = identity.worker
        self._block = queue_reads.read_block

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled. Raises LeaseLost when the group is gone, which means that Redis lost its data."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_back_on)
            self._reading.set_stopping(False)
            task_status.started()
            try:
                while True:
                    await self._fetch_or_wait()
            finally:
                self._reading.set_stopping(True)
                self.release_unstarted()

    async def fetch(self) -> int:
        """One pass: wait for room, read, hand on. Gives how many jobs were read."""
        connects = self._reader.statistics().connects
        if self._reading.take_audit_request() or connects != self._connects:
            # The reading connection was made anew: an answer may have been lost on the way. It may be lost even now,
            # if the server has not heard yet that nobody listens to the old one: then its read ends with its time.
            await self._audit()
            self._connects = connects
            self._audit_at = trio.current_time() + self._block + REREAD_GRACE
        elif trio.current_time() >= self._audit_at:
            await self._audit()
            self._audit_at = math.inf
        found = await self._read(await self._free())
        if 0 < found <= SMALL_BATCH:
            for _ in range(SETTLE_TURNS):
                await trio.lowlevel.checkpoint()
        return found

    def release_unstarted(self) -> None:
        """Release what waits unstarted; its attempt is not counted (I9)."""
        for queue in self._queues.values():
            for delivery in queue.drain():
                self._unstarted.settle(delivery, Release())
        for delivery in self._suspects.drain(read_before=math.inf):
            self._unstarted.settle(delivery, Release())

    @property
    def paused_queues(self) -> frozenset[str]:
        """The queues that are not read now."""
        return self._reading.paused_queues

    @property
    def is_stopping(self) -> bool:
        """Whether it reads no more."""
        return self._reading.is_stopping

    def pause(self, queue: str) -> None:
        """Read this queue no more, until `resume`. What was read of it is run."""
        self._reading.pause(queue)

    def stop_reading(self) -> None:
        """Read no more at all, until the end: give back what has not started, and let what runs go on."""
        self._resting = True
        self._reading.pause(*(keys.queue for keys in self._order.queues))
        self.release_unstarted()

    def resume(self, queue: str) -> None:
        """Read this queue again."""
        if self._resting:
            return
        self._reading.resume(queue)
        self._ledger.remove(())

    def recheck(self) -> None:
        """Something may have been read whose answer was lost."""
        self._reading.request_audit()

    async def _fetch_or_wait(self) -> None:
        try:
            await self.fetch()
        except BrokerUnavailable as error:
            self._reading.request_audit()
            await self._wait(error)
        except BrokerReplied as error:
            if error.code == "NOGROUP":
                raise self._lease.mark_lost(f"the queue's consumer group is gone: {error}") from None
            if not is_recoverable(error):
                raise
            self._reading.request_audit()  # entries of an unreadable reply are pending: read them again
            await self._wait(error)
        else:
            self._waits.record_recovery()

    async def _wait(self, error: BrokerError) -> None:
        self._waits.record_error(error)
        await trio.sleep(RETRY_INTERVAL)

    async def _free(self) -> dict[str, int]:
        """How many jobs of each queue there is room for, once there is room for one."""
        while True:
            rooms = {keys.queue: self._room(keys.queue) for keys in self._order.queues}
            self._turnstile.set_unreadable(not all(rooms.values()))
            if any(rooms.values()):
                return rooms
            await self._ledger.wait_changed()

    def _room(self, queue: str) -> int:
        """How many jobs of one queue there is room for."""
        return 0 if self._reading.is_paused(queue) else self._rooms.get_capacity(queue)

    async def _read(self, rooms: Mapping[str, int]) -> int:
        """Read from the queues that have room. COUNT holds for each stream of a read, so queues with different shares
        are read one after the other, without waiting; only when all are empty are all waited for."""
        open_ = [keys for keys in self._order.queues if rooms[keys.queue]]
        closed = [queue for queue, room in rooms.items() if not room]
        room = PassCapacity(rooms, {keys.queue: self._rooms.get_kinds(keys.queue) for keys in open_})
        shares = room.group_by_share(open_)
        found = await self._order.read_nonblocking(open_, room, self._receive)
        if found or any(
            self._reading.is_paused(keys.queue) for keys in open_
        ):  # paused since we asked who is open
            return found
        lanes = self._order.get_lanes(open_)
        count = max(min(shares) * len(open_) // len(lanes), 1)
        call = jobs.read_jobs(lanes, self._worker, count=count, block_seconds=self._block)
        found, failure = 0, None
        if not closed:
            with trio.CancelScope() as scope:
                self._reading.begin_read(scope)
                found = len(await self._receive(call))
            return found
        async with trio.open_nursery() as nursery:
            self._reading.begin_read(nursery.cancel_scope)
            nursery.start_soon(self._until_room, closed, nursery.cancel_scope)
            try:
                found = len(await self._receive(call))
            except BrokerError as error:
                failure = error  # raised outside, so that it does not arrive wrapped in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return found

    async def _receive(self, call: Call[list[Entry]]) -> Sequence[Entry]:
        # Nothing comes between the read and the ledger: what was read must be known to be ours.
        entries = await self._reader.perform(call, self._intake.accept)
        self._budget.update()
        return entries

    async def _until_room(self, closed: Sequence[str], reading: trio.CancelScope) -> None:
        """End a read that leaves queues out as soon as there is room for one of them, too."""
        while not any(map(self._room, closed)):
            await self._ledger.wait_changed()
        reading.cancel()

    async def _audit(self) -> None:
        lost = 0
        for keys in self._order.get_held_lanes():
            after = b"0"
            while True:
                entries = await self._redis.perform(
                    jobs.read_pending(keys, self._worker, after=after, count=AUDIT_PAGE)
                )
                missing = {each.id for each in entries if (each.queue, each.id) not in self._ledger}
                if missing:
                    # Some may have been settled while the answer was on its way. Who is still there was lost.
                    again = await self._redis.perform(
                        jobs.read_pending(keys, self._worker, after=after, count=AUDIT_PAGE)
                    )
                    lost += self._intake.accept_new([each for each in again if each.id in missing])
                if len(entries) < AUDIT_PAGE:
                    break
                after = entries[-1].id
        if lost:
            self._log.event(
                "consumer:jobs-recovered",
                "warning",
                count=lost,
                why="their delivery was lost with a connection",
            )

    async def _give_back_on(self) -> None:
        """Short jobs may be followed by long ones: what then waits here is given back, and the pace learnt anew."""
        while True:
            await trio.sleep(HORIZON)
            now = time.time()
            for kind, queue in self._queues.items():
                if queue and queue.items[0].read < now - STALE_HORIZONS * self._rooms.get_horizon(kind):
                    self._give_back_stale(kind, queue.drain())
            for delivery in self._suspects.drain(read_before=now - STALE_HORIZONS * HORIZON):
                self._unstarted.settle(delivery, Release())
            self._rooms.update_lookahead()

    def _give_back_stale(self, kind: str, waiting: Sequence[Delivery]) -> None:
        level: Level = "debug" if self._rooms.record_release(kind, len(waiting)) else "info"
        self._log.event("consumer:jobs-returned", level, count=len(waiting), kind=kind)
        for delivery in waiting:
            self._unstarted.settle(delivery, Release())
