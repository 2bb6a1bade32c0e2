"""Declare the schedules of an application, in code and configuration.

A declaration is checked and stored. Fire times are computed only in a Scheduler, so that no worker or producer
loads the code for that.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.job import to_seconds
from celery5.protocol.scheduling.periodic import Misfire, MisfirePolicy, OverlapPolicy
from celery5.protocol.scheduling.triggers import AnyTrigger, validate_cron_fields
from celery5.scheduling.triggers import parse_trigger

if TYPE_CHECKING:
    pass

MAX_JITTER = 86_400.0


class Periodic(msgspec.Struct, frozen=True):
    """A task that runs by the clock: the value of `@app.task(schedule=...)` when a time alone is not enough."""

    # A line of a crontab, seconds, a timedelta, a datetime, or what `cron`, `every`, `calendar` and `at` return.
    when: Any
    # The name of the schedule; '' for that of the task.
    name: str = ""
    # The arguments of the task.
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    # What becomes of fire times that were not published in time.
    misfire: Misfire | MisfirePolicy = "once"
    # What happens while the previous job has not ended: `allow`, `skip`, or `queue`, where at most one waits.
    overlap: OverlapPolicy = "allow"
    # Each fire is delayed by a random time of up to so many seconds.
    jitter: float | timedelta = 0.0


def parse_periodic(said: object, what: str) -> tuple[Periodic, ...]:
    """Return the schedules of a `schedule=` option: one, or a list of them. Raises Misconfigured."""
    if said is None:
        return ()
    listed = cast("list[object]", said) if isinstance(said, list | tuple) else [said]
    schedules = tuple(
        [
            schedule if isinstance(schedule, Periodic) else Periodic(cast("Any", schedule))
            for schedule in listed
        ]
    )
    names = [schedule.name for schedule in schedules]
    if len(set(names)) < len(names):
        raise Misconfigured(f"{what} has several schedules: give each a name, Periodic(..., name=...)")
    for schedule in schedules:
        try:
            _ = resolve_parts(schedule)
        except Misconfigured as error:
            raise Misconfigured(f"{what}: schedule: {error}") from None
    return schedules


def resolve_parts(how: Periodic) -> tuple[AnyTrigger, Misfire, float]:
    """Return the trigger, the misfire policy and the jitter of a declaration. Raises Misconfigured."""
    misfire = how.misfire if isinstance(how.misfire, Misfire) else Misfire(how.misfire)
    jitter = to_seconds(how.jitter)
    if how.overlap not in ("allow", "skip", "queue"):
        raise Misconfigured(f"overlap {how.overlap!r} is not known: allow, skip or queue")
    if jitter is None or not 0 <= jitter <= MAX_JITTER:
        raise Misconfigured(f"jitter is {how.jitter!r}: give 0 seconds to a day")
    if how.name and (len(how.name) > 200 or any(character < " " for character in how.name)):
        raise Misconfigured(f"a schedule's name has at most 200 characters, and {how.name!r} is none")
    trigger = parse_trigger(how.when)
    validate_cron_fields(trigger)
    return trigger, misfire.validate(), jitter


def parse_schedule(schedule: object, task: str) -> tuple[Periodic, ...]:
    """Return the schedules of a task's declaration. Raises Misconfigured."""
    return parse_periodic(schedule, f"task {task}")
