"""The pages of processes: what each worker does, and the members of the cluster."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.operations.operation import NotFound
from celery5.protocol.observability.overview import update_worker


async def load_workers(request: PageRequest) -> Mapping[str, Any]:
    """Return how each worker does, and the other processes."""
    overview = await request.read("top:show")
    return {
        "workers": overview.workers,
        "left_out": overview.left_out.workers,
        "lost": overview.lost,
        "lost_left_out": overview.left_out.lost,
        "at": overview.at,
        "state": await request.read("info:show", limit=0),
    }


async def load_worker(request: PageRequest) -> Mapping[str, Any]:
    """Return what a worker answers: what it runs, its numbers, its checks and breakers.

    Its figures are those of its answer, as what it runs is; those of its last report while it does not answer.
    """
    name = request.path["worker"]
    overview = await request.read("top:show")
    commands = ["active", "health", *(["stack"] if request.wants("stack") else [])]
    stats = (await request.read("worker:stats", to=[name]))[0]
    replies = dict.fromkeys(commands, stats)
    if stats.ok:  # a frozen worker is asked, and waited for, once
        read = await request.read_together(*(f"worker:{command}" for command in commands), to=[name])
        replies = {command: reply[0] for command, reply in zip(commands, read, strict=True)}
    worker = next((worker for worker in overview.workers if worker.name == name), None)
    return {
        "name": name,
        "worker": update_worker(worker, stats.answer) if worker and stats.ok else worker,
        "lost": [process for process in overview.lost if name in (process.name, process.worker)],
        "at": overview.at,
        "stats": stats,
        "stack": None,
        **replies,
    }


async def load_cluster(request: PageRequest) -> Mapping[str, Any]:
    """Return the members of the cluster, as its Controllers say."""
    try:
        replies = await request.read("controller:status")
    except NotFound as error:
        return {"replies": [], "empty": str(error)}
    return {"replies": replies, "empty": "" if replies else NO_CONTROLLER}


NO_CONTROLLER = "No Controller runs, so nobody starts members again: celery5 controller start starts one"
"""What the page of the cluster says where no Controller lives."""

PROCESS_PAGES = (
    Page(
        path="workers",
        template="workers.html",
        title="Workers",
        load=load_workers,
        nav="Workers",
        refresh=3.0,
    ),
    Page(
        path="workers/{worker:path}",
        template="worker.html",
        title="Worker {worker}",
        load=load_worker,
        refresh=5.0,
    ),
    Page(
        path="cluster",
        template="cluster.html",
        title="Cluster",
        load=load_cluster,
        nav="Cluster",
        refresh=5.0,
    ),
)
"""The pages of processes."""
