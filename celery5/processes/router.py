"""Router: the wiring page of a Router process (CEP rows C84, C108, C109).

A Router takes in events, data and commands, and makes jobs of them: the three parts of the CEP's figure. It runs no
job. There may be any number of Routers, and none leads: each step is one atomic script, so any of them may die at any
point. The command ingestion is its inbox (C56).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import Step
from celery5.bootsteps.worker_steps import EventsMembership, LentConnection
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import EVENTS, Keys
from celery5.events.sources import group_by_source
from celery5.logs.log import Log
from celery5.processes import attendant_parts
from celery5.processes.attendant_parts import BASE_PARTS, ChannelListener
from celery5.processes.connection_parts import make_reader
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.processes.worker import WorkerOptions, make_status_values
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.results.sinks import SinkOptions, check_sinks, get_all_recipients, get_all_sink_options
from celery5.services.commands.dispatcher import CommandHandler, SelfCommandSender
from celery5.services.commands.inbox import Inbox
from celery5.services.events.event_actions import EventActions
from celery5.services.events.event_ingestion import BrokerLookup, EventIngestion
from celery5.services.events.sink_delivery import SinkDelivery
from celery5.services.events.source_ingestion import SourceIngestion
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.vital_sources import ConnectionStatus, DocumentMetrics, EventMetrics, LeaseStatus
from celery5.services.health.vitals import ProcessStatus, StatusSource
from celery5.services.process.reloader import NextIncarnation
from celery5.services.worker.due_jobs import Mover
from celery5.services.worker.lease import Heartbeat, Lease
from celery5.services.worker.recoverer import Recoverer


def make_data_steps(sink_delivery: SinkDelivery, source_ingestion: SourceIngestion) -> tuple[Step, ...]:
    """Its part of the boot graph. A write that is under way when the Router stops has a moment to end."""
    return (
        Step("sinks", sink_delivery, ("publishing", "heartbeat", "listen"), stop_limit=30.0),
        Step("sources", source_ingestion, ("publishing", "heartbeat")),
    )


def make_routing_redis(app: App, redis: TrioRedis) -> Any:
    """What reaches the broker of each queue: the process' own connection where there is one broker."""
    return RemoteRedis(app) if app.brokers.is_multi_broker else redis


def make_home(app: App) -> BrokerLookup:
    """Which broker a queue is on; another application's count as being here."""

    def home(name: str, queue: str, /) -> str:
        return app.brokers.broker_of_queue(queue) if name == app.name else DEFAULT_BROKER

    return home


def make_sink_delivery(
    broker_router: Any,
    keys: Keys,
    outlets: Sequence[SinkOptions],
    recipients: Mapping[str, str],
    queue_names: Sequence[str],
    message_limit: int,
    log: Log,
) -> SinkDelivery:
    """What gives Data Sinks the documents of all brokers."""
    return SinkDelivery(
        redis=broker_router,
        keys=keys,
        sink_options=outlets,
        recipients=recipients,
        queue_names=queue_names,
        message_limit=message_limit,
        log=log,
    )


DATA_PARTS: Mapping[str, Any] = {
    "broker_router": value(make_routing_redis),
    "find_broker": value(make_home),
    "sink_delivery": value(make_sink_delivery),
    "source_ingestion": SourceIngestion,
}
"""The parts."""


def make_data_values(app: App) -> dict[str, Any]:
    """The values that they ask for by name. Raises Misconfigured when two sinks or sources have one name."""
    tasks = list(app.tasks.values())
    default = app.settings.default_queue
    return {
        "outlets": get_all_sink_options(tasks),
        "recipients": get_all_recipients(tasks),
        "queue_names": sorted({default, *(task.queue for task in tasks)}),
        "subscriptions": group_by_source(tasks),
        "send": app.asend_jobs,
    }


def has_data(app: App) -> bool:
    """Whether any task has sinks, or is given what a source brings."""
    return any(task.sinks or task.sources for task in app.tasks.values())


KIND = "router"
UNLIMITED_DELIVERIES = 10**9
"""Routers that an event may take down before it is buried: it runs no code of anybody's."""


class MoverListener:
    """The channel on which it is said that an event falls due before all others."""

    def __init__(self, *, mover: Mover) -> None:
        self._mover = mover

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return self._mover.channels

    def on_message(self, channel: bytes, payload: bytes) -> None:
        """It was said."""
        self._mover.on_message(channel, payload)

    def recheck(self) -> None:
        """It may have been said while nobody listened."""
        self._mover.recheck()


def make_listeners(
    inbox: Inbox, mover_listener: MoverListener, sink_delivery: SinkDelivery
) -> tuple[ChannelListener, ...]:
    """Who is told what is said on channels."""
    return (inbox, mover_listener, sink_delivery)


def make_heartbeat_listeners(mover: Mover, recoverer: Recoverer) -> tuple[Any, ...]:
    """Who hears what the Heartbeat brings."""
    return (mover.on_heartbeat, recoverer.on_heartbeat)


