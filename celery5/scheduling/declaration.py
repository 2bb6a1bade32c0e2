"""Periodic: the schedules of an application, as code and configuration declare them: what is sent, and when.

Declaring one checks and remembers it. When triggers fire is only worked out in a Scheduler, so that no worker and no
producer loads what that takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.envelope import read_envelope
from celery5.protocol.job.job import to_seconds
from celery5.protocol.scheduling.periodic import (
    Misfire,
    MisfirePolicy,
    OverlapPolicy,
    ScheduleDefinition,
    ScheduleOrigin,
)
from celery5.protocol.scheduling.triggers import AnyTrigger, validate_cron_fields, with_zone
from celery5.scheduling.triggers import parse_trigger

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.tasks.task import Signature, Task

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


class DeclaredSchedule(msgspec.Struct, frozen=True):
    """A schedule as somebody declared it: the call, and how it is repeated."""

    name: str
    call: Any
    periodic: Periodic
    origin: ScheduleOrigin = "code"


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


def make_definition(app: "App", call: "Signature[Any]", how: Periodic) -> ScheduleDefinition:
    """What a Scheduler needs to know, so that it can publish the jobs without the code of their task. Raises
    Misconfigured, BadArguments, MessageTooLarge."""
    trigger, misfire, jitter = resolve_parts(how)
    job = call.job()
    if job.at:
        raise Misconfigured(f"schedule of {job.task}: a countdown or an eta has no place beside a schedule")
    envelope = read_envelope(job.message)
    template = msgspec.structs.replace(envelope, id="-", sent=0.0, expires=None, trace="")
    expires = call.task.send_options.expires
    lasts = (
        to_seconds(cast("float | timedelta | None", expires)) if not hasattr(expires, "utcoffset") else None
    )
    return ScheduleDefinition(
        task=job.task,
        queue=job.queue,
        trigger=with_zone(trigger, app.settings.timezone),
        message=msgspec.json.encode(template).decode(),
        expires=lasts,
        lane=job.lane,
        lock=job.lock,
        unique_for=job.unique_for,
        jitter=jitter,
        misfire=misfire,
        overlap=how.overlap,
    )


def iterate_declared(app: "App", by_call: Sequence[DeclaredSchedule]) -> Iterator[DeclaredSchedule]:
    """All schedules that the application's code and its configuration declare. Raises Misconfigured."""
    yield from by_call
    for task in list(app.tasks.values()):
        yield from iterate_task_schedules(task)
    for name, said in app.settings.schedules.items():
        yield _configured(app, name, said)


def iterate_task_schedules(task: "Task[Any, Any]") -> Iterator[DeclaredSchedule]:
    """The schedules that a task was declared with."""
    from celery5.tasks.task import Signature

    for how in task.schedule:
        call = Signature(task, tuple(how.args), dict(how.kwargs))
        yield DeclaredSchedule(how.name or task.name, call, how)


def _configured(app: "App", name: str, said: Mapping[str, Any]) -> DeclaredSchedule:
    words = dict(said)
    task = words.pop("task", None)
    if not isinstance(task, str) or task not in app.tasks:
        raise Misconfigured(
            f"schedule {name!r} in the settings: task is {task!r}, which is none of this application"
        )
    call = app.tasks[task]
    options = words.pop("options", None)
    if options is not None:
        call = call.options(**options)
    try:
        own = {each: words.pop(each) for each in ("args", "kwargs", "overlap", "jitter") if each in words}
        misfire = words.pop("misfire", "once")
        if isinstance(misfire, Mapping):
            misfire = msgspec.convert(misfire, Misfire)
        how = Periodic(words.pop("when", None) or words, name, misfire=misfire, **own)
        _ = resolve_parts(how)
    except (TypeError, msgspec.ValidationError, Misconfigured) as error:
        raise Misconfigured(f"schedule {name!r} in the settings: {error}") from None
    from celery5.tasks.task import Signature

    return DeclaredSchedule(name, Signature(call, tuple(how.args), dict(how.kwargs)), how, "configuration")
