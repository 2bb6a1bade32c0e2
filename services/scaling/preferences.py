"""Preferences: the queues and tasks that this worker prefers at the moment, as a Scheduler decided.

A preference expires unless it is repeated, so it ends when the Scheduler is gone.
"""

import math
from collections.abc import Mapping

import trio

from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PreferParameters
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.scaling.prioritisation import MAX_WEIGHT, Preference
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.job.internal_queues import InternalTasksQueue


class Preferences:
    """The weights of queues and tasks; neutral without a recent command."""

    def __init__(self, *, log: Log) -> None:
        self._log = log
        self._now = Preference()
        self._until = -math.inf
        self._turns: dict[str, float] = {}

    @property
    def queues(self) -> Mapping[str, float]:
        """Return the weights of queues, up to 1.0, which is also that of queues not named; empty while none is
        preferred.
        """
        return self._current().queues

    @property
    def tasks(self) -> Mapping[str, float]:
        """Return the weights of tasks, in the same form."""
        return self._current().tasks

    def get_weights(self) -> dict[str, dict[str, float]]:
        """Return all current weights."""
        now = self._current()
        return {"tasks": dict(now.tasks), "queues": dict(now.queues)}

    async def handle_command(self, parameters: PreferParameters) -> object:
        """Run the command `prefer`: set weights of `tasks` and of `queues` for some `seconds`, and return the
        current ones.
        """
        preference = parameters.preference
        if preference != self._current():
            self._log.event(
                "worker:preferences-changed", tasks=dict(preference.tasks), queues=dict(preference.queues)
            )
        self._now, self._until = preference, trio.current_time() + parameters.seconds
        self._turns.clear()
        return self.get_weights()

    def get_weight(self, job: Delivery) -> float:
        """Return the weight of a job: its task's or its queue's, whichever is less."""
        now = self._current()
        return min(
            now.tasks.get(_task_of(job), MAX_WEIGHT),
            now.queues.get(get_queue_of_shard(job.queue), MAX_WEIGHT),
        )

    def sort_queue(self, queue: InternalTasksQueue) -> None:
        """Sort the jobs that wait in `queue` by when they should start: tasks take turns by their weights, and
        none starves.

        Call it after jobs were added, while something is preferred.
        """
        weights, turns = self.tasks, self._turns
        now = min(
            (queued.start_order for queued in queue.items if queued.start_order),
            default=max(turns.values(), default=1.0),
        )
        for item in queue.items:
            if not item.start_order:
                task = _task_of(item)
                pause = MAX_WEIGHT / weights.get(task, MAX_WEIGHT)
                turns[task] = max(now, turns.get(task, 0.0)) + pause
                item.set_start_order(turns[task])
        ordered = sorted(queue.items, key=_turn_of)
        queue.items.clear()
        queue.items.extend(ordered)

    def _current(self) -> Preference:
        if not self._now.is_neutral and trio.current_time() >= self._until:
            self._now = Preference()
            self._turns.clear()
            self._log.event("worker:preferences-changed", tasks={}, queues={}, why="they were not renewed")
        return self._now


def _turn_of(delivery: Delivery) -> float:
    return delivery.start_order


def _task_of(delivery: Delivery) -> str:
    return delivery.command.task if delivery.command else ""
