"""Own the resource budget of a worker process: what its jobs take of GPUs and memory, and which jobs wait for them.

The decisions are in `celery5.protocol.scaling.resource_budget`. They hold for all incarnations of a process together.
An executor takes what a job needs together with its slot, and gives it back with that, however the job has ended.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import Protocol, cast

import trio

from celery5.protocol.job.delivery import AssignedResources
from celery5.protocol.scaling.resource_budget import (
    BEGIN,
    DEVICES,
    NOTHING,
    UNIT,
    Amounts,
    Evict,
    Grant,
    Needs,
    ResourceBudget,
    ResourceUse,
    show,
    to_numbers,
)

ABSENT_LIMIT = 2.0
"""Seconds for which a task keeps its turn after its last job here was released for other workers."""


class WaitingJobs(Protocol):
    """A queue of jobs whose next one may fit now."""

    def __len__(self) -> int: ...
    def recheck(self) -> None: ...


class ResourceSlots:
    """The capacity of one process, and what its jobs have taken of it.

    Args:
        capacity: What it has.
        devices: Its devices: the number of each in this process, and the name under which a new process finds it.
    """

    def __init__(self, capacity: Amounts = NOTHING, devices: Sequence[tuple[int, str]] = ()) -> None:
        self._budget = ResourceBudget(capacity)
        self._devices = tuple(devices) or tuple(
            (number, str(number)) for number in range(capacity.get(DEVICES, 0) // UNIT)
        )
        self._queues: dict[WaitingJobs, str] = {}
        self._needs: dict[str, Needs] = {}
        self._closers: dict[str, trio.MemorySendChannel[Hashable]] = {}
        self._present_at: dict[str, float] = {}
        self._is_rechecking = False

    @property
    def capacity(self) -> Amounts:
        """What the process has."""
        return self._budget.capacity

    @property
    def needs(self) -> Mapping[str, Needs]:
        """The needs of jobs, by the name of their task. Tasks whose jobs take nothing are left out."""
        return self._needs

    def get_use(self) -> dict[str, ResourceUse]:
        """Return what the process has of each resource, and what is taken now."""
        has, taken = to_numbers(self._budget.capacity), to_numbers(self._budget.taken)
        return {name: ResourceUse(has[name], taken[name]) for name in has}

    def set_needs(self, needs: Mapping[str, Needs]) -> None:
        """Add the needs of the jobs of a new incarnation, by the name of their task."""
        self._needs.update(needs)

    def find_task(self, task: str) -> "TaskResources | None":
        """Return the resources of a task's jobs; None if they take nothing."""
        return TaskResources(self, task) if task in self._needs else None

    def add_queue(self, task: str, queue: WaitingJobs) -> None:
        """Recheck a queue of a task's jobs whenever something is given back."""
        self._queues[queue] = task

    def remove_queue(self, queue: WaitingJobs) -> None:
        """Forget a queue."""
        self._queues.pop(queue, None)

    def receive_closings(self, owner: str) -> trio.MemoryReceiveChannel[Hashable]:
        """Return a channel with the keys of resources that `owner` must close, since a job needs their space."""
        self._closers[owner], channel = trio.open_memory_channel[Hashable](inf)
        return channel

    # jobs

    def may_begin(self, task: str) -> bool:
        """Return whether the needs of a task's next job are free. If not, the task waits for its turn."""
        self._present_at[task] = trio.current_time()
        decision = self._budget.decide(task, self._needs[task])
        if isinstance(decision, Evict):
            for key in decision.keys:
                owner, resource = cast("tuple[str, Hashable]", key)
                self._closers[owner].send_nowait(resource)
        return decision == BEGIN

    def take(self, task: str) -> Grant:
        """Take what the next job of a task needs. Call it only after `may_begin` has returned True."""
        had_others = len(self._budget.waiting) > 1
        grant = self._budget.take(task, self._needs[task])
        if had_others:
            self.recheck()
        return grant

    def give_back(self, grant: Grant) -> None:
        """Give back what a job had."""
        self._budget.give_back(grant)
        self.recheck()

    def assign(self, grant: Grant) -> AssignedResources:
        """Return the amounts and the devices of a job, as `current_job()` shows them."""
        devices = [self._devices[number] for number in grant.devices]
        return AssignedResources(
            to_numbers(grant.needs.amounts),
            tuple(number for number, _ in devices),
            tuple(name for _, name in devices),
        )

    def get_read_slots(self, task: str) -> int:
        """Return the number of slots for which to read jobs of a task: the running jobs, and those that fit.

        If none fits because other tasks have what it needs, one more is read, so that the task gets its turn.
        """
        running = self._budget.count_running(task)
        fitting = self._budget.count_fitting(self._needs[task])
        return running + (fitting or self._is_held_by_others(task))

    def count_most(self, task: str) -> int:
        """Return how many jobs of a task can run here at once."""
        return self._budget.count_most(self._needs[task])

    def find_lacking(self, needs: Needs) -> str:
        """Return what this process lacks for a job with these needs, for people; '' if it can run here."""
        lacking = self._budget.find_lacking(needs)
        return ", ".join(
            f"{name} {show(amount)} (it has {show(self.capacity.get(name, 0))})"
            for name, amount in lacking.items()
        )

    def _is_held_by_others(self, task: str) -> bool:
        names = self._needs[task].total.keys()
        return any(
            other != task
            and (self._budget.count_running(other) or other in self._budget.waiting)
            and not names.isdisjoint(needs.total)
            for other, needs in self._needs.items()
        )

    def forget_absent(self) -> None:
        """End the turns of tasks whose jobs were released for other workers."""
        if not self._budget.waiting:
            return
        now = trio.current_time()
        self._present_at.update({task: now for queue, task in self._queues.items() if len(queue)})
        for task in list(self._budget.waiting):
            if now - self._present_at.get(task, -inf) > ABSENT_LIMIT:
                self._budget.leave(task)
                self.recheck()

    # shared resources

    def note_closed(self, key: Hashable) -> None:
        """Note that a shared resource is closed."""
        self._budget.note_closed(key)
        self.recheck()

    def end_closings(self, owner: str) -> None:
        """Note that `owner` has ended, and that all its resources are closed."""
        self._closers.pop(owner, None)
        for key in list(self._budget.open_keys):
            if cast("tuple[str, Hashable]", key)[0] == owner:
                self._budget.note_closed(key)

    def recheck(self) -> None:
        """Recheck all queues soon: a job may fit now."""
        if self._queues and not self._is_rechecking:
            self._is_rechecking = True
            trio.lowlevel.current_trio_token().run_sync_soon(self._recheck_now)

    def _recheck_now(self) -> None:
        self._is_rechecking = False
        for queue in list(self._queues):
            queue.recheck()


class TaskResources:
    """The resources of one task's jobs, within the capacity of a process."""

    def __init__(self, slots: ResourceSlots, task: str) -> None:
        self._slots = slots
        self._task = task

    def may_begin(self) -> bool:
        """Return whether the needs of the next job are free. If not, the task waits for its turn."""
        return self._slots.may_begin(self._task)

    def take(self) -> Grant:
        """Take what the next job needs. Call it only after `may_begin` has returned True."""
        return self._slots.take(self._task)

    def give_back(self, grant: Grant) -> None:
        """Give back what a job had."""
        self._slots.give_back(grant)

    def assign(self, grant: Grant) -> AssignedResources:
        """Return the amounts and the devices of a job, as `current_job()` shows them."""
        return self._slots.assign(grant)

    def add_queue(self, queue: WaitingJobs) -> None:
        """Recheck a queue of the task's jobs whenever something is given back."""
        self._slots.add_queue(self._task, queue)

    def remove_queue(self, queue: WaitingJobs) -> None:
        """Forget a queue."""
        self._slots.remove_queue(queue)


def make_key(owner: str, resource: Hashable) -> Hashable:
    """Return the key of a resource that `owner` opens."""
    return (owner, resource)
