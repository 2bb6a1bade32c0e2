"""Presence: tells that this Scheduler lives, for as long as it does.

Floor: services. Reads: who else of its kind lives. Writes: its own lease among them.

Nobody is fenced off by this lease: whatever these processes do is one atomic step that any number of them may try. It
is for those who want to know who is there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from celery5.broker import presence
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.log import Log
from celery5.services.passing import passes

BEATS = 3
"""Times in one lease that it is told."""
AGAIN = 0.5
"""Seconds between attempts while Redis is away."""
LEAVE_LIMIT = 2.0
"""Seconds that leaving may take; whoever cannot leave is gone when its lease lapses."""

Names = tuple[str, ...]


class Performs(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[Names], /) -> Names: ...


class Presence:
    """One process of a `kind`, `scheduler` say, among its like. Who `follows` is told at each beat who lives."""

    def __init__(
        self,
        *,
        redis: Performs,
        keys: Keys,
        kind: str,
        worker: str,
        lease_seconds: float,
        log: Log,
        follows: Sequence[Callable[[Names], object]] = (),
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._kind = kind
        self._name = worker
        self._lease = lease_seconds
        self._log = log
        self._follows = follows
        self._missed = False
        self.living: Names = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled, then leave."""
        try:
            await self.beat()
            task_status.started()
            while True:
                await trio.sleep(self._lease / BEATS)
                while not await self._beaten():  # noqa: ASYNC110  it is Redis that changes
                    await trio.sleep(min(AGAIN, self._lease / BEATS))
        finally:
            with trio.move_on_after(LEAVE_LIMIT, shield=True):
                await self._leave()

    async def beat(self) -> None:
        """Tell it once."""
        self.living = await self._redis.perform(
            presence.present(self._keys, self._kind, self._name, lease=self._lease)
        )
        for tell in self._follows:
            tell(self.living)

    async def _beaten(self) -> bool:
        try:
            await self.beat()
        except (BrokerUnavailable, BrokerReplied) as error:
            if not passes(error):
                raise
            self._log.event("presence:missed", "debug" if self._missed else "warning", why=str(error))
            self._missed = True
            return False
        self._missed = False
        return True

    async def _leave(self) -> None:
        try:
            await self._redis.perform(presence.leave(self._keys, self._kind, self._name))
        except (BrokerUnavailable, BrokerReplied) as error:
            self._log.event("presence:not-left", "debug", why=str(error))
