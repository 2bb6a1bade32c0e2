"""Worker Parts: every part of a worker, how those are made that take more than a constructor, and the boot graph.

Floor: processes. Reads: nothing. Writes: nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dependencies import Injector, value

from celery5.app import App
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import Step
from celery5.bootsteps.join_queues import JoinQueues
from celery5.bootsteps.listen import Hears, Listen
from celery5.bootsteps.open_publishing import OpenPublishing
from celery5.broker.keys import QueueKeys
from celery5.broker.on_trio import ParkedRedis, PushRedis, TrioRedis
from celery5.log import Log
from celery5.own_commands import handlers_of
from celery5.processes.box_home import home_of
from celery5.processes.connection_parts import LooksAgain, make_push, make_reader
from celery5.processes.several import Afar
from celery5.processes.vital_parts import make_sources
from celery5.protocol.budget import Budget, fixed
from celery5.protocol.budget_words import budgets_in
from celery5.protocol.events import Subscription
from celery5.protocol.routes import DEFAULT
from celery5.runners.boxed import BoxedRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.thread import ThreadRunner
from celery5.services.black_box import BlackBox
from celery5.services.board import RETRY, Board
from celery5.services.burst import Burst
from celery5.services.circuits import Circuits
from celery5.services.commands import Commands, Handler, PostsToItself
from celery5.services.concurrency_budget import ConcurrencyBudget
from celery5.services.consumer import Consumer
from celery5.services.deadlines import Deadlines
from celery5.services.fine_timer import FineTimer
from celery5.services.gates import Gates
from celery5.services.health import Health
from celery5.services.heartbeat import Heartbeat
from celery5.services.impositions import Impositions
from celery5.services.inbox import Inbox, OwnPost
from celery5.services.internal_queues import ResultsQueue
from celery5.services.judgement import Judgement
from celery5.services.lanes import NEWS, Lanes
from celery5.services.ledger import Ledger
from celery5.services.log_again import LogAgain, log_handlers
from celery5.services.mover import Mover
from celery5.services.pauses import Pauses
from celery5.services.preferences import Preferences
from celery5.services.process_commands import ProcessCommands
from celery5.services.queue_depths import QueueDepths, Way
from celery5.services.reach import Reach
from celery5.services.reading import Reading
from celery5.services.recent import Recent
from celery5.services.recoverer import Recoverer
from celery5.services.recycling import Recycling
from celery5.services.reloader import Reloader
from celery5.services.reporter import Reporter
from celery5.services.result_publisher import ResultPublisher
from celery5.services.revocations import Revocations
from celery5.services.rooms import Rooms
from celery5.services.subscriptions import Subscriptions
from celery5.services.suspects import Suspects
from celery5.services.systemd_notify import SystemdNotify
from celery5.services.task_execution import TaskExecution
from celery5.services.turnstile import Turnstile
from celery5.services.unpublishable import Unpublishable
from celery5.services.vitals import VitalSigns
from celery5.services.worker_commands import WorkerCommands
from celery5.strategies import is_scaled


def budgets_for(app: App) -> dict[str, Budget]:
    """How many jobs of each kind may run at once: what the application says, else its setting `budgets`, else the
    number of slots that there is a setting for, which does not move."""
    settings = app.settings
    usual = {
        "trio": fixed(settings.concurrency),
        "asyncio": fixed(settings.concurrency),
        "thread": fixed(settings.cpu_slots),
        "boxed": fixed(settings.box_slots),
    }
    return {**usual, **budgets_in(settings.budgets), **app.budgets}


def make_hearers(
    mover: Mover,
    revocations: Revocations,
    inbox: Inbox,
    heartbeat: Heartbeat,
    gates: Gates,
    impositions: Impositions,
) -> dict[bytes, Hears]:
    """Which channel is whose."""

    def woken(channel: bytes, payload: bytes) -> None:
        if payload == NEWS:
            heartbeat.ask()
        else:
            mover.wake(channel, payload)

    all_of_them: dict[str, Hears] = dict.fromkeys(mover.channels, woken)
    all_of_them |= dict.fromkeys(revocations.channels, revocations.hear)
    all_of_them |= dict.fromkeys(inbox.channels, inbox.hear)
    all_of_them |= dict.fromkeys(gates.channels, gates.hear)
    all_of_them |= dict.fromkeys(impositions.channels, impositions.hear)
    return {each.encode(): hears for each, hears in all_of_them.items()}


def make_lookers(
    mover: Mover, revocations: Revocations, inbox: Inbox, pauses: Pauses, impositions: Impositions
) -> tuple[LooksAgain, ...]:
    """Who looks again when something may have been said while nobody listened."""
    return (mover, revocations, inbox, pauses, impositions)


def make_boxes(
    app: App, budget: ConcurrencyBudget, log: Log, worker: str, black_box: BlackBox | None
) -> BoxedRunner:
    """Where boxed tasks run."""
    settings = app.settings
    return BoxedRunner(
        tasks=app.tasks,
        slots=lambda: budget.slots("boxed"),
        home=lambda: home_of(app),
        tell=log.event,
        worker=worker,
        limit=settings.message_limit,
        jobs=settings.box_jobs,
        idle=settings.box_idle,
        groups=black_box,
    )


def make_runners(
    asyncio_runner: AsyncioRunner, boxes: BoxedRunner, budget: ConcurrencyBudget
) -> dict[str, Any]:
    """Where each kind of task runs."""
    threads = ThreadRunner(slots=budget.slots("thread"))
    budget.follow(lambda kind, slots: threads.resize(slots) if kind == "thread" else None)
    return {"trio": TrioRunner(), "asyncio": asyncio_runner, "thread": threads, "boxed": boxes}


def make_wake(
    mover: Mover,
    recoverer: Recoverer,
    revocations: Revocations,
    lanes: Lanes,
    gates: Gates,
    impositions: Impositions,
) -> tuple[Any, ...]:
    """Who hears what the Heartbeat brings."""
    return (mover.hear, recoverer.hear, revocations.beat, lanes.hear, gates.beat, impositions.beat)


def make_handlers(
    app: App,
    worker_commands: WorkerCommands,
    reloader: Reloader,
    board: Board,
    budget: ConcurrencyBudget,
    preferences: Preferences,
    health: Health,
    reach: Reach,
    log: Log,
) -> dict[str, Handler]:
    """What this worker does when it is told to."""
    return {
        **handlers_of(app.command.known),
        **worker_commands.handlers,
        "reload": reloader.handle,
        RETRY: board.retry,
        "check-expired": health.expired,
        "health": health.answer,
        "budget": budget.order,
        "prefetch": reach.order,
        "prefer": preferences.order,
        **log_handlers(log),
    }


def make_depth_ways(broker: str, redis: TrioRedis) -> dict[str, Way]:
    """Return the way to the broker that its queues are on."""
    return {broker: redis}


def make_measured(consumed: Sequence[QueueKeys]) -> tuple[str, ...]:
    """Return the queues that it measures: its own."""
    return tuple(each.queue for each in consumed)


def make_reports(app: App) -> bool:
    """Whether somebody decides from how workers do."""
    return is_scaled(app.settings)


def make_missed(pauses: Pauses) -> Callable[[], None]:
    """What is looked at again when a command came too late to be done."""
    return pauses.look_again


def make_added(app: App, steps_here: bool) -> tuple[BootStep, ...]:
    """The application's own boot steps and services, which one life of a process has."""
    return app.bootsteps if steps_here else ()


