"""Shared queues: Internal Tasks Queues of several lives in one process, which together run no more than one would.

A worker of several brokers has a life for each, with executors of its own. Each job of theirs needs a slot of the
process, and who was turned away is next: a broker that is full of jobs does not keep another's waiting. While jobs have
weights, since some are preferred, slots go by these. With one broker there is nothing of this.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from celery5.protocol.job.delivery import Delivery, Settlement
from celery5.protocol.job.job import new_id
from celery5.protocol.scaling.prioritisation import MAX_WEIGHT

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
    """Outcomes that wait to be settled."""

    def __init__(self) -> None:
        super().__init__()
        self._on_first: Callable[[Delivery, Settlement], None] | None = None

    async def take_first(
        self, on_first: Callable[[Delivery, Settlement], None]
    ) -> tuple[Delivery, Settlement]:
        """Return the oldest outcome. If it must be waited for, call `on_first` with it as it is put, before we wake."""
        self._on_first = on_first
        try:
            return await self.take()
        finally:
            self._on_first = None

    def _wake_one(self) -> None:
        if self._parked:
            super()._wake_one()
            if self._on_first is not None:
                self._on_first(*self.items[0])


def _alike(_job: Delivery) -> float:
    return MAX_WEIGHT


class _Pool:
    """The slots of one kind: as many as the life that has most executors of it."""

    def __init__(self) -> None:
        self.queues: list[SharedTasksQueue] = []
        self.taken = 0
        self.now = 0.0
        self._turned_away: deque[SharedTasksQueue] = deque()

    def grant(self, queue: "SharedTasksQueue") -> bool:
        """Whether an executor of `queue` may take a job."""
        if queue.reserved_slots:
            queue.reserved_slots -= 1
            return True
        if self.taken < max(each.executor_count for each in self.queues):
            self._take(queue)
            return True
        if queue not in self._turned_away:
            self._turned_away.append(queue)
        return False

    def give_back(self, slots: int, by: "SharedTasksQueue | None" = None) -> None:
        """So many slots are free. Where jobs have weights one may be for whoever gives it back, and goes on (`by`)."""
        self.taken -= slots
        for _ in range(slots):
            if any(each.get_next_weight() < MAX_WEIGHT for each in self.queues):
                self._give_by_weight(by)
            else:
                self._give_in_turn()

    def _give_in_turn(self) -> None:
        """To those who were turned away first."""
        while self._turned_away:
            queue = self._turned_away.popleft()
            if queue.items and queue.wake_executor():
                self._reserve(queue)
                break

    def _give_by_weight(self, by: "SharedTasksQueue | None") -> None:
        """To whoever has jobs and whose turn is the earliest. Who was idle has saved nothing up."""
        rivals = [each for each in self.queues if len(each.items) > each.reserved_slots]
        for queue in sorted(rivals, key=lambda each: max(each.next_turn, self.now)):
            if queue is by or queue.wake_executor():
                self._reserve(queue)
                break

    def _reserve(self, queue: "SharedTasksQueue") -> None:
        queue.reserved_slots += 1
        self._take(queue)

    def _take(self, queue: "SharedTasksQueue") -> None:
        """It has a slot; the lighter its next job, the longer until its next turn."""
        self.taken += 1
        self.now = max(self.now, queue.next_turn)
        queue.next_turn = self.now + MAX_WEIGHT / queue.get_next_weight()

    def forget(self, queue: "SharedTasksQueue") -> None:
        """A life has ended."""
        if queue in self.queues:
            self.queues.remove(queue)
        if queue in self._turned_away:
            self._turned_away.remove(queue)


class SharedTasksQueue(TasksQueue):
    """Jobs of one kind that wait in one life for an executor and a slot of the process."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self._pool = pool
        self._at_work: set[Task] = set()
        self._weight: Callable[[Delivery], float] = _alike
        self.executor_count = 0
        """How many executors it has."""
        self.reserved_slots = 0
        """Slots that are kept for it, until one of its executors wakes up."""
        self.next_turn = 0.0
        """When it is its turn again, by weights: where that of another one is earlier, the other one is first."""

    def set_weights(self, weight: Callable[[Delivery], float]) -> None:
        """As TasksQueue.weigh."""
        self._weight = weight

    def get_next_weight(self) -> float:
        """That of its next job."""
        return self._weight(self.items[0]) if self.items else MAX_WEIGHT

    async def take_next(self) -> Delivery | None:
        """As TasksQueue.next; whoever asks has ended its former job."""
        me = trio.lowlevel.current_task()
        if me in self._at_work:
            self._at_work.discard(me)
            self._pool.give_back(1, None if self.surplus_executors else self)
        while not self.surplus_executors:
            if not self.items and self.reserved_slots:
                unused, self.reserved_slots = self.reserved_slots, 0
                self._pool.give_back(unused)
            if self.items and self._pool.grant(self):
                self._at_work.add(me)
                item = self.items.popleft()
                if self.items:
                    self.wake_executor()
                return item
            await self._park()
        self.surplus_executors -= 1
        if self.items:
            self.wake_executor()
        return None

    def wake_executor(self) -> bool:
        """Wake an executor; whether one is on its way."""
        if not self._waking:
            self._wake_one()
        return self._waking

    def remove_executors(self, count: int) -> None:
        """As TasksQueue.dismiss."""
        self.executor_count -= count
        super().remove_executors(count)

    def add_executors(self, count: int) -> int:
        """As TasksQueue.keep."""
        if self not in self._pool.queues:
            self._pool.queues.append(self)
        self.executor_count += count
        return super().add_executors(count)

    def reset_executors(self) -> None:
        """All executors are gone, and what they had."""
        freed, self.reserved_slots, self.executor_count = len(self._at_work) + self.reserved_slots, 0, 0
        self._at_work.clear()
        self._pool.forget(self)
        self._pool.give_back(freed)


class SharedSlots:
    """The slots of one process, by kind. `process` is a name that no other one's have."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.process = new_id()
        self._pools = {kind: _Pool() for kind in kinds}

    def make_queues(self) -> dict[str, TasksQueue]:
        """Queues for another life."""
        return {kind: SharedTasksQueue(pool) for kind, pool in self._pools.items()}
