"""The pages of operation: limits, storage, health, settings, the audit trail."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import DECLARED, Page, PageRequest


async def load_limits(request: PageRequest) -> Mapping[str, Any]:
    """Return what is imposed on tasks, what they declare, and how many jobs are held."""
    state = await request.read("info:show")
    return {
        "limits": await request.read("task:limits"),
        "declared": [
            task for task in await request.read_part(DECLARED, "task:list", list[Any]()) if task.limits
        ],
        "queues": [queue for queue in state.queues.values() if queue.held],
    }


async def load_health(request: PageRequest) -> Mapping[str, Any]:
    """Return what workers say of their checks and breakers, and what the doctor finds when it is asked."""
    return {
        "replies": await request.read("worker:health"),
        "findings": await request.read("doctor:run") if request.wants("doctor") else None,
    }


async def load_storage(request: PageRequest) -> Mapping[str, Any]:
    """Return what Redis holds."""
    return {"storage": await request.read("queue:storage")}


async def load_settings(request: PageRequest) -> Mapping[str, Any]:
    """Return all settings."""
    return {"settings": await request.read("config:show")}


async def load_audit(request: PageRequest) -> Mapping[str, Any]:
    """Return the last actions, or those before one of them."""
    chosen = request.choose("action", "who", "since", "limit")
    words = {"limit": "100", **chosen, **request.choose("before")}
    entries = await request.read("audit:list", **words)
    has_more = len(entries) == int(words["limit"])
    return {"entries": entries, "chosen": chosen, "before": entries[-1].id if has_more else ""}


OPERATION_PAGES = (
    Page(path="limits", template="limits.html", title="Limits", load=load_limits, nav="Limits", refresh=5.0),
    Page(
        path="storage",
        template="storage.html",
        title="Storage",
        load=load_storage,
        nav="Storage",
        refresh=10.0,
    ),
    Page(path="health", template="health.html", title="Health", load=load_health, nav="Health", refresh=0.0),
    Page(path="audit", template="audit.html", title="Audit", load=load_audit, nav="Audit", refresh=0.0),
    Page(
        path="settings",
        template="settings.html",
        title="Settings",
        load=load_settings,
        nav="Settings",
        refresh=0.0,
    ),
)
"""The pages for whoever operates the application."""
