"""Move scheduled jobs and retries to their queues when they are due.

Jobs wait in Redis, not in the worker, which only knows when the next one is due. Any number of workers may move jobs
at once; each job is moved once. When another job becomes the next that is due, all workers get a message and a few act
on it (`WakeUps`). A worker that has moved a job goes on with the next. Heartbeats find due jobs that no worker moved.
"""

import math
from collections.abc import Mapping, Sequence

import trio

from celery5.broker.calls import jobs
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.process.wake_ups import HEARTBEATS_PER_LEASE
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog
from celery5.services.process.lease import Lease
from celery5.services.process.wake_ups import WakeUps
from celery5.services.workflows.run_progress import RunProgress

BATCH = 100
"""Jobs moved in one call."""

MoveResult = tuple[int, float | None]


class Mover:
    """Moves the due jobs of a worker's queues."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        run_progress: RunProgress,
        lease: Lease,
        wake_ups: WakeUps,
        log: Log,
    ) -> None:
        self._redis = redis
        self._lease = lease
        self._wake_ups = wake_ups
        self._runs = run_progress
        self._queues: Mapping[bytes, QueueKeys] = {keys.wake.encode(): keys for keys in consumed}
        self._outages = OutageLog(log, "due-jobs:interrupted", "due-jobs:resumed")
        self._due: dict[str, float] = {}
        self._unread: set[str] = set()  # queues of which it is not known when the next job is due
        self._changed = trio.Event()

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.wake for keys in self._queues.values()]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """Take the heartbeat reply of one queue: when its next job is due."""
        if pulse.due_in is None or pulse.due_in > self._lease.seconds / HEARTBEATS_PER_LEASE:
            return  # the next heartbeat comes before that
        # A job that is due and still there: none of the workers that acted has moved it.
        if pulse.due_in == 0 or self._wake_ups.does_answer(keys.queue):
            self._expect(keys, trio.current_time() + pulse.due_in)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """Read again when the next job of a queue is due: one was scheduled before all others."""
        keys = self._queues[channel]
        if self._wake_ups.does_answer(keys.queue):
            self._unread.add(keys.queue)
            self._expect(keys, trio.current_time())

    def recheck(self) -> None:
        """Read again when the next jobs are due: the listening connection is new, and messages may have been missed."""
        for keys in self._queues.values():
            self._unread.add(keys.queue)
            self._expect(keys, trio.current_time())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move jobs as they fall due, until cancelled."""
        self.recheck()
        task_status.started()
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._changed.wait()
            self._changed = trio.Event()
            await self.move_due_jobs()

    async def move_due_jobs(self) -> int:
        """Move the due jobs of all queues. Return how many were moved."""
        total = 0
        for keys in self._queues.values():
            if self._due.get(keys.queue, math.inf) > trio.current_time():
                continue
            del self._due[keys.queue]
            try:
                promoted = await self._redis.perform(jobs.promote_due_jobs(keys, limit=BATCH))
            except (BrokerUnavailable, BrokerReplied) as error:
                self._outages.record_error(error)
                self._expect(keys, trio.current_time() + RETRY_INTERVAL)
                continue
            self._outages.record_recovery()
            if promoted.run_records:
                self._runs.note_records(keys.queue)
            total += promoted.moved
            # Another worker was faster and goes on with the next job, so this one acts only by chance.
            goes_on = promoted.moved or keys.queue in self._unread or self._wake_ups.does_answer(keys.queue)
            self._unread.discard(keys.queue)
            if promoted.due_in is not None and goes_on:
                self._expect(keys, trio.current_time() + promoted.due_in)
        return total

    def _expect(self, keys: QueueKeys, when: float) -> None:
        if when < self._due.get(keys.queue, math.inf):
            self._due[keys.queue] = when
            self._changed.set()
