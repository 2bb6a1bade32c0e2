"""Consumer: reads jobs, never more than there is room for, and hands each to the queue of its kind (C55)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable, Corrupt
from celery5.logs.log import Level, Log
from celery5.protocol.job.delivery import Delivery, make_drop, make_settlement
from celery5.protocol.job.envelope import Envelope, Failure, read_envelope, read_job_id
from celery5.protocol.job.lanes import ADMITTED
from celery5.protocol.job.verdict import Bury, Reason, Release
from celery5.protocol.scaling.prefetch import HORIZON
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.services.process.broker_outages import OutageLog, is_recoverable
from celery5.services.scaling.preferences import Preferences
from celery5.services.worker.capacity import QueueCapacity
from celery5.services.worker.concurrency_budget import ConcurrencyBudget
from celery5.services.worker.in_flight import InFlightJobs, IsolatedJobs, RecentJobs
from celery5.services.worker.internal_queues import ResultsQueue, TasksQueue
from celery5.services.worker.lease import Lease
from celery5.services.worker.reading import PassCapacity, ReadOrder
from celery5.tasks.task import Task

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
    _stopping = False
    _resting = False

    def __init__(
        self,
        *,
        reader: ParkedRedis,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        read_order: ReadOrder,
        preferences: Preferences,
        tasks: Mapping[str, Task[..., Any]],
        queues: Mapping[str, TasksQueue],
        queue_capacity: QueueCapacity,
        budget: ConcurrencyBudget,
        results: ResultsQueue,
        in_flight: InFlightJobs,
        recent: RecentJobs,
        isolated_jobs: IsolatedJobs,
        admission: AdmissionState,
        lease: Lease,
        log: Log,
        worker: str,
        read_block: float,
        results_ttl: float,
        message_limit: int,
    ) -> None:
        self._reader = reader
        self._redis = redis
        self._order = read_order
        self._preferences = preferences
        read_order.add_listener(lambda: self._reading.cancel())
        self._tasks = tasks
        self._queues = queues
        self._rooms = queue_capacity
        self._budget = budget
        self._results = results
        self._ledger = in_flight
        self._recent = recent
        self._suspects = isolated_jobs
        self._turnstile = admission
        admission.take_entries = self.accept_new
        admission.release_job = self._settle
        admission.recheck = self._look_for_lost
        admission.is_queue_closed = lambda queue: self._stopping or queue in self._paused
        self._lease = lease
        self._log = log
        self._waits = OutageLog(log, "consumer:interrupted", "consumer:resumed")
        self._worker = worker
        self._block = read_block
        self._ttl, self._message_limit = results_ttl, message_limit
        self._paused: set[str] = set()
        self._reading = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled. Raises LeaseLost when the group is gone, which means that Redis lost its data."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_back_on)
            self._stopping = False
            task_status.started()
            try:
                while True:
                    await self._fetch_or_wait()
            finally:
                self._stopping = True
                self.release_unstarted()

    async def fetch(self) -> int:
        """One pass: wait for room, read, hand on. Gives how many jobs were read."""
        connects = self._reader.statistics().connects
        if connects != self._connects:
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
                self._settle(delivery, Release())
        for delivery in self._suspects.drain(read_before=math.inf):
            self._settle(delivery, Release())

    @property
    def paused_queues(self) -> frozenset[str]:
        """The queues that are not read now."""
        return frozenset(self._paused)

    @property
    def is_stopping(self) -> bool:
        """Whether it reads no more."""
        return self._stopping

    def pause(self, queue: str) -> None:
        """Read this queue no more, until `resume`. What was read of it is run."""
        self._paused.add(queue)
        self._reading.cancel()

    def stop_reading(self) -> None:
        """Read no more at all, until the end: give back what has not started, and let what runs go on."""
        self._resting = True
        self._paused.update(keys.queue for keys in self._order.queues)
        self._reading.cancel()
        self.release_unstarted()

    def resume(self, queue: str) -> None:
        """Read this queue again."""
        if self._resting:
            return
        self._paused.discard(queue)
        self._reading.cancel()
        self._ledger.remove(())

    def recheck(self) -> None:
        """Something may have been read whose answer was lost."""
        self._connects = -1

    def _look_for_lost(self) -> None:
        self.recheck()
        self._reading.cancel()

    async def _fetch_or_wait(self) -> None:
        try:
            await self.fetch()
        except BrokerUnavailable as error:
            self._connects = -1
            await self._wait(error)
        except BrokerReplied as error:
            if error.code == "NOGROUP":
                raise self._lease.mark_lost(f"the queue's consumer group is gone: {error}") from None
            if not is_recoverable(error):
                raise
            self._connects = -1  # entries of an unreadable reply are pending: read them again
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
            self._turnstile.has_unreadable_queue = not all(rooms.values())
            if any(rooms.values()):
                return rooms
            await self._ledger.wait_changed()

    def _room(self, queue: str) -> int:
        """How many jobs of one queue there is room for."""
        return 0 if queue in self._paused else self._rooms.get_capacity(queue)

    async def _read(self, rooms: Mapping[str, int]) -> int:
        """Read from the queues that have room. COUNT holds for each stream of a read, so queues with different shares
        are read one after the other, without waiting; only when all are empty are all waited for."""
        open_ = [keys for keys in self._order.queues if rooms[keys.queue]]
        closed = [queue for queue, room in rooms.items() if not room]
        room = PassCapacity(rooms, {keys.queue: self._rooms.get_kinds(keys.queue) for keys in open_})
        shares = room.group_by_share(open_)
        found = await self._order.read_nonblocking(open_, room, self._receive)
        if found or any(keys.queue in self._paused for keys in open_):  # paused since we asked who is open
            return found
        lanes = self._order.get_lanes(open_)
        count = max(min(shares) * len(open_) // len(lanes), 1)
        call = jobs.read_jobs(lanes, self._worker, count=count, block_seconds=self._block)
        found, failure = 0, None
        if not closed:
            with trio.CancelScope() as self._reading:
                found = len(await self._receive(call))
            return found
        async with trio.open_nursery() as nursery:
            self._reading = nursery.cancel_scope
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
        entries = await self._reader.perform(call, self.accept)
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
                    lost += self.accept_new([each for each in again if each.id in missing])
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

    def accept_new(self, entries: Sequence[Entry]) -> int:
        """Take what this worker does not hold yet; gives how many that are. What is handed to a worker may be found
        as lost while the answer that carries it is on its way: whichever comes second is no copy of the job."""
        new = [each for each in entries if (each.queue, each.id) not in self._ledger]
        self.accept(new)
        return len(new)

    def accept(self, entries: Sequence[Entry]) -> None:
        """These were read for this worker, here or by somebody else."""
        now = time.time()
        met: dict[str, dict[str, int]] = {}
        for entry in entries:
            delivery = Delivery(
                entry.queue, entry.id, entry.message, entry.deliveries, read=now, lane=entry.lane
            )
            try:
                envelope = delivery.envelope = read_envelope(entry.message, self._message_limit)
            except Corrupt as error:
                self._refuse(delivery, Reason.CORRUPT, "Corrupt", str(error))
                continue
            if self._recent.check_and_add(delivery, envelope):
                self._discard(delivery, envelope)
                continue
            if envelope.task not in self._tasks:
                text = f"no task {envelope.task!r} on this worker: does it load the module that declares it?"
                self._refuse(delivery, Reason.UNKNOWN_TASK, "UnknownTask", text)
                continue
            task = self._tasks[envelope.task]
            kind, delivery.recipients = task.kind, task.recipients
            delivery.kind = kind
            counts = met.setdefault(entry.queue, {})
            if entry.lane == ADMITTED or envelope.task in self._turnstile.rules:
                self._to_its_gate(delivery, envelope.task, counts)
                continue
            counts[kind] = counts.get(kind, 0) + 1
            self._ledger.add(delivery)
            if entry.deliveries < self._suspects.min_deaths:
                self._queues[kind].put(delivery)
            else:
                self._suspects.add(delivery)
        self._rooms.record_read(met)
        if self._preferences.tasks:
            for queue_of_kind in self._queues.values():
                self._preferences.sort_queue(queue_of_kind)

    def _to_its_gate(self, delivery: Delivery, task: str, counts: dict[str, int]) -> None:
        """Whoever has to pass a gate goes there; who was handed over has passed it."""
        if why := self._turnstile.receive(delivery, task):
            self._refuse(delivery, Reason.REJECTED_BY_LIMIT, "RejectedByLimit", why)
        elif delivery.lane != ADMITTED:
            counts[AWAITING_ADMISSION] = counts.get(AWAITING_ADMISSION, 0) + 1

    def _refuse(self, delivery: Delivery, reason: Reason, kind: str, text: str) -> None:
        self._ledger.add(delivery)
        delivery.finished = delivery.read
        self._settle(delivery, Bury(reason, Failure(type=kind, message=text)))
        job = delivery.envelope.id if delivery.envelope else read_job_id(delivery.message)
        entry = delivery.entry.decode()
        self._log.log_job(
            "error", job=job, queue=delivery.queue, entry=entry, state="DEAD", reason=reason.value, error=text
        )

    def _discard(self, delivery: Delivery, envelope: Envelope) -> None:
        """The very same message came before (C47): this one goes, and the job is as it was."""
        self._ledger.add(delivery)
        self._results.put((delivery, make_drop(delivery)))
        self._log.event(
            "consumer:duplicate-dropped", "warning", job=envelope.id, task=envelope.task, attempt=envelope.attempt,
            queue=delivery.queue, entry=delivery.entry.decode(),
        )  # fmt: skip

    def _settle(self, delivery: Delivery, verdict: Bury | Release) -> None:
        words = make_settlement(verdict, delivery, worker=self._worker, ttl=self._ttl)
        self._results.put((delivery, words))

    async def _give_back_on(self) -> None:
        """Short jobs may be followed by long ones: what then waits here is given back, and the pace learnt anew."""
        while True:
            await trio.sleep(HORIZON)
            now = time.time()
            for kind, queue in self._queues.items():
                if queue and queue.items[0].read < now - STALE_HORIZONS * self._rooms.get_horizon(kind):
                    self._give_back_stale(kind, queue.drain())
            for delivery in self._suspects.drain(read_before=now - STALE_HORIZONS * HORIZON):
                self._settle(delivery, Release())
            self._rooms.update_lookahead()

    def _give_back_stale(self, kind: str, waiting: Sequence[Delivery]) -> None:
        level: Level = "debug" if self._rooms.record_release(kind, len(waiting)) else "info"
        self._log.event("consumer:jobs-returned", level, count=len(waiting), kind=kind)
        for delivery in waiting:
            self._settle(delivery, Release())
