"""The pages of events and of who is subscribed to them."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.page import Page, PageRequest


async def load_events(request: PageRequest) -> Mapping[str, Any]:
    """Return the events, and what waits for a Router."""
    return {"events": await request.read("event:list"), "state": await request.read("info:show", limit=0)}


async def load_event(request: PageRequest) -> Mapping[str, Any]:
    """Return the versions of an event."""
    return {"versions": await request.read("event:show", event=request.path["event"])}


EVENT_PAGES = (
    Page(path="events", template="events.html", title="Events", load=load_events, nav="Events", refresh=5.0),
    Page(path="events/{event}", template="event.html", title="Event {event}", load=load_event, refresh=5.0),
)
"""The pages of events."""
