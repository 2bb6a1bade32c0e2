"""Limit how many jobs of a task run at once and how many start in a period of time, and queue the others fairly."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.limits.overrides import TaskResumed, TaskSuspended
    from celery5.protocol.limit_rules import TimeWindow
    from celery5.protocol.limits import Limit, Range, Rate

__all__ = ["Limit", "Range", "Rate", "TaskResumed", "TaskSuspended", "TimeWindow"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Limit": "celery5.protocol.limits",
            "Range": "celery5.protocol.limits",
            "Rate": "celery5.protocol.limits",
            "TaskResumed": "celery5.limits.overrides",
            "TaskSuspended": "celery5.limits.overrides",
            "TimeWindow": "celery5.protocol.limit_rules",
        },
    )
