"""Bounded queue: messages in memory that wait to be published, in order for each queue, limited in number and bytes."""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from celery5.errors import BacklogFull

T = TypeVar("T")


class BacklogCapacity(msgspec.Struct):
    """How much a backlog takes, and how much is in it."""

    max_messages: int
    max_bytes: float = math.inf
    used_messages: int = 0
    used_bytes: int = 0

    def has_space(self, messages: int, size: int) -> bool:
        """Return whether this many more messages of this many bytes in all fit."""
        return self.used_messages + messages <= self.max_messages and self.used_bytes + size <= self.max_bytes

    def check(self, messages: int, size: int) -> None:
        """Raise BacklogFull when this many more do not fit."""
        if not self.has_space(messages, size):
            raise BacklogFull(
                f"no room for {messages} more: the backlog has {self.used_messages} of at most "
                f"{self.max_messages} messages, and "
                f"{self.used_bytes} of at most {self.max_bytes} bytes; none of these was kept, send them later"
            )

    def resize(self, max_messages: int, max_bytes: float = math.inf) -> None:
        """Take this many messages and bytes at most from now on."""
        self.max_messages = max_messages
        self.max_bytes = max_bytes

    def adjust_usage(self, count: int, size: int) -> None:
        """Count so much more as used, or less."""
        self.used_messages += count
        self.used_bytes += size


class QueuedItem(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """One entry of a BoundedQueue."""

    # Grows in the order in which items were added, from 1, and is never used again.
    number: int
    queue: str
    id: str
    size: int
    value: T


class BoundedQueue(Generic[T]):
    """What waits for several queues, in order for each. Not safe to use from several threads at a time.

    Adding does not check the capacity: whoever adds several items checks once for all of them, so that all or none
    are added.
    """

    def __init__(self, capacity: BacklogCapacity) -> None:
        self.capacity = capacity
        self._number = 0
        self._queues: dict[str, dict[int, QueuedItem[T]]] = {}
        self._queue_of: dict[int, str] = {}
        self._ids: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._queue_of)

    @property
    def queues(self) -> list[str]:
        """The queues for which something waits."""
        return list(self._queues)

    def has_queue(self, queue: str) -> bool:
        """Return whether something waits for a queue."""
        return queue in self._queues

    def has_id(self, queue: str, item_id: str) -> bool:
        """Return whether the item of this id waits for a queue."""
        return (queue, item_id) in self._ids

    def add(self, queue: str, item_id: str, size: int, value: T) -> None:
        """Add an item of this many bytes, unless one of its id waits for the same queue already."""
        if (queue, item_id) in self._ids:
            return
        self._number += 1
        self._ids.add((queue, item_id))
        self._queue_of[self._number] = queue
        self._queues.setdefault(queue, {})[self._number] = QueuedItem(
            self._number, queue, item_id, size, value
        )
        self.capacity.adjust_usage(1, size)

    def first(
        self, queue: str, *, limit: int, max_bytes: float = math.inf, after: int = 0
    ) -> Sequence[QueuedItem[T]]:
        """Return the first items of a queue whose numbers are above `after`, in order; one at least if there is any."""
        found, size = list[QueuedItem[T]](), 0
        waiting = self._queues.get(queue, {}).values()
        for item in islice((item for item in waiting if item.number > after), limit):
            size += item.size
            if found and size > max_bytes:
                break
            found.append(item)
        return found

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove the items with these numbers. Those that are not there are passed over."""
        for number in numbers:
            queue = self._queue_of.pop(number, None)
            if queue is None:
                continue
            item = self._queues[queue].pop(number)
            self._ids.discard((queue, item.id))
            self.capacity.adjust_usage(-1, -item.size)
            if not self._queues[queue]:
                del self._queues[queue]
