"""Decide which processes an application needs besides workers: the Controller, the development mode and the doctor ask.

What only a Router or a Scheduler does stands still while none lives, and no worker notices.
"""

from typing import TYPE_CHECKING

from celery5.boot_step import select_steps
from celery5.config.scaling import is_scaled

if TYPE_CHECKING:
    from celery5.app import App


def needs_router(app: "App") -> bool:
    """Return whether the application has what only a Router does: events, tasks with sinks or sources, or own steps."""
    has_data = any(task.sinks or task.sources for task in app.tasks.values())
    return has_data or app.events.has_own_events or bool(select_steps(app.bootsteps, "router"))


def needs_scheduler(app: "App") -> bool:
    """Return whether the application has what only a Scheduler does: schedules, scaling, limit rules, own steps."""
    decides = is_scaled(app.settings) or app.schedule.is_used or app.limit_rule.is_used
    return decides or bool(select_steps(app.bootsteps, "scheduler"))
