"""Burst: ends the worker when all of its queues are done.

Done means: nothing on a stream, nothing with any worker, nothing scheduled, no retry to come (F37).
"""

from collections.abc import Sequence
from typing import TypeVar

import trio

from celery5.broker.calls import jobs, limits
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.limits import unescape_word
from celery5.services.worker.in_flight import InFlightJobs

POLL_INTERVAL = 0.05
"""Seconds between two looks."""
WARN_INTERVAL = 1.0
"""Seconds between two looks for tasks that keep it waiting."""

T = TypeVar("T")


class Burst:
    """Sets `done` once nothing is left to do, also on queues that others consume and that are `awaited`. Does nothing
    when `enabled` is false."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        consumed: Sequence[QueueKeys],
        in_flight: InFlightJobs,
        stop_requested: trio.Event,
        log: Log,
        burst: bool,
        awaited: Sequence[QueueKeys] = (),
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._told: set[str] = set()
        self._next = 0.0
        self._queues = (*consumed, *awaited)
        self._ledger = in_flight
        self._done = stop_requested
        self._log = log
        self._enabled = burst

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look until all is done."""
        task_status.started()
        # Two looks in a row: a job may send another to a queue that was looked at a moment before.
        empty = 0
        while self._enabled and empty < 2:
            empty = empty + 1 if len(self._ledger) == 0 and await self.is_done() else 0
            await trio.sleep(POLL_INTERVAL)
        if self._enabled:
            self._log.event("burst:finished")
            self._done.set()
        await trio.sleep_forever()

    async def is_done(self) -> bool:
        """Whether nothing is left on any queue. False when Redis does not answer."""
        try:
            sizes = await self._redis.perform_all([jobs.measure_queue(keys) for keys in self._queues])
            if any(size.limited for size in sizes) and trio.current_time() >= self._next:
                await self._warn()
        except BrokerUnavailable:
            return False
        return not any(size.unfinished for size in sizes)

    async def _warn(self) -> None:
        """Say once of each suspended task that its jobs keep this burst from its end."""
        self._next = trio.current_time() + WARN_INTERVAL
        suspended = (await self._redis.perform(limits.list_overrides(self._keys))).suspended
        if not suspended:
            return
        counts = await self._redis.perform_all([jobs.read_hash(keys.limited_counts) for keys in self._queues])
        held = {unescape_word(task) for each in counts for task in each}
        for task in sorted((held & suspended.keys()) - self._told):
            self._log.event("burst:blocked", "warning", task=task, suspended=suspended[task].why, why=_WAITS)
            self._told.add(task)


_WAITS = "its task is suspended and has jobs: this burst ends when they have run, after celery5 task resume"
