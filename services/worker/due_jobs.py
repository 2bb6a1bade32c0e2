"""Move scheduled jobs and retries to their queues when they are due.

Jobs wait in Redis, not in the worker, which only knows when the next one is due. Any number of workers may move jobs
at once; each job is moved once.
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
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog
from celery5.services.workflows.run_progress import RunProgress

BATCH = 100
"""Jobs moved in one call."""

MoveResult = tuple[int, float | None]


class Mover:
    """Moves the due jobs of a worker's queues."""

    def __init__(
        self, *, redis: AsyncDriver, consumed: Sequence[QueueKeys], run_progress: RunProgress, log: Log
    ) -> None:
        self._redis = redis
        self._runs = run_progress
        self._queues: Mapping[bytes, QueueKeys] = {keys.wake.encode(): keys for keys in consumed}
        self._outages = OutageLog(log, "due-jobs:interrupted", "due-jobs:resumed")
        self._due: dict[str, float] = {}
        self._changed = trio.Event()

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.wake for keys in self._queues.values()]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """Take the heartbeat reply of one queue: when its next job is due."""
        if pulse.due_in is not None:
            self._expect(keys, trio.current_time() + pulse.due_in)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """Read again when the next job of a queue is due: one was scheduled before all others."""
        self._expect(self._queues[channel], trio.current_time())

    def recheck(self) -> None:
        """Read again when the next jobs are due: the listening connection is new, and messages may have been missed."""
        for keys in self._queues.values():
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
                moved: int = 0
                due_in: float | None = RETRY_INTERVAL
            else:
                self._outages.record_recovery()
                moved, due_in = promoted.moved, promoted.due_in
                if promoted.run_records:
                    self._runs.note_records(keys.queue)
            total += moved
            if due_in is not None:
                self._expect(keys, trio.current_time() + due_in)
        return total

    def _expect(self, keys: QueueKeys, when: float) -> None:
        if when < self._due.get(keys.queue, math.inf):
            self._due[keys.queue] = when
            self._changed.set()
