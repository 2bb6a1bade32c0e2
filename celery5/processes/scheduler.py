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
from celery5.checks import get_all_checks
from celery5.errors import CeleryError, Misconfigured
from celery5.fire_times import validate_trigger
from celery5.log import Log
from celery5.periodic import make_definition
from celery5.processes.attendant_parts import (
    BASE_PARTS,
    ChannelListener,
    make_common_values,
    run_auxiliary_process,
)
from celery5.processes.lives import ProcessKind
from celery5.processes.scaling_parts import SCALING_PARTS
from celery5.processes.several import RemoteRedis
from celery5.processes.worker import WorkerOptions
from celery5.protocol.routes import DEFAULT_BROKER
from celery5.services.autoscaler import Autoscaler
from celery5.services.commands import CommandHandler
from celery5.services.declarations import ScheduleDeclarations
from celery5.services.elsewhere import RemoteBrokerSchedules
from celery5.services.expirations import CheckExpirations
from celery5.services.inbox import Inbox
from celery5.services.timetable import Timetable
from celery5.services.vitals import StatusSource
from celery5.strategies import get_autoscale, get_prioritisation, is_scaled

KIND = "scheduler"


def make_listeners(inbox: Inbox, timetable: Timetable) -> tuple[ChannelListener, ...]:
    """Who is told what is said on channels."""
    return (inbox, timetable)


def make_handlers(common_handlers: dict[str, CommandHandler]) -> dict[str, CommandHandler]:
    """What this Scheduler does when it is told to."""
    return {**common_handlers}


def make_presence_listeners(
    declarations: ScheduleDeclarations, remote_schedules: dict[str, RemoteBrokerSchedules]
) -> tuple[Any, ...]:
    """Who is told, at each beat, which Schedulers live."""
    return (
        declarations.set_live_schedulers,
        *[each.set_live_schedulers for each in remote_schedules.values()],
    )


def make_remote_schedules(
    app: App, keys: Keys, worker: str, lease_seconds: float, log: Log
) -> dict[str, RemoteBrokerSchedules]:
    """What declares and fires the schedules of further brokers, by their names."""
    found: dict[str, RemoteBrokerSchedules] = {}
    for broker in app.brokers.names[1:]:
        redis = RemoteRedis(app, broker)
        declarations = ScheduleDeclarations(
            redis=redis,
            app=app,
            keys=keys,
            worker=worker,
            lease_seconds=lease_seconds,
            log=log,
            other_brokers=_ways(app, broker),
            broker=broker,
        )
        timetable = Timetable(redis=redis, app=app, keys=keys, worker=worker, log=log)
        found[broker] = RemoteBrokerSchedules(
            broker=broker, declarations=declarations, timetable=timetable, log=log
        )
    return found


def make_others(app: App) -> dict[str, RemoteRedis]:
    """The ways to the brokers besides the default one."""
    return _ways(app, DEFAULT_BROKER)


def _ways(app: App, broker: str) -> dict[str, RemoteRedis]:
    return {name: RemoteRedis(app, name) for name in app.brokers.names if name != broker}


def make_extra_sources(timetable: Timetable, autoscaler: Autoscaler) -> tuple[StatusSource, ...]:
    """Who else knows how this process does."""
    return (timetable, autoscaler)


def make_time_steps(
    declarations: ScheduleDeclarations,
    timetable: Timetable,
    expirations: CheckExpirations,
    remote_schedules: dict[str, RemoteBrokerSchedules],
) -> tuple[Step, ...]:
    """The part of the boot graph that watches the clock: periodic tasks and health checks."""
    return (
        Step("declarations", declarations, ("presence",)),
        Step("timetable", timetable, ("declarations", "listen")),
        Step("expirations", expirations, ("presence",)),
        *[Step(f"schedules-{name}", each, ("presence",)) for name, each in remote_schedules.items()],
    )


def make_required_steps(time_steps: tuple[Step, ...], scaling_steps: tuple[Step, ...]) -> tuple[str, ...]:
    """What must be up before the process counts as up."""
    return ("presence", "inbox", *[step.name for step in (*time_steps, *scaling_steps)])


def make_steps(
    base_steps: tuple[Step, ...],
    time_steps: tuple[Step, ...],
    scaling_steps: tuple[Step, ...],
    final_steps: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (*base_steps, *time_steps, *scaling_steps, *final_steps)


SchedulerParts = Injector(
    **BASE_PARTS,
    **SCALING_PARTS,
    listeners=value(make_listeners),
    handlers=value(make_handlers),
    presence_listeners=value(make_presence_listeners),
    more=value(make_extra_sources),
    time_steps=value(make_time_steps),
    declarations=ScheduleDeclarations,
    timetable=Timetable,
    remote_schedules=value(make_remote_schedules),
    others=value(make_others),
    checks=value(get_all_checks),
    expirations=CheckExpirations,
    last=value(make_required_steps),
    steps=value(make_steps),
)
"""Every part of a Scheduler. A part is built from the names of its constructor's parameters."""


def is_needed(app: App) -> bool:
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
    known = partial(make_common_values, kind=KIND)
    await run_auxiliary_process(
        app, options, KIND, SchedulerParts, known, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application cannot be scheduled for; for all schedules that make no sense at
    once."""
    get_autoscale(app.settings)
    get_prioritisation(app.settings)
    wrong: list[str] = []
    for each in app.schedule.list_declared().values():
        try:
            validate_trigger(make_definition(app, each.call, each.periodic).trigger)
        except (CeleryError, TypeError) as error:
            wrong.append(f"schedule {each.name!r}: {error}")
    if wrong:
        raise Misconfigured("; ".join(wrong))


SCHEDULER = ProcessKind(KIND, run, check)
"""What serves as a Scheduler."""
