"""Periodic: the schedules of an application, as code and configuration declare them: what is sent, and when.

Declaring one checks and remembers it. When triggers fire is only worked out in a Scheduler, so that no worker and no
producer loads what that takes.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.job import to_seconds
from celery5.protocol.scheduling.periodic import (
    Misfire,
    MisfirePolicy,
    OverlapPolicy,
)
from celery5.protocol.scheduling.triggers import AnyTrigger, validate_cron_fields
from celery5.scheduling.triggers import parse_trigger

if TYPE_CHECKING:
    pass

MAX_JITTER = 86_400.0


class Periodic(msgspec.Struct, frozen=True):
    """A task that runs by the clock: what `@app.task(schedule=...)` takes where a time alone does not say enough.

    `when` is a line of a crontab, seconds, a timedelta, a datetime, or what `cron`, `every`, `calendar` and `at` give.
    `args` and `kwargs` are the task's. `name` is the schedule's, its task's without it. `misfire` says what becomes of
    fire times that nobody published in time, `overlap` what happens while the job before has not ended (`allow`,
    `skip`, or `queue`: one waits at most). Each fire is put off by up to `jitter` seconds.
    """

    when: Any
    name: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    misfire: Misfire | MisfirePolicy = "once"
    overlap: OverlapPolicy = "allow"
    jitter: float | timedelta = 0.0


def parse_periodic(said: object, what: str) -> tuple[Periodic, ...]:
    """What `schedule=` says: one schedule, or a list of them. Raises Misconfigured."""
    if said is None:
        return ()
    listed = cast("list[object]", said) if isinstance(said, list | tuple) else [said]
    made = tuple([each if isinstance(each, Periodic) else Periodic(cast("Any", each)) for each in listed])
    names = [each.name for each in made]
    if len(set(names)) < len(names):
        raise Misconfigured(f"{what} has several schedules: give each a name, Periodic(..., name=...)")
    for each in made:
        try:
            _ = resolve_parts(each)
        except Misconfigured as error:
            raise Misconfigured(f"{what}: schedule: {error}") from None
    return made


def resolve_parts(how: Periodic) -> tuple[AnyTrigger, Misfire, float]:
    """The trigger, the misfire policy and the jitter of a declaration. Raises Misconfigured."""
    misfire = how.misfire if isinstance(how.misfire, Misfire) else Misfire(how.misfire)
    jitter = to_seconds(how.jitter)
    if how.overlap not in ("allow", "skip", "queue"):
        raise Misconfigured(f"overlap {how.overlap!r} is not known: allow, skip or queue")
    if jitter is None or not 0 <= jitter <= MAX_JITTER:
        raise Misconfigured(f"jitter is {how.jitter!r}: give 0 seconds to a day")
    if how.name and (len(how.name) > 200 or any(each < " " for each in how.name)):
        raise Misconfigured(f"a schedule's name has at most 200 characters, and {how.name!r} is none")
    trigger = parse_trigger(how.when)
    validate_cron_fields(trigger)
    return trigger, misfire.validate(), jitter


def parse_schedule(schedule: object, task: str) -> tuple[Periodic, ...]:
    """Return when a task runs by itself, as its declaration says. Raises Misconfigured."""
    return parse_periodic(schedule, f"task {task}")
