"""Scheduler: the wiring page of a Scheduler process (C93): what only has to be decided once for a whole cluster.

Floor: processes. Reads: nothing itself. Writes: nothing itself.

It publishes and commands, and runs no job. There may be any number of Schedulers and none of them leads: whatever one
does is one atomic step that the others may try as well. Kill any of them at any time.
"""

from functools import partial
from typing import Any

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.broker.keys import Keys
from celery5.checks import all_checks
from celery5.errors import CeleryError, Misconfigured
from celery5.fire_times import checked
from celery5.log import Log
from celery5.periodic import definition
from celery5.processes.attendant_parts import GROUND, Listens, attend, given
from celery5.processes.lives import Page
from celery5.processes.scaling_parts import SCALING
from celery5.processes.several import Afar
from celery5.processes.worker import WorkerOptions
from celery5.protocol.routes import DEFAULT
from celery5.services.autoscaler import Autoscaler
from celery5.services.commands import Handler
from celery5.services.declarations import Declarations
from celery5.services.elsewhere import Elsewhere
from celery5.services.expirations import Expirations
from celery5.services.inbox import Inbox
from celery5.services.timetable import Timetable
from celery5.services.vitals import Source
from celery5.strategies import autoscale_of, is_scaled, prioritise_of

KIND = "scheduler"


def make_listeners(inbox: Inbox, timetable: Timetable) -> tuple[Listens, ...]:
    """Who is told what is said on channels."""
    return (inbox, timetable)


def make_handlers(usual: dict[str, Handler]) -> dict[str, Handler]:
    """What this Scheduler does when it is told to."""
    return {**usual}


def make_follows(declarations: Declarations, elsewhere: dict[str, Elsewhere]) -> tuple[Any, ...]:
    """Who is told, at each beat, which Schedulers live."""
    return (declarations.follow, *[each.follow for each in elsewhere.values()])


def make_elsewhere(app: App, keys: Keys, worker: str, lease_seconds: float, log: Log) -> dict[str, Elsewhere]:
    """What declares and fires the schedules of further brokers, by their names."""
    found: dict[str, Elsewhere] = {}
    for broker in app.brokers.names[1:]:
        redis = Afar(app, broker)
        declarations = Declarations(
            redis=redis,
            app=app,
            keys=keys,
            worker=worker,
            lease_seconds=lease_seconds,
            log=log,
            others=_ways(app, broker),
            broker=broker,
        )
        timetable = Timetable(redis=redis, app=app, keys=keys, worker=worker, log=log)
        found[broker] = Elsewhere(broker=broker, declarations=declarations, timetable=timetable, log=log)
    return found


def make_others(app: App) -> dict[str, Afar]:
    """The ways to the brokers besides the default one."""
    return _ways(app, DEFAULT)


def _ways(app: App, broker: str) -> dict[str, Afar]:
    return {name: Afar(app, name) for name in app.brokers.names if name != broker}


def make_more(timetable: Timetable, autoscaler: Autoscaler) -> tuple[Source, ...]:
    """Who else knows how this process does."""
    return (timetable, autoscaler)


def make_time(
    declarations: Declarations,
    timetable: Timetable,
    expirations: Expirations,
    elsewhere: dict[str, Elsewhere],
) -> tuple[Step, ...]:
    """The part of the boot graph that watches the clock: periodic tasks and health checks."""
    return (
        Step("declarations", declarations, ("presence",)),
        Step("timetable", timetable, ("declarations", "listen")),
        Step("expirations", expirations, ("presence",)),
        *[Step(f"schedules-{name}", each, ("presence",)) for name, each in elsewhere.items()],
    )


def make_last(time_steps: tuple[Step, ...], scaling_steps: tuple[Step, ...]) -> tuple[str, ...]:
    """What must be up before the process counts as up."""
    return ("presence", "inbox", *[step.name for step in (*time_steps, *scaling_steps)])


def make_steps(
    ground: tuple[Step, ...],
    time_steps: tuple[Step, ...],
    scaling_steps: tuple[Step, ...],
    top: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (*ground, *time_steps, *scaling_steps, *top)


SchedulerParts = Injector(
    **GROUND,
    **SCALING,
    listeners=value(make_listeners),
    handlers=value(make_handlers),
    follows=value(make_follows),
    more=value(make_more),
    time_steps=value(make_time),
    declarations=Declarations,
    timetable=Timetable,
    elsewhere=value(make_elsewhere),
    others=value(make_others),
    checks=value(all_checks),
    expirations=Expirations,
    last=value(make_last),
    steps=value(make_steps),
)
"""Every part of a Scheduler. A part is built from the names of its constructor's parameters."""


def needed(app: App) -> bool:
    """Whether the application has what only a Scheduler does."""
    return is_scaled(app.settings) or app.schedule.is_used


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a Scheduler until cancelled. Raises BrokerError when Redis lets nobody in."""
    known = partial(given, kind=KIND)
    await attend(app, options, KIND, SchedulerParts, known, log=log, done=done, task_status=task_status)


def check(app: App) -> None:
    """Raises Misconfigured when the application cannot be scheduled for; for all schedules that make no sense at
    once."""
    autoscale_of(app.settings)
    prioritise_of(app.settings)
    wrong: list[str] = []
    for each in app.schedule.declared().values():
        try:
            checked(definition(app, each.call, each.how).trigger)
        except (CeleryError, TypeError) as error:
            wrong.append(f"schedule {each.name!r}: {error}")
    if wrong:
        raise Misconfigured("; ".join(wrong))


SCHEDULER = Page(KIND, run, check)
"""What serves as a Scheduler."""
