"""Messages store: the messages that a Publisher has accepted for one broker and not published yet.

They are in the backlog. When that cannot be written, new messages go to a bounded queue in memory, and the
sender learns that they are not durable. They are published first, since they are lost if the process dies. So
only these messages break the order of a queue: they overtake what was written before.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import trio

from celery5.errors import BacklogFull
from celery5.logs.log import Log
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge
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
"""The most messages in memory while the backlog cannot be written."""
MAX_MEMORY_BYTES = 64 * 1024 * 1024
RETRY_DELAY = 1.0
"""Seconds between attempts to delete published messages while the backlog cannot be written."""
FINAL_DELETE_LIMIT = 5.0
"""Seconds that deleting may take at the end. What remains is published again, which does no harm."""
DELETE_BATCH = 5000
"""Messages that are deleted in one step."""


class MessagesStore:
    """The messages that wait for one broker, and which of their queues are being published."""

    def __init__(self, *, broker: str, backlog: MessagesBacklog, log: Log) -> None:
        self.broker = broker
        self.received = 0
        self.published = 0
        self._waiting_queues: dict[str, None] = {}  # those that may have messages, longest waiting first
        self._taken_queues: set[str] = set()  # those that are being published, or pause after a failure
        self._backlog = backlog
        self._log = log
        self._in_memory = BoundedQueue[MessageWithDue](BacklogCapacity(MAX_MEMORY_MESSAGES, MAX_MEMORY_BYTES))
        self._last_published: dict[str, int] = {}  # the number of the last published message of each queue
        self._to_delete: list[int] = []
        self._queues_changed = trio.Event()
        self._delete_requested = trio.Event()
        self._problem = ""

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
        """Return how many messages are in memory because the backlog could not be written."""
        return len(self._in_memory)

    @property
    def problem(self) -> str:
        """Return why the last write to the backlog failed; '' when it succeeded."""
        return self._problem

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the backlog open until cancelled."""
        async with trio.open_nursery() as nursery:
            backlog = trio.CancelScope()
            await nursery.start(self._keep_open, backlog)
            await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
            backlog.shield = True  # closed only after all published messages are deleted
            try:
                for queue in (*self._in_memory.queues, *await self._backlog.queues()):
                    self.add_waiting_queue(queue)
                task_status.started()
                await self._keep_deleting()
            finally:
                with trio.move_on_after(FINAL_DELETE_LIMIT, shield=True):
                    await self._delete_published()
                backlog.cancel()

    async def _keep_open(self, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await self._backlog.run(task_status=task_status)

    # ---- storing

    async def put(self, messages: Sequence[JobMessage]) -> bool:
        """Store these messages, all or none; return whether they are in the backlog, and not only in memory.

        Raises BacklogFull.
        """
        now = int(time.time() * 1000)
        pairs = [(message, get_due_time(message, now)) for message in messages]
        queues = dict.fromkeys(message.queue for message in messages)
        in_backlog = True
        try:
            await self._backlog.put(pairs)
        except BacklogFull:
            raise
        except trio.Cancelled:  # it may be written after all: readers wait for that
            for queue in queues:
                self.add_waiting_queue(queue)
            raise
        except Exception as error:  # an error of the disk, or of the user's own backlog
            self._record_write_error(error)
            self._put_in_memory(pairs, error)
            in_backlog = False
        else:
            if self._problem:
                self._log.event("backlog:write-recovered", broker=self.broker, hint="it can be written again")
            self._problem = ""
        self.received += len(messages)
        for queue in queues:
            self.add_waiting_queue(queue)
        return in_backlog

    def _put_in_memory(self, pairs: Sequence[MessageWithDue], error: Exception) -> None:
        new = [pair for pair in pairs if not self._in_memory.has_id(pair[0].queue, pair[0].id)]
        if not self._in_memory.capacity.has_space(len(new), get_total_size(new)):
            raise BacklogFull(
                f"the backlog cannot be written ({error}), and there is no room in memory for {len(new)} more: "
                f"{len(self._in_memory)} of at most {MAX_MEMORY_MESSAGES} wait there; none of these was kept"
            ) from error
        for message, due in new:
            self._in_memory.add(message.queue, message.id, len(message.message), (message, due))

    def _record_write_error(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if why != self._problem:
            self._log.event(
                "backlog:write-failed",
                "error",
                broker=self.broker,
                why=why,
                hint="what comes is kept in memory meanwhile",
            )
        self._problem = why

    # ---- queues

    def add_waiting_queue(self, queue: str) -> None:
        """Mark a queue as one that may have messages."""
        self._waiting_queues.setdefault(queue)
        self._wake()

    def find_free_queue(self) -> str | None:
        """Return the queue that has waited longest of those that nobody has taken."""
        return next((queue for queue in self._waiting_queues if queue not in self._taken_queues), None)

    def take_queue(self, queue: str) -> None:
        """Reserve a waiting queue: until it is released, `find_free_queue` does not return it."""
        del self._waiting_queues[queue]
        self._taken_queues.add(queue)

    def release_queue(self, queue: str) -> None:
        """End the reservation of a queue. It waits again only when it was added again."""
        self._taken_queues.discard(queue)
        self._wake()

    @property
    def has_work(self) -> bool:
        """Return whether a queue may have messages or is taken."""
        return bool(self._waiting_queues or self._taken_queues)

    async def wait_for_queues(self) -> None:
        """Return when a queue was added or released."""
        await self._queues_changed.wait()

    def _wake(self) -> None:
        changed, self._queues_changed = self._queues_changed, trio.Event()
        changed.set()

    # ---- reading and deleting

    async def read_first(self, queue: str) -> Sequence[StoredMessage]:
        """Return the first messages of a queue, those in memory first. They stay until `mark_published`."""
        in_memory = self._in_memory.first(queue, limit=MAX_READ_MESSAGES, max_bytes=MAX_READ_BYTES)
        if in_memory:  # negative numbers, to tell them from the backlog's
            return [StoredMessage(-item.number, *item.value) for item in in_memory]
        return await self._backlog.first(queue, self._last_published.get(queue, 0))

    def mark_published(self, queue: str, messages: Sequence[StoredMessage]) -> None:
        """Mark these messages as published: they are not returned again, and will be deleted."""
        self.published += len(messages)
        self._in_memory.remove([-message.number for message in messages if message.number < 0])
        numbers = [message.number for message in messages if message.number > 0]
        if numbers:
            self._last_published[queue] = numbers[-1]
            self._to_delete += numbers
            self._delete_requested.set()

    async def _keep_deleting(self) -> None:
        while True:
            await self._delete_requested.wait()
            self._delete_requested = trio.Event()
            if not await self._delete_published():
                await trio.sleep(RETRY_DELAY)
                self._delete_requested.set()

    async def _delete_published(self) -> bool:
        """Delete what is published from the backlog; return False when it cannot be written."""
        while self._to_delete:
            part = self._to_delete[:DELETE_BATCH]
            try:
                await self._backlog.gone(part)
            except Exception as error:  # it would be published again after a restart, which does no harm
                self._record_write_error(error)
                return False
            del self._to_delete[: len(part)]
        self._last_published.clear()  # nothing published is left to be passed over; queues may be any number
        return True

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if the backlog cannot be written."""
        return {f"backlog {self.broker}": self._problem}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the numbers of messages received, published and waiting."""
        labels = {"broker": self.broker}
        yield make_counter(
            "celery5_publisher_received_total",
            "Messages received from producers.",
            (float(self.received), labels),
        )
        yield make_counter(
            "celery5_publisher_published_total", "Messages published.", (float(self.published), labels)
        )
        yield make_gauge(
            "celery5_publisher_backlog_messages", "Messages in the backlog.", (float(self.size), labels)
        )
        yield make_gauge(
            "celery5_publisher_memory_messages",
            "Messages in memory, because the backlog could not be written.",
            (float(self.in_memory), labels),
        )
