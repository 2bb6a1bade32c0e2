"""Which tasks have jobs in waiting lists, as far as one worker knows, and which queue is the next to get a slot."""

from collections.abc import Iterable, Mapping
from typing import Any

from celery5.protocol.scaling.prioritisation import MAX_WEIGHT
from celery5.protocol.scaling.read_order import parse_queue_order
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.scaling.preferences import Preferences
from celery5.tasks.task import Task

QueueTask = tuple[str, str]
"""A queue, and a task that has jobs in its waiting list there."""


class WaitingTasks:
    """The tasks whose jobs wait in Redis, by queue. What is not so any more is found out by asking once in vain.

    Several queues that have waiting jobs of one kind share its slots as they share what is read: in the order of the
    setting `queue_order`, or by weights, else alike.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        budget: MaximalConcurrencyBudget,
        preferences: Preferences,
        queue_order: str,
    ) -> None:
        self._tasks = tasks
        self._get_name = budget.get_name
        self._preferences = preferences
        self._order = parse_queue_order(queue_order)
        self._found: set[QueueTask] = set()
        self._next_turns: dict[str, float] = {}
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._found)

    def __contains__(self, queue_task: QueueTask) -> bool:
        return queue_task in self._found

    def add(self, queue: str, task: str) -> None:
        """Note that a task has waiting jobs on a queue."""
        self._found.add((queue, task))

    def discard(self, queue: str, tasks: Iterable[str]) -> None:
        """Note that tasks have none on a queue."""
        self._found.difference_update({(queue, task) for task in tasks})

    def get_tasks(self, queue: str) -> list[str]:
        """Return the tasks with waiting jobs on a queue."""
        return [task for found_queue, task in self._found if found_queue == queue]

    def get_all_tasks(self) -> set[str]:
        """Return the tasks with waiting jobs on any queue."""
        return {task for _, task in self._found}

    def has_kind(self, kind: str) -> bool:
        """Return whether jobs of a kind wait on any queue."""
        return any(self._get_name(self._tasks[task]) == kind for _, task in self._found)

    def get_queues(self) -> list[str]:
        """Return the queues with waiting jobs, in the order of their turns."""
        return sorted({queue for queue, _ in self._found}, key=self._get_turn)

    def get_rivals(self, queue: str, kinds: Iterable[str]) -> set[str]:
        """Return those of the `kinds` that jobs wait for on another queue whose turn comes before this one."""
        turn, kinds = self._get_turn(queue), set(kinds)
        return {
            kind
            for other, task in self._found
            if other != queue
            and (kind := self._get_name(self._tasks[task])) in kinds
            and self._get_turn(other) < turn
        }

    def note_served(self, queue: str, count: int) -> None:
        """Note that `count` jobs of a queue were admitted here: the lighter the queue, the later its next turn."""
        if count:
            weight = self._order.weights.get(queue, 1.0) * self._preferences.queues.get(queue, MAX_WEIGHT)
            self._now = max(self._now, self._next_turns.get(queue, 0.0))
            self._next_turns[queue] = self._now + count / weight

    def _get_turn(self, queue: str) -> tuple[int, float, str]:
        return self._order.get_rank(queue), self._next_turns.get(queue, 0.0), queue
