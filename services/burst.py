"""Burst: ends the worker when all of its queues are done.

Floor: services. Reads: the sizes of its queues. Writes: nothing.

Done means: nothing on a stream, nothing with any worker, nothing scheduled, no retry to come (F37).
"""

from collections.abc import Sequence
from typing import Protocol

import trio

from celery5.broker import calls
from celery5.broker.call import Call
from celery5.broker.calls import Size
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerUnavailable
from celery5.log import Log
from celery5.services.ledger import Ledger

PAUSE = 0.05
"""Seconds between two looks."""


class Performs(Protocol):
    """Makes several trips in one write."""

    async def perform_all(self, calls: Sequence[Call[Size]], /) -> list[Size]: ...


class Burst:
    """Sets `done` once nothing is left to do, also on queues that others consume and that are `awaited`. Does nothing
    when `enabled` is false."""

    def __init__(
        self,
        *,
        redis: Performs,
        consumed: Sequence[QueueKeys],
        ledger: Ledger,
        done: trio.Event,
        log: Log,
        burst: bool,
        awaited: Sequence[QueueKeys] = (),
    ) -> None:
        self._redis = redis
        self._queues = (*consumed, *awaited)
        self._ledger = ledger
        self._done = done
        self._log = log
        self._enabled = burst

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look until all is done."""
        task_status.started()
        # Two looks in a row: a job may send another to a queue that was looked at a moment before.
        empty = 0
        while self._enabled and empty < 2:
            empty = empty + 1 if len(self._ledger) == 0 and await self.is_done() else 0
            await trio.sleep(PAUSE)
        if self._enabled:
            self._log.event("burst:done")
            self._done.set()
        await trio.sleep_forever()

    async def is_done(self) -> bool:
        """Whether nothing is left on any queue. False when Redis does not answer."""
        try:
            sizes = await self._redis.perform_all([calls.measure(keys) for keys in self._queues])
        except BrokerUnavailable:
            return False
        return not any(size.unfinished for size in sizes)