def make_handlers(common_handlers: dict[str, CommandHandler]) -> dict[str, CommandHandler]:
    """What this Router does when it is told to: its command ingestion."""
    return {**common_handlers}


def make_extra_sources(
    reader: ParkedRedis,
    lease: Lease,
    sink_delivery: SinkDelivery,
    source_ingestion: SourceIngestion,
    event_ingestion: EventIngestion,
) -> tuple[StatusSource, ...]:
    """Who else knows how this process does."""
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
    )


def make_event_steps(
    reader: ParkedRedis,
    join: EventsMembership,
    publishing: LentConnection,
    heartbeat: Heartbeat,
    mover: Mover,
    recoverer: Recoverer,
    event_ingestion: EventIngestion,
) -> tuple[Step, ...]:
    """Event ingestion, and what it stands on: this Router is a consumer of the events' queue, as a worker is of its."""
    return (
        Step("reader", reader, ("redis",)),
        Step("publishing", publishing, ("redis",)),
        Step("join", join, ("redis",)),
        Step("heartbeat", heartbeat, ("join",)),
        Step("recoverer", recoverer, ("heartbeat",)),
        Step("mover", mover, ("heartbeat", "listen")),
        Step("events", event_ingestion, ("reader", "heartbeat", "recoverer", "mover")),
    )


def make_app_steps() -> tuple[BootStep, ...]:
    """The application's own services that run here, supervised: its data sources."""
    return ()


def make_injectable_values(app: App, worker: str, self_commands: SelfCommandSender) -> dict[str, Any]:
    """What their code may ask for by name."""
    return {"app": app, "settings": app.settings, "worker": worker, "inbox": self_commands}


def make_base_steps(redis: TrioRedis, push: Any, listen: Any, inbox: Inbox) -> tuple[Step, ...]:
    """The first part of the boot graph. Its lease is one among the events' consumers, not a presence."""
    return (
        Step("redis", redis),
        Step("push", push, ("redis",)),
        Step("listen", listen, ("push",)),
        Step("inbox", inbox, ("listen",)),
    )


def make_required_steps(event_steps: tuple[Step, ...], data_steps: tuple[Step, ...]) -> tuple[str, ...]:
    """What must be up before the process counts as up."""
    return ("inbox", *[step.name for step in (*event_steps, *data_steps)])


def make_steps(
    base_steps: tuple[Step, ...],
    event_steps: tuple[Step, ...],
    data_steps: tuple[Step, ...],
    final_steps: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (*base_steps, *event_steps, *data_steps, *final_steps)


_PARTS: Mapping[str, Any] = {
    **BASE_PARTS,
    **DATA_PARTS,
    "reader": value(make_reader),
    "mover_listener": MoverListener,
    "listeners": value(make_listeners),
    "join": EventsMembership,
    "publishing": LentConnection,
    "heartbeat": Heartbeat,
    "heartbeat_listeners": value(make_heartbeat_listeners),
    "mover": Mover,
    "recoverer": Recoverer,
    "event_actions": EventActions,
    "event_ingestion": EventIngestion,
    "circuit_breakers": CircuitBreakers,
    "handlers": value(make_handlers),
    "extra_sources": value(make_extra_sources),
    "base_steps": value(make_base_steps),
    "event_steps": value(make_event_steps),
    "data_steps": value(make_data_steps),
    "added": value(make_app_steps),
    "offered": value(make_injectable_values),
    "required_steps": value(make_required_steps),
    "steps": value(make_steps),
}
RouterParts = Injector(**_PARTS)
"""Every part of a Router. A part is built from the names of its constructor's parameters."""


def is_needed(app: App) -> bool:
    """Whether the application has what only a Router does."""
    return has_data(app) or app.events.has_own_events


def make_values(
    app: App, options: WorkerOptions, name: str, log: Log, done: trio.Event, next_incarnation: NextIncarnation
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    settings, vitals = app.settings, options.process_status or ProcessStatus(app=app.name)
    lease = Lease(seconds=settings.lease)
    return {
        **attendant_parts.make_common_values(app, options, name, log, done, next_incarnation, kind=KIND),
        **make_status_values(options, vitals, lease, next_incarnation),
        **make_data_values(app),
        "consumed": (app.queue(EVENTS),),
        "lease": lease,
        "sidecar": None,
        "tasks": dict[str, Any](),
        "max_deliveries": UNLIMITED_DELIVERIES,
        "results_ttl": settings.results_ttl,
        "read_block": settings.read_block,
        "event_retention": settings.event_retention,
        "message_limit": settings.message_limit,
        "clock": time.time,
    }


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a Router until cancelled; `done` is set when a command has it end. Of the options those about queues and jobs
    mean nothing to it. Raises BrokerError when Redis lets nobody in."""
    await attendant_parts.run_auxiliary_process(
        app, options, KIND, RouterParts, make_values, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application cannot be served by a Router."""
    check_sinks(make_data_values(app)["outlets"])


ROUTER = ProcessKind(KIND, run, check)
"""What takes in events, data and commands."""
