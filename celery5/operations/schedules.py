"""See schedules, add, change and remove them, pause, resume and trigger them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from celery5.errors import Misconfigured
from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Span, Text, about
from celery5.protocol.scheduling.declaration import at, cron, every
from celery5.protocol.scheduling.triggers import AnyTrigger

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.scheduling.schedules import ScheduleState


async def list_schedules(app: "App", _: Nothing) -> "list[ScheduleState]":
    """Show each schedule: when it fired last, when it fires next, and how often it did, and did not."""
    return await app.schedule.alist(with_declared=True)


class OneSchedule(msgspec.Struct, frozen=True):
    """A schedule."""

    name: Annotated[Text, about("The schedule.")]


async def show_schedule(app: "App", asked: OneSchedule) -> "ScheduleState":
    """Show all that is known of a schedule."""
    return await app.schedule.ashow(asked.name)


class FireTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When a schedule fires: one of `cron`, `every` and `at`."""

    cron: Annotated[str | None, about("A line of a crontab: `0 3 * * *`.", metavar="LINE")] = None
    every: Annotated[Span | None, about("An interval.", metavar="SECONDS")] = None
    at: Annotated[datetime | None, about("Once: 2026-12-24T18:00:00+01:00.", metavar="TIME")] = None
    timezone: Annotated[
        str | None, about("Of cron: Europe/Berlin; default: the setting.", metavar="ZONE")
    ] = None


class NewSchedule(FireTimes, frozen=True, kw_only=True):
    """A schedule to add: give one of `cron`, `every` and `at`."""

    name: Annotated[Text, about("Its name.")]
    task: Annotated[Text, about("The task whose jobs it sends.")]
    args: Annotated[list[Any], about("The task's arguments, as a list.", metavar="JSON")] = []
    kwargs: Annotated[dict[str, Any], about("Those by name, as an object.", metavar="JSON")] = {}
    queue: Annotated[str, about("The queue of its jobs; default: the task's.")] = ""
    misfire: Annotated[
        Literal["skip", "once", "catch-up"], about("What happens to times that were missed.")
    ] = "once"
    overlap: Annotated[
        Literal["allow", "skip", "queue"], about("What happens while the job before still runs.")
    ] = "allow"
    jitter: Annotated[Span, about("Put off by up to so much.", metavar="SECONDS")] = 0.0


async def add_schedule(app: "App", asked: NewSchedule) -> Changed:
    """Add a schedule, which sends jobs of a task."""
    when = _parse_when(asked)
    call = app.signature(asked.task, *asked.args, **asked.kwargs)
    if asked.queue:
        call = call.task.options(queue=asked.queue).s(*asked.args, **asked.kwargs)
    policies = {"misfire": asked.misfire, "overlap": asked.overlap, "jitter": asked.jitter}
    added = await app.schedule.aadd(call, when, name=asked.name, **policies)
    return Changed(summary=f"schedule {asked.name} is added", count=1, value=added)


def _parse_when(asked: FireTimes) -> AnyTrigger:
    """Return when a schedule fires. Raises Misconfigured."""
    if sum(given is not None for given in (asked.cron, asked.every, asked.at)) != 1:
        raise Misconfigured("say when: `cron`, `every` or `at`, one of them")
    if asked.timezone is not None and asked.cron is None:
        raise Misconfigured("`timezone` is for `cron`")
    if asked.timezone == "":
        raise Misconfigured("`timezone` '' is no time zone: give a name like Europe/Berlin, or leave it out")
    if asked.cron is not None:
        return cron(asked.cron, timezone=asked.timezone or "")
    if asked.every is not None:
        return every(asked.every)
    assert asked.at is not None  # one of them is given
    if asked.at.utcoffset() is None:
        offset = asked.at.replace(tzinfo=UTC).isoformat()
        raise Misconfigured(
            f"`at` {asked.at.isoformat()!r} does not say where: give an offset from UTC, such as {offset}"
        )
    return at(asked.at)


class NewTimes(FireTimes, frozen=True, kw_only=True):
    """A schedule, and when it is to fire from now on: give one of `cron`, `every` and `at`."""

    name: Annotated[Text, about("The schedule.")]


async def change_schedule(app: "App", asked: NewTimes) -> Changed:
    """Change when a schedule fires that was added by hand."""
    changed = await app.schedule.achange(asked.name, _parse_when(asked))
    return Changed(summary=f"schedule {asked.name} fires {changed.when}", count=1, value=changed)


async def pause_schedule(app: "App", asked: OneSchedule) -> Changed:
    """Pause a schedule until it is resumed."""
    paused = await app.schedule.apause(asked.name)
    return Changed(summary=f"schedule {asked.name} is paused", count=1, value=paused)


async def resume_schedule(app: "App", asked: OneSchedule) -> Changed:
    """Have a schedule go on, with its next time that is still to come."""
    resumed = await app.schedule.aresume(asked.name)
    return Changed(summary=f"schedule {asked.name} goes on", count=1, value=resumed)


async def remove_schedule(app: "App", asked: OneSchedule) -> Changed:
    """Remove a schedule; jobs that it has sent stay."""
    removed = await app.schedule.aremove(asked.name)
    declared = "" if removed.origin == "runtime" else "; it is declared in code, so a Scheduler adds it again"
    return Changed(summary=f"schedule {asked.name} is removed{declared}", count=1, value=removed)


async def trigger_schedule(app: "App", asked: OneSchedule) -> Changed:
    """Send a schedule's job now; its times stay as they are."""
    sent = await app.schedule.atrigger(asked.name)
    return Changed(summary=f"job {sent.id} of schedule {asked.name} is sent", count=1, value={"id": sent.id})


SCHEDULE_OPERATIONS = (
    Operation("schedule:list", list_schedules, result_module="celery5.scheduling.schedules"),
    Operation("schedule:show", show_schedule, result_module="celery5.scheduling.schedules"),
    Operation("schedule:add", add_schedule, Effect.ADJUST | Effect.SEND_JOBS),
    Operation("schedule:change", change_schedule, Effect.ADJUST),
    Operation("schedule:pause", pause_schedule, Effect.ADJUST),
    Operation("schedule:resume", resume_schedule, Effect.ADJUST),
    Operation("schedule:trigger", trigger_schedule, Effect.SEND_JOBS),
    Operation("schedule:remove", remove_schedule, Effect.DELETE),
)
"""The operations on schedules."""
