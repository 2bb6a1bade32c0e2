"""Scheduler: the page of a Scheduler process, which decides what is decided once for a whole cluster.

It publishes jobs and sends commands, and runs no job. There may be any number of Schedulers and none of them leads: all
that one does is one atomic step, which the others may try as well. Any of them may be killed at any time.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import trio

from celery5.app import App
from celery5.bootsteps.boot import BootGraph
from celery5.bootsteps.worker_steps import ChannelSubscriptions, LentConnection
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.keys import Keys
from celery5.broker.routing.broker_router import AsyncBrokerRouter, BrokerMap
from celery5.config.scaling import get_autoscale, get_prioritisation
from celery5.doctor.needed_processes import needs_scheduler
from celery5.errors import CeleryError, Misconfigured
from celery5.health.checks import get_all_checks
from celery5.limits.holds import LimitHolds
from celery5.limits.rules import DeclaredRules
from celery5.logs.log import Log
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.multi_broker import RemoteRedis, connect_all_brokers, make_queue_depths
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import (
    AuxiliaryParts,
    ChannelListener,
    Incarnation,
    make_alert_rules,
    make_alert_webhook,
    make_process_values,
    make_push,
    make_systemd,
    run_auxiliary_process,
)
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.limits import DeclaredLimits
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.scheduling.fire_times import validate_trigger
from celery5.scheduling.schedules import make_definition
from celery5.services.commands.inbox import Inbox, InboxAddress
from celery5.services.commands.log_retry import LogRetry
from celery5.services.health.health_checks import CheckExpirations
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.limits.limit_rule_evaluator import LimitRuleEvaluator
from celery5.services.observability.alert_delivery import AlertDelivery
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.presence import Presence
from celery5.services.process.reloader import Reloader
from celery5.services.scaling.autoscaler import Autoscaler
from celery5.services.scaling.observer import ClusterObserver, TimeLimitedDriver
from celery5.services.scaling.scaling_commands import CommandSender, ScalingCommands, SigningKeys
from celery5.services.scheduling.declarations import RemoteBrokerSchedules, ScheduleDeclarations
from celery5.services.scheduling.timetable import Timetable
from celery5.wiring import build, part, step, steps


def make_broker_connections(app: App, redis: TrioRedis) -> dict[str, AsyncDriver]:
    """Return the connections to all brokers, by their names."""
    further = {
        name: TimeLimitedDriver(redis=RemoteRedis(app, name), broker=name) for name in app.brokers.names[1:]
    }
    return {DEFAULT_BROKER: redis, **further}


def make_command_sender(
    app: App,
    broker_connections: dict[str, AsyncDriver],
    keys: Keys,
    keyring: SigningKeys,
    address: InboxAddress,
    log: Log,
) -> CommandSender:
    """Return what sends commands to the workers of all brokers: an inbox is on the broker of its worker."""

    async def connect(broker: str) -> AsyncDriver:
        return broker_connections[broker]

    broker_map = BrokerMap(app.brokers.names, app.brokers.broker_of_queue, app.name)
    router = AsyncBrokerRouter(broker_map, connect)
    return CommandSender(redis=router, keys=keys, keyring=keyring, address=address, log=log)


KIND = "scheduler"


class SchedulerValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a Scheduler ask for besides each other and what every process has."""

    # The broker that its own connection is for.
    broker: str
    # The kind and the limits of tasks, by name.
    kinds: Mapping[str, str]
    declared_limits: Mapping[str, DeclaredLimits]
    # The queues that its tasks name, which are looked at before others.
    known_queues: Collection[str]
    # Returns the broker of a queue.
    find_broker: Callable[[str], str]


def make_values(app: App) -> SchedulerValues:
    """Return the values that only a Scheduler has."""
    return SchedulerValues(
        broker=DEFAULT_BROKER,
        kinds={name: task.kind for name, task in app.tasks.items()},
        declared_limits={
            name: task.declared_limits for name, task in app.tasks.items() if task.declared_limits is not None
        },
        known_queues=frozenset(task.queue for task in app.tasks.values()),
        find_broker=app.brokers.broker_of_queue,
    )


def resolve_rules(app: App) -> DeclaredRules:
    """Return the rules by which limits are imposed. Raises Misconfigured."""
    return app.limit_rule.resolve(app.tasks, get_all_checks(app), app.settings.timezone)


def make_listeners(inbox: Inbox, timetable: Timetable) -> tuple[ChannelListener, ...]:
    """Return who hears channels."""
    return (inbox, timetable)


def make_presence_listeners(
    declarations: ScheduleDeclarations, remote_schedules: dict[str, RemoteBrokerSchedules]
) -> tuple[Any, ...]:
    """Return who hears, at each heartbeat, which Schedulers are alive."""
    return (
        declarations.set_live_schedulers,
        *[schedules.set_live_schedulers for schedules in remote_schedules.values()],
    )


