"""The page of schedules: what fires when."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest


async def load_schedules(request: PageRequest) -> Mapping[str, Any]:
    """Return the schedules, the next one first, and whether a Scheduler runs."""
    schedules = await request.read("schedule:list")
    state = await request.read("info:show", limit=0)
    return {
        "schedules": sorted(
            schedules, key=lambda schedule: (schedule.next is None, schedule.next or 0.0, schedule.name)
        ),
        "schedulers": state.schedulers,
        "start": state.start_advice.format_start("scheduler"),
    }


SCHEDULE_PAGES = (
    Page(
        path="schedules",
        template="schedules.html",
        title="Schedules",
        load=load_schedules,
        nav="Schedules",
        refresh=5.0,
    ),
)
"""The page of schedules."""
