"""Presence: tells that this Scheduler lives, for as long as it does.

Nobody is fenced off by this lease: whatever these processes do is one atomic step that any number of them may try. It
is for those who want to know who is there.
"""

from collections.abc import Callable, Sequence

import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.process.broker_outages import is_recoverable

BEATS_PER_LEASE = 3
"""Times in one lease that it is told."""
RETRY_INTERVAL = 0.5
"""Seconds between attempts while Redis is away."""
LEAVE_TIMEOUT = 2.0
"""Seconds that leaving may take; whoever cannot leave is gone when its lease lapses."""

ProcessNames = tuple[str, ...]


class Presence:
    """One process of a `kind`, `scheduler` say, among its like. Who `follows` is told at each beat who lives."""

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
        self._follows = presence_listeners
        self._missed = False
        self.live_processes: ProcessNames = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled, then leave."""
        try:
            await self.renew()
            task_status.started()
            while True:
                await trio.sleep(self._lease / BEATS_PER_LEASE)
                while not await self._beaten():  # noqa: ASYNC110  it is Redis that changes
                    await trio.sleep(min(RETRY_INTERVAL, self._lease / BEATS_PER_LEASE))
        finally:
            with trio.move_on_after(LEAVE_TIMEOUT, shield=True):
                await self._leave()

    async def renew(self) -> None:
        """Tell it once."""
        self.live_processes = await self._redis.perform(
            cluster.renew_presence(self._keys, self._kind, self._name, lease=self._lease)
        )
        for tell in self._follows:
            tell(self.live_processes)

    async def _beaten(self) -> bool:
        try:
            await self.renew()
        except (BrokerUnavailable, BrokerReplied) as error:
            if not is_recoverable(error):
                raise
            self._log.event("presence:renew-failed", "debug" if self._missed else "warning", why=str(error))
            self._missed = True
            return False
        self._missed = False
        return True

    async def _leave(self) -> None:
        try:
            await self._redis.perform(cluster.end_presence(self._keys, self._kind, self._name))
        except (BrokerUnavailable, BrokerReplied) as error:
            self._log.event("presence:leave-failed", "debug", why=str(error))
