"""Read jobs from the queues, never more than the worker has capacity for."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.cluster.canary_limit import CanaryLimit
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import Release
from celery5.protocol.observability.families import MetricFamily, make_counter
from celery5.protocol.scaling.prefetch import HORIZON
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.unstarted_jobs import UnstartedJobs
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL, OutageLog, retry_until_available
from celery5.services.process.lease import Lease
from celery5.services.worker.capacity import QueueCapacity
from celery5.services.worker.foreign_jobs import TAKE_BATCH, ForeignJobs
from celery5.services.worker.job_intake import JobIntake
from celery5.services.worker.reading import PassCapacity, ReadOrder

STALE_HORIZONS = 5.0
"""Horizons that a job may wait unstarted in this worker before it is released for other workers."""
REREAD_GRACE = 1.0
"""Seconds that a read may outlast `read_block` on a server that has not noticed the end of the connection."""
SMALL_BATCH = 16
"""The most jobs of a read that are run before the next read: to prepare that takes longer than to run them, if they are
short."""
SETTLE_TURNS = 2
"""Turns of the loop in which a job that never waits is run by its executor, and settled by the publisher."""
AUDIT_PAGE = 100
"""Pending entries that an audit reads in one call."""


class Consumer:
    """Reads for one worker. When stopped it releases the jobs that have not been started."""

    _connects = 1
    _last_block = 0.0
    _audit_at = math.inf
    _stopped_reading = False
    _is_canary_paused = False

    def __init__(
        self,
        *,
        worker: str,
        lease: Lease,
        redis: AsyncDriver,
        reader: ParkedRedis,
        read_order: ReadOrder,
        reading: ReadingState,
        read_block: float,
        queue_capacity: QueueCapacity,
        intake: JobIntake,
        in_flight: InFlightJobs,
        isolated_jobs: IsolatedJobs,
        unstarted: UnstartedJobs,
        foreign_jobs: ForeignJobs,
        queues: Mapping[str, InternalTasksQueue],
        budget: MaximalConcurrencyBudget,
        admission: AdmissionState,
        canary_limit: CanaryLimit,
        log: Log,
    ) -> None:
        self._reader = reader
        self._redis = redis
        self._read_order = read_order
        self._reading = reading
        self._queues = queues
        self._capacity = queue_capacity
        self._budget = budget
        self._intake = intake
        self._unstarted = unstarted
        self._in_flight = in_flight
        self._isolated_jobs = isolated_jobs
        self._admission = admission
        self._canary_limit = canary_limit
        self._foreign_jobs = foreign_jobs
        self._lease = lease
        self._log = log
        self._outages = OutageLog(log, "consumer:interrupted", "consumer:resumed")
        self._worker = worker
        self._read_block = read_block
        self._lost_settlements = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled.

        Raises:
            LeaseLost: The consumer group is gone, which means that Redis lost its data.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._release_stale_jobs)
            self._reading.set_stopping(False)
            task_status.started()
            try:
                while True:
                    await retry_until_available(self._fetch, self._outages, SHORT_RETRY_INTERVAL)
            finally:
                self._reading.set_stopping(True)
                self.release_unstarted()

    async def fetch(self) -> int:
        """Wait for capacity and read once. Return how many jobs were read."""
        connects = self._reader.statistics().connects
        if self._reading.take_audit_request() or connects != self._connects:
            # The reading connection is new: a reply on the old one may have been lost. One may still get lost while
            # the server has not noticed the end of the old connection; so a second audit follows when that read ends.
            await self._audit()
            self._connects = connects
            self._audit_at = trio.current_time() + max(self._read_block, self._last_block) + REREAD_GRACE
        elif trio.current_time() >= self._audit_at:
            await self._audit()
            self._audit_at = math.inf
        capacity_by_queue = await self._wait_for_capacity()
        queue = self._foreign_jobs.choose_queue(capacity_by_queue)
        if queue is None:
            received = await self._read(capacity_by_queue)
        else:
            received = await self._take_foreign(queue, capacity_by_queue[queue])
        if 0 < received <= SMALL_BATCH:
            for _ in range(SETTLE_TURNS):
                await trio.lowlevel.checkpoint()
        return received

    def release_unstarted(self) -> None:
        """Release the jobs that wait unstarted; their attempts are not counted."""
        for queue in self._queues.values():
            for delivery in queue.drain():
                self._unstarted.settle(delivery, Release())
        for delivery in self._isolated_jobs.drain(read_before=math.inf):
            self._unstarted.settle(delivery, Release())

    @property
    def paused_queues(self) -> frozenset[str]:
        """The queues that are not read now."""
        return self._reading.paused_queues

    @property
    def is_stopping(self) -> bool:
        """Whether it reads no more jobs."""
        return self._reading.is_stopping

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: it reads, or waits until it may."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield how many outcomes Redis has lost."""
        yield make_counter(
            "celery5_settlements_lost_total",
            "Jobs that had ended in this worker and whose outcomes Redis has lost, as at a failover: they run again.",
            self._lost_settlements,
        )

    def pause(self, queue: str) -> None:
        """Stop reading a queue until `resume`. The jobs that were read are run."""
        self._reading.pause(queue)

    def stop_reading(self) -> None:
        """Read no more jobs, for good: release those that have not started, and let running jobs go on."""
        self._stopped_reading = True
        self._reading.pause(*(keys.queue for keys in self._read_order.queues))
        self.release_unstarted()

    def resume(self, queue: str) -> None:
        """Read a queue again."""
        if self._stopped_reading:
            return
        self._reading.resume(queue)
        self._in_flight.notify()
        self._admission.notify()

    def recheck(self) -> None:
        """Audit before the next read: jobs may have been read in a reply that was lost."""
        self._reading.request_audit()

    async def _fetch(self) -> None:
        try:
            await self.fetch()
        except (BrokerUnavailable, BrokerReplied) as error:
            if isinstance(error, BrokerReplied) and error.code == "NOGROUP":
                raise self._lease.mark_lost(f"the queue's consumer group is gone: {error}") from None
            self._reading.request_audit()  # entries of a reply that was lost or unreadable are pending
            raise

    async def _wait_for_capacity(self) -> dict[str, int]:
        """Return the capacity for jobs of each queue, once there is any."""
        while True:
            capacity_by_queue = self._count_capacities([keys.queue for keys in self._read_order.queues])
            self._admission.set_unreadable(not all(capacity_by_queue.values()))
            if any(capacity_by_queue.values()):
                return capacity_by_queue
            await self._wait_changed()

    async def _wait_changed(self) -> None:
        """Wait until there may be capacity again: jobs were settled, or a canary's pause or limit has ended."""
        pause = self._canary_limit.pause_left
        if pause < math.inf and not self._is_canary_paused:
            self._is_canary_paused = True
            self._log.event("canary:paused", "warning", seconds=round(pause, 1), why=_CANARY_PAUSE)
        with trio.move_on_after(self._canary_limit.next_change) as timeout:
            await self._in_flight.wait_changed()
        if timeout.cancelled_caught:
            self._is_canary_paused = False
            self._admission.notify()

    def _count_capacities(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many jobs of each queue may be read now."""
        free_of_canary = self._canary_limit.count_free(len(self._in_flight))
        return {queue: self._count_capacity(queue, free_of_canary) for queue in queues}

    def _count_capacity(self, queue: str, free_of_canary: float) -> int:
        if self._reading.is_paused(queue):
            return 0
        if free_of_canary < math.inf:  # each queue has its share, and one at least
            free_of_canary = max(free_of_canary // len(self._read_order.queues), min(free_of_canary, 1))
        return int(min(self._capacity.get_capacity(queue), free_of_canary))

    async def _read(self, capacity_by_queue: Mapping[str, int]) -> int:
        """Read from the queues that there is capacity for.

        COUNT holds for each stream of a read, so queues with different shares are read one after the other, without
        blocking. Only when all are empty, one blocking read waits for all.
        """
        open_queues = [keys for keys in self._read_order.queues if capacity_by_queue[keys.queue]]
        closed_queues = [queue for queue, capacity in capacity_by_queue.items() if not capacity]
        capacity = PassCapacity(
            capacity_by_queue, {keys.queue: self._capacity.get_kinds(keys.queue) for keys in open_queues}
        )
        shares = capacity.group_by_share(open_queues)
        received = await self._read_order.read_nonblocking(open_queues, capacity, self._receive)
        if received or any(self._reading.is_paused(keys.queue) for keys in open_queues):  # paused since
            return received
        lanes = self._read_order.get_lanes(open_queues)
        count = max(min(shares) * len(open_queues) // len(lanes), 1)
        self._last_block = max(self._read_block, self._lease.idle_interval)
        block = 0.0 if self._foreign_jobs.is_wanted(capacity_by_queue) else self._last_block
        call = jobs.read_jobs(lanes, self._worker, count=count, block_seconds=block)
        received, failure = 0, None
        if not closed_queues:
            with trio.CancelScope() as scope:
                self._reading.begin_read(scope)
                received = len(await self._receive(call))
            return received
        async with trio.open_nursery() as nursery:
            self._reading.begin_read(nursery.cancel_scope)
            nursery.start_soon(self._interrupt_when_open, closed_queues, nursery.cancel_scope)
            try:
                received = len(await self._receive(call))
            except BrokerError as error:
                failure = error  # raised outside, so that it does not arrive wrapped in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return received

    async def _take_foreign(self, queue: str, capacity: int) -> int:
        """Take jobs that were kept for workers with other code than those that have read them."""
        (keys,) = [keys for keys in self._read_order.queues if keys.queue == queue]
        count = min(capacity, TAKE_BATCH)
        version = self._foreign_jobs.version
        call = jobs.take_foreign_jobs(keys, self._worker, version=version, count=count)
        try:
            entries = await self._receive(call)
        except BrokerError as error:  # what Redis refuses to give costs no worker, and holds up no other job
            self._foreign_jobs.note_taken(queue, has_more=False)
            if is_outage(error):
                raise
            return 0
        self._foreign_jobs.note_taken(queue, has_more=len(entries) > 0)
        return len(entries)

    async def _receive(self, call: Call[list[Entry]]) -> Sequence[Entry]:
        # No checkpoint between the read and the intake: an audit would take the jobs for lost.
        entries = await self._reader.perform(call, self._intake.accept)
        if entries and self._lease.idle_interval:
            self._lease.request_renewal()
        self._budget.update()
        return entries

    async def _interrupt_when_open(self, closed_queues: Sequence[str], reading: trio.CancelScope) -> None:
        """End a read that leaves queues out as soon as there is capacity for one of them."""
        while not any(self._count_capacities(closed_queues).values()):
            await self._in_flight.wait_changed()
        reading.cancel()

    async def _audit(self) -> None:
        lost = unsettled = 0
        for keys in self._read_order.get_held_lanes():
            after = b"0"
            while True:
                entries = await self._redis.perform(
                    jobs.read_pending(keys, self._worker, after=after, count=AUDIT_PAGE)
                )
                missing = {entry.id for entry in entries if (entry.queue, entry.id) not in self._in_flight}
                if missing:
                    # Some may have been settled while the reply was on its way. Those still pending were lost.
                    still_pending = await self._redis.perform(
                        jobs.read_pending(keys, self._worker, after=after, count=AUDIT_PAGE)
                    )
                    had_before = self._intake.duplicate_count
                    found = self._intake.accept_new([entry for entry in still_pending if entry.id in missing])
                    settled = self._intake.duplicate_count - had_before
                    lost, unsettled = lost + found - settled, unsettled + settled
                if len(entries) < AUDIT_PAGE:
                    break
                after = entries[-1].id
        if lost:
            self._lease.request_renewal()
            why = "their delivery was lost with a connection"
            self._log.event("consumer:jobs-recovered", "warning", count=lost, why=why)
        if unsettled:
            self._lost_settlements += unsettled
            why = "Redis has lost their outcomes, as it may at a failover; they run again"
            self._log.event("consumer:settlements-lost", "warning", count=unsettled, why=why)

    async def _release_stale_jobs(self) -> None:
        """Release jobs that wait for too long, and estimate their duration again: long jobs may follow short ones."""
        while True:
            await trio.sleep(HORIZON)
            now = time.time()
            for kind, queue in self._queues.items():
                if queue and queue.items[0].read < now - STALE_HORIZONS * self._capacity.get_horizon(kind):
                    self._release_jobs(kind, queue.drain())
            for delivery in self._isolated_jobs.drain(read_before=now - STALE_HORIZONS * HORIZON):
                self._unstarted.settle(delivery, Release())
            self._capacity.update_saturation()

    def _release_jobs(self, kind: str, waiting: Sequence[Delivery]) -> None:
        self._capacity.record_release(kind)
        self._log.event("consumer:jobs-returned", "info", count=len(waiting), kind=kind)
        for delivery in waiting:
            self._unstarted.settle(delivery, Release())


_CANARY_PAUSE = (
    "so many attempts have failed that this canary reads no jobs until its Controller has judged it"
)
