"""The first page: how the application is, at a glance."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest


async def load_overview(request: PageRequest) -> Mapping[str, Any]:
    """Return the queues, the processes, and the history of the last hour."""
    return {
        "state": await request.read("info:show"),
        "history": await request.read("metrics:history"),
    }


OVERVIEW_PAGES = (
    Page(path="", template="overview.html", title="Overview", load=load_overview, nav="Overview"),
)
"""The page of the application as a whole."""
