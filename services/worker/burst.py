"""End a worker in burst mode when all of its queues are done.

Done means: no job on a stream, none held by any worker, none scheduled, no retry to come, no end of a job that its run
has yet to count, and nothing in an outbox that is still to be sent, such as the `on_failure` job of a dead one.
"""

from collections.abc import Sequence
from typing import TypeVar

import trio

from celery5.broker.calls import jobs, limits, queues, workflows
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.limits import unescape_word
from celery5.services.job.in_flight import InFlightJobs

POLL_INTERVAL = 0.05
"""Seconds between two checks."""
WARN_INTERVAL = 1.0
"""Seconds between two checks for suspended tasks that block the end."""

T = TypeVar("T")


class Burst:
    """Sets `stop_requested` once no job is left, also on queues of other processes that are `awaited`.

    Does nothing unless `burst` is true.
    """

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
        self._warned_tasks: set[str] = set()
        self._next_warning = 0.0
        self._queues = (*consumed, *awaited)
        self._in_flight = in_flight
        self._done = stop_requested
        self._log = log
        self._is_burst = burst

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check until all queues are done."""
        task_status.started()
        # Two checks in a row: a job may send another to a queue that was checked just before.
        empty = 0
        while self._is_burst and empty < 2:
            empty = empty + 1 if len(self._in_flight) == 0 and await self.is_done() else 0
            await trio.sleep(POLL_INTERVAL)
        if self._is_burst:
            self._log.event("burst:finished")
            self._done.set()
        await trio.sleep_forever()

    async def is_done(self) -> bool:
        """Return whether no job is left on any queue; False when Redis is unreachable."""
        try:
            # In the order in which a run goes on: what leaves one of these is in the next one then.
            records = await self._redis.perform_all([workflows.count_records(keys) for keys in self._queues])
            unsent = await self._redis.perform_all([workflows.count_outbox(keys) for keys in self._queues])
            depths = await self._redis.perform_all([queues.get_queue_depth(keys) for keys in self._queues])
            if any(depth.held for depth in depths) and trio.current_time() >= self._next_warning:
                await self._warn()
        except BrokerUnavailable:
            return False
        return not (any(records) or any(unsent)) and not any(depth.unfinished for depth in depths)

    async def _warn(self) -> None:
        """Warn once of each suspended task that its jobs keep this burst from ending."""
        self._next_warning = trio.current_time() + WARN_INTERVAL
        suspended = (await self._redis.perform(limits.list_overrides(self._keys))).suspended
        if not suspended:
            return
        counts = await self._redis.perform_all([jobs.read_hash(keys.limited_counts) for keys in self._queues])
        blocking = {unescape_word(task) for queue_counts in counts for task in queue_counts}
        for task in sorted((blocking & suspended.keys()) - self._warned_tasks):
            self._log.event("burst:blocked", "warning", task=task, suspended=suspended[task].why, why=_WAITS)
            self._warned_tasks.add(task)


_WAITS = "its task is suspended and has jobs: this burst ends when they have run, after celery5 task resume"
