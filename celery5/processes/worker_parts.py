"""Worker Parts: every part of a worker, how those are made that take more than a constructor, and the boot graph."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from dependencies import Injector, value

from celery5.app import App
from celery5.boot_step import BootStep
from celery5.bootsteps.boot import Step
from celery5.bootsteps.worker_steps import (
    ChannelHandler,
    ChannelSubscriptions,
    LentConnection,
    QueueMembership,
)
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.keys import QueueKeys
from celery5.commands.declaration import make_own_handlers
from celery5.logs.log import Log
from celery5.processes.connection_parts import ReconnectObserver, make_push, make_reader
from celery5.processes.lifecycle.multi_broker import RemoteRedis
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.events.messages import Subscription
from celery5.protocol.job.names import resolve_module_name
from celery5.protocol.scaling.budget import Budget, fixed_budget, parse_budgets
from celery5.runners.boxes.boxed import BoxedRunner
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.scaling.strategies import is_scaled
from celery5.services.commands.dispatcher import CommandHandler, CommandRegistry, SelfCommandSender
from celery5.services.commands.inbox import Inbox, SelfCommandQueue
from celery5.services.commands.log_again import LogRetry, log_handlers
from celery5.services.commands.paused_queues import PausedQueues
from celery5.services.commands.process_commands import ProcessCommands
from celery5.services.commands.worker_commands import WorkerCommands
from celery5.services.events.subscriptions import Subscriptions
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.health_checks import HealthMonitor
from celery5.services.health.queue_depths import QueueDepths
from celery5.services.health.vital_sources import (
    BreakerMetrics,
    CommandMetrics,
    ConnectionStatus,
    JobMetrics,
    LeaseStatus,
    LogMetrics,
)
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.limits.admission_control import AdmissionControl
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.limits.overrides import LimitOverrides
from celery5.services.process.recycling import Recycling
from celery5.services.process.reloader import Reloader
from celery5.services.process.shared_memory import SidecarMemory
from celery5.services.process.step_status import RETRY_COMMAND, StepStatus
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.scaling.preferences import Preferences
from celery5.services.scaling.reporter import Reporter
from celery5.services.worker.burst import Burst
from celery5.services.worker.capacity import PrefetchFactor, QueueCapacity
from celery5.services.worker.concurrency_budget import ConcurrencyBudget
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.due_jobs import Mover
from celery5.services.worker.in_flight import InFlightJobs, IsolatedJobs, RecentJobs
from celery5.services.worker.internal_queues import ResultsQueue, TasksQueue
from celery5.services.worker.judgement import OutcomeHandler
from celery5.services.worker.lease import Heartbeat, Lease
from celery5.services.worker.reading import NEW_LANE, QueueLanes, ReadOrder
from celery5.services.worker.recoverer import Recoverer
from celery5.services.worker.result_publisher import ResultPublisher, UnpublishableRetries
from celery5.services.worker.revocations import Revocations
from celery5.services.worker.task_execution import TaskExecution
from celery5.services.worker.time_limits import Deadlines, FineTimer

if TYPE_CHECKING:
    from celery5.protocol.boxes.frames import BoxHome


def make_box_home(app: App) -> "BoxHome":
    """Where a box finds the tasks of `app`, and with which settings: those of the worker, however it got them."""
    from celery5.protocol.boxes.frames import BoxHome

    path = tuple(os.path.abspath(each) for each in sys.path)  # '' is the working directory
    return BoxHome(resolve_module_name(app.module), app.name, path, msgspec.to_builtins(app.settings))


def make_sources(
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    circuit_breakers: CircuitBreakers,
    lease: Lease,
    in_flight: InFlightJobs,
    queues: Mapping[str, TasksQueue],
    budget: ConcurrencyBudget,
    task_execution: TaskExecution,
    command_counts: Mapping[str, int],
    log: Log,
) -> tuple[StatusSource, ...]:
    """Who is asked for /readyz and /metrics."""
    return (
        ConnectionStatus(redis=redis, reader=reader, push=push),
        BreakerMetrics(circuit_breakers),
        LeaseStatus(lease),
        JobMetrics(in_flight=in_flight, queues=queues, budget=budget, task_execution=task_execution),
        CommandMetrics(command_counts),
        LogMetrics(log),
    )


def resolve_budgets(app: App) -> dict[str, Budget]:
    """How many jobs of each kind may run at once: what the application says, else its setting `budgets`, else the
    number of slots that there is a setting for, which does not move."""
    settings = app.settings
    usual = {
        "trio": fixed_budget(settings.concurrency),
        "asyncio": fixed_budget(settings.concurrency),
        "thread": fixed_budget(settings.cpu_slots),
        "boxed": fixed_budget(settings.box_slots),
    }
    return {**usual, **parse_budgets(settings.budgets), **app.budgets}


def make_channel_handlers(
    mover: Mover,
    revocations: Revocations,
    inbox: Inbox,
    heartbeat: Heartbeat,
    admission_control: AdmissionControl,
    limit_overrides: LimitOverrides,
) -> dict[bytes, ChannelHandler]:
    """Which channel is whose."""

    def woken(channel: bytes, payload: bytes) -> None:
        if payload == NEW_LANE:
            heartbeat.beat_now()
        else:
            mover.on_message(channel, payload)

    all_of_them: dict[str, ChannelHandler] = dict.fromkeys(mover.channels, woken)
    all_of_them |= dict.fromkeys(revocations.channels, revocations.on_message)
    all_of_them |= dict.fromkeys(inbox.channels, inbox.on_message)
    all_of_them |= dict.fromkeys(admission_control.channels, admission_control.on_message)
    all_of_them |= dict.fromkeys(limit_overrides.channels, limit_overrides.on_message)
    return {each.encode(): hears for each, hears in all_of_them.items()}


def make_reconnect_observers(
    mover: Mover,
    revocations: Revocations,
    inbox: Inbox,
    pauses: PausedQueues,
    limit_overrides: LimitOverrides,
) -> tuple[ReconnectObserver, ...]:
    """Who looks again when something may have been said while nobody listened."""
    return (mover, revocations, inbox, pauses, limit_overrides)


def make_boxes(
    app: App, budget: ConcurrencyBudget, log: Log, worker: str, sidecar_memory: SidecarMemory | None
) -> BoxedRunner:
    """Where boxed tasks run."""
    settings = app.settings
    return BoxedRunner(
        tasks=app.tasks,
        get_slots=lambda: budget.get_slots("boxed"),
        get_home=lambda: make_box_home(app),
        log_event=log.event,
        worker=worker,
        result_limit=settings.message_limit,
        max_jobs=settings.box_jobs,
        idle_timeout=settings.box_idle,
        box_groups=sidecar_memory,
    )


def make_runners(
    asyncio_runner: AsyncioRunner, boxes: BoxedRunner, budget: ConcurrencyBudget
) -> dict[str, Any]:
    """Where each kind of task runs."""
    threads = ThreadRunner(slots=budget.get_slots("thread"))
    budget.add_listener(lambda kind, slots: threads.resize(slots) if kind == "thread" else None)
    return {"trio": TrioRunner(), "asyncio": asyncio_runner, "thread": threads, "boxed": boxes}


def make_heartbeat_listeners(
    mover: Mover,
    recoverer: Recoverer,
    revocations: Revocations,
    lanes: QueueLanes,
    admission_control: AdmissionControl,
    limit_overrides: LimitOverrides,
) -> tuple[Any, ...]:
    """Who hears what the Heartbeat brings."""
    return (
        mover.on_heartbeat,
        recoverer.on_heartbeat,
        revocations.on_heartbeat,
        lanes.on_heartbeat,
        admission_control.on_heartbeat,
        limit_overrides.on_heartbeat,
    )


def make_handlers(
    app: App,
    worker_commands: WorkerCommands,
    reloader: Reloader,
    step_status: StepStatus,
    budget: ConcurrencyBudget,
    preferences: Preferences,
    health: HealthMonitor,
    prefetch_factor: PrefetchFactor,
    log: Log,
) -> dict[str, CommandHandler]:
    """What this worker does when it is told to."""
    return {
        **make_own_handlers(app.command.known),
        **worker_commands.handlers,
        "reload": reloader.handle_command,
        RETRY_COMMAND: step_status.handle_command,
        "check-expired": health.check_expired,
        "health": health.report_health,
        "budget": budget.handle_command,
        "prefetch": prefetch_factor.handle_command,
        "prefer": preferences.handle_command,
        **log_handlers(log),
    }


def make_depth_connections(broker: str, redis: TrioRedis) -> dict[str, AsyncDriver]:
    """Return the way to the broker that its queues are on."""
    return {broker: redis}


def make_measured(consumed: Sequence[QueueKeys]) -> tuple[str, ...]:
    """Return the queues that it measures: its own."""
    return tuple(each.queue for each in consumed)


def make_reports(app: App) -> bool:
    """Whether somebody decides from how workers do."""
    return is_scaled(app.settings)


def make_recheck(pauses: PausedQueues) -> Callable[[], None]:
    """What is looked at again when a command came too late to be done."""
    return pauses.recheck


def make_app_steps(app: App, steps_here: bool) -> tuple[BootStep, ...]:
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
        redis=redis if broker == DEFAULT_BROKER else RemoteRedis(app, DEFAULT_BROKER),
        subscribed=subscribed,
        subscription_ttl=subscription_ttl,
        event_catch_up=event_catch_up,
        log=log,
    )


def make_injectable_values(app: App, worker: str, self_commands: SelfCommandSender) -> dict[str, Any]:
    """What their code may ask for by name."""
    return {"app": app, "settings": app.settings, "worker": worker, "inbox": self_commands}


def make_background_steps(
    burst_watch: Burst,
    log_again: LogRetry,
    status_phase: StatusPhase,
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
        Step("vitals", status_phase, ("consumer",)),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, ("consumer",)),
        Step("recycling", recycling, ("consumer",)),
        Step("depths", queue_depths, ("redis",)),
    )


def make_base_steps(
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    listen: ChannelSubscriptions,
    join: QueueMembership,
    publishing: LentConnection,
    heartbeat: Heartbeat,
    mover: Mover,
    recoverer: Recoverer,
    inbox: Inbox,
    pauses: PausedQueues,
    limit_overrides: LimitOverrides,
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
        Step("limits", limit_overrides, ("listen",)),
    )


def make_steps(
    base_steps: tuple[Step, ...],
    budget: ConcurrencyBudget,
    asyncio_runner: AsyncioRunner,
    boxes: BoxedRunner,
    deadlines: Deadlines,
    fine_timer: FineTimer,
    revocations: Revocations,
    health: HealthMonitor,
    result_publisher: ResultPublisher,
    admission_control: AdmissionControl,
    task_execution: TaskExecution,
    consumer: Consumer,
    background_steps: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    return (
        *base_steps,
        Step("budget", budget),
        Step("asyncio", asyncio_runner),
        Step("boxes", boxes),
        Step("deadlines", deadlines),
        Step("timer", fine_timer),
        Step("revocations", revocations, ("heartbeat", "listen")),
        Step("health", health, ("redis",)),
        Step("results", result_publisher, ("heartbeat", "publishing")),
        # Who is suspended must be known before anybody is let through.
        Step("gates", admission_control, ("results", "limits")),
        Step(
            "execution",
            task_execution,
            ("results", "budget", "asyncio", "boxes", "deadlines", "timer", "revocations", "health"),
            stop_limit=math.inf,  # it has limits of its own
        ),
        Step(
            "consumer", consumer, ("execution", "reader", "mover", "recoverer", "pauses", "limits", "gates")
        ),
        *background_steps,
    )


WorkerParts = Injector(
    redis=TrioRedis,
    reader=value(make_reader),
    push=value(make_push),
    channel_handlers=value(make_channel_handlers),
    reconnect_observers=value(make_reconnect_observers),
    listen=ChannelSubscriptions,
    join=QueueMembership,
    publishing=LentConnection,
    lanes=QueueLanes,
    read_order=ReadOrder,
    preferences=Preferences,
    in_flight=InFlightJobs,
    recent=RecentJobs,
    isolated_jobs=IsolatedJobs,
    admission=AdmissionState,
    queue_capacity=QueueCapacity,
    admission_control=AdmissionControl,
    results=ResultsQueue,
    asyncio_runner=AsyncioRunner,
    boxes=value(make_boxes),
    runners=value(make_runners),
    budget=ConcurrencyBudget,
    deadlines=Deadlines,
    fine_timer=FineTimer,
    circuit_breakers=CircuitBreakers,
    health=HealthMonitor,
    outcome_handler=OutcomeHandler,
    handlers=value(make_handlers),
    process_commands=ProcessCommands,
    worker_commands=WorkerCommands,
    commands=CommandRegistry,
    step_status=StepStatus,
    added=value(make_app_steps),
    offered=value(make_injectable_values),
    self_commands=SelfCommandQueue,
    on_expired=value(make_recheck),
    inbox=Inbox,
    pauses=PausedQueues,
    limit_overrides=LimitOverrides,
    revocations=Revocations,
    heartbeat=Heartbeat,
    heartbeat_listeners=value(make_heartbeat_listeners),
    mover=Mover,
    recoverer=Recoverer,
    unpublishable_retries=UnpublishableRetries,
    result_publisher=ResultPublisher,
    task_execution=TaskExecution,
    consumer=Consumer,
    burst_watch=Burst,
    subscriptions=value(make_subscriptions),
    log_again=LogRetry,
    sources=value(make_sources),
    status_phase=StatusPhase,
    reloader=Reloader,
    recycling=Recycling,
    prefetch_factor=PrefetchFactor,
    reports=value(make_reports),
    reporter=Reporter,
    depth_brokers=value(make_depth_connections),
    measured_queues=value(make_measured),
    queue_depths=QueueDepths,
    base_steps=value(make_base_steps),
    background_steps=value(make_background_steps),
    steps=value(make_steps),
)
"""Every part of a worker. A part is built from the names of its constructor's parameters."""
