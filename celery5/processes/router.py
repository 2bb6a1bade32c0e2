"""Router: the page of a Router process, which takes in events, data and commands, and makes jobs of them.

It runs no job. There may be any number of Routers, and none leads: each step is one atomic script, so any of them may
die at any point. Its inbox takes in the commands.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.bootsteps.boot import BootGraph
from celery5.bootsteps.worker_steps import ChannelSubscriptions, EventsMembership, LentConnection
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.keys import EVENTS, QueueKeys
from celery5.doctor.needed_processes import needs_router
from celery5.events.sources import Source, group_by_source
from celery5.limits.holds import LimitHolds
from celery5.logs.log import Log
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.multi_broker import RemoteRedis, connect_all_brokers, make_queue_depths
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import (
    AuxiliaryParts,
    ChannelListener,
    Incarnation,
    ProcessValues,
    make_alert_rules,
    make_alert_webhook,
    make_process_values,
    make_push,
    make_reader,
    make_systemd,
    run_auxiliary_process,
)
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.events.sinks import SinkOptions, check_sinks, get_all_recipients, get_all_sink_options
from celery5.protocol.job.job import Job
from celery5.protocol.task_kinds import EventLoop
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_retry import LogRetry
from celery5.services.events.event_ingestion import (
    BrokerLookup,
    EventActions,
    EventIngestion,
)
from celery5.services.events.sink_delivery import SinkDelivery
from celery5.services.events.source_ingestion import SourceIngestion
from celery5.services.health.vital_sources import (
    ConnectionStatus,
    DocumentMetrics,
    EventMetrics,
    LeaseStatus,
)
from celery5.services.health.vitals import ProcessStatus, StatusPhase, StatusSource
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.observability.alert_delivery import AlertDelivery
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.lease import Heartbeat, Lease
from celery5.services.process.reloader import Reloader
from celery5.services.process.wake_ups import WakeUps
from celery5.services.worker.due_jobs import Mover
from celery5.services.worker.recovery import Recoverer
from celery5.services.workflows.run_progress import RunProgress
from celery5.tasks.task import Task
from celery5.wiring import build, part, step

KIND = "router"
UNLIMITED_DELIVERIES = 10**9
"""Deliveries after which an event is dead-lettered: a Router runs no code of anybody's, so no event takes it down."""


class RouterValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a Router ask for besides each other and what every process has."""

    # The queue of events.
    consumed: Sequence[QueueKeys]
    lease: Lease
    # A Router has none: see the same fields of a worker.
    sidecar: None
    counted_jobs: None
    max_deliveries: int
    # Returns the broker of an application's queue.
    find_broker: BrokerLookup
    # The queues of its tasks, in which documents arrive.
    queue_names: Sequence[str]
    # The sinks of all tasks, and which of them take which documents.
    sink_options: Sequence[SinkOptions]
    recipients: Mapping[str, str]
    # Which tasks have subscribed to which sources, and what sends their jobs.
    subscriptions: Mapping[Source, Sequence[Task[..., Any]]]
    send: Callable[[Sequence[Job]], Awaitable[Sequence[Any]]]
    # The event loop of sources and sinks that name none.
    default_loop: EventLoop
    # Returns the time, in seconds.
    clock: Callable[[], float]


def make_values(
    app: App, options: ProcessOptions, incarnation: Incarnation
) -> tuple[ProcessValues, RouterValues]:
    """Return the values that one incarnation of a Router is built with.

    Raises:
        Misconfigured: Two sinks or two sources have one name.
    """
    settings, tasks, lease = app.settings, list(app.tasks.values()), Lease(seconds=app.settings.lease)
    status = options.process_status or ProcessStatus(app=app.name)
    process_values = make_process_values(
        app,
        replace(options, process_status=status),
        incarnation,
        kind=KIND,
        lease=lease,
        status_line=status.format_summary,
    )

    def find_broker(name: str, queue: str, /) -> str:
        # The queues of other applications count as being on the default broker.
        return app.brokers.broker_of_queue(queue) if name == app.name else DEFAULT_BROKER

    return process_values, RouterValues(
        consumed=(app.queue(EVENTS),),
        lease=lease,
        sidecar=None,
        counted_jobs=None,
        max_deliveries=UNLIMITED_DELIVERIES,
        find_broker=find_broker,
        queue_names=sorted(
            shard
            for queue in {settings.default_queue, *(task.queue for task in tasks)}
            for shard in app.brokers.list_shards(queue)
        ),
        sink_options=get_all_sink_options(tasks),
        recipients=get_all_recipients(tasks),
        subscriptions=group_by_source(tasks),
        send=app.asend_jobs,
        default_loop=app.loop,
        clock=time.time,
    )


def make_broker_router(app: App, redis: TrioRedis) -> AsyncDriver:
    """Return what reaches the broker of each queue: the process' own connection where there is one broker."""
    return RemoteRedis(app) if app.brokers.is_multi_broker else redis


