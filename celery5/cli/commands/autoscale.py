"""Show how an application is scaled (`autoscale`)."""

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo, echo_hint, format_fields, format_time, to_json
from celery5.operations.processes import PROCESS_OPERATIONS
from celery5.protocol.durations import format_age, format_duration

if TYPE_CHECKING:
    from celery5.broker.calls.scaling import Scaling

_UNSCALED = "nothing is scaled: it takes the setting autoscale or prioritise, and a Scheduler: celery5 scheduler start"


def _show_status(finished: Finished) -> None:
    app, scaling = finished.app, finished.result
    if finished.wants_json:
        echo(to_json(scaling))
    elif scaling is None:
        echo_hint(_UNSCALED)
    else:
        with app.brokers.reachable():  # Schedulers are registered on the broker that has the scaling
            echo(format_fields(format_scaling(scaling, app.schedule.schedulers())))


def format_scaling(scaling: "Scaling", schedulers: Collection[str]) -> dict[str, object]:
    """Return the state of scaling as fields for people; `schedulers` are the live ones."""
    course, fields = scaling.course, dict[str, object]()
    if course is not None:
        cool_down = scaling.cool_until - scaling.at
        factor = f"{course.prefetch:g}"
        fields = {
            "jobs": scaling.jobs,
            "workers": scaling.workers,
            "needed": scaling.needed,
            "wanted": f"{course.workers}, from {scaling.minimum} to {scaling.maximum}",
            "prefetch": f"{factor} for {', '.join(course.crowded)}" if course.crowded else factor,
            "concurrency": f"{course.concurrency:g}",
            "last step": format_time(course.at) or "none yet",
            "cool-down": f"{format_duration(cool_down)} to go" if cool_down > 0 else "over",
        }
    if scaling.preferred:
        by_weight = sorted(scaling.preferred.items(), key=lambda item: item[1])
        fields["come later"] = ", ".join(f"{name} {weight:g}" for name, weight in by_weight)
    if scaling.unseen:
        fields["not seen"] = f"broker {', '.join(scaling.unseen)}: nothing becomes less meanwhile"
    decided_by = scaling.by if schedulers else f"{scaling.by}; no Scheduler is running: nothing is scaled now"
    now = time.time()
    return {**fields, "decided": f"{format_age(min(scaling.at, now), now)} by {decided_by}"}


autoscale = make_group(
    "autoscale",
    "See how many workers there should be, and how far they read ahead.",
    PROCESS_OPERATIONS,
    {"status": CommandView(show=_show_status)},
)
