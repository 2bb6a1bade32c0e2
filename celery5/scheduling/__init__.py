"""Periodic tasks, and when they are due."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.protocol.scheduling.declaration import Periodic, at, calendar, cron, every
    from celery5.protocol.scheduling.periodic import Misfire

__all__ = ["Misfire", "Periodic", "at", "calendar", "cron", "every"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Misfire": "celery5.protocol.scheduling.periodic",
            "Periodic": "celery5.protocol.scheduling.declaration",
            "at": "celery5.protocol.scheduling.declaration",
            "calendar": "celery5.protocol.scheduling.declaration",
            "cron": "celery5.protocol.scheduling.declaration",
            "every": "celery5.protocol.scheduling.declaration",
        },
    )
