"""Router: the wiring page of a Router process (CEP rows C84, C108, C109).

Floor: processes. Reads: the environment's systemd variables. Writes: nothing itself.

A Router takes in events, data and commands, and makes jobs of them: the three parts of the CEP's figure. It runs no
job. There may be any number of Routers, and none leads: each step is one atomic script, so any of them may die at any
point. The command ingestion is its inbox (C56).
"""

import time
from collections.abc import Mapping
from typing import Any

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import Step
from celery5.bootsteps.join_events import JoinEvents
from celery5.bootsteps.open_publishing import OpenPublishing
from celery5.broker.keys import EVENTS
from celery5.broker.on_trio import ParkedRedis, TrioRedis
from celery5.log import Log
from celery5.processes import attendant_parts
from celery5.processes.attendant_parts import GROUND, Listens
from celery5.processes.connection_parts import make_reader
from celery5.processes.data_parts import DATA, given_of_data, has_data, make_data_steps
from celery5.processes.lives import Page
from celery5.processes.worker import WorkerOptions, known_of
from celery5.services.circuits import Circuits
from celery5.services.commands import Handler, PostsToItself
from celery5.services.event_acts import EventActs
from celery5.services.event_ingestion import EventIngestion
from celery5.services.heartbeat import Heartbeat
from celery5.services.inbox import Inbox
from celery5.services.lease import Lease
from celery5.services.mover import Mover
from celery5.services.recoverer import Recoverer
from celery5.services.reloader import Next
from celery5.services.sink_delivery import SinkDelivery
from celery5.services.source_ingestion import SourceIngestion
from celery5.services.vital_sources import Connections, Documents, LeaseHeld, Routed
from celery5.services.vitals import Source, Vitals
from celery5.sinks import check_sinks

KIND = "router"
NEVER = 10**9
"""Routers that an event may take down before it is buried: it runs no code of anybody's."""


class Wakes:
    """The channel on which it is said that an event falls due before all others."""

    def __init__(self, *, mover: Mover) -> None:
        self._mover = mover

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return self._mover.channels

    def hear(self, channel: bytes, payload: bytes) -> None:
        """It was said."""
        self._mover.wake(channel, payload)

    def look_again(self) -> None:
        """It may have been said while nobody listened."""
        self._mover.look_again()


def make_listeners(inbox: Inbox, wakes: Wakes, sink_delivery: SinkDelivery) -> tuple[Listens, ...]:
    """Who is told what is said on channels."""
    return (inbox, wakes, sink_delivery)


def make_wake(mover: Mover, recoverer: Recoverer) -> tuple[Any, ...]:
    """Who hears what the Heartbeat brings."""
    return (mover.hear, recoverer.hear)


def make_handlers(usual: dict[str, Handler]) -> dict[str, Handler]:
    """What this Router does when it is told to: its command ingestion."""
    return {**usual}


def make_more(
    reader: ParkedRedis,
    lease: Lease,
    sink_delivery: SinkDelivery,
    source_ingestion: SourceIngestion,
    event_ingestion: EventIngestion,
) -> tuple[Source, ...]:
    """Who else knows how this process does."""
    documents = Documents(
        given=sink_delivery.told, waiting=sink_delivery.waiting, taken=source_ingestion.told
    )
    return (Connections(reader=reader), LeaseHeld(lease), Routed(event_ingestion.routed), documents)


def make_event_steps(
    reader: ParkedRedis,
    join: JoinEvents,
    publishing: OpenPublishing,
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


def make_added() -> tuple[BootStep, ...]:
    """The application's own services that run here, supervised: its data sources."""
    return ()


def make_offered(app: App, worker: str, posts: PostsToItself) -> dict[str, Any]:
    """What their code may ask for by name."""
    return {"app": app, "settings": app.settings, "worker": worker, "inbox": posts}


def make_ground(redis: TrioRedis, push: Any, listen: Any, inbox: Inbox) -> tuple[Step, ...]:
    """The first part of the boot graph. Its lease is one among the events' consumers, not a presence."""
    return (
        Step("redis", redis),
        Step("push", push, ("redis",)),
        Step("listen", listen, ("push",)),
        Step("inbox", inbox, ("listen",)),
    )


def make_last(event_steps: tuple[Step, ...], data_steps: tuple[Step, ...]) -> tuple[str, ...]:
    """What must be up before the process counts as up."""
    return ("inbox", *[step.name for step in (*event_steps, *data_steps)])


def make_steps(
    ground: tuple[Step, ...],
    event_steps: tuple[Step, ...],
    data_steps: tuple[Step, ...],
    top: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (*ground, *event_steps, *data_steps, *top)


_PARTS: Mapping[str, Any] = {
    **GROUND,
    **DATA,
    "reader": value(make_reader),
    "wakes": Wakes,
    "listeners": value(make_listeners),
    "join": JoinEvents,
    "publishing": OpenPublishing,
    "heartbeat": Heartbeat,
    "wake": value(make_wake),
    "mover": Mover,
    "recoverer": Recoverer,
    "event_acts": EventActs,
    "event_ingestion": EventIngestion,
    "circuits": Circuits,
    "handlers": value(make_handlers),
    "more": value(make_more),
    "ground": value(make_ground),
    "event_steps": value(make_event_steps),
    "data_steps": value(make_data_steps),
    "added": value(make_added),
    "offered": value(make_offered),
    "last": value(make_last),
    "steps": value(make_steps),
}
RouterParts = Injector(**_PARTS)
"""Every part of a Router. A part is built from the names of its constructor's parameters."""


def needed(app: App) -> bool:
    """Whether the application has what only a Router does."""
    return has_data(app) or app.events.own


def given(
    app: App, options: WorkerOptions, name: str, log: Log, done: trio.Event, next_life: Next
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    settings, vitals = app.settings, options.vitals or Vitals(app=app.name)
    lease = Lease(seconds=settings.lease)
    return {
        **attendant_parts.given(app, options, name, log, done, next_life, kind=KIND),
        **known_of(options, vitals, lease, next_life),
        **given_of_data(app),
        "consumed": (app.queue(EVENTS),),
        "lease": lease,
        "understudy": None,
        "tasks": dict[str, Any](),
        "max_deliveries": NEVER,
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
    await attendant_parts.attend(
        app, options, KIND, RouterParts, given, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application cannot be served by a Router."""
    check_sinks(given_of_data(app)["outlets"])


ROUTER = Page(KIND, run, check)
"""What takes in events, data and commands."""
