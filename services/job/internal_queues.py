"""Queues inside a worker: jobs that wait for an executor, and outcomes that wait to be settled.

A worker of several brokers runs an incarnation for each, with executors of its own. They share the slots of the
process: each job needs one, and an incarnation that was refused a slot gets the next, so that a broker full of jobs
does not keep another's waiting. While jobs have weights, since some are preferred, slots go by these. A worker of one
broker shares nothing, unless a task has its own budget: its jobs have their own queue then, whose slots are
some of those of its kind.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from celery5.protocol.job.delivery import Delivery, Settlement
from celery5.protocol.job.job import new_id
from celery5.protocol.scaling.prioritisation import MAX_WEIGHT
from celery5.protocol.scaling.resource_budget import Grant
from celery5.services.job.resource_slots import ResourceSlots, TaskResources
from celery5.services.job.thread_load import ThreadLoad

T = TypeVar("T")


class HandoffQueue(Generic[T]):
    """A queue whose consumers park until an item is put.

    One consumer is woken at a time, and it wakes the next one if items are left: a consumer whose jobs never wait
    takes them all by itself, one that waits is followed by others at once. The consumer that parked last is woken
    first, since its memory is warm.
    """

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self._parked: list[Task] = []
        self._waking = False

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> None:
        """Append an item. Never blocks."""
        self.items.append(item)
        if not self._waking:
            self._wake_one()

    def insert_at(self, count: int, item: T) -> None:
        """Insert an item behind `count` others. Never blocks."""
        self.items.insert(count, item)
        if not self._waking:
            self._wake_one()

    async def take(self) -> T:
        """Return the oldest item, without a checkpoint when there is one, else the next that is put."""
        while not self.items:
            await self._park()
        return self.take_now()

    def take_now(self) -> T:
        """Return the oldest item: there must be one."""
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
        """Remove an item. Return False when it is not in the queue."""
        if item not in self.items:
            return False
        self.items.remove(item)
        return True

    def drain(self, limit: int | None = None) -> list[T]:
        """Take the oldest items, up to `limit`, without waiting."""
        count = len(self.items) if limit is None else min(limit, len(self.items))
        return [self.items.popleft() for _ in range(count)]


class InternalTasksQueue(HandoffQueue[Delivery]):
    """Jobs of one kind, or of one task with its own budget, that wait in this worker for an executor.

    Args:
        load: Decides whether a job may begin; None for all kinds but threads.
    """

    def __init__(self, load: ThreadLoad | None = None) -> None:
        super().__init__()
        self.surplus_executors = 0
        self._returned: dict[Delivery, int] = {}
        self._load = load
        if load is not None:
            load.add_queue(self)

    async def take_next(self) -> Delivery | None:
        """Return the oldest job, or None when this executor is one too many and must end."""
        if self._load is not None:
            self._load.end(trio.lowlevel.current_task())
        while not self.surplus_executors:
            items = self.items
            if items and (self._load is None or self._load.may_begin(items[0])):
                item = items.popleft()
                if self._load is not None:
                    self._load.take(trio.lowlevel.current_task(), item)
                if items and not self._waking:
                    self._wake_one()
                return item
            await self._park()
        self.surplus_executors -= 1
        if self.items and not self._waking:
            self._wake_one()  # it may have been woken for this item
        return None

    def get_next(self, executor: Task | None, may_follow: Callable[[Delivery], bool]) -> Delivery | None:
        """Return the job that an executor may `take_following` after its own; None if it must ask by `take_next`."""
        load = self._load
        if load is not None:
            load.end(executor)
        if not self.items or self.surplus_executors or not may_follow(item := self.items[0]):
            return None
        return item if load is None or load.may_follow(item) else None

    def take_following(self, executor: Task | None) -> Delivery:
        """Return the oldest job for an executor: there must be one, and it may begin."""
        if self._load is not None and executor is not None:
            self._load.take(executor, self.items[0])
        return self.take_now()

    @property
    def spare_executors(self) -> int:
        """How many more executors there are than slots: they take jobs that wait for a thread."""
        return 0 if self._load is None else self._load.spare_executors

    def is_ahead(self, delivery: Delivery) -> bool:
        """Return whether a job was taken though no slot was free, and may be given back."""
        return self._load is not None and self._load.is_ahead(delivery)

    def finish_waiting(self, delivery: Delivery) -> None:
        """Note that a job waits no more for a slot."""
        if self._load is not None:
            self._load.finish_waiting(delivery)

    def put_back(self, delivery: Delivery) -> None:
        """Put a job back that could not begin, before those that were not taken yet, in the order of taking."""
        assert self._load is not None
        number, place = self._load.finish_waiting(delivery), 0
        self._load.note_stall(trio.lowlevel.current_task())
        while place < len(self.items) and self._returned.get(self.items[place], math.inf) < number:
            place += 1
        self._returned = {item: self._returned[item] for item in self.items if item in self._returned}
        self._returned[delivery] = number
        self.items.insert(place, delivery)

    def take_returned(self) -> list[Delivery]:
        """Take the jobs that were put back and wait still."""
        returned = [item for item in self.items if item in self._returned]
        for item in returned:
            self.items.remove(item)
        return returned

    def recheck(self) -> None:
        """Wake an executor if there is a job: it may begin now."""
        if self.items and not self._waking:
            self._wake_one()

    def remove_executors(self, count: int) -> None:
        """Make `count` executors end: those that wait do so at once, others after their job."""
        self.surplus_executors += count
        for _ in range(min(count, len(self._parked))):
            trio.lowlevel.reschedule(self._parked.pop())

    def keep_slots(self, slots: int) -> None:
        """Make other tasks of the kind leave this many slots free: here, no task shares them."""

    def drop_executor(self, executor: Task | None) -> None:
        """Note that the Trio task of an executor has ended by itself; another one goes on in its place."""
        if self._load is not None:
            self._load.end(executor)

    def reset_executors(self) -> None:
        """Note that all executors have ended."""
        self.surplus_executors = 0
        if self._load is not None:
            self._load.remove_queue(self)

    def add_executors(self, count: int) -> int:
        """Keep up to `count` surplus executors that have not ended yet. Return how many must be started."""
        kept = min(count, self.surplus_executors)
        self.surplus_executors -= kept
        return count - kept


def get_task_name(delivery: Delivery) -> str:
    """Return the task of a job; '' for a message that could not be read."""
    return delivery.command.task if delivery.command is not None else ""


class InternalResultsQueue(HandoffQueue[tuple[Delivery, Settlement]]):
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


class _Pool:
    """The slots of one kind: as many as the incarnation with the most executors has.

    Tasks with budgets of their own share them with the rest of the kind. A task takes no more than its own slots, and
    others leave it those that are kept for it.
    """

    def __init__(self) -> None:
        self.queues: list[SharedTasksQueue] = []
        self.taken = 0
        self.now = 0.0
        self._refused: deque[SharedTasksQueue] = deque()
        self._taken_by_task: Counter[str] = Counter()  # '' for the rest of the kind
        self._has_tasks = False

    def add(self, queue: "SharedTasksQueue") -> None:
        """Add the queue of an incarnation that begins."""
        if queue not in self.queues:
            self.queues.append(queue)
            self._has_tasks = self._has_tasks or bool(queue.task)

    def grant(self, queue: "SharedTasksQueue") -> bool:
        """Return whether an executor of `queue` may take a job; it has a slot then."""
        if queue.reserved_slots:
            queue.reserved_slots -= 1
            return True
        if self._has_slot_for(queue):
            self._take(queue)
            return True
        if queue not in self._refused:
            self._refused.append(queue)
        return False

    def _has_slot_for(self, queue: "SharedTasksQueue") -> bool:
        if not queue.may_begin_next():
            return False
        slots = max((other.executor_count for other in self.queues if not other.task), default=0)
        if not self._has_tasks:
            return self.taken < slots and queue.may_take_resources()
        own = max((other.executor_count for other in self.queues if other.task == queue.task), default=0)
        if self._taken_by_task[queue.task] >= own:
            return False
        kept: dict[str, int] = {}
        for other in self.queues:
            if other.task and other.task != queue.task:
                kept[other.task] = max(kept.get(other.task, 0), other.kept_slots)
        free = slots - self.taken
        return (
            free > sum(max(least - self._taken_by_task[task], 0) for task, least in kept.items())
            and queue.may_take_resources()
        )

    def give_back(self, slots: int, queue: "SharedTasksQueue", *, goes_on: bool = False) -> None:
        """Free slots of a queue. Where jobs have weights, one may go back to that queue if it `goes_on`."""
        self.taken -= slots
        self._taken_by_task[queue.task] -= slots
        for _ in range(slots):
            self._give_slot(queue if goes_on else None)

    def offer_slots(self) -> None:
        """Give the slots that have become free to queues that were refused one."""
        while self._give_slot(None):
            pass

    def _give_slot(self, by: "SharedTasksQueue | None") -> bool:
        if any(queue.get_next_weight() < MAX_WEIGHT for queue in self.queues):
            return self._give_by_weight(by)
        return self._give_in_turn()

    def _give_in_turn(self) -> bool:
        """Give a slot to the first of the queues that were refused one, and may have one now."""
        waiting = deque[SharedTasksQueue]()
        given = False
        while self._refused and not given:
            queue = self._refused.popleft()
            if not self._has_slot_for(queue):
                waiting.append(queue)
            elif queue.items and queue.wake_executor():
                self._reserve(queue)
                given = True
        self._refused.extendleft(reversed(waiting))
        return given

    def _give_by_weight(self, by: "SharedTasksQueue | None") -> bool:
        """Give a slot to the queue with jobs whose turn is the earliest. An idle queue saves up no turns."""
        candidates = [
            queue
            for queue in self.queues
            if len(queue.items) > queue.reserved_slots and self._has_slot_for(queue)
        ]
        for queue in sorted(candidates, key=lambda queue: max(queue.next_turn, self.now)):
            if queue is by or queue.wake_executor():
                self._reserve(queue)
                return True
        return False

    def _reserve(self, queue: "SharedTasksQueue") -> None:
        queue.reserved_slots += 1
        self._take(queue)

    def _take(self, queue: "SharedTasksQueue") -> None:
        """Take a slot for a queue; the lighter its next job, the longer until its next turn."""
        queue.take_resources()
        self.taken += 1
        self._taken_by_task[queue.task] += 1
        self.now = max(self.now, queue.next_turn)
        queue.next_turn = self.now + MAX_WEIGHT / queue.get_next_weight()

    def forget(self, queue: "SharedTasksQueue") -> None:
        """Forget the queue of an incarnation that has ended."""
        if queue in self.queues:
            self.queues.remove(queue)
        if queue in self._refused:
            self._refused.remove(queue)
        self._has_tasks = any(other.task for other in self.queues)


class SharedTasksQueue(InternalTasksQueue):
    """Jobs of one kind, or of one `task`, that wait in one incarnation for an executor and a slot of their kind."""

    def __init__(
        self,
        pool: _Pool,
        get_weight: Callable[[Delivery], float],
        task: str = "",
        load: ThreadLoad | None = None,
        resources: TaskResources | None = None,
    ) -> None:
        super().__init__(load)
        self.task = task
        self._resources = resources  # None where its jobs take none
        self._reserved_grants: list[Grant] = []
        self._grants: dict[Task, Grant] = {}
        self._pool = pool
        self._busy_executors: set[Task] = set()
        self._get_weight = get_weight
        self.executor_count = 0
        """The number of its executors."""
        self.reserved_slots = 0
        """Slots that are reserved until one of its executors wakes up."""
        self.kept_slots = 0
        """Slots that other tasks of the kind leave free."""
        self.next_turn = 0.0
        """The time of its next turn, by weights: the queue with the earliest turn goes first."""

    def get_next_weight(self) -> float:
        """Return the weight of its next job."""
        return self._get_weight(self.items[0]) if self.items else MAX_WEIGHT

    def get_next(self, executor: Task | None, may_follow: Callable[[Delivery], bool]) -> Delivery | None:
        """None: each job needs a slot of its pool."""
        return None

    async def take_next(self) -> Delivery | None:
        """Return the oldest job, or None for a surplus executor. The slot of its former job is freed."""
        executor = trio.lowlevel.current_task()
        if executor in self._busy_executors:
            self._busy_executors.discard(executor)
            if self._load is not None:
                self._load.end(executor)
            self._give_resources_back(executor)
            self._pool.give_back(1, self, goes_on=not self.surplus_executors)
        while not self.surplus_executors:
            if not self.items and self.reserved_slots:
                unused, self.reserved_slots = self.reserved_slots, 0
                self._give_resources_back()
                self._pool.give_back(unused, self)
            if self.items and self._pool.grant(self):
                self._busy_executors.add(executor)
                item = self.items.popleft()
                if self._resources is not None:
                    grant = self._grants[executor] = self._reserved_grants.pop()
                    item.assign(self._resources.assign(grant))
                if self._load is not None:
                    self._load.begin(executor, get_task_name(item))
                if self.items:
                    self.wake_executor()
                return item
            await self._park()
        self.surplus_executors -= 1
        if self.items:
            self.wake_executor()
        return None

    @property
    def spare_executors(self) -> int:
        """None: its slots are those of its pool."""
        return 0

    def may_begin_next(self) -> bool:
        """Return whether the next job may begin beside those that run in threads."""
        return self._load is None or not self.items or self._load.fits(get_task_name(self.items[0]))

    def may_take_resources(self) -> bool:
        """Return whether what the next job needs of the worker's capacity is free."""
        return self._resources is None or not self.items or self._resources.may_begin()

    def take_resources(self) -> None:
        """Take what a job needs, together with a slot."""
        if self._resources is not None:
            self._reserved_grants.append(self._resources.take())

    def _give_resources_back(self, executor: Task | None = None) -> None:
        """Give back what the job of an executor had; by default what was reserved for jobs that are gone."""
        if self._resources is None:
            return
        grants = self._reserved_grants if executor is None else [self._grants.pop(executor)]
        for grant in grants:
            self._resources.give_back(grant)
        if executor is None:
            self._reserved_grants = []

    def recheck(self) -> None:
        """Offer the slots of the kind again: more jobs may begin now."""
        self._pool.offer_slots()

    def wake_executor(self) -> bool:
        """Wake an executor. Return whether one is waking up."""
        if not self._waking:
            self._wake_one()
        return self._waking

    def remove_executors(self, count: int) -> None:
        """Make `count` executors end."""
        self.executor_count -= count
        super().remove_executors(count)

    def add_executors(self, count: int) -> int:
        """Keep up to `count` surplus executors. Return how many must be started."""
        self._pool.add(self)
        if self._resources is not None:
            self._resources.add_queue(self)
        self.executor_count += count
        missing = super().add_executors(count)
        self._pool.offer_slots()
        return missing

    def drop_executor(self, executor: Task | None) -> None:
        """Free the slot of an executor whose Trio task has ended by itself."""
        super().drop_executor(executor)
        if executor in self._busy_executors:
            self._busy_executors.discard(executor)
            self._give_resources_back(executor)
            self._pool.give_back(1, self)

    def keep_slots(self, slots: int) -> None:
        """Make other tasks of the kind leave this many slots free."""
        self.kept_slots = slots
        self._pool.offer_slots()

    def reset_executors(self) -> None:
        """Note that all executors have ended, and free their slots."""
        super().reset_executors()
        freed, self.reserved_slots, self.executor_count = (
            len(self._busy_executors) + self.reserved_slots,
            0,
            0,
        )
        for executor in self._busy_executors:
            super().drop_executor(executor)
            self._give_resources_back(executor)
        self._give_resources_back()
        self._busy_executors.clear()
        if self._resources is not None:
            self._resources.remove_queue(self)
        self._pool.forget(self)
        self._pool.give_back(freed, self)