def make_remote_schedules(
    app: App, keys: Keys, worker: str, lease_seconds: float, log: Log
) -> dict[str, RemoteBrokerSchedules]:
    """Return what declares and fires the schedules of further brokers, by their names."""
    schedules: dict[str, RemoteBrokerSchedules] = {}
    for broker in app.brokers.names[1:]:
        redis = RemoteRedis(app, broker)
        declarations = ScheduleDeclarations(
            redis=redis,
            app=app,
            keys=keys,
            worker=worker,
            lease_seconds=lease_seconds,
            log=log,
            other_brokers=_connect_others(app, broker),
            broker=broker,
        )
        timetable = Timetable(redis=redis, app=app, keys=keys, worker=worker, log=log)
        schedules[broker] = RemoteBrokerSchedules(
            broker=broker, declarations=declarations, timetable=timetable, log=log
        )
    return schedules


def make_other_brokers(app: App) -> dict[str, RemoteRedis]:
    """Return the connections to the brokers besides the default one."""
    return _connect_others(app, DEFAULT_BROKER)


def _connect_others(app: App, broker: str) -> dict[str, RemoteRedis]:
    return {name: RemoteRedis(app, name) for name in app.brokers.names if name != broker}


def make_extra_sources(
    timetable: Timetable, autoscaler: Autoscaler, alert_delivery: AlertDelivery
) -> tuple[StatusSource, ...]:
    """Return who else is asked for /readyz and /metrics."""
    return (timetable, autoscaler, alert_delivery)


class SchedulerParts(AuxiliaryParts):
    """Every part of a Scheduler, and its boot graph: its steps start from the top and stop from the bottom."""

    # connections and commands
    listeners = part(make_listeners)
    presence_listeners = part(make_presence_listeners)
    redis = step(open_redis)
    push = step(make_push, after=(redis,))
    listen = step(ChannelSubscriptions, after=(push,))
    publishing = step(LentConnection, after=(redis,))
    asyncio_runner = step(AsyncioRunner, name="asyncio")
    presence = step(Presence, after=(redis,))
    inbox = step(Inbox, after=(listen,))
    # schedules
    other_brokers = part(make_other_brokers)
    declarations = step(ScheduleDeclarations, after=(presence,))
    timetable = step(Timetable, after=(declarations, listen))
    # health checks
    checks = part(get_all_checks)
    expirations = step(CheckExpirations, after=(presence,))
    remote_schedules = steps(make_remote_schedules, name="schedules", after=(presence,))
    # scaling
    broker_connections = part(make_broker_connections)
    observer = part(ClusterObserver)
    command_sender = part(make_command_sender)
    scaling_commands = part(ScalingCommands)
    autoscale = part(get_autoscale)
    prioritise = part(get_prioritisation)
    autoscaler = step(Autoscaler, after=(presence,))
    # limits
    declared_rules = part(resolve_rules)
    rule_observer = part(ClusterObserver)
    limit_rules = step(LimitRuleEvaluator, name="limits", after=(presence, asyncio_runner))
    # metrics and alerts
    all_brokers = part(connect_all_brokers)
    alert_rules = part(make_alert_rules)
    limit_holds = part(LimitHolds)
    alert_webhook = part(make_alert_webhook)
    queue_depths = step(make_queue_depths, name="depths", after=(redis,))
    metrics_reporter = step(MetricsReporter, name="metrics", after=(redis,))
    history_rollup = step(HistoryRollup, name="history", after=(redis,))
    alert_evaluator = step(AlertEvaluator, name="alerts", after=(redis,))
    alert_delivery = step(AlertDelivery, name="notices", after=(redis,))
    log_again = step(LogRetry, after=(redis,))
    # the life of the process: what must be up before it counts as up
    _work = (declarations, timetable, expirations, remote_schedules, autoscaler, limit_rules)
    extra_sources = part(make_extra_sources)
    status_phase = step(StatusPhase, name="vitals", after=(presence, inbox, *_work))
    systemd = step(make_systemd, after=(status_phase,))
    reloader = step(Reloader, after=(presence, inbox, *_work))


class SchedulerDegradedParts(SchedulerParts):
    """What a Scheduler runs while the default broker cannot be reached: the schedules of the others."""

    systemd = step(make_systemd)
    remote_schedules = steps(make_remote_schedules, name="schedules")


def is_needed(app: App) -> bool:
    """Whether the application has what only a Scheduler does."""
    return needs_scheduler(app)


async def run(
    app: App,
    options: ProcessOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a Scheduler until cancelled. Raises BrokerError when the broker lets nobody in."""

    def make_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        log.event("scheduler:boot-started", name=incarnation.name)
        values = make_process_values(app, options, incarnation, kind=KIND)
        return build(BootGraph, SchedulerParts, values, make_values(app))

    def make_degraded_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        values = make_process_values(app, options, incarnation, kind=KIND)
        return build(BootGraph, SchedulerDegradedParts, values, make_values(app), added=())

    await run_auxiliary_process(
        app, options, make_boot, make_degraded_boot, kind=KIND, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Check the scaling, limit rules, alerts and all schedules. Raises Misconfigured, once for all wrong schedules."""
    get_autoscale(app.settings)
    get_prioritisation(app.settings)
    resolve_rules(app)
    make_alert_rules(app)
    make_alert_webhook(app)
    errors: list[str] = []
    for schedule in app.schedule.list_declared().values():
        try:
            validate_trigger(make_definition(app, schedule.call, schedule.periodic).trigger)
        except (CeleryError, TypeError) as error:
            errors.append(f"schedule {schedule.name!r}: {error}")
    if errors:
        raise Misconfigured("; ".join(errors))


SCHEDULER = ProcessKind(KIND, run, check)
