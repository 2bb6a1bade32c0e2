"""Events that happened, the tasks that subscribe to them, and sources of documents."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.events.event import Event
    from celery5.events.registry import EventState
    from celery5.events.sources import Emit, Source, source
    from celery5.protocol.events.documents import SourceDocument

__all__ = ["Emit", "Event", "EventState", "Source", "SourceDocument", "source"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Emit": "celery5.events.sources",
            "Event": "celery5.events.event",
            "EventState": "celery5.events.registry",
            "Source": "celery5.events.sources",
            "SourceDocument": "celery5.protocol.events.documents",
            "source": "celery5.events.sources",
        },
    )