class MoverListener:
    """The channel on which it is announced that an event falls due before all others."""

    def __init__(self, *, mover: Mover) -> None:
        self._mover = mover

    @property
    def channels(self) -> list[str]:
        """Return the channels to hear."""
        return self._mover.channels

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """Pass on a message."""
        self._mover.on_message(channel, payload)

    def recheck(self) -> None:
        """Look again: a message may have been missed."""
        self._mover.recheck()


def make_listeners(
    inbox: Inbox, mover_listener: MoverListener, sink_delivery: SinkDelivery
) -> tuple[ChannelListener, ...]:
    """Return who hears channels."""
    return (inbox, mover_listener, sink_delivery)


def make_heartbeat_listeners(wake_ups: WakeUps, mover: Mover, recoverer: Recoverer) -> tuple[Any, ...]:
    """Return what hears the replies to heartbeats."""
    return (wake_ups.on_heartbeat, mover.on_heartbeat, recoverer.on_heartbeat)


def make_extra_sources(
    reader: ParkedRedis,
    lease: Lease,
    sink_delivery: SinkDelivery,
    source_ingestion: SourceIngestion,
    event_ingestion: EventIngestion,
    alert_delivery: AlertDelivery,
) -> tuple[StatusSource, ...]:
    """Return who else is asked for /readyz and /metrics."""
    documents = DocumentMetrics(
        delivered=sink_delivery.get_counts,
        waiting=sink_delivery.get_waiting_counts,
        published=source_ingestion.get_counts,
    )
    return (
        ConnectionStatus(reader=reader),
        LeaseStatus(lease),
        EventMetrics(event_ingestion.counts),
        documents,
        alert_delivery,
    )


class RouterParts(AuxiliaryParts):
    """Every part of a Router, and its boot graph: its steps start from the top and stop from the bottom.

    It is a consumer of the events' queue, as a worker is of its queues: its lease is one among those consumers.
    """

    # connections and commands
    listeners = part(make_listeners)
    redis = step(open_redis)
    push = step(make_push, after=(redis,))
    listen = step(ChannelSubscriptions, after=(push,))
    inbox = step(Inbox, after=(listen,))
    reader = step(make_reader, after=(redis,))
    publishing = step(LentConnection, after=(redis,))
    # membership and recovery
    wake_ups = part(WakeUps)
    heartbeat_listeners = part(make_heartbeat_listeners)
    run_progress = part(RunProgress)
    mover_listener = part(MoverListener)
    job_middleware = part(JobMiddleware)
    join = step(EventsMembership, after=(redis,))
    heartbeat = step(Heartbeat, after=(join,))
    recoverer = step(Recoverer, after=(heartbeat,))
    mover = step(Mover, after=(heartbeat, listen))
    # events, and documents
    asyncio_runner = step(AsyncioRunner, name="asyncio")
    event_actions = part(EventActions)
    broker_router = part(make_broker_router)
    event_ingestion = step(EventIngestion, name="events", after=(reader, heartbeat, recoverer, mover))
    # A write that is under way when the Router stops has a moment to end.
    sink_delivery = step(
        SinkDelivery, name="sinks", after=(publishing, heartbeat, listen, asyncio_runner), stop_limit=30.0
    )
    source_ingestion = step(SourceIngestion, name="sources", after=(publishing, heartbeat, asyncio_runner))
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
    _work = (join, heartbeat, recoverer, mover, event_ingestion, sink_delivery, source_ingestion)
    extra_sources = part(make_extra_sources)
    status_phase = step(StatusPhase, name="vitals", after=(inbox, reader, publishing, *_work))
    systemd = step(make_systemd, after=(status_phase,))
    reloader = step(Reloader, after=(inbox, reader, publishing, *_work))


class RouterDegradedParts(RouterParts):
    """What a Router runs while the default broker cannot be reached: sinks and sources of the others. Events wait."""

    systemd = step(make_systemd)
    asyncio_runner = step(AsyncioRunner, name="asyncio")
    sink_delivery = step(SinkDelivery, name="sinks", after=(asyncio_runner,), stop_limit=30.0)
    source_ingestion = step(SourceIngestion, name="sources", after=(asyncio_runner,))


def is_needed(app: App) -> bool:
    """Whether the application has what only a Router does."""
    return needs_router(app)


async def run(
    app: App,
    options: ProcessOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a Router until cancelled; `done` is set when a command ends it.

    Raises:
        BrokerError: The broker lets nobody in.
    """

    def make_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        log.event("router:boot-started", name=incarnation.name)
        return build(BootGraph, RouterParts, *make_values(app, options, incarnation))

    def make_degraded_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        values = make_values(app, options, incarnation)
        redis = RemoteRedis(app, DEFAULT_BROKER)  # it connects when it can
        return build(BootGraph, RouterDegradedParts, *values, redis=redis, added=())

    await run_auxiliary_process(
        app, options, make_boot, make_degraded_boot, kind=KIND, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Check the sinks, sources and alerts of an application. Raises Misconfigured."""
    make_alert_rules(app)
    make_alert_webhook(app)
    check_sinks(get_all_sink_options(list(app.tasks.values())))
    group_by_source(app.tasks.values())


ROUTER = ProcessKind(KIND, run, check)
