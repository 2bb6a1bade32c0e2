"""Scheduler: the page of a Scheduler process, which decides what is decided once for a whole cluster.

It publishes jobs and sends commands, and runs no job. There may be any number of Schedulers and none of them leads: all
that one does is one atomic step, which the others may try as well. Any of them may be killed at any time.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from celery5.app import App
from celery5.bootsteps.boot import BootGraph
from celery5.bootsteps.worker_steps import ChannelSubscriptions, LentConnection
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import Keys
from celery5.broker.routing.broker_router import AsyncBrokerRouter, BrokerMap
from celery5.config.scaling import get_autoscale, get_prioritisation
from celery5.doctor.needed_processes import needs_scheduler
from celery5.errors import CeleryError, Misconfigured
from celery5.health.checks import get_all_checks
from celery5.health.health_check import HealthCheck
from celery5.limits.holds import LimitHolds
from celery5.limits.rules import DeclaredRules
from celery5.logs.log import Log
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.multi_broker import RemoteRedis, connect_all_brokers, make_queue_depths
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import (
    AuxiliaryParts,
    ChannelListener,
    DegradedBootTable,
    Incarnation,
    make_alert_rules,
    make_alert_webhook,
    make_process_values,
    run_auxiliary_process,
)
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.limits import DeclaredLimits
from celery5.protocol.scaling.autoscale import Autoscale
from celery5.protocol.scaling.prioritisation import PrioritisationStrategy
from celery5.scheduling.fire_times import validate_trigger
from celery5.scheduling.schedules import make_definition
from celery5.services.commands.inbox import Inbox, InboxAddress
from celery5.services.commands.log_again import LogRetry
from celery5.services.health.health_checks import CheckExpirations
from celery5.services.health.vital_sources import QueueDepths
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.limits.rule_evaluation import LimitRuleEvaluator
from celery5.services.observability.alert_delivery import AlertDelivery
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.presence import Presence
from celery5.services.process.reloader import Reloader
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.scaling.autoscaler import Autoscaler
from celery5.services.scaling.observer import ClusterObserver, TimeLimitedDriver
from celery5.services.scaling.scaling_commands import CommandSender, ScalingCommands, SigningKeys
from celery5.services.scheduling.declarations import RemoteBrokerSchedules, ScheduleDeclarations
from celery5.services.scheduling.timetable import Timetable
from celery5.wiring import BootTable, build, made_by, step


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


UP = ("presence", "inbox", "declarations", "timetable", "expirations", "schedules", "autoscaler", "limits")
"""What must be up before the process counts as up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerValues:
    """What the parts of a Scheduler ask for besides each other and what every process has."""

    # How the cluster is scaled, and which tasks go first.
    autoscale: Autoscale | None
    prioritise: PrioritisationStrategy | None
    # The kind and the limits of tasks, by name.
    kinds: Mapping[str, str]
    declared_limits: Mapping[str, DeclaredLimits]
    # The queues that its tasks name, which are looked at before others.
    known_queues: Collection[str]
    # Returns the broker of a queue.
    find_broker: Callable[[str], str]
    checks: Mapping[str, HealthCheck]
    # By which limits are imposed.
    declared_rules: DeclaredRules


def make_values(app: App) -> SchedulerValues:
    """Return the values that only a Scheduler has."""
    return SchedulerValues(
        autoscale=get_autoscale(app.settings),
        prioritise=get_prioritisation(app.settings),
        kinds={name: task.kind for name, task in app.tasks.items()},
        declared_limits={
            name: task.declared_limits for name, task in app.tasks.items() if task.declared_limits is not None
        },
        known_queues=frozenset(task.queue for task in app.tasks.values()),
        find_broker=app.brokers.broker_of_queue,
        checks=get_all_checks(app),
        declared_rules=resolve_rules(app),
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


@dataclass(frozen=True, kw_only=True)
class SchedulerBootTable(BootTable):
    """The boot graph of a Scheduler: up from the top, down from the bottom."""

    redis: TrioRedis = step("redis")
    push: PushRedis = step("push", requires=("redis",))
    listen: ChannelSubscriptions = step("listen", requires=("push",))
    publishing: LentConnection = step("publishing", requires=("redis",))
    presence: Presence = step("presence", requires=("redis",))
    inbox: Inbox = step("inbox", requires=("listen",))
    declarations: ScheduleDeclarations = step("declarations", requires=("presence",))
    timetable: Timetable = step("timetable", requires=("declarations", "listen"))
    expirations: CheckExpirations = step("expirations", requires=("presence",))
    remote_schedules: Mapping[str, RemoteBrokerSchedules] = step("schedules", requires=("presence",))
    autoscaler: Autoscaler = step("autoscaler", requires=("presence",))
    limit_rules: LimitRuleEvaluator = step("limits", requires=("presence",))
    queue_depths: QueueDepths = step("depths", requires=("redis",))
    metrics_reporter: MetricsReporter = step("metrics", requires=("redis",))
    history_rollup: HistoryRollup = step("history", requires=("redis",))
    alert_evaluator: AlertEvaluator = step("alerts", requires=("redis",))
    alert_delivery: AlertDelivery = step("notices", requires=("redis",))
    log_again: LogRetry = step("log-again", requires=("redis",))
    status_phase: StatusPhase = step("vitals", requires=UP)
    systemd: SystemdNotify = step("systemd", requires=("vitals",))
    reloader: Reloader = step("reloader", requires=UP)


@dataclass(frozen=True, kw_only=True)
class SchedulerDegradedBootTable(DegradedBootTable):
    """What a Scheduler runs while the default broker cannot be reached: the schedules of the others."""

    remote_schedules: Mapping[str, RemoteBrokerSchedules] = step("schedules")


class SchedulerParts(AuxiliaryParts):
    """Every part of a Scheduler."""

    boot_table: type[BootTable] = SchedulerBootTable
    listeners = made_by(make_listeners)
    presence_listeners = made_by(make_presence_listeners)
    all_brokers = made_by(connect_all_brokers)
    queue_depths = made_by(make_queue_depths)
    history_rollup = HistoryRollup
    alert_rules = made_by(make_alert_rules)
    limit_holds = LimitHolds
    alert_webhook = made_by(make_alert_webhook)
    alert_evaluator = AlertEvaluator
    alert_delivery = AlertDelivery
    extra_sources = made_by(make_extra_sources)
    # schedules
    declarations = ScheduleDeclarations
    timetable = Timetable
    remote_schedules = made_by(make_remote_schedules)
    other_brokers = made_by(make_other_brokers)
    # health checks
    expirations = CheckExpirations
    # scaling
    broker_connections = made_by(make_broker_connections)
    observer = ClusterObserver
    command_sender = made_by(make_command_sender)
    scaling_commands = ScalingCommands
    autoscaler = Autoscaler
    # limits
    rule_observer = ClusterObserver
    limit_rules = LimitRuleEvaluator


class SchedulerDegradedParts(SchedulerParts):
    """Every part of a Scheduler that cannot reach the default broker."""

    boot_table = SchedulerDegradedBootTable
    added = ()


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

    def make(parts: type, options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        values = make_process_values(app, options, incarnation, kind=KIND)
        return build(BootGraph, parts, values, make_values(app))

    def make_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        log.event("scheduler:boot-started", name=incarnation.name)
        return make(SchedulerParts, options, incarnation)

    make_degraded_boot = partial(make, SchedulerDegradedParts)
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
