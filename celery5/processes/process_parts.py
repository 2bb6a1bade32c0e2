"""Process Parts: the values and parts that processes of all kinds are made of, and how those run that run no jobs."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.boot_step import BootStep, select_steps
from celery5.bootsteps.boot import BootGraph
from celery5.bootsteps.own_steps import ASYNCIO_RUNNER
from celery5.bootsteps.worker_steps import ChannelHandler
from celery5.broker.calls import jobs
from celery5.broker.connection.link import (
    BreakerClosed,
    BreakerOpened,
    CallsAccepted,
    CallsRefused,
    LinkConnected,
    LinkConnectFailed,
    LinkEnded,
    LinkEvent,
    LinkLost,
)
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.drivers.opening_on_trio import open_parked, open_push
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.timing import Timing
from celery5.commands.keyring import Keyring
from celery5.config.configuration import Configuration
from celery5.config.settings import Settings
from celery5.errors import BrokerError
from celery5.logs.log import Level, Log
from celery5.observability import webhook
from celery5.observability.outlets import MetricsOutlet
from celery5.processes.lifecycle.incarnations import DegradedOperation, run_incarnations
from celery5.processes.lifecycle.loaded_code import find_code_file
from celery5.processes.lifecycle.noted_process import noting_process
from celery5.processes.options import ProcessOptions
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.commands.definitions import RELOAD, RETRY_BOOT_STEP, get_inbox_name
from celery5.protocol.observability.alerting import AlertRule
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.commands.dispatcher import CommandHandler, CommandRegistry, SelfCommandSender, handle
from celery5.services.commands.inbox import (
    InboxAddress,
    SelfCommandQueue,
)
from celery5.services.commands.log_retry import log_handlers
from celery5.services.commands.process_commands import ProcessCommands
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vital_sources import (
    BreakerMetrics,
    CommandMetrics,
    ConnectionStatus,
    LogMetrics,
)
from celery5.services.health.vitals import ProcessStatus, StatusSource
from celery5.services.observability.metrics_reporter import guard_outlets
from celery5.services.process.lease import Lease
from celery5.services.process.reloader import NextIncarnation, Reloader, ReloadSignal
from celery5.services.process.step_status import StepStatus
from celery5.services.process.systemd_notify import NotifySettings, SystemdNotify, read_notify_settings
from celery5.wiring import part


class Incarnation(msgspec.Struct, frozen=True):
    """One incarnation of a process, which is about to be built."""

    # Its whole name.
    name: str
    log: Log
    # Set when the process is to end by itself: a burst is over, or a command has asked for it.
    stop_requested: trio.Event
    # What follows it.
    next_incarnation: NextIncarnation


class ProcessValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a process of any kind ask for besides each other."""

    app: App
    # Its settings, each of which a part may ask for by its name: `celery5 config show` explains them.
    settings: Settings
    # worker, router, scheduler, controller or publisher.
    kind: str
    keys: Keys
    # The server of the broker that this process, or this incarnation of it, works on.
    endpoint: Endpoint
    # Limits and intervals of connections.
    timing: Timing
    # What the server calls the connections of this process.
    name: str
    # The whole name of the incarnation, whatever its kind.
    worker: str
    # Seconds after which a process that does not renew its lease counts as dead.
    lease_seconds: float
    log: Log
    # Hears what happens to connections.
    watch: "ConnectionLog"
    # Where commands for this process arrive.
    address: InboxAddress
    keyring: Keyring
    # How many commands came, by what became of them.
    command_counts: Counter[str]
    # The commands that were performed, by id.
    performed_commands: dict[str, float]
    # The configuration backend to watch, if there is one.
    configuration: Configuration | None
    # Whether a change of the configuration takes effect without a restart.
    reload: bool
    next_incarnation: NextIncarnation
    reload_signal: ReloadSignal
    # Called when a step does not end.
    on_stuck: Callable[[], None]
    # Set when the process is to end by itself.
    stop_requested: trio.Event
    process_status: ProcessStatus
    # Seconds between reports on metrics, and who gets them besides Redis.
    metrics_interval: float
    outlets: Sequence[MetricsOutlet]
    # How many failed jobs the history keeps, and as many others; 0: there is none.
    history_limit: int
    # Whether another incarnation follows this one.
    is_restarting: Callable[[], bool]
    # What systemd requests, what it shows of the process, and whether the process ends for good.
    notify_settings: NotifySettings
    status_line: Callable[[], str]
    is_exiting: Callable[[], bool]
    # The file of the application's module.
    code_file: str


