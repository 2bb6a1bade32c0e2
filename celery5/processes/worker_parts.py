"""Worker Parts: the values, the parts and the boot graph of a worker.

`WorkerParts` has a line for each part: what makes it, and for a boot step after which others it starts. `WorkerValues`
is what they ask for besides each other and what every process has (process_parts.py); settings they get by the names
of the settings. The functions between them make the parts that take more than a constructor.
"""

import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from celery5.app import App
from celery5.boot_step import BootStep
from celery5.bootsteps.worker_steps import (
    ChannelHandler,
    ChannelSubscriptions,
    LentConnection,
    QueueMembership,
    WorkerDeparture,
)
from celery5.broker.connection.push import PushRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_parked, open_redis
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.keys import QueueKeys
from celery5.broker.timing import Timing
from celery5.commands.declaration import make_own_handlers
from celery5.health.checks import get_all_checks
from celery5.health.event_loop import LoopBlocks
from celery5.limits.holds import LimitHolds
from celery5.logs.log import Log
from celery5.processes.lifecycle.multi_broker import RemoteRedis, connect_all_brokers
from celery5.processes.options import find_task_kinds, resolve_budgets
from celery5.processes.process_parts import (
    ConnectionLog,
    ProcessParts,
    ReconnectObserver,
    make_alert_rules,
    make_alert_webhook,
    make_push,
    make_reader,
    make_systemd,
)
from celery5.processes.watch.sidecar import Sidecar
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.cluster.canary_limit import CanaryLimit
from celery5.protocol.commands.definitions import (
    BUDGET,
    CHECK_EXPIRED,
    CONCURRENCY,
    HEALTH,
    PREFER,
    PREFETCH,
    RELOAD,
    RETRY_BOOT_STEP,
)
from celery5.protocol.events.messages import Subscription
from celery5.protocol.job.foreign import CodeVersion
from celery5.protocol.job.retry_policy import UnpublishableChoice, UnpublishableFallback
from celery5.protocol.limits import Rate
from celery5.protocol.names import resolve_module_name
from celery5.protocol.observability.ended_jobs import EndedJobs
from celery5.protocol.observability.job_tally import JobTally
from celery5.protocol.process.recycling import RecyclingLimits
from celery5.protocol.scaling.budget import Budget
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.protocol.scheduling.timers import TimerCounts, TimerStanding
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.runners.boxes.boxed import BoxedRunner, BoxLimits
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.open_resources import OpenResources
from celery5.runners.running_job import Runner
from celery5.scheduling.timers import Timer
from celery5.services.commands.dispatcher import CommandHandler, handle
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_retry import LogRetry, log_handlers
from celery5.services.events.subscriptions import Subscriptions
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.health.health_checks import HealthMonitor
from celery5.services.health.vital_sources import (
    BreakerMetrics,
    CommandMetrics,
    ConnectionStatus,
    JobMetrics,
    LeaseStatus,
    LogMetrics,
    QueueDepths,
    TimerMetrics,
)
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.job.attempt_recorder import AttemptRecorder
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RecentJobs, RunningJobs
from celery5.services.job.internal_queues import InternalResultsQueue, InternalTasksQueue, SharedSlots
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.job.thread_load import ThreadLoad
from celery5.services.job.unstarted_jobs import UnstartedJobs
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.limits.kind_rates import KindRates
from celery5.services.limits.overrides import LimitOverrides
from celery5.services.limits.waiting_tasks import WaitingTasks
from celery5.services.observability.alert_delivery import AlertDelivery
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.observability.ended_counter import EndedCounter
from celery5.services.observability.history_rollup import HistoryRollup
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.lease import Heartbeat, Lease, RedisClock
from celery5.services.process.reloader import Reloader
from celery5.services.process.shared_memory import SidecarMemory
from celery5.services.process.step_status import StepStatus
from celery5.services.process.suspect_turn import SuspectTurn
from celery5.services.process.wake_ups import WakeUps
from celery5.services.scaling.observer import TimeLimitedDriver
from celery5.services.scaling.preferences import Preferences
from celery5.services.scaling.prefetch_factor import PrefetchFactor
from celery5.services.scaling.reporter import Reporter
from celery5.services.scheduling.timer_leadership import TimerLeadership
from celery5.services.scheduling.timers import TimerRuns, Timers
from celery5.services.streams import outbox_relay, processor_calls, processor_group
from celery5.services.streams.group_lags import GroupLags
from celery5.services.streams.group_member import GroupMember
from celery5.services.streams.stream_archives import StreamArchives
from celery5.services.streams.stream_processors import ProcessorsStop, StreamProcessors
from celery5.services.worker.admission_control import AdmissionControl
from celery5.services.worker.burst import Burst
from celery5.services.worker.capacity import QueueCapacity
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.due_jobs import Mover
from celery5.services.worker.earlier_shards import EarlierShards
from celery5.services.worker.foreign_jobs import NEW_FOREIGN, ForeignJobs
from celery5.services.worker.job_intake import JobIntake
from celery5.services.worker.paused_queues import PausedQueues
from celery5.services.worker.progress_reports import ProgressReports
from celery5.services.worker.reading import NEW_LANE, QueueLanes, ReadOrder
from celery5.services.worker.recovery import Recoverer
from celery5.services.worker.recycling import Recycling, RestartMode
from celery5.services.worker.resources import ResourceKeeper
from celery5.services.worker.result_publisher import (
    ResultPublisher,
    UnpublishableRetries,
)
from celery5.services.worker.revocations import Revocations
from celery5.services.worker.task_execution import TaskExecution
from celery5.services.worker.time_limits import Deadlines, FineTimer
from celery5.services.worker.worker_commands import WorkerCommands
from celery5.services.workflows.member_jobs import MemberJobs
from celery5.services.workflows.run_progress import NEW_RUNS, RunProgress, RunRelay
from celery5.streams import processor, stream
from celery5.tasks.task import Task
from celery5.wiring import part, step

