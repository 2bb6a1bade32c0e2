"""Messages store: the messages that a Publisher has accepted for one broker and not published yet.

They are in the backlog. When that cannot be written, new messages go to a bounded list in memory, and the
sender learns that they are not durable. The list is published first, since the process may go down with it. So
only these messages break the order of a queue: they overtake what was written before.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import trio

from celery5.errors import BacklogFull
from celery5.logs.log import Log
from celery5.protocol.health.metrics import MetricFamily, make_counter, make_gauge
from celery5.protocol.publisher.frames import JobMessage, get_due_time
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue
from celery5.sending.messages_backlog import (
    MAX_READ_BYTES,
    MAX_READ_MESSAGES,
    MemoryBacklog,
    MessagesBacklog,
    MessageWithDue,
    StoredMessage,
    get_total_size,
)

MAX_MEMORY_MESSAGES = 1000
"""The most messages on the list in memory."""
MAX_MEMORY_BYTES = 64 * 1024 * 1024
RETRY_DELAY = 1.0
"""Seconds between attempts to delete published messages while the backlog cannot be written."""
FINAL_DELETE_LIMIT = 5.0
"""Seconds that deleting may take at the end. What remains is published again, which does no harm."""
DELETE_BATCH = 5000
"""Messages that are deleted in one step."""


class MessagesStore:
    """The messages that wait for one broker.

    `waiting` holds the queues that may have messages, longest waiting first.
    """

    def __init__(self, *, broker: str, backlog: MessagesBacklog, log: Log) -> None:
        self.broker = broker
        self.waiting_queues: OrderedDict[str, None] = OrderedDict()
        self.received = 0
        self.published = 0
        self._backlog = backlog
        self._log = log
        self._in_memory = BoundedQueue[MessageWithDue](BacklogCapacity(MAX_MEMORY_MESSAGES, MAX_MEMORY_BYTES))
        self._done: dict[str, int] = {}
        self._gone: list[int] = []
        self._news = trio.Event()
        self._to_forget = trio.Event()
        self._trouble = ""

    @property
    def size(self) -> int:
        """Return how many messages wait or are not deleted yet."""
        return self._backlog.size + len(self._in_memory)

    @property
    def is_durable(self) -> bool:
        """Return whether waiting messages survive this process."""
        return not self._in_memory and not isinstance(self._backlog, MemoryBacklog)

    @property
    def in_memory(self) -> int:
        """Return how many messages are on the list in memory."""
        return len(self._in_memory)

    @property
    def problem(self) -> str:
        """Return why the last write to the backlog failed; '' when it succeeded."""
        return self._trouble

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the backlog open until cancelled."""
        async with trio.open_nursery() as nursery:
            backlog = trio.CancelScope()
            await nursery.start(self._keep_open, backlog)
            await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
            backlog.shield = True  # closed only after all published messages are deleted
            try:
                for queue in await self._backlog.queues():
                    self.add_waiting_queue(queue)
                task_status.started()
                await self._forget_for_ever()
            finally:
                with trio.move_on_after(FINAL_DELETE_LIMIT, shield=True):
                    await self._forget()
                backlog.cancel()

    async def _keep_open(self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await self._backlog.run(task_status=task_status)

    # ---- storing

    async def put(self, parcels: Sequence[JobMessage]) -> bool:
        """Store these messages, all or none; return whether durably, which is False on the list in memory.

        Raises BacklogFull.
        """
        now = int(time.time() * 1000)
        pairs = [(each, get_due_time(each, now)) for each in parcels]
        firmly = True
        try:
            await self._backlog.put(pairs)
        except BacklogFull:
            raise
        except trio.Cancelled:  # it may be written after all: readers wait for that
            for queue in dict.fromkeys(each.queue for each in parcels):
                self.add_waiting_queue(queue)
            raise
        except Exception as error:  # an error of the disk, or of the user's own backlog
            self._failed(error)
            self._put_first(pairs, error)
            firmly = False
        else:
            if self._trouble:
                self._log.event("backlog:write-recovered", broker=self.broker, hint="it can be written again")
            self._trouble = ""
        self.received += len(parcels)
        for queue in dict.fromkeys(each.queue for each in parcels):
            self.add_waiting_queue(queue)
        return firmly

    def _put_first(self, pairs: Sequence[MessageWithDue], error: Exception) -> None:
        new = [pair for pair in pairs if not self._in_memory.has_id(pair[0].queue, pair[0].id)]
        if not self._in_memory.capacity.has_space(len(new), get_total_size(new)):
            raise BacklogFull(
                f"the backlog cannot be written ({error}), and there is no room in memory for {len(new)} more: "
                f"{len(self._in_memory)} of at most {MAX_MEMORY_MESSAGES} wait there; none of these was kept"
            ) from error
        for message, due in new:
            self._in_memory.add(message.queue, message.id, len(message.message), (message, due))

    def _failed(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if why != self._trouble:
            self._log.event(
                "backlog:write-failed",
                "error",
                broker=self.broker,
                why=why,
                hint="what comes is kept in memory meanwhile",
            )
        self._trouble = why

    def add_waiting_queue(self, queue: str) -> None:
        """Mark a queue as one that may have messages."""
        self.waiting_queues.setdefault(queue)
        self.recheck()

    def recheck(self) -> None:
        """Wake the tasks that wait for queues."""
        news, self._news = self._news, trio.Event()
        news.set()

    async def wait_for_queues(self) -> None:
        """Return when the waiting queues should be checked."""
        await self._news.wait()

    # ---- reading and deleting

    async def read_first(self, queue: str) -> Sequence[StoredMessage]:
        """Return the first messages of a queue, those in memory first. They stay until `mark_published`."""
        in_memory = self._in_memory.first(queue, limit=MAX_READ_MESSAGES, max_bytes=MAX_READ_BYTES)
        if in_memory:  # negative numbers, to tell them from the backlog's
            return [StoredMessage(-item.number, *item.value) for item in in_memory]
        return await self._backlog.first(queue, self._done.get(queue, 0))

    def mark_published(self, queue: str, kept: Sequence[StoredMessage]) -> None:
        """Mark these messages as published: they are not returned again, and will be deleted."""
        self.published += len(kept)
        self._in_memory.remove([-each.number for each in kept if each.number < 0])
        numbers = [each.number for each in kept if each.number > 0]
        if numbers:
            self._done[queue] = numbers[-1]
            self._gone += numbers
            self._to_forget.set()

    async def _forget_for_ever(self) -> None:
        while True:
            await self._to_forget.wait()
            self._to_forget = trio.Event()
            if not await self._forget():
                await trio.sleep(RETRY_DELAY)
                self._to_forget.set()

    async def _forget(self) -> bool:
        while self._gone:
            part = self._gone[:DELETE_BATCH]
            try:
                await self._backlog.gone(part)
            except Exception as error:  # it would be published again after a restart, which does no harm
                self._failed(error)
                return False
            del self._gone[: len(part)]
        return True

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if the backlog cannot be written."""
        return {f"backlog {self.broker}": self._trouble}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers of messages received, published and waiting."""
        of = {"broker": self.broker}
        yield make_counter(
            "celery5_publisher_received_total", "Messages taken from producers.", (float(self.received), of)
        )
        yield make_counter(
            "celery5_publisher_published_total", "Messages published.", (float(self.published), of)
        )
        yield make_gauge(
            "celery5_publisher_backlog_messages", "Messages in the backlog.", (float(self.size), of)
        )
        yield make_gauge(
            "celery5_publisher_memory_messages",
            "Messages in memory, because the backlog could not be written.",
            (float(self.in_memory), of),
        )
