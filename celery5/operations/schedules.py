"""See schedules, add and remove them, pause, resume and trigger them."""

from datetime import datetime
from typing import Any, Literal

import msgspec

from celery5.app import App
from celery5.errors import Misconfigured
from celery5.operations.operation import Changed, Effect, Nothing, Operation, Seconds, Text
from celery5.protocol.scheduling.declaration import at, cron, every
from celery5.scheduling.schedules import ScheduleState


async def list_schedules(app: App, _: Nothing) -> list[ScheduleState]:
    """Show each schedule: when it fired last, when it fires next, and how often it did, and did not."""
    return await app.schedule.alist()


class OneSchedule(msgspec.Struct, frozen=True):
    """A schedule."""

    name: Text


async def show_schedule(app: App, asked: OneSchedule) -> ScheduleState:
    """Show all that is known of a schedule."""
    return await app.schedule.ashow(asked.name)


class NewSchedule(msgspec.Struct, frozen=True):
    """A schedule to add: give one of `cron`, `every` and `at`."""

    name: Text
    task: Text
    # A line of a crontab: `0 3 * * *`.
    cron: str = ""
    # Seconds between two jobs.
    every: Seconds | None = None
    # Once, such as 2026-12-24T18:00:00+01:00.
    at: datetime | None = None
    # Of `cron`: Europe/Berlin; '' for that of the settings.
    timezone: str = ""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    # The queue of its jobs; '' for the task's.
    queue: str = ""
    misfire: Literal["skip", "once", "catch-up"] = "once"
    overlap: Literal["allow", "skip", "queue"] = "allow"
    # Put off by up to so many seconds.
    jitter: Seconds = 0.0


async def add_schedule(app: App, asked: NewSchedule) -> Changed:
    """Add a schedule, which sends jobs of a task."""
    if sum((bool(asked.cron), asked.every is not None, asked.at is not None)) != 1:
        raise Misconfigured("say when: cron, every or at, one of them")
    when: Any = at(asked.at) if asked.at else every(asked.every or 0.0)
    if asked.cron:
        when = cron(asked.cron, timezone=asked.timezone)
    call = app.signature(asked.task, *asked.args, **asked.kwargs)
    if asked.queue:
        call = call.task.options(queue=asked.queue).s(*asked.args, **asked.kwargs)
    policies = {"misfire": asked.misfire, "overlap": asked.overlap, "jitter": asked.jitter}
    await app.schedule.aadd(call, when, name=asked.name, **policies)
    return Changed(summary=f"schedule {asked.name} is added", count=1)


async def pause_schedule(app: App, asked: OneSchedule) -> Changed:
    """Let a schedule rest until it is resumed."""
    await app.schedule.apause(asked.name)
    return Changed(summary=f"schedule {asked.name} is paused", count=1)


async def resume_schedule(app: App, asked: OneSchedule) -> Changed:
    """Have a schedule go on, with its next time that is still to come."""
    await app.schedule.aresume(asked.name)
    return Changed(summary=f"schedule {asked.name} goes on", count=1)


async def remove_schedule(app: App, asked: OneSchedule) -> Changed:
    """Remove a schedule; jobs that it has sent stay."""
    removed = await app.schedule.aremove(asked.name)
    declared = "" if removed.origin == "runtime" else "; it is declared in code, so a Scheduler adds it again"
    return Changed(summary=f"schedule {asked.name} is removed{declared}", count=1)


async def trigger_schedule(app: App, asked: OneSchedule) -> Changed:
    """Send a schedule's job now; its times stay as they are."""
    sent = await app.schedule.atrigger(asked.name)
    return Changed(summary=f"job {sent.id} of schedule {asked.name} is sent", count=1)


SCHEDULE_OPERATIONS = (
    Operation("schedule:list", list_schedules),
    Operation("schedule:show", show_schedule),
    Operation("schedule:add", add_schedule, Effect.CHANGE),
    Operation("schedule:pause", pause_schedule, Effect.CHANGE),
    Operation("schedule:resume", resume_schedule, Effect.CHANGE),
    Operation("schedule:trigger", trigger_schedule, Effect.CHANGE),
    Operation("schedule:remove", remove_schedule, Effect.DESTROY),
)
"""The operations on schedules."""
