"""Internal queues: the Internal Tasks Queues, one for each kind of task, and the Internal Results Queue (C51, C52).

Floor: services. Reads: nothing. Writes: nothing.

Plain double-ended queues with parked tasks instead of memory channels, which cost three times as much. Both are
bounded by the ledger: no job is read that it has no room for.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from celery5.protocol.delivery import Delivery, Settlement

T = TypeVar("T")


class HandoffQueue(Generic[T]):
    """A queue whose takers park until something is put.

    One taker is woken at a time, and it wakes the next one if something is left: a taker whose jobs never wait takes
    them all by itself, one that waits is followed by others at once. The taker that parked last is woken first, since
    its memory is warm.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._parked: list[Task] = []
        self._waking = False

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> None:
        """Keep `item` for a taker. Never blocks."""
        self.items.append(item)
        if not self._waking:
            self._wake_one()

    def insert_at(self, count: int, item: T) -> None:
        """Keep `item` for a taker, behind so many others. Never blocks."""
        self.items.insert(count, item)
        if not self._waking:
            self._wake_one()

    async def take(self) -> T:
        """The oldest item, at once when there is one (with no checkpoint), else the next that is put."""
        while not self.items:
            await self._park()
        item = self.items.popleft()
        if self.items and not self._waking:
            self._wake_one()
        return item

    async def _park(self) -> None:
        task = trio.lowlevel.current_task()
        self._parked.append(task)

        def abort(_raise: RaiseCancelT) -> Abort:
            self._parked.remove(task)
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._waking = False

    def _wake_one(self) -> None:
        if self._parked:
            self._waking = True
            trio.lowlevel.reschedule(self._parked.pop())

    def remove(self, item: T) -> bool:
        """Take out one that waits. False when it is not here."""
        if item not in self.items:
            return False
        self.items.remove(item)
        return True

    def drain(self, limit: int | None = None) -> list[T]:
        """Take the oldest items, up to `limit`, without waiting."""
        count = len(self.items) if limit is None else min(limit, len(self.items))
        return [self.items.popleft() for _ in range(count)]


class TasksQueue(HandoffQueue[Delivery]):
    """Jobs of one kind that wait in this worker for an executor."""

    def __init__(self) -> None:
        super().__init__()
        self.surplus_executors = 0

    async def take_next(self) -> Delivery | None:
        """`take`, for an executor. None says that there is one executor too many, and that it is this one."""
        while not self.surplus_executors:
            items = self.items
            if items:
                item = items.popleft()
                if items and not self._waking:
                    self._wake_one()
                return item
            await self._park()
        self.surplus_executors -= 1
        if self.items and not self._waking:
            self._wake_one()  # it was perhaps woken for what lies here
        return None

    def remove_executors(self, count: int) -> None:
        """So many executors are to go: those that wait do so at once, others after their job."""
        self.surplus_executors += count
        for _ in range(min(count, len(self._parked))):
            trio.lowlevel.reschedule(self._parked.pop())

    def set_weights(self, weight: Callable[[Delivery], float]) -> None:
        """What weights its jobs have, should there be other queues to share slots with."""

    def reset_executors(self) -> None:
        """All executors are gone."""

    def add_executors(self, count: int) -> int:
        """So many more are wanted; those that have not gone yet stay. Gives how many must come anew."""
        kept = min(count, self.surplus_executors)
        self.surplus_executors -= kept
        return count - kept


class ResultsQueue(HandoffQueue[tuple[Delivery, Settlement]]):
    """Outcomes that wait to be settled. `ahead` is told of one that finds the publisher waiting, before that wakes."""

    def __init__(self) -> None:
        super().__init__()
        self.before_wake: Callable[[Delivery, Settlement], None] | None = None

    def _wake_one(self) -> None:
        if self._parked:
            super()._wake_one()
            if self.before_wake is not None:
                self.before_wake(*self.items[0])
