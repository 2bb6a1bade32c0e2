"""Internal queues: the Internal Tasks Queues, one for each kind of task, and the Internal Results Queue (C51, C52).

Floor: services. Reads: nothing. Writes: nothing.

Plain double-ended queues with parked tasks instead of memory channels: a job is handed straight to the executor that
waits for it, which costs a third of a channel. Both are bounded by the ledger: no job is read that it has no room for.
"""

from collections import deque
from typing import Generic, TypeVar

import outcome
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from celery5.protocol.delivery import Delivery, Words

T = TypeVar("T")


class HandOver(Generic[T]):
    """A queue whose takers park until something is put. The taker that parked last is served first: its memory is warm."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._parked: list[Task] = []

    def __len__(self) -> int:
        return len(self.items)

    @property
    def parked(self) -> int:
        """How many takers wait."""
        return len(self._parked)

    def put(self, item: T) -> None:
        """Hand `item` to a taker that waits, or keep it. Never blocks."""
        if self._parked:
            trio.lowlevel.reschedule(self._parked.pop(), outcome.Value(item))
        else:
            self.items.append(item)

    async def take(self) -> T:
        """The oldest item, at once when there is one (with no checkpoint), else the next that is put."""
        if self.items:
            return self.items.popleft()
        task = trio.lowlevel.current_task()
        self._parked.append(task)

        def abort(_raise: RaiseCancelT) -> Abort:
            self._parked.remove(task)
            return Abort.SUCCEEDED

        item: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return item

    def drain(self, limit: int | None = None) -> list[T]:
        """Take the oldest items, up to `limit`, without waiting."""
        count = len(self.items) if limit is None else min(limit, len(self.items))
        return [self.items.popleft() for _ in range(count)]


class TasksQueue(HandOver[Delivery]):
    """Jobs of one kind that wait in this worker for an executor."""


class ResultsQueue(HandOver[tuple[Delivery, Words]]):
    """Outcomes that wait to be settled."""