def make_process_values(
    app: App,
    options: ProcessOptions,
    incarnation: Incarnation,
    *,
    kind: str,
    endpoint: Endpoint | None = None,
    lease: Lease | None = None,
    status_line: Callable[[], str] | None = None,
) -> ProcessValues:
    """Return the values that every kind of process has.

    Args:
        app: The application.
        options: How the process runs.
        incarnation: The incarnation that is about to be built.
        kind: Its kind, in a word.
        endpoint: The server to work on; default: that of the default broker.
        lease: Its lease, if it has one: an incarnation that has lost it is followed by another.
        status_line: Returns what systemd shows; default: which conditions keep the process from being ready.
    """
    status = options.process_status or ProcessStatus(app=app.name)
    status.follow_refusals(incarnation.log.lost_connections.get_refusals)
    next_incarnation, restart_mode = incarnation.next_incarnation, options.restart_mode

    def is_restarting() -> bool:
        return next_incarnation.is_due or (lease is not None and lease.is_lost)

    def is_exiting() -> bool:
        # An incarnation that ends by an error is followed by another one, unless the process was asked to stop.
        asked_to_stop = status.phase == "stopping"
        return asked_to_stop and not is_restarting() and not (restart_mode.is_due and restart_mode.in_place)

    return ProcessValues(
        app=app,
        settings=app.settings,
        kind=kind,
        keys=app.keys,
        endpoint=endpoint or app.connections.endpoint,
        timing=Timing(),
        name=f"celery5:{incarnation.name}",
        worker=incarnation.name,
        lease_seconds=app.settings.lease,
        log=incarnation.log,
        watch=ConnectionLog(log=incarnation.log),
        address=InboxAddress(
            app.name,
            get_inbox_name(incarnation.name),
            is_open=app.settings.inbox,
            is_signed=app.settings.inbox_signatures,
            is_durable=bool(options.name),
        ),
        keyring=app.control.keyring,
        command_counts=Counter[str](),
        performed_commands=options.performed_commands,
        configuration=app.configuration,
        reload=options.reload,
        next_incarnation=next_incarnation,
        reload_signal=options.reload_signal,
        on_stuck=options.on_stuck,
        stop_requested=incarnation.stop_requested,
        process_status=status,
        metrics_interval=app.settings.metrics_interval,
        outlets=list_outlets(app),
        history_limit=app.settings.job_history,
        is_restarting=is_restarting,
        notify_settings=read_notify_settings({} if options.shares_process else os.environ, os.getpid()),
        status_line=status_line or (lambda: _format_conditions(status)),
        is_exiting=is_exiting,
        code_file=find_code_file(app),
    )


def list_outlets(app: App) -> Sequence[MetricsOutlet]:
    """Return who gets the metrics besides Redis. Where the application names nobody, `app.metrics` is not loaded."""
    return app.metrics.outlets if app.settings.statsd or "metrics" in vars(app) else ()


def _format_conditions(process_status: ProcessStatus) -> str:
    conditions = process_status.get_readiness().conditions
    return "; ".join(f"{name}: {reason}" for name, reason in conditions.items() if reason) or "ready"


_LINK_EVENTS: dict[type, tuple[str, Level]] = {
    LinkConnected: ("redis:connected", "info"),
    LinkConnectFailed: ("redis:connect-failed", "debug"),
    LinkLost: ("redis:disconnected", "debug"),
    BreakerOpened: ("redis:breaker-opened", "warning"),
    BreakerClosed: ("redis:breaker-closed", "debug"),
}
"""The names and levels of link events in the log. Events that follow from an outage are at level debug instead."""
_HIDDEN_FIELDS = ("broker", "is_error", "is_refused", "is_return", "silence")
"""Fields of link events that decide what is logged, and are not logged themselves."""