def make_subscriptions(
    app: App,
    redis: TrioRedis,
    broker: str,
    subscribed: Mapping[str, Sequence[Subscription]],
    subscription_ttl: float,
    event_catch_up: bool,
    log: Log,
) -> Subscriptions:
    """What tells of subscriptions, on the default broker, where Routers look."""
    return Subscriptions(
        redis=redis if broker == DEFAULT else Afar(app, DEFAULT),
        subscribed=subscribed,
        subscription_ttl=subscription_ttl,
        event_catch_up=event_catch_up,
        log=log,
    )


def make_offered(app: App, worker: str, posts: PostsToItself) -> dict[str, Any]:
    """What their code may ask for by name."""
    return {"app": app, "settings": app.settings, "worker": worker, "inbox": posts}


def make_aside(
    burst_watch: Burst,
    log_again: LogAgain,
    vital_signs: VitalSigns,
    systemd: SystemdNotify,
    reloader: Reloader,
    reporter: Reporter,
    subscriptions: Subscriptions,
    recycling: Recycling,
    queue_depths: QueueDepths,
) -> tuple[Step, ...]:
    """The part of the boot graph that no job passes through."""
    return (
        Step("reporter", reporter, ("consumer",)),
        Step("subscriptions", subscriptions, ("redis",)),
        Step("burst", burst_watch, ("consumer",)),
        Step("log-again", log_again, ("redis",)),
        Step("vitals", vital_signs, ("consumer",)),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, ("consumer",)),
        Step("recycling", recycling, ("consumer",)),
        Step("depths", queue_depths, ("redis",)),
    )


