"""Say which tasks are suspended or limited, by which user and why (`info`, `queue list`, `task`)."""

from typing import TYPE_CHECKING

from celery5.cli.terminal.output import as_called, format_cell, format_time
from celery5.protocol.durations import format_age

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.limits.overrides import TaskLimits


def format_suspensions(app: "App") -> str:
    """Return which tasks are suspended, and why; '' when none is."""
    suspended = [limits for limits in app.limits.list().values() if limits.suspended]
    descriptions = [f"{limits.task} ({limits.why})" if limits.why else limits.task for limits in suspended]
    return format_cell(", ".join(descriptions))


def format_rule_limit(limits: "TaskLimits") -> str:
    """Return the limit that the Scheduler imposes on a task, and by which rules."""
    values = (
        f"limit {limits.limit}" if limits.limit is not None else "",
        limits.rate and f"rate {limits.rate}",
    )
    return f"{limits.task} {', '.join(filter(None, values))} by rule {', '.join(limits.rules)}"


def format_rule_limits(app: "App") -> str:
    """Return which tasks the Scheduler limits, and by which rules; '' when none is."""
    limited = [limits for limits in app.limits.list().values() if limits.rules]
    return format_cell("; ".join(format_rule_limit(limits) for limits in limited))


def format_suspension(limits: "TaskLimits | None", now: float) -> str:
    """Return since when a task is suspended, who suspended it and why; '' when it is not suspended."""
    if limits is None or not limits.suspended:
        return ""
    start = limits.suspended_since
    since = f"since {format_time(start)} ({format_age(min(start, now), now)})"
    details = (
        since if format_time(start) else "",
        limits.suspended_by and f"by {limits.suspended_by}",
    )
    why = f": {limits.why}" if limits.why else ""
    resume = as_called(f"celery5 task resume {limits.task}")
    return f"{' '.join(filter(None, ('its task is', *details)))}{why}; to go on: {resume}"
