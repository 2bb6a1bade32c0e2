"""Count in Redis how many attempts have ended on each queue: by that is measured how fast a queue drains."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import trio

from celery5.broker.calls import queues as queue_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.logs.log import Log
from celery5.protocol.observability.job_tally import RETRY_REQUESTED
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.broker_outages import OutageLog

INTERVAL = 1.0
"""Seconds after which what has ended is counted in Redis, at most: one call a queue, and none while nothing ends.

Where jobs are settled it would be one more command for each of them, which jobs behind limits have no room for.
"""
EVERY = 3600.0
"""Seconds after which queues on which nothing ends are counted, too: else it is forgotten that anybody counts."""
ENDED = ("SUCCESS", "RETRY", RETRY_REQUESTED, "DEAD", "REVOKED", "EXPIRED", "REJECTED")
"""The states in which attempts end: those that a worker gives back have not."""
LAST_TIMEOUT = 1.0
"""Seconds that the last counts may take, while the worker stops."""


class EndedCounter:
    """Counts until cancelled, and once more then. What does not arrive is counted with the next attempts.

    Args:
        redis: The broker of the queues.
        consumed: The queues that this worker reads.
        process_status: What has counted the attempts that end in this process.
        metrics_interval: Seconds between two reports on metrics; 0: this incarnation makes none.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        process_status: ProcessStatus,
        metrics_interval: float,
        log: Log,
    ) -> None:
        self._redis = redis
        self._consumed = consumed
        self._jobs = process_status.jobs
        # 0 where another incarnation of the process reports its metrics: the queues are on this one's broker.
        self._interval = min(INTERVAL, metrics_interval or INTERVAL)
        self._outages = OutageLog(log, "flow:count-failed")
        self._sent: Counter[str] = Counter()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Count until cancelled."""
        self._sent = self._count()
        task_status.started()
        try:
            while True:
                await self._send(every=True)
                due = trio.current_time() + EVERY
                while trio.current_time() < due:
                    await trio.sleep(self._interval)
                    await self._send()
        finally:
            with trio.move_on_after(LAST_TIMEOUT, shield=True):
                await self._send()

    def _count(self) -> Counter[str]:
        """Return how many attempts have ended in this process, by queue."""
        counts: Counter[str] = Counter()
        for queue, _, tally in self._jobs.items():
            counts[queue] += sum(tally.counts.get(state, 0) for state in ENDED)
        return counts

    async def _send(self, *, every: bool = False) -> None:
        """Send how many attempts have ended since the last time, of each queue, or of those where any have."""
        counts = self._count()
        new = {keys: counts[keys.queue] - self._sent[keys.queue] for keys in self._consumed}
        calls = [queue_calls.count_ended(keys, count) for keys, count in new.items() if count or every]
        if not calls:
            return
        with self._outages.suppressing():
            await self._redis.perform_all(calls)
            self._sent = counts