def make_ground(
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    listen: Listen,
    join: JoinQueues,
    publishing: OpenPublishing,
    heartbeat: Heartbeat,
    mover: Mover,
    recoverer: Recoverer,
    inbox: Inbox,
    pauses: Pauses,
    impositions: Impositions,
) -> tuple[Step, ...]:
    """The first part of the boot graph: what a worker stands on."""
    return (
        Step("redis", redis),
        Step("reader", reader, ("redis",)),
        Step("push", push, ("redis",)),
        Step("listen", listen, ("push",)),
        Step("publishing", publishing, ("redis",)),
        Step("join", join, ("redis",)),
        Step("heartbeat", heartbeat, ("join",)),
        Step("recoverer", recoverer, ("heartbeat",)),
        Step("mover", mover, ("heartbeat", "listen")),
        Step("inbox", inbox, ("listen",)),
        Step("pauses", pauses, ("listen",)),
        Step("limits", impositions, ("listen",)),
    )


def make_steps(
    ground: tuple[Step, ...],
    budget: ConcurrencyBudget,
    asyncio_runner: AsyncioRunner,
    boxes: BoxedRunner,
    deadlines: Deadlines,
    fine_timer: FineTimer,
    revocations: Revocations,
    health: Health,
    result_publisher: ResultPublisher,
    gates: Gates,
    task_execution: TaskExecution,
    consumer: Consumer,
    aside: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (
        *ground,
        Step("budget", budget),
        Step("asyncio", asyncio_runner),
        Step("boxes", boxes),
        Step("deadlines", deadlines),
        Step("timer", fine_timer),
        Step("revocations", revocations, ("heartbeat", "listen")),
        Step("health", health, ("redis",)),
        Step("results", result_publisher, ("heartbeat", "publishing")),
        # Who is suspended must be known before anybody is let through.
        Step("gates", gates, ("results", "limits")),
        Step(
            "execution",
            task_execution,
            ("results", "budget", "asyncio", "boxes", "deadlines", "timer", "revocations", "health"),
            stop_limit=math.inf,  # it has limits of its own
        ),
        Step(
            "consumer", consumer, ("execution", "reader", "mover", "recoverer", "pauses", "limits", "gates")
        ),
        *aside,
    )


WorkerParts = Injector(
    redis=TrioRedis,
    reader=value(make_reader),
    push=value(make_push),
    hearers=value(make_hearers),
    lookers=value(make_lookers),
    listen=Listen,
    join=JoinQueues,
    publishing=OpenPublishing,
    lanes=Lanes,
    reading=Reading,
    preferences=Preferences,
    ledger=Ledger,
    recent=Recent,
    suspects=Suspects,
    turnstile=Turnstile,
    rooms=Rooms,
    gates=Gates,
    results=ResultsQueue,
    asyncio_runner=AsyncioRunner,
    boxes=value(make_boxes),
    runners=value(make_runners),
    budget=ConcurrencyBudget,
    deadlines=Deadlines,
    fine_timer=FineTimer,
    circuits=Circuits,
    health=Health,
    judgement=Judgement,
    handlers=value(make_handlers),
    process_commands=ProcessCommands,
    worker_commands=WorkerCommands,
    commands=Commands,
    board=Board,
    added=value(make_added),
    offered=value(make_offered),
    posts=OwnPost,
    missed=value(make_missed),
    inbox=Inbox,
    pauses=Pauses,
    impositions=Impositions,
    revocations=Revocations,
    heartbeat=Heartbeat,
    wake=value(make_wake),
    mover=Mover,
    recoverer=Recoverer,
    unpublishable=Unpublishable,
    result_publisher=ResultPublisher,
    task_execution=TaskExecution,
    consumer=Consumer,
    burst_watch=Burst,
    subscriptions=value(make_subscriptions),
    log_again=LogAgain,
    sources=value(make_sources),
    vital_signs=VitalSigns,
    reloader=Reloader,
    recycling=Recycling,
    reach=Reach,
    reports=value(make_reports),
    reporter=Reporter,
    depth_ways=value(make_depth_ways),
    measured=value(make_measured),
    queue_depths=QueueDepths,
    ground=value(make_ground),
    aside=value(make_aside),
    steps=value(make_steps),
)
"""Every part of a worker. A part is built from the names of its constructor's parameters."""
