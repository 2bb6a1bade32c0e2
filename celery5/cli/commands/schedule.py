"""Show, add and control the schedules of periodic tasks (`schedule`)."""

import time
from typing import TYPE_CHECKING

from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo, echo_hint, format_time, to_one_line
from celery5.operations.operation import Changed
from celery5.operations.schedules import SCHEDULE_OPERATIONS
from celery5.protocol.brokers import DEFAULT_BROKER

if TYPE_CHECKING:
    from celery5.scheduling.schedules import ScheduleState

OVERDUE_AFTER = 5.0
"""Seconds after which an unpublished fire time is overdue: a live Scheduler checks this often."""


def _make_row(state: "ScheduleState") -> dict[str, object]:
    return {
        "schedule": state.name,
        "when": state.when,
        "state": state.state,
        "last": format_time(state.last or 0),
        "next": _format_next(state),
        "fired": state.fired,
        "missed": state.missed,
        "skipped": state.skipped,
    }


def _format_next(state: "ScheduleState") -> str:
    """Return when a schedule fires next, and whether that is overdue; '' when it does not."""
    if state.next is None:
        return ""
    overdue = time.time() - state.next > state.jitter + OVERDUE_AFTER
    return f"{format_time(state.next)}{' overdue' if overdue else ''}"


def _get_fields(state: "ScheduleState") -> dict[str, object]:
    limit = "" if state.misfire.limit is None else f", {state.misfire.limit:g} s at most"
    return {
        "schedule": state.name,
        "task": state.task,
        "queue": state.queue,
        "when": state.when,
        "state": state.state,
        "last": format_time(state.last or 0),
        "next": _format_next(state),
        "fired": state.fired,
        "missed": state.missed,
        "skipped": state.skipped,
        "triggered": state.triggered,
        "last job": state.job,
        "overlap": state.overlap,
        "misfire": f"{state.misfire.policy}, late after {state.misfire.after:g} s{limit}",
        "jitter": f"{state.jitter:g} s",
        "declared by": state.origin,
    }


def _format_state(changed: Changed) -> str:
    """Return what was done, and when it fires: `celery5 schedule show` has all of it."""
    state: ScheduleState = changed.value
    following = _format_next(state)
    return to_one_line(f"{changed.summary}; {state.when}{following and f', next {following}'}")


def _format_removed(changed: Changed) -> str:
    removed: ScheduleState = changed.value
    is_declared = removed.origin != "runtime"
    hint = " It is declared in code: a Scheduler that begins declares it again." if is_declared else ""
    return f"removed {to_one_line(removed.name)}.{hint}"


def _warn_without_scheduler(finished: Finished) -> None:
    states = {state.state for state in finished.result}
    if finished.wants_json or not states & {"active", "declared"}:
        return
    app = finished.app
    if not app.schedule.schedulers() and DEFAULT_BROKER not in finished.unreachable:
        start = app.info(limit=0).start_advice.format_start("scheduler")
        echo_hint(f"no Scheduler of {app.name} is running, and nothing fires: {start}", err=True)
    elif "declared" in states:
        echo(
            "declared schedules fire when a Scheduler with this code starts",
            err=True,
        )


schedule = make_group(
    "schedule",
    "Schedules send the jobs of periodic tasks.",
    SCHEDULE_OPERATIONS,
    {
        "list": CommandView(
            row=_make_row,
            empty="no schedules: none was added, and none is declared",
            after=_warn_without_scheduler,
            skips_unreachable=True,
        ),
        "show": CommandView(row=_get_fields),
        "add": CommandView(text=_format_state, needs_code=True),
        "change": CommandView(text=_format_state),
        "pause": CommandView(text=_format_state),
        "resume": CommandView(text=_format_state),
        "remove": CommandView(
            text=_format_removed, would=lambda asked: f"remove the schedule {to_one_line(asked.name)}"
        ),
        "trigger": CommandView(text=lambda changed: str(changed.value["id"])),
    },
)
