"""Join Events: makes this Router a consumer of its application's events, and takes it off again.

Floor: bootsteps. Reads: nothing. Writes: the consumer group and the leases of the events' queue.
"""

from collections.abc import Sequence

import trio

from celery5.bootsteps.join_queues import LEAVE_TIMEOUT, Performs, leave_queues
from celery5.broker import calls
from celery5.broker.keys import QueueKeys
from celery5.log import Log
from celery5.services.lease import Lease


class EventsMembership:
    """Joins on the way up, leaves on the way down. The queue of the events is not among those that tasks have."""

    def __init__(
        self, *, redis: Performs, consumed: Sequence[QueueKeys], lease: Lease, log: Log, worker: str
    ) -> None:
        self._redis = redis
        self._consumed = consumed
        self._lease = lease
        self._log = log
        self._worker = worker

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, stay until cancelled, leave."""
        await self._redis.perform_all(
            [calls.join_queue(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]
        )
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(LEAVE_TIMEOUT, shield=True):
                await leave_queues(
                    self._redis, self._consumed, lease=self._lease, worker=self._worker, log=self._log
                )