class ConnectionLog:
    """Logs what happens to the connections of a process: each outage of a broker once, each connection at debug.

    A server that refuses calls or connections is logged likewise.

    Above debug are also the first connection to a broker, with the version of its server, the first breaker that opens
    before any connection was made, which is no outage, and the first one in an outage that opens too often.
    """

    def __init__(self, *, log: Log) -> None:
        self._log = log
        self._connected: set[str] = set()
        self._unreached: set[str] = set()

    def __call__(self, event: LinkEvent) -> None:
        """Log one event."""
        outages = self._log.lost_connections
        match event:
            case LinkEnded():
                outages.record_end(event.where)
            case CallsRefused():
                outages.record_refusal(event.where, event.reason, event.code)
            case CallsAccepted():
                outages.record_acceptance(event.where, event.code, is_end=event.is_end)
            case _:
                self._log_event(event, is_news=self._record_change(event))

    def _record_change(self, event: LinkEvent) -> bool:
        """Record what happens to a connection. Return whether it is logged above debug, if its level is."""
        outages = self._log.lost_connections
        match event:
            case LinkConnected(broker=broker):
                is_first = broker not in self._connected
                self._connected.add(broker)
                self._unreached.discard(broker)
                outages.record_connection(broker, is_return=event.is_return)
                return is_first
            case LinkLost():
                outages.record_loss(
                    event.where,
                    event.reason,
                    failed=event.failed,
                    resent=event.resent,
                    silence=event.silence,
                )
            case LinkConnectFailed(is_refused=True):
                outages.record_refused_connection(event.where, event.reason)
            case BreakerOpened():
                is_first = not (event.where in self._unreached or outages.is_lost(event.where))
                self._unreached.add(event.where)
                return is_first
            case _:
                pass
        return True

    def _log_event(self, event: LinkEvent, *, is_news: bool) -> None:
        name, level = _LINK_EVENTS[type(event)]
        event_fields = msgspec.structs.asdict(event)
        if event_fields.get("is_error") and self._log.lost_connections.escalate(event.where):
            level, is_news = "error", True
        for hidden in _HIDDEN_FIELDS:
            event_fields.pop(hidden, None)
        self._log.event(name, level if is_news else "debug", **event_fields)


class ReconnectObserver(Protocol):
    """A part that looks again when it may have missed a message."""

    def recheck(self) -> None: ...


class ChannelListener(ReconnectObserver, Protocol):
    """A part that hears channels."""

    @property
    def channels(self) -> list[str]: ...

    def on_message(self, channel: bytes, payload: bytes, /) -> None: ...


def make_reader(redis: TrioRedis, timing: Timing, name: str, watch: ConnectionLog) -> ParkedRedis:
    """Return the connection for blocking reads; the shared one ends its waits."""
    return open_parked(control=redis, timing=timing, name=name, watch=watch)


def make_push(
    redis: TrioRedis,
    channel_handlers: dict[bytes, ChannelHandler],
    reconnect_observers: Sequence[ReconnectObserver],
    timing: Timing,
    name: str,
    watch: ConnectionLog,
) -> PushRedis:
    """Return the connection that hears channels. While it was down, any message may have been missed."""

    def on_message(channel: bytes, payload: bytes) -> None:
        channel_handlers[channel](channel, payload)

    def on_connected() -> None:
        for observer in reconnect_observers:
            observer.recheck()

    return open_push(
        control=redis,
        on_message=on_message,
        on_connected=on_connected,
        timing=timing,
        name=name,
        watch=watch,
    )


def make_injectable_values(
    app: App, worker: str, self_commands: SelfCommandSender, asyncio_runner: AsyncioRunner
) -> dict[str, Any]:
    """Return what the application's boot steps may ask for by name, and what runs those on asyncio."""
    values = {"app": app, "settings": app.settings, "worker": worker, "inbox": self_commands}
    return {**values, ASYNCIO_RUNNER: asyncio_runner}


def make_systemd(
    notify_settings: NotifySettings,
    status_line: Callable[[], str],
    is_exiting: Callable[[], bool],
    code_file: str,
    worker: str,
) -> SystemdNotify:
    """Return what notifies systemd."""
    return SystemdNotify(
        **notify_settings, status=status_line, is_exiting=is_exiting, code=code_file, incarnation=worker
    )


class ProcessParts:
    """The parts that every kind of process has.

    Each kind adds its steps, `channel_handlers`, `reconnect_observers`, `handlers` and `sources`.
    """

    asyncio_runner = part(AsyncioRunner)  # a step where code of the application may run
    offered = part(make_injectable_values)
    step_status = part(StepStatus)
    process_commands = part(ProcessCommands)
    commands = part(CommandRegistry)
    self_commands = part(SelfCommandQueue)
    guarded_outlets = part(guard_outlets)


# ---- processes that run no jobs


def make_channel_handlers(listeners: Sequence[ChannelListener]) -> dict[bytes, ChannelHandler]:
    """Return what hears each channel."""
    return {channel.encode(): listener.on_message for listener in listeners for channel in listener.channels}


def make_reconnect_observers(listeners: Sequence[ChannelListener]) -> Sequence[ReconnectObserver]:
    """Return who looks again after the connection was down."""
    return listeners


