"""The pages of queues: how far behind each is, and whether it catches up."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.observability.metrics import select_over
from celery5.protocol.observability.overview import describe_flow
from celery5.protocol.shards import get_queue_of_shard


async def load_queues(request: PageRequest) -> Mapping[str, Any]:
    """Return how each queue stands."""
    overview = await request.read("top:show")
    return {"queues": overview.queues, "window": overview.queue_window, "left_out": overview.left_out.queues}


async def load_queue(request: PageRequest) -> Mapping[str, Any]:
    """Return the state of a queue, its verdict, and its history."""
    queue = request.path["queue"]
    whole = get_queue_of_shard(queue)
    overview = await request.read("top:show")
    judged = next((candidate for candidate in overview.queues if candidate.name == queue), None)
    return {
        "queue": await request.read("queue:show", queue=queue),
        "whole": whole,
        "task_window": overview.task_window,
        "judged": judged,
        "flow": describe_flow(judged.flow if judged else None),
        "tasks": [task for task in overview.tasks if whole in task.queues],
        "history": select_over(
            await request.read_part(
                "the history", "metrics:history", list[Any](), queue=queue, since=request.query.get("since")
            )
        ),
        "starts": overview.starts,
        "held": sorted({name for worker in overview.workers for name in worker.breakers}),
    }


QUEUE_PAGES = (
    Page(path="queues", template="queues.html", title="Queues", load=load_queues, nav="Queues", refresh=3.0),
    Page(
        path="queues/{queue:path}", template="queue.html", title="Queue {queue}", load=load_queue, refresh=5.0
    ),
)
"""The pages of queues."""
