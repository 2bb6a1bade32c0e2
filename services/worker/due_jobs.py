"""Mover: moves scheduled jobs and retries to their queue when their time has come.

Jobs wait in Redis, not here: the Mover only knows when the next one falls due. Any number of workers may move at
once; each job moves once.
"""

import math
from collections.abc import Mapping, Sequence

import trio

from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.process.broker_outages import OutageLog

BATCH = 100
"""Jobs moved in one trip."""
RETRY_INTERVAL = 0.5
"""Seconds between attempts while Redis is away."""

MoveResult = tuple[int, float | None]


class Mover:
    """Watches the time of the scheduled jobs of a worker's queues."""

    def __init__(self, *, redis: AsyncDriver, consumed: Sequence[QueueKeys], log: Log) -> None:
        self._redis = redis
        self._queues: Mapping[bytes, QueueKeys] = {keys.wake.encode(): keys for keys in consumed}
        self._waits = OutageLog(log, "due-jobs:interrupted", "due-jobs:resumed")
        self._due: dict[str, float] = {}
        self._news = trio.Event()

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [keys.wake for keys in self._queues.values()]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """The Heartbeat's news of one queue."""
        if pulse.due_in is not None:
            self._expect(keys, trio.current_time() + pulse.due_in)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """A job was scheduled or will be retried before all others: look when."""
        self._expect(self._queues[channel], trio.current_time())

    def recheck(self) -> None:
        """The listening connection was made anew: something may have been missed."""
        for keys in self._queues.values():
            self._expect(keys, trio.current_time())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move jobs as they fall due, until cancelled."""
        self.recheck()
        task_status.started()
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._news.wait()
            self._news = trio.Event()
            await self.move_due_jobs()

    async def move_due_jobs(self) -> int:
        """One pass over the queues whose next job is due. Gives how many jobs were moved."""
        total = 0
        for keys in self._queues.values():
            if self._due.get(keys.queue, math.inf) > trio.current_time():
                continue
            del self._due[keys.queue]
            try:
                moved, due_in = await self._redis.perform(jobs.promote_due_jobs(keys, limit=BATCH))
            except (BrokerUnavailable, BrokerReplied) as error:
                self._waits.record_error(error)
                moved, due_in = 0, RETRY_INTERVAL
            else:
                self._waits.record_recovery()
            total += moved
            if due_in is not None:
                self._expect(keys, trio.current_time() + due_in)
        return total

    def _expect(self, keys: QueueKeys, when: float) -> None:
        if when < self._due.get(keys.queue, math.inf):
            self._due[keys.queue] = when
            self._news.set()