def make_common_handlers(
    process_commands: ProcessCommands, reloader: Reloader, step_status: StepStatus, log: Log
) -> dict[str, CommandHandler]:
    """Return the commands that all these processes know."""
    return {
        **process_commands.handlers,
        **handle(RELOAD, reloader.handle_command),
        **handle(RETRY_BOOT_STEP, step_status.handle_command),
        **log_handlers(log),
    }


def make_handlers(common_handlers: dict[str, CommandHandler]) -> dict[str, CommandHandler]:
    """Return the commands of a process that knows no others."""
    return common_handlers


def make_sources(
    redis: TrioRedis,
    push: PushRedis,
    command_counts: Mapping[str, int],
    log: Log,
    circuit_breakers: CircuitBreakers,
    extra_sources: Sequence[StatusSource],
) -> tuple[StatusSource, ...]:
    """Return who is asked for /readyz and /metrics."""
    return (
        ConnectionStatus(redis=redis, push=push),
        BreakerMetrics(circuit_breakers),
        CommandMetrics(command_counts),
        LogMetrics(log),
        *extra_sources,
    )


def make_alert_rules(app: App) -> tuple[AlertRule, ...]:
    """Return when alerts fire. Raises Misconfigured."""
    return app.alerts.rules()


def make_alert_webhook(app: App) -> "webhook.AlertWebhook | None":
    """Return where notifications of alerts are sent. Raises Misconfigured."""
    return app.alerts.webhook


def make_default_redis(redis: TrioRedis) -> AsyncDriver:
    """Return the connection to the default broker."""
    return redis


def make_added_steps(app: App, kind: str) -> tuple[BootStep, ...]:
    """Return the steps that the application adds to processes of this kind."""
    return select_steps(app.bootsteps, kind)


def make_service_breakers(log: Log) -> CircuitBreakers:
    """Return the circuit breakers of the application's services: here no task has one."""
    return CircuitBreakers(tasks={}, log=log)


class AuxiliaryParts(ProcessParts):
    """The parts of a process that runs no jobs. Each kind adds its steps, `listeners` and `extra_sources`."""

    default_redis = part(make_default_redis)
    added = part(make_added_steps)
    circuit_breakers = part(make_service_breakers)
    channel_handlers = part(make_channel_handlers)
    reconnect_observers = part(make_reconnect_observers)
    common_handlers = part(make_common_handlers)
    handlers = part(make_handlers)
    sources = part(make_sources)


async def try_write(app: App, broker: str = DEFAULT_BROKER) -> None:
    """Write to a broker what nobody reads. Raises BrokerError while it takes no writes."""

    def write() -> None:
        # A connection of its own: that of the incarnation is closed by now, and none is to be left.
        redis = open_blocking(app.brokers.get(broker).endpoint, max_connections=1)
        try:
            redis.perform(jobs.try_write(app.queue(app.settings.default_queue)))
        finally:
            redis.close()

    await trio.to_thread.run_sync(write, abandon_on_cancel=True)


async def reach_another(app: App, broker: str) -> bool:
    """Return whether any broker besides this one can be written to."""
    for name in app.brokers.names:
        if name != broker:
            with suppress(BrokerError):
                await try_write(app, name)
                return True
    return False


async def run_auxiliary_process(
    app: App,
    options: ProcessOptions,
    make_boot: Callable[[ProcessOptions, Incarnation], BootGraph],
    make_degraded_boot: Callable[[ProcessOptions, Incarnation], BootGraph] | None = None,
    *,
    kind: str,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run a process of this kind until cancelled; `make_boot` builds each incarnation, and `make_degraded_boot` what
    goes on where there are several brokers and the default one cannot be reached.
    """
    options = replace(options, process_status=options.process_status or ProcessStatus(app=app.name))

    def make(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        return make_boot(options, Incarnation(name, log, done, next_incarnation))

    def make_degraded(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        assert make_degraded_boot is not None
        return make_degraded_boot(options, Incarnation(name, log, done, next_incarnation))

    degraded = None
    if make_degraded_boot is not None and app.brokers.is_multi_broker:
        degraded = DegradedOperation(
            DEFAULT_BROKER, make_degraded, partial(reach_another, app, DEFAULT_BROKER)
        )
    assert options.process_status is not None
    with noting_process(app, kind, options.name, log, task_status) as status:
        await run_incarnations(
            kind,
            make,
            options.process_status,
            name=options.name,
            first_name=options.incarnation,
            log=log,
            try_write=partial(try_write, app),
            task_status=status,
            degraded=degraded,
        )
