"""Pauses: which queues this worker does not read: those that are paused for all workers, and those that it alone was
told to leave.

That set outlives workers: one that begins, or whose connection was away, asks for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import trio

from celery5.broker.calls import commands
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import CommandRefused
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PAUSE_QUEUE, RESUME_QUEUE, CommandDefinition
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.worker.consumer import Consumer

RETRY_INTERVAL = 1.0
"""Seconds between attempts while Redis is unreachable, or another program has spoilt the key."""

T = TypeVar("T")


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
        self._queues = tuple(each.queue for each in consumed)
        self._consumer = consumer
        self._here = paused
        self._everywhere: set[str] = set()
        self._news = trio.Event()
        self._log = log
        self._outages = OutageLog(log, "queue:pauses-read-failed")

    def list_states(self) -> dict[str, str]:
        """Each queue: `read`, `paused`, or `paused here`, by this worker alone."""
        return {name: self._state(name) for name in self._queues}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Know what is paused for all, until cancelled. Nothing is asked for unless there may be news."""
        await self._look()
        task_status.started()
        while True:
            await self._news.wait()
            self._news = trio.Event()
            await retry_until_available(self._look, self._outages, RETRY_INTERVAL, even_refused=True)

    def recheck(self) -> None:
        """The connection was away: something may have been missed."""
        self._news.set()

    async def pause(self, parameters: Mapping[str, Any]) -> object:
        """The command `pause-queue`: read `queue` no more, until `resume`; what was read of it is run. It is paused for
        all workers, also those that begin later, unless `here` is true: then for this process. Raises
        CommandRefused."""
        queue, here = self._asked(PAUSE_QUEUE, parameters)
        if here:
            self._here.add(queue)
        else:
            await self._redis.perform(commands.pause_queue(self._keys, queue))
            self._everywhere.add(queue)
        return self._applied(queue)

    async def resume(self, parameters: Mapping[str, Any]) -> object:
        """The command `resume-queue`: read `queue` again. Without `here` nothing keeps any worker from it; with it only
        what this process was told is taken back. Raises CommandRefused."""
        queue, here = self._asked(RESUME_QUEUE, parameters)
        if not here:
            await self._redis.perform(commands.resume_queue(self._keys, queue))
            self._everywhere.discard(queue)
        self._here.discard(queue)
        return self._applied(queue)

    async def _look(self) -> None:
        known, self._everywhere = (
            self._everywhere,
            await self._redis.perform(commands.list_paused_queues(self._keys)),
        )
        news = [each for each in self._queues if each in self._everywhere and each not in known]
        if news:
            self._log.event("queue:paused", "warning", queues=news, why=_PAUSED)
        for queue in self._queues:
            self._apply(queue)

    def _applied(self, queue: str) -> object:
        self._apply(queue)
        self._log.event("queue:changed", queue=queue, state=self._state(queue))
        return {"queue": queue, "state": self._state(queue)}

    def _apply(self, queue: str) -> None:
        pausing_it = queue in self._here or queue in self._everywhere
        if pausing_it and queue not in self._consumer.paused_queues:
            self._consumer.pause(queue)
        elif not pausing_it and queue in self._consumer.paused_queues:
            self._consumer.resume(queue)

    def _state(self, queue: str) -> str:
        if queue in self._everywhere:
            return "paused"
        return "paused here" if queue in self._here else "read"

    def _asked(self, definition: CommandDefinition, parameters: Mapping[str, Any]) -> tuple[str, bool]:
        definition.check_parameters(parameters)
        queue, here = parameters.get("queue"), parameters.get("here", False)
        if not isinstance(here, bool):
            raise CommandRefused(f"parameter 'here' is {here!r}: give true or false")
        if queue not in self._queues:
            raise CommandRefused(
                f"this worker does not read queue {queue!r}; its queues: {', '.join(self._queues)}"
            )
        return str(queue), here


_PAUSED = "paused for all workers, until celery5 worker resume-queue: this one does not read them"
