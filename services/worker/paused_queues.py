"""Keep track of the queues that this worker does not read: those paused for all workers, and those paused for it alone.

Redis stores which queues are paused for all. A worker reads that at its start and after a lost connection.
"""

from collections.abc import Sequence

import trio

from celery5.broker.calls import commands
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import NotConcerned
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import QueueParameters
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.worker.consumer import Consumer


class PausedQueues:
    """The queues that one worker does not read."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        keys: Keys,
        consumed: Sequence[QueueKeys],
        consumer: Consumer,
        paused: set[str],
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._shards: dict[str, list[str]] = {}
        for shard in consumed:
            self._shards.setdefault(get_queue_of_shard(shard.queue), []).append(shard.queue)
        self._queues = tuple(self._shards)
        self._consumer = consumer
        self._paused_for_this = paused
        self._paused_for_all: set[str] = set()
        self._may_have_changed = trio.Event()
        self._log = log
        self._outages = OutageLog(log, "queue:pauses-read-failed")

    def list_states(self) -> dict[str, str]:
        """Return the state of each queue: `read`, `paused`, or `paused here`, by this worker alone."""
        return {name: self._state(name) for name in self._queues}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow which queues are paused for all, until cancelled. Redis is read only when that may have changed."""
        await self._read_paused()
        task_status.started()
        while True:
            await self._may_have_changed.wait()
            self._may_have_changed = trio.Event()
            await retry_until_available(self._read_paused, self._outages, even_refused=True)

    def recheck(self) -> None:
        """Read the paused queues: a change may have been missed while the connection was down."""
        self._may_have_changed.set()

    async def pause(self, parameters: QueueParameters) -> object:
        """Run the command `pause-queue`: stop reading `queue`; jobs that were read already still run.

        It is paused for all workers, also later ones; with `here`, for this process alone. Raises CommandRefused.
        """
        queue = parameters.queue
        self._check(queue)
        if parameters.here:
            self._paused_for_this.add(queue)
        else:
            await self._redis.perform(commands.pause_queue(self._keys, queue))
            self._paused_for_all.add(queue)
        return self._apply_command(queue)

    async def resume(self, parameters: QueueParameters) -> object:
        """Run the command `resume-queue`: read `queue` again.

        It is resumed for all workers and for this process; with `here`, for this process alone. Raises CommandRefused.
        """
        queue = parameters.queue
        self._check(queue)
        if not parameters.here:
            await self._redis.perform(commands.resume_queue(self._keys, queue))
            self._paused_for_all.discard(queue)
        self._paused_for_this.discard(queue)
        return self._apply_command(queue)

    async def _read_paused(self) -> None:
        paused = await self._redis.perform(commands.list_paused_queues(self._keys))
        before, self._paused_for_all = self._paused_for_all, paused
        new = [queue for queue in self._queues if queue in paused and queue not in before]
        if new:
            self._log.event("queue:paused", "warning", queues=new, why=_PAUSED)
        for queue in self._queues:
            self._apply(queue)

    def _apply_command(self, queue: str) -> object:
        self._apply(queue)
        self._log.event("queue:changed", queue=queue, state=self._state(queue))
        return {"queue": queue, "state": self._state(queue)}

    def _apply(self, queue: str) -> None:
        is_paused = queue in self._paused_for_this or queue in self._paused_for_all
        for shard in self._shards[queue]:
            if is_paused and shard not in self._consumer.paused_queues:
                self._consumer.pause(shard)
            elif not is_paused and shard in self._consumer.paused_queues:
                self._consumer.resume(shard)

    def _state(self, queue: str) -> str:
        if queue in self._paused_for_all:
            return "paused"
        return "paused here" if queue in self._paused_for_this else "read"

    def _check(self, queue: str) -> None:
        if queue not in self._queues:
            raise NotConcerned(
                f"this worker does not read queue {queue!r}; its queues: {', '.join(self._queues)}"
            )


_PAUSED = "paused for all workers, until celery5 queue resume: this one does not read them"