if TYPE_CHECKING:
    from celery5.protocol.boxes.frames import BoxHome


class WorkerValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a worker ask for besides each other and what every process has."""

    # The tasks of the application, by name.
    tasks: Mapping[str, Task[..., Any]]
    # The broker that this incarnation works on, by name, and the keys of the queues that it consumes there.
    broker: str
    consumed: Sequence[QueueKeys]
    # What its code knows.
    code_version: CodeVersion
    # The queues that it measures: those that it consumes.
    measured_queues: Sequence[str]
    # Shards from an earlier, larger number that still hold jobs, kept over incarnations; whether the setting names any.
    earlier_shards: set[str]
    has_shards: bool
    # Returns the broker of a queue.
    find_broker: Callable[[str], str]
    # The queues that tasks and settings of the application name, consumed here or not; and the others of which the
    # process has warned, kept over incarnations.
    used: Collection[str]
    doubted: set[str]
    # Queues of another kind of process beside it, for which a burst waits.
    awaited: Sequence[QueueKeys]
    # The queues that are paused, kept over incarnations.
    paused: set[str]
    lease: Lease
    # The process that steps in when this one dies or hangs, and the memory that it shares with that.
    sidecar: Sidecar | None
    sidecar_memory: SidecarMemory | None
    # The slots that workers on several brokers in one process share; `process` names that process then.
    slots: SharedSlots | None
    process: str
    # What jobs take of the capacity of this process, and what jobs of tasks lack here that cannot run.
    resource_slots: ResourceSlots
    lacking: Mapping[str, str]
    # How many jobs of each kind of task may begin in a period, on all workers.
    kind_rates: Mapping[str, Rate]
    # What the loop and the jobs of this process have done so far.
    loop_blocks: LoopBlocks
    tally: JobTally
    # What has ended in this process and is not in the history yet, and whether there is a history.
    ended_jobs: EndedJobs
    keeps_history: bool
    # Whether the depths of queues are measured, and whether workers report for the decision on scaling.
    is_measuring: bool
    reports: bool
    # The boot steps and services of the application.
    added: Sequence[BootStep]
    # Which sinks take which documents, and which events the tasks are subscribed to.
    recipients: Mapping[str, str]
    subscribed: Mapping[str, Sequence[Subscription]]
    # Whether it ends when there are no more jobs.
    burst: bool
    # The processors of streams that it runs, and the name under which it does.
    processors: "Sequence[processor.Processor[Any]]"
    member: GroupMember
    # The streams of records whose archive it serves.
    archived_streams: "Sequence[stream.Stream[Any]]"
    # The timers that it runs, and what has become of each in this process, by name.
    declared_timers: Sequence[Timer]
    timer_counts: dict[str, TimerCounts]
    # What the process knows of the leader of the timers, kept over incarnations.
    timer_standing: TimerStanding
    # When the process is replaced by a fresh one, and how.
    recycle_at: RecyclingLimits
    restart_mode: RestartMode
    # A name that the process shares with the one that takes its place when it is recycled.
    recycling_name: str
    # How many jobs it may take while it is a canary.
    canary_limit: CanaryLimit
    # What becomes of retries that cannot be published.
    when_unpublishable: UnpublishableChoice | UnpublishableFallback


def make_box_home(app: App) -> "BoxHome":
    """Return where a box finds the tasks of `app`, and the settings of this worker, however it got them."""
    from celery5.processes.box_django import read_django
    from celery5.protocol.boxes.frames import BoxHome

    path = tuple(os.path.abspath(entry) for entry in sys.path)  # '' is the working directory
    settings = msgspec.to_builtins(app.settings)
    return BoxHome(resolve_module_name(app.module), app.name, path, settings, read_django())


def make_thread_load(slots: SharedSlots | None) -> ThreadLoad:
    """Return what decides which jobs may begin in threads: one for all incarnations of a process."""
    return ThreadLoad() if slots is None else slots.thread_load


def make_queues(
    slots: SharedSlots | None,
    preferences: Preferences,
    task_kinds: Mapping[str, str],
    thread_load: ThreadLoad,
    resource_slots: ResourceSlots,
    budgets: Mapping[str, Budget],
) -> dict[str, InternalTasksQueue]:
    """Return where jobs of each kind, and of each task with its own budget, wait for an executor."""
    separate = [task for task in task_kinds if budgets[task].is_separate]
    if slots is not None:
        return slots.make_queues(preferences.get_weight, task_kinds, separate)
    shared_kinds = {kind for task, kind in task_kinds.items() if task not in separate}
    queues = {
        kind: InternalTasksQueue(thread_load if kind == "thread" else None)
        for kind in TASK_KINDS
        if kind not in shared_kinds
    }
    shared = SharedSlots(shared_kinds, thread_load, resource_slots).make_queues(
        preferences.get_weight, task_kinds, separate
    )
    return {**queues, **shared}


def limit_budgets(app: App, resource_slots: ResourceSlots) -> dict[str, Budget]:
    """Return how many jobs of each kind and task may run at once, of those that take resources no more than fit."""
    budgets = resolve_budgets(app)
    for name, budget in budgets.items():
        if budget.is_separate:  # a task that cannot run here has the least that there is
            most = resource_slots.count_most(name) if name in resource_slots.needs else 1
            budgets[name] = msgspec.structs.replace(budget, maximum=max(min(budget.max_slots, most), 1))
    return budgets


def make_duration_estimates(budgets: Mapping[str, Budget]) -> dict[str, DurationEstimate]:
    """Return what estimates how long jobs of each kind, and of each task with its own budget, take."""
    return {name: DurationEstimate() for name in budgets}


def make_sources(
    app: App,
    redis: TrioRedis,
    reader: ParkedRedis,
    push: PushRedis,
    consumer: Consumer,
    circuit_breakers: CircuitBreakers,
    lease: Lease,
    in_flight: InFlightJobs,
    queues: Mapping[str, InternalTasksQueue],
    budget: MaximalConcurrencyBudget,
    task_execution: TaskExecution,
    resource_slots: ResourceSlots,
    command_counts: Mapping[str, int],
    group_lags: GroupLags,
    stream_archives: StreamArchives,
    timer_counts: Mapping[str, TimerCounts],
    alert_delivery: AlertDelivery,
    log: Log,
) -> tuple[StatusSource, ...]:
    """Return who is asked for /readyz and /metrics."""
    return (
        ConnectionStatus(redis=redis, reader=reader, push=push),
        BreakerMetrics(circuit_breakers),
        LeaseStatus(lease),
        JobMetrics(
            in_flight=in_flight,
            queues=queues,
            budget=budget,
            task_execution=task_execution,
            resource_slots=resource_slots,
            kinds={task.kind for task in app.tasks.values()},
        ),
        consumer,
        CommandMetrics(command_counts),
        group_lags,
        stream_archives,
        TimerMetrics(timer_counts),
        LogMetrics(log),
        alert_delivery,
    )


def make_channel_handlers(
    mover: Mover,
    revocations: Revocations,
    inbox: Inbox,
    heartbeat: Heartbeat,
    admission_control: AdmissionControl,
    limit_overrides: LimitOverrides,
    stream_processors: StreamProcessors,
    run_relay: RunRelay,
    foreign_jobs: ForeignJobs,
) -> dict[bytes, ChannelHandler]:
    """Return what hears each channel."""

    def on_wake_up(channel: bytes, payload: bytes) -> None:
        if payload == NEW_LANE:
            heartbeat.beat_now()
        elif payload == NEW_RUNS:
            run_relay.on_message(channel)
        elif payload.startswith(NEW_FOREIGN):
            foreign_jobs.on_message(channel, payload)
        else:
            mover.on_message(channel, payload)

    handlers: dict[str, ChannelHandler] = dict.fromkeys(mover.channels, on_wake_up)
    handlers |= dict.fromkeys(revocations.channels, revocations.on_message)
    handlers |= dict.fromkeys(inbox.channels, inbox.on_message)
    handlers |= dict.fromkeys(admission_control.channels, admission_control.on_message)
    handlers |= dict.fromkeys(limit_overrides.channels, limit_overrides.on_message)
    handlers |= dict.fromkeys(stream_processors.channels, stream_processors.on_message)
    return {channel.encode(): handler for channel, handler in handlers.items()}


def make_reconnect_observers(
    mover: Mover,
    revocations: Revocations,
    inbox: Inbox,
    pauses: PausedQueues,
    limit_overrides: LimitOverrides,
    stream_processors: StreamProcessors,
) -> tuple[ReconnectObserver, ...]:
    """Return who looks again after the connection was down."""
    return (mover, revocations, inbox, pauses, limit_overrides, stream_processors)


def get_incarnation_end(step_status: StepStatus) -> IncarnationEnd:
    """Return what knows how the incarnation ends: its boot graph tells it."""
    return step_status.incarnation_end


def make_stream_processors(
    app: App,
    processors: "Sequence[processor.Processor[Any]]",
    member: GroupMember,
    redis: TrioRedis,
    timing: Timing,
    watch: ConnectionLog,
    asyncio_runner: AsyncioRunner,
    incarnation_end: IncarnationEnd,
    suspect_turn: SuspectTurn,
    log: Log,
) -> StreamProcessors:
    """Return what runs the processors: each has its own connection, on which it waits for records."""
    trials = trio.Lock()
    member = msgspec.structs.replace(member, incarnation_end=incarnation_end, suspect_turn=suspect_turn)
    groups = [
        processor_group.ProcessorGroup(
            processor=processor,
            member=member,
            redis=redis,
            reader=open_parked(
                control=redis,
                timing=timing,
                name=f"celery5:{member.incarnation}:{processor.name}",
                watch=watch,
            ),
            relay=outbox_relay.OutboxRelay(
                keys=processor.stream.keys,
                group=processor.name,
                streams=app.streams,
                send_jobs=app.asend_jobs,
                redis=redis,
                log=log,
            ),
            processor_calls=processor_calls.ProcessorCalls(
                processor=processor, asyncio_runner=asyncio_runner
            ),
            trials=trials,
            log=log,
        )
        for processor in processors
    ]
    return StreamProcessors(groups=groups)


def make_boxes(
    app: App, budget: MaximalConcurrencyBudget, log: Log, worker: str, sidecar_memory: SidecarMemory | None
) -> BoxedRunner:
    """Return the runner of boxed tasks."""
    settings = app.settings
    return BoxedRunner(
        tasks=app.tasks,
        get_slots=lambda: budget.get_slots("boxed") + budget.count_separate_slots("boxed"),
        get_home=lambda: make_box_home(app),
        log_event=log.event,
        log_message=log.write_message,
        worker=worker,
        limits=BoxLimits(settings.message_limit, settings.box_jobs, settings.box_idle),
        box_groups=sidecar_memory,
    )


def make_runners(
    asyncio_runner: AsyncioRunner,
    boxes: BoxedRunner,
    budget: MaximalConcurrencyBudget,
    thread_load: ThreadLoad,
) -> dict[str, Runner]:
    """Return the runner of each kind of task, and of tasks that have their own."""
    threads = ThreadRunner(get_slots=lambda: budget.get_slots("thread"), meters=thread_load.meters)
    # They have threads of their own: short jobs wait for one of the others, as many as there are slots.
    separate = ThreadRunner(get_slots=lambda: max(budget.count_separate_slots("thread"), 1))
    return {
        "trio": TrioRunner(),
        "asyncio": asyncio_runner,
        "thread": threads,
        "boxed": boxes,
        **dict.fromkeys(budget.list_separate_tasks("thread"), separate),
    }


def make_heartbeat_listeners(
    wake_ups: WakeUps,
    mover: Mover,
    recoverer: Recoverer,
    revocations: Revocations,
    lanes: QueueLanes,
    admission_control: AdmissionControl,
    limit_overrides: LimitOverrides,
    run_relay: RunRelay,
    redis_clock: RedisClock,
) -> tuple[Any, ...]:
    """Return what hears the replies to heartbeats."""
    return (
        wake_ups.on_heartbeat,
        redis_clock.on_heartbeat,
        mover.on_heartbeat,
        recoverer.on_heartbeat,
        revocations.on_heartbeat,
        lanes.on_heartbeat,
        admission_control.on_heartbeat,
        limit_overrides.on_heartbeat,
        run_relay.on_heartbeat,
    )


def make_counted_jobs(
    in_flight: InFlightJobs, processors: "Sequence[processor.Processor[Any]]"
) -> InFlightJobs | None:
    """Return the jobs that keep the worker from being idle; None if it is never idle, since it processes streams."""
    return None if processors else in_flight


def make_handlers(
    app: App,
    worker_commands: WorkerCommands,
    reloader: Reloader,
    step_status: StepStatus,
    budget: MaximalConcurrencyBudget,
    preferences: Preferences,
    health: HealthMonitor,
    prefetch_factor: PrefetchFactor,
    asyncio_runner: AsyncioRunner,
    log: Log,
) -> dict[str, CommandHandler]:
    """Return the commands that a worker knows."""
    return {
        **make_own_handlers(app.command.known, asyncio_runner.call),
        **worker_commands.handlers,
        **handle(RELOAD, reloader.handle_command),
        **handle(RETRY_BOOT_STEP, step_status.handle_command),
        **handle(CHECK_EXPIRED, health.check_expired),
        **handle(HEALTH, health.report_health),
        **handle(BUDGET, budget.handle_command),
        **handle(CONCURRENCY, budget.handle_factor_command),
        **handle(PREFETCH, prefetch_factor.handle_command),
        **handle(PREFER, preferences.handle_command),
        **log_handlers(log),
    }


def make_depth_brokers(broker: str, redis: TrioRedis) -> dict[str, AsyncDriver]:
    """Return the connection to the broker that its queues are on."""
    return {broker: redis}


def make_default_redis(app: App, redis: TrioRedis, broker: str) -> AsyncDriver:
    """Return the connection to the default broker, which has what all workers share: metrics, timers, events."""
    return redis if broker == DEFAULT_BROKER else RemoteRedis(app, DEFAULT_BROKER)


def make_kind_rates_redis(app: App, redis: TrioRedis, broker: str) -> AsyncDriver:
    """Return the connection to the default broker, where the rates of kinds are counted.

    While another broker cannot reach it, its jobs without such a rate are not to wait for long.
    """
    if broker == DEFAULT_BROKER:
        return redis
    return TimeLimitedDriver(redis=RemoteRedis(app, DEFAULT_BROKER), broker=DEFAULT_BROKER)


def make_recheck(pauses: PausedQueues) -> Callable[[], None]:
    """Return what is looked at again when a command came too late to be performed."""
    return pauses.recheck


def get_open_resources(resource_keeper: ResourceKeeper) -> OpenResources:
    """Return where jobs find their resources."""
    return resource_keeper.open_resources


class WorkerParts(ProcessParts):
    """Every part of a worker, and its boot graph: its steps start from the top and stop from the bottom."""

    # connections and channels
    channel_handlers = part(make_channel_handlers)
    reconnect_observers = part(make_reconnect_observers)
    redis = step(open_redis)
    default_redis = part(make_default_redis)
    reader = step(make_reader, after=(redis,))
    push = step(make_push, after=(redis,))
    listen = step(ChannelSubscriptions, after=(push,))
    publishing = step(LentConnection, after=(redis,))
    # membership and recovery
    incarnation_end = part(get_incarnation_end)
    departure = part(WorkerDeparture)
    redis_clock = part(RedisClock)
    wake_ups = part(WakeUps)
    heartbeat_listeners = part(make_heartbeat_listeners)
    counted_jobs = part(make_counted_jobs)
    join = step(QueueMembership, after=(redis,))
    heartbeat = step(Heartbeat, after=(join,))
    recoverer = step(Recoverer, after=(heartbeat,))
    mover = step(Mover, after=(heartbeat, listen))
    # commands
    asyncio_runner = step(AsyncioRunner, name="asyncio")
    handlers = part(make_handlers)
    worker_commands = part(WorkerCommands)
    on_expired = part(make_recheck)
    inbox = step(Inbox, after=(listen, asyncio_runner))
    pauses = step(PausedQueues, after=(listen,))
    earlier_shards_watch = step(EarlierShards, name="shards", after=(listen,))
    limit_overrides = step(LimitOverrides, name="limits", after=(listen,))
    # what jobs run with
    runners = part(make_runners)
    circuit_breakers = part(CircuitBreakers)
    job_middleware = part(JobMiddleware)
    budgets = part(limit_budgets)
    task_kinds = part(find_task_kinds)
    duration_estimates = part(make_duration_estimates)
    member_jobs = part(MemberJobs)
    budget = step(MaximalConcurrencyBudget)
    boxes = step(make_boxes)
    resource_keeper = step(ResourceKeeper, name="resources", after=(asyncio_runner,), start_limit=math.inf)
    resources = part(get_open_resources)
    deadlines = step(Deadlines)
    fine_timer = step(FineTimer, name="timer")
    revocations = step(Revocations, after=(heartbeat, listen))
    checks = part(get_all_checks)
    health = step(HealthMonitor, after=(redis, asyncio_runner))
    # It needs a lease to delete what jobs have reported that ended when the worker stopped.
    progress_reports = step(ProgressReports, name="progress", after=(heartbeat, publishing))
    # metrics and alerts
    all_brokers = part(connect_all_brokers)
    alert_rules = part(make_alert_rules)
    limit_holds = part(LimitHolds)
    alert_webhook = part(make_alert_webhook)
    # It stops after everything that it counts has ended.
    metrics_reporter = step(MetricsReporter, name="metrics", after=(publishing,))
    history_rollup = step(HistoryRollup, name="history", after=(publishing,))
    ended_counter = step(EndedCounter, name="ended", after=(publishing,))
    alert_evaluator = step(AlertEvaluator, name="alerts", after=(publishing,))
    alert_delivery = step(AlertDelivery, name="notices", after=(publishing,))
    # from the worker into the broker
    results = part(InternalResultsQueue)
    unpublishable_retries = part(UnpublishableRetries)
    run_progress = part(RunProgress)
    result_publisher = step(
        ResultPublisher, name="results", after=(heartbeat, publishing, metrics_reporter, ended_counter)
    )
    run_relay = step(RunRelay, name="runs", after=(heartbeat, listen, publishing))
    # from the queue into the worker
    in_flight = part(InFlightJobs)
    recent = part(RecentJobs)
    isolated_jobs = part(IsolatedJobs)
    suspect_turn = part(SuspectTurn)
    running_jobs = part(RunningJobs)
    thread_load = part(make_thread_load)
    queues = part(make_queues)
    preferences = part(Preferences)
    reading = part(ReadingState)
    lanes = part(QueueLanes)
    read_order = part(ReadOrder)
    queue_capacity = part(QueueCapacity)
    prefetch_factor = part(PrefetchFactor)
    intake = part(JobIntake)
    unstarted = part(UnstartedJobs)
    foreign_jobs = step(ForeignJobs, name="foreign", after=(join, result_publisher))
    # limits
    admission = part(AdmissionState)
    waiting_tasks = part(WaitingTasks)
    kind_starts = part(KindRates)
    kind_rates_redis = part(make_kind_rates_redis)
    # Which tasks are suspended must be known before any job is admitted.
    admission_control = step(AdmissionControl, name="admission", after=(result_publisher, limit_overrides))
    # timers and streams. They have limits of their own for their ends.
    # The leader stops after what runs there only.
    timer_leadership = step(TimerLeadership, name="timer-leader", after=(redis,))
    timer_runs = step(TimerRuns, after=(publishing, asyncio_runner, timer_leadership), stop_limit=math.inf)
    stream_processors = step(
        make_stream_processors,
        name="processors",
        after=(heartbeat, listen, publishing, asyncio_runner),
        stop_limit=math.inf,
    )
    # execution. It has limits of its own for its end.
    outcome_handler = part(OutcomeHandler)
    attempt_recorder = part(AttemptRecorder)
    task_execution = step(
        TaskExecution,
        name="execution",
        after=(
            *(result_publisher, budget, asyncio_runner, boxes, deadlines, fine_timer, revocations, health),
            resource_keeper,
            # It stops before these two: what runs there has its grace period.
            *(progress_reports, timer_runs, stream_processors),
        ),
        stop_limit=math.inf,
    )
    consumer = step(
        Consumer,
        after=(
            *(task_execution, reader, mover, recoverer, pauses, limit_overrides, admission_control),
            # This one first revokes what a worker that died has left to revoke.
            run_relay,
            foreign_jobs,
        ),
    )
    timers = step(Timers, after=(task_execution,))
    processors_stop = step(ProcessorsStop, after=(task_execution,))
    # No job passes through the rest.
    sources = part(make_sources)
    depth_brokers = part(make_depth_brokers)
    reporter = step(Reporter, after=(consumer,))
    subscriptions = step(Subscriptions, after=(redis,))
    burst_watch = step(Burst, name="burst", after=(consumer,))
    log_again = step(LogRetry, after=(redis,))
    status_phase = step(StatusPhase, name="vitals", after=(consumer,))
    systemd = step(make_systemd, after=(status_phase,))
    reloader = step(Reloader, after=(consumer,))
    # It starts after systemd or the Controller knows that the process is up: only then may the turn end.
    recycling = step(Recycling, after=(systemd,))
    queue_depths = step(QueueDepths, name="depths", after=(redis,))
    group_lags = step(GroupLags, name="lags", after=(redis,))
    stream_archives = step(StreamArchives, name="archives", after=(redis,))
