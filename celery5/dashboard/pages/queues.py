"""The pages of queues: how far behind each is, and whether it catches up."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest


async def load_queues(request: PageRequest) -> Mapping[str, Any]:
    """Return the state of each queue."""
    return {"queues": await request.read("queue:list")}


async def load_queue(request: PageRequest) -> Mapping[str, Any]:
    """Return the state of a queue, and its history."""
    queue = request.path["queue"]
    return {
        "queue": await request.read("queue:show", queue=queue),
        "history": await request.read("metrics:history", queue=queue, since=request.query.get("since")),
    }


QUEUE_PAGES = (
    Page(path="queues", template="queues.html", title="Queues", load=load_queues, nav="Queues"),
    Page(path="queues/{queue}", template="queue.html", title="Queue {queue}", load=load_queue, refresh=5.0),
)
"""The pages of queues."""
