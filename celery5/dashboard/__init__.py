"""The dashboard: pages and a JSON API for people who look after an application, as one ASGI application."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.dashboard.access import Identify, ProxyHeaders, TokenFile, User
    from celery5.dashboard.application import Dashboard

__all__ = ["Dashboard", "Identify", "ProxyHeaders", "TokenFile", "User"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Dashboard": "celery5.dashboard.application",
            "Identify": "celery5.dashboard.access",
            "ProxyHeaders": "celery5.dashboard.access",
            "TokenFile": "celery5.dashboard.access",
            "User": "celery5.dashboard.access",
        },
    )
