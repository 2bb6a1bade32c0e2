"""Shared queues: Internal Tasks Queues of several lives in one process, which together run no more than one would.

Floor: services. Reads: nothing. Writes: nothing.

A worker of several brokers has a life for each, with executors of its own. Each job of theirs needs a slot of the
process, and who was turned away is next: a broker that is full of jobs does not keep another's waiting. With one broker
there is nothing of this.
"""

from collections import deque
from collections.abc import Iterable

import trio
from trio.lowlevel import Task

from celery5.protocol.delivery import Delivery
from celery5.protocol.job import new_id
from celery5.services.internal_queues import TasksQueue


class _Pool:
    """The slots of one kind: as many as the life that has most executors of it."""

    def __init__(self) -> None:
        self.queues: list[SharedTasksQueue] = []
        self.taken = 0
        self._turned_away: deque[SharedTasksQueue] = deque()

    def grant(self, queue: "SharedTasksQueue") -> bool:
        """Whether an executor of `queue` may take a job."""
        if queue.reserved:
            queue.reserved -= 1
            return True
        if self.taken < max(each.crew for each in self.queues):
            self.taken += 1
            return True
        if queue not in self._turned_away:
            self._turned_away.append(queue)
        return False

    def give_back(self, slots: int) -> None:
        """So many slots are free: they are for those who were turned away first."""
        self.taken -= slots
        for _ in range(slots):
            while self._turned_away:
                queue = self._turned_away.popleft()
                if queue.items and queue.call_one():
                    queue.reserved += 1
                    self.taken += 1
                    break

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
        self.crew = 0
        """How many executors it has."""
        self.reserved = 0
        """Slots that are kept for it, until one of its executors wakes up."""

    async def next(self) -> Delivery | None:
        """As TasksQueue.next; whoever asks has ended its former job."""
        me = trio.lowlevel.current_task()
        if me in self._at_work:
            self._at_work.discard(me)
            self._pool.give_back(1)
        while not self.surplus:
            if not self.items and self.reserved:
                unused, self.reserved = self.reserved, 0
                self._pool.give_back(unused)
            if self.items and self._pool.grant(self):
                self._at_work.add(me)
                item = self.items.popleft()
                if self.items:
                    self.call_one()
                return item
            await self._park()
        self.surplus -= 1
        if self.items:
            self.call_one()
        return None

    def call_one(self) -> bool:
        """Wake an executor; whether one is on its way."""
        if not self._waking:
            self._wake_one()
        return self._waking

    def dismiss(self, count: int) -> None:
        """As TasksQueue.dismiss."""
        self.crew -= count
        super().dismiss(count)

    def keep(self, count: int) -> int:
        """As TasksQueue.keep."""
        if self not in self._pool.queues:
            self._pool.queues.append(self)
        self.crew += count
        return super().keep(count)

    def left(self) -> None:
        """All executors are gone, and what they had."""
        freed, self.reserved, self.crew = len(self._at_work) + self.reserved, 0, 0
        self._at_work.clear()
        self._pool.forget(self)
        self._pool.give_back(freed)


class SharedSlots:
    """The slots of one process, by kind. `process` is a name that no other one's have."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.process = new_id()
        self._pools = {kind: _Pool() for kind in kinds}

    def queues(self) -> dict[str, TasksQueue]:
        """Queues for another life."""
        return {kind: SharedTasksQueue(pool) for kind, pool in self._pools.items()}
