"""The pages of tasks: which fails since when and why, and how long they run and wait."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from celery5.dashboard.page import Page, PageRequest
from celery5.observability.metrics import HistoryPoint

FAILED = ("RETRY", "DEAD")
MAX_QUEUES = 10
"""Queues of a task whose history is read."""


class TaskPoint(NamedTuple):
    """A minute or an hour of a task, on all of its queues."""

    at: int
    ended: int
    failed: int
    # Seconds, the largest of all queues; None where none has run.
    run: float | None
    wait: float | None


def sum_task(task: str, histories: Iterable[list[HistoryPoint]]) -> list[TaskPoint]:
    """Return the history of a task over the histories of its queues, the oldest first."""
    points: dict[int, TaskPoint] = {}
    for point in (point for history in histories for point in history):
        before = points.get(point.at, TaskPoint(point.at, 0, 0, None, None))
        for numbers in point.tasks:
            if numbers.task == task:
                before = TaskPoint(
                    point.at,
                    before.ended + sum(numbers.counts.values()),
                    before.failed + sum(numbers.counts.get(state, 0) for state in FAILED),
                    _get_larger(before.run, numbers.run),
                    _get_larger(before.wait, numbers.wait),
                )
        points[point.at] = before
    return [points[at] for at in sorted(points)]


def _get_larger(before: float | None, percentiles: Mapping[str, float] | None) -> float | None:
    found = (percentiles or {}).get("p95")
    return max((one for one in (before, found) if one is not None), default=None)


async def load_tasks(request: PageRequest) -> Mapping[str, Any]:
    """Return how each task does, also those that have not run, and what is imposed on them."""
    overview = await request.read("top:show", since=request.query.get("since"))
    measured = {task.name for task in overview.tasks}
    declared = [task for task in await request.read("task:list") if task.task not in measured]
    limits = {limit.task: limit for limit in await request.read("task:limits")}
    return {"tasks": overview.tasks, "idle": declared, "limits": limits, "left_out": overview.left_out.tasks}


async def load_task(request: PageRequest) -> Mapping[str, Any]:
    """Return how one task does, its history, and its last dead letters."""
    name = request.path["task"]
    overview = await request.read("top:show")
    found = next((task for task in overview.tasks if task.name == name), None)
    since = request.query.get("since")
    histories = [
        await request.read("metrics:history", queue=queue, since=since)
        for queue in (found.queues if found else ())[:MAX_QUEUES]
    ]
    limits = await request.read("task:limits")
    return {
        "name": name,
        "task": found,
        "points": sum_task(name, histories),
        "limit": next((limit for limit in limits if limit.task == name), None),
        "dead": await request.read("dlq:read", task=[name], count=10),
        "starts": overview.starts,
    }


TASK_PAGES = (
    Page(path="tasks", template="tasks.html", title="Tasks", load=load_tasks, nav="Tasks", refresh=5.0),
    Page(path="tasks/{task:path}", template="task.html", title="Task {task}", load=load_task, refresh=5.0),
)
"""The pages of tasks."""
