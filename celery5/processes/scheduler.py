"""Scheduler: the wiring page of a Scheduler process (C93): what only has to be decided once for a whole cluster.

It publishes and commands, and runs no job. There may be any number of Schedulers and none of them leads: whatever one
does is one atomic step that the others may try as well. Kill any of them at any time.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import Keys
from celery5.broker.routing.broker_router import AsyncBrokerRouter, BrokerMap
from celery5.errors import CeleryError, Misconfigured
from celery5.health.checks import get_all_checks
from celery5.logs.log import Log
from celery5.processes.attendant_parts import (
    BASE_PARTS,
    ChannelListener,
    make_common_values,
    run_auxiliary_process,
)
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.processes.worker import WorkerOptions
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.limits import DeclaredLimits
from celery5.protocol.scaling.autoscale import Autoscale
from celery5.protocol.scaling.prioritisation import PrioritisationStrategy
from celery5.scaling.strategies import get_autoscale, get_prioritisation, is_scaled
from celery5.scheduling.declaration import make_definition
from celery5.scheduling.fire_times import validate_trigger
from celery5.services.commands.dispatcher import CommandHandler
from celery5.services.commands.inbox import Inbox, InboxAddress
from celery5.services.health.expirations import CheckExpirations
from celery5.services.health.vitals import StatusSource
from celery5.services.scaling.autoscaler import Autoscaler
from celery5.services.scaling.observer import ClusterObserver, TimeLimitedDriver
from celery5.services.scaling.scaling_commands import CommandSender, ScalingCommands, SigningKeys
from celery5.services.scheduling.declarations import ScheduleDeclarations
from celery5.services.scheduling.remote_schedules import RemoteBrokerSchedules
from celery5.services.scheduling.timetable import Timetable


def make_autoscale(app: App) -> Autoscale | None:
    """How it is scaled."""
    return get_autoscale(app.settings)


def make_prioritise(app: App) -> PrioritisationStrategy | None:
    """Which tasks go first."""
    return get_prioritisation(app.settings)


def make_kinds(app: App) -> dict[str, str]:
    """The kind of each of its tasks."""
    return {name: task.kind for name, task in app.tasks.items()}


def make_admission_rules(app: App) -> dict[str, DeclaredLimits]:
    """The gates of those that have one."""
    return {name: task.limits.declared for name, task in app.tasks.items() if task.limits is not None}


def make_task_queues(app: App) -> frozenset[str]:
    """The queues that its tasks name, which are looked at before others."""
    return frozenset(task.queue for task in app.tasks.values())


def make_broker_connections(app: App, redis: TrioRedis) -> dict[str, AsyncDriver]:
    """The ways to all brokers, by their names."""
    further = {
        name: TimeLimitedDriver(redis=RemoteRedis(app, name), broker=name) for name in app.brokers.names[1:]
    }
    return {DEFAULT_BROKER: redis, **further}


def make_home(app: App) -> Callable[[str], str]:
    """Which broker a queue is on."""
    return app.brokers.broker_of_queue


def make_command_sender(
    app: App,
    broker_connections: dict[str, AsyncDriver],
    keys: Keys,
    keyring: SigningKeys,
    address: InboxAddress,
    log: Log,
) -> CommandSender:
    """What posts commands to the workers of all brokers: an inbox is on that of its worker's life."""

    async def reach(broker: str) -> AsyncDriver:
        return broker_connections[broker]

    chart = BrokerMap(app.brokers.names, app.brokers.broker_of_queue, app.name)
    junction = AsyncBrokerRouter(chart, reach)
    return CommandSender(redis=junction, keys=keys, keyring=keyring, address=address, log=log)


def make_scaling_steps(autoscaler: Autoscaler) -> tuple[Step, ...]:
    """The part of the boot graph that looks at the whole cluster."""
    return (Step("autoscaler", autoscaler, ("presence",)),)


SCALING_PARTS: Mapping[str, Any] = {
    "autoscale": value(make_autoscale),
    "prioritise": value(make_prioritise),
    "kinds": value(make_kinds),
    "declared_limits": value(make_admission_rules),
    "known_queues": value(make_task_queues),
    "broker_connections": value(make_broker_connections),
    "find_broker": value(make_home),
    "observer": ClusterObserver,
    "command_sender": value(make_command_sender),
    "scaling_commands": ScalingCommands,
    "autoscaler": Autoscaler,
    "scaling_steps": value(make_scaling_steps),
}
"""Parts of a Scheduler."""


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
    extra_sources=value(make_extra_sources),
    time_steps=value(make_time_steps),
    declarations=ScheduleDeclarations,
    timetable=Timetable,
    remote_schedules=value(make_remote_schedules),
    other_brokers=value(make_others),
    checks=value(get_all_checks),
    expirations=CheckExpirations,
    required_steps=value(make_required_steps),
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
