"""Show the other processes of a kind that this one is alive.

Its lease locks no other process out: whatever these processes do is one atomic step, which any number of them may try.
"""

from collections.abc import Callable, Sequence

import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.logs.log import Log
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog, last_try, retry_until_available

RENEWALS_PER_LEASE = 3
"""Renewals within one lease."""

ProcessNames = tuple[str, ...]


class Presence:
    """Renews the lease of one process of a `kind`, such as `scheduler`.

    Each renewal returns the live processes of the kind; they are passed to `presence_listeners`.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        kind: str,
        worker: str,
        lease_seconds: float,
        log: Log,
        presence_listeners: Sequence[Callable[[ProcessNames], object]] = (),
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._kind = kind
        self._name = worker
        self._lease = lease_seconds
        self._log = log
        self._listeners = presence_listeners
        self._outages = OutageLog(log, "presence:renew-failed")
        self.live_processes: ProcessNames = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew the lease until cancelled, then end it."""
        interval = self._lease / RENEWALS_PER_LEASE
        try:
            await self.renew()
            task_status.started()
            while True:
                await trio.sleep(interval)
                await retry_until_available(self.renew, self._outages, min(RETRY_INTERVAL, interval))
        finally:
            with last_try(self._log, "presence:leave-failed"):
                await self._redis.perform(cluster.end_presence(self._keys, self._kind, self._name))

    async def renew(self) -> None:
        """Renew the lease once."""
        self.live_processes = await self._redis.perform(
            cluster.renew_presence(self._keys, self._kind, self._name, lease=self._lease)
        )
        for listener in self._listeners:
            listener(self.live_processes)
