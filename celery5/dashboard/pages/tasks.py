"""The pages of tasks: which fails since when and why, and how long they run and wait."""

import glob
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from celery5.dashboard.page import DECLARED, Page, PageRequest
from celery5.dashboard.pages.dead_letters import READING_TIME
from celery5.observability.job_search import JobPage
from celery5.observability.metrics import HistoryPoint, select_over
from celery5.operations.operation import NotFound
from celery5.protocol.job.failure_groups import DeadJobGroups
from celery5.protocol.observability.rollup import count_attempts

SHOWN_ERRORS = 5
SHOWN_GROUPS = 10
MAX_QUEUES = 10
"""Queues of a task whose history is read."""


class TaskPoint(NamedTuple):
    """A minute or an hour of a task, on all of its queues."""

    at: int
    ended: int
    failed: int
    # Percentiles in seconds, the largest of all queues; None where none has run.
    run_p50: float | None = None
    run: float | None = None
    run_p99: float | None = None
    wait_p50: float | None = None
    wait: float | None = None
    wait_p99: float | None = None


def sum_task(task: str, histories: Iterable[list[HistoryPoint]]) -> list[TaskPoint]:
    """Return the history of a task over the histories of its queues, the oldest first."""
    points: dict[int, TaskPoint] = {}
    for point in (point for history in histories for point in select_over(history)):
        before = points.get(point.at, TaskPoint(point.at, 0, 0))
        for numbers in point.tasks:
            if numbers.task == task:
                attempts = count_attempts(numbers.counts)
                before = TaskPoint(
                    point.at,
                    before.ended + attempts.ended,
                    before.failed + attempts.failed,
                    _get_larger(before.run_p50, numbers.run, "p50"),
                    _get_larger(before.run, numbers.run, "p95"),
                    _get_larger(before.run_p99, numbers.run, "p99"),
                    _get_larger(before.wait_p50, numbers.wait, "p50"),
                    _get_larger(before.wait, numbers.wait, "p95"),
                    _get_larger(before.wait_p99, numbers.wait, "p99"),
                )
        points[point.at] = before
    return [points[at] for at in sorted(points)]


def _get_larger(before: float | None, percentiles: Mapping[str, float] | None, name: str) -> float | None:
    found = (percentiles or {}).get(name)
    return max((time for time in (before, found) if time is not None), default=None)


async def load_tasks(request: PageRequest) -> Mapping[str, Any]:
    """Return how each task does, also those that have not run, and what is imposed on them."""
    overview = await request.read("top:show", since=request.query.get("since"))
    measured = {task.name for task in overview.tasks}
    tasks = await request.read_part(DECLARED, "task:list", list[Any]())
    limits = {
        limit.task: limit for limit in await request.read_part("the limits", "task:limits", list[Any]())
    }
    return {
        "tasks": overview.tasks,
        "idle": [task for task in tasks if task.task not in measured],
        "limits": limits,
        "left_out": overview.left_out.tasks,
        "window": overview.task_window,
    }


async def load_task(request: PageRequest) -> Mapping[str, Any]:
    """Return how one task does, its history, its last errors and its dead jobs by cause."""
    name = request.path["task"]
    overview = await request.read("top:show")
    found = next((task for task in overview.tasks if task.name == name), None)
    limits = await request.read_part("the limits", "task:limits", list[Any]())
    pattern = glob.escape(name)
    groups: DeadJobGroups = await request.read("dlq:groups", task=[pattern], within=READING_TIME)
    declared = await request.read_part(DECLARED, "task:list", list[Any]())
    known = {*(task.task for task in declared), *(limit.task for limit in limits)}
    if found is None and not groups.groups and declared and name not in known:
        raise NotFound(f"there is no task {name!r}")
    since = request.query.get("since")
    histories = [
        await request.read_part(
            "the history", "metrics:history", list[HistoryPoint](), queue=queue, since=since
        )
        for queue in (found.queues if found else ())[:MAX_QUEUES]
    ]
    errors: JobPage = await request.read("task:search", task=pattern, error="*", limit=SHOWN_ERRORS)
    return {
        "name": name,
        "pattern": pattern,
        "groups": groups.groups[:SHOWN_GROUPS],
        "errors": errors.jobs,
        "task": found,
        "window": overview.task_window,
        "points": sum_task(name, histories),
        "limit": next((limit for limit in limits if limit.task == name), None),
        "dead": await request.read_part("dead jobs", "dlq:read", list[Any](), task=[pattern], limit=5),
        "starts": overview.starts,
        "held_on": sum(name in worker.breakers for worker in overview.workers),
    }


TASK_PAGES = (
    Page(path="tasks", template="tasks.html", title="Tasks", load=load_tasks, nav="Tasks", refresh=5.0),
    Page(path="tasks/{task:path}", template="task.html", title="Task {task}", load=load_task, refresh=5.0),
)
"""The pages of tasks."""
