"""Structured log messages, and where they are written."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.logs.trace import tracing

__all__ = ["tracing"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, {"tracing": "celery5.logs.trace"})
