"""Read the shards from an earlier, larger number of shards for as long as they hold jobs."""

from collections.abc import Collection, Sequence

import trio

from celery5.broker.calls import queues as queue_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.logs.log import Log
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.process.reloader import ConfigurationChanged, NextIncarnation

LEASES_BETWEEN_CHECKS = 3.0
"""Leases of a worker between two checks."""


class EarlierShards:
    """Checks at the start, and at intervals while there are shards. The next incarnation reads what it finds.

    Args:
        earlier_shards: What was found, kept over incarnations.
        has_shards: Whether the setting `shards` names queues, if only with the number 1: they may have had more.
        lease_seconds: The length of the worker's lease.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        consumed: Sequence[QueueKeys],
        earlier_shards: set[str],
        has_shards: bool,
        lease_seconds: float,
        next_incarnation: NextIncarnation,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._consumed = {keys.queue for keys in consumed}
        self._earlier = earlier_shards
        self._has_shards = has_shards
        self._interval = LEASES_BETWEEN_CHECKS * lease_seconds
        self._next = next_incarnation
        self._log = log
        self._outages = OutageLog(log, "queue:shards-read-failed")
        self._found: Collection[str] = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check until cancelled. Raises ConfigurationChanged when there are more queues to read."""
        task_status.started()
        while True:
            await retry_until_available(self._check, self._outages, even_refused=True)
            if self._found:
                break
            if not (self._has_shards or self._earlier):
                await trio.sleep_forever()
            await trio.sleep(self._interval)
        self._earlier.update(self._found)
        self._log.event("queue:shards-found", "info", queues=sorted(self._found), why=_WHY)
        self._next.request(_keep_settings)
        raise ConfigurationChanged

    async def _check(self) -> None:
        queues = {get_queue_of_shard(name) for name in self._consumed}
        names = [
            name
            for name in await self._redis.perform(queue_calls.list_queues(self._keys))
            if get_queue_of_shard(name) in queues and name not in self._consumed
        ]
        if not names:
            return
        depths = await self._redis.perform_all(
            [queue_calls.get_queue_depth(self._keys.for_queue(name)) for name in names]
        )
        self._found = [
            name for name, depth in zip(names, depths, strict=True) if depth.unfinished or depth.runs
        ]


def _keep_settings() -> None:
    """Change no setting in the next incarnation."""


_WHY = (
    "shards of an earlier number still hold jobs: the worker begins a new incarnation, which reads them, too"
)
