"""The page of actions on many jobs: how far each is."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest


async def load_bulk(request: PageRequest) -> Mapping[str, Any]:
    """Return the actions of this dashboard."""
    return {"actions": await request.read("bulk:list")}


BULK_PAGES = (
    Page(path="bulk", template="bulk.html", title="Bulk actions", load=load_bulk, nav="Bulk actions"),
)
"""The page of bulk actions."""