class SharedSlots:
    """The slots of one process, by kind. `process` is a unique name.

    Args:
        thread_load: Decides which jobs may begin in threads.
        resource_slots: Decides which jobs may begin by what they take of the worker's capacity.
    """

    def __init__(
        self,
        kinds: Iterable[str],
        thread_load: ThreadLoad | None = None,
        resource_slots: ResourceSlots | None = None,
    ) -> None:
        self.process = new_id()
        self.thread_load = thread_load or ThreadLoad()
        self.resource_slots = resource_slots or ResourceSlots()
        self._pools = {kind: _Pool() for kind in kinds}
        self._own_pools: dict[str, _Pool] = {}

    def make_queues(
        self,
        get_weight: Callable[[Delivery], float],
        task_kinds: Mapping[str, str] = MappingProxyType({}),
        separate: Collection[str] = (),
    ) -> dict[str, InternalTasksQueue]:
        """Return the queues of another incarnation, by kind, and by task for those with budgets of their own.

        Args:
            get_weight: Returns the weight of one of its jobs.
            task_kinds: The kinds of those tasks.
            separate: Those of them whose slots are not some of their kind: what they take limits them.
        """
        loads = {"thread": self.thread_load}
        queues = {
            kind: SharedTasksQueue(pool, get_weight, load=loads.get(kind))
            for kind, pool in self._pools.items()
        }
        find_resources = self.resource_slots.find_task
        own = {
            task: SharedTasksQueue(self._pools[kind], get_weight, task, loads.get(kind), find_resources(task))
            for task, kind in task_kinds.items()
            if task not in separate
        }
        own |= {
            task: SharedTasksQueue(
                self._own_pools.setdefault(task, _Pool()), get_weight, resources=find_resources(task)
            )
            for task in separate
        }
        return {**queues, **own}
