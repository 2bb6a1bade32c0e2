"""Join Events: makes this Router a consumer of its application's events, and takes it off again.

Floor: bootsteps. Reads: nothing. Writes: the consumer group and the leases of the events' queue.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import trio

from celery5.broker import calls
from celery5.broker.call import Call
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError
from celery5.log import Log
from celery5.services.lease import Lease

LEAVE_LIMIT = 5.0
"""Seconds that leaving may take; whoever cannot leave is recovered when its lease lapses."""


class Performs(Protocol):
    """Makes several trips in one write."""

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]: ...


class JoinEvents:
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
            [calls.join(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]
        )
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(LEAVE_LIMIT, shield=True):
                await self._leave()

    async def _leave(self) -> None:
        if self._lease.lost:  # others have taken care of everything
            return
        try:
            held = await self._redis.perform_all([calls.leave(keys, self._worker) for keys in self._consumed])
            self._log.event("queues:left", left_behind=sum(held))
        except BrokerError as error:
            self._log.event("queues:not-left", "warning", why=str(error), hint=_UNTOLD)


_UNTOLD = "what it still holds, if anything, goes to others when its lease lapses"
