"""The pages of dead letters: what died from which cause, and sending it again."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest
from celery5.protocol.bulk import INTERRUPTED, RUNNING, WAITING, BulkStatus
from celery5.protocol.job.failure_groups import DeadJobGroups

SHOWN = 50
"""Dead jobs on one page."""
SHOWN_GROUPS = 200
MAX_SEARCHED = 10_000
"""Dead jobs, the newest ones, in which one look at a page searches for a part of the message."""
READING_TIME = 0.1
"""Seconds for which one look at a page reads dead jobs that were not read before; further looks go on."""
FILTERS = ("queue", "task", "error", "reason", "message")


async def load_groups(request: PageRequest) -> Mapping[str, Any]:
    """Return what made jobs fail that are dead, and what is done about it."""
    chosen: dict[str, Any] = request.choose(*FILTERS, "newer_than")
    bounds = {"limit": MAX_SEARCHED} if "message" in chosen else {"within": READING_TIME}
    found: DeadJobGroups = await request.read("dlq:groups", **_to_lists(chosen), **bounds)
    return {
        "found": found,
        "groups": found.groups[:SHOWN_GROUPS],
        "more": len(found.groups[SHOWN_GROUPS:]),
        "chosen": chosen,
        "actions": await _read_running(request),
    }


async def load_group(request: PageRequest) -> Mapping[str, Any]:
    """Return the dead jobs that failed in one way."""
    group = request.path["group"]
    found: DeadJobGroups = await request.read("dlq:groups", group=[group], within=READING_TIME)
    jobs = await request.read("dlq:read", group=[group], limit=SHOWN, after=request.query.get("after"))
    last = jobs[-1] if len(jobs) == SHOWN else None
    return {
        "group": found.groups[0] if found.groups else None,
        "jobs": jobs,
        "after": f"{last.queue}:{last.entry}" if last else "",
        "actions": await _read_running(request),
    }


async def _read_running(request: PageRequest) -> list[BulkStatus]:
    return [
        action
        for action in await request.read_part("what is done about it", "bulk:list", list[BulkStatus]())
        if action.state in (WAITING, RUNNING, INTERRUPTED)
    ]


def _to_lists(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an operation: of most conditions it takes several values."""
    return {
        name: [value] if name not in ("message", "newer_than") else value for name, value in chosen.items()
    }


async def load_dead(request: PageRequest) -> Mapping[str, Any]:
    """Return dead jobs, the newest first."""
    chosen: dict[str, Any] = request.choose(*FILTERS)
    jobs = await request.read("dlq:read", **_to_lists(chosen), limit=SHOWN, after=request.query.get("after"))
    last = jobs[-1] if len(jobs) == SHOWN else None
    return {"jobs": jobs, "chosen": chosen, "after": f"{last.queue}:{last.entry}" if last else ""}


DEAD_LETTER_PAGES = (
    Page(
        path="dead",
        template="dead.html",
        title="Dead letters",
        load=load_groups,
        nav="Dead letters",
        refresh=5.0,
    ),
    # These have checkboxes: no row may move under the pointer.
    Page(
        path="dead/groups/{group}",
        template="dead_group.html",
        title="Dead jobs of one cause",
        load=load_group,
        refresh=0.0,
    ),
    Page(path="dead/jobs", template="dead_jobs.html", title="Dead jobs", load=load_dead, refresh=0.0),
)
"""The pages of dead letters."""
