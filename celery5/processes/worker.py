"""Worker: the page of a worker process.

`run` keeps one incarnation after another alive on each broker whose queues it consumes. What an incarnation is built of
stands in worker_parts.py; a worker that was taken for dead begins a new one under a new name.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.boot_step import select_steps
from celery5.bootsteps.boot import BootGraph
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.keys import EVENTS
from celery5.config.scaling import is_scaled
from celery5.health.capacity import find_capacity
from celery5.health.checks import get_all_checks
from celery5.logs.log import Log, NullLog
from celery5.processes.lifecycle import multi_broker
from celery5.processes.lifecycle.incarnations import DegradedOperation, run_incarnations
from celery5.processes.lifecycle.multi_broker import name_for_broker
from celery5.processes.lifecycle.noted_process import noting_process
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import (
    Incarnation,
    ProcessParts,
    ProcessValues,
    make_alert_rules,
    make_alert_webhook,
    make_process_values,
    make_systemd,
    reach_another,
    try_write,
)
from celery5.processes.watch.sidecar import Sidecar
from celery5.processes.worker_parts import WorkerParts, WorkerValues
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.cluster.canary_limit import CanaryBounds, CanaryLimit
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.events.sinks import get_all_recipients
from celery5.protocol.job.foreign import make_code_version, mark_lacking
from celery5.protocol.limits import parse_kind_rates
from celery5.protocol.process.recycling import RecyclingLimits
from celery5.protocol.scaling.read_order import parse_priorities, parse_queue_order
from celery5.protocol.scaling.resource_budget import Needs, SizedThing
from celery5.protocol.scheduling.timers import TimerStanding
from celery5.protocol.streams.groups import GroupMembership
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.protocol.text_values import SIZE
from celery5.runners.open_resources import REPLACED_RESOURCES
from celery5.services.health.vitals import ProcessStatus
from celery5.services.job.internal_queues import SharedSlots
from celery5.services.job.resource_slots import ResourceSlots, make_key
from celery5.services.process.lease import Lease
from celery5.services.process.reloader import NextIncarnation, ReloadSignal
from celery5.services.scheduling.timers import check_triggers
from celery5.services.streams.group_member import GroupMember
from celery5.services.worker.recycling import RestartMode
from celery5.similar_names import did_you_mean
from celery5.wiring import build, part, step

if TYPE_CHECKING:
    from celery5.streams.processor import Processor
    from celery5.streams.stream import Stream


class WorkerOptions(ProcessOptions, frozen=True, kw_only=True):
    """What a worker is started with besides what all processes are."""

    # The queues that it consumes; none: all that its tasks name.
    queues: tuple[str, ...] = ()
    # The names of the processors of streams that it runs; None: all.
    processors: tuple[str, ...] | None = None
    # Whether it ends when there are no more jobs.
    burst: bool = False
    # The queues that are paused: kept over incarnations.
    paused_queues: set[str] = msgspec.field(default_factory=set[str])
    # The queues of which it has warned that they may be misspelt: kept over incarnations.
    doubted_queues: set[str] = msgspec.field(default_factory=set[str])
    # Shards that remain from an earlier, larger number and that it reads, too; kept over incarnations.
    earlier_shards: set[str] = msgspec.field(default_factory=set[str])
    # What this process knows of the leader of the timers: kept over incarnations.
    timer_standing: TimerStanding = msgspec.field(default_factory=TimerStanding)
    # A Router runs in the same process: a burst waits for its events.
    has_router: bool = False
    # The broker that an incarnation works on, by name.
    broker: str = DEFAULT_BROKER
    # The processes that step in when this one dies or hangs, by broker.
    sidecars: Mapping[str, Sidecar] = msgspec.field(default_factory=dict[str, Sidecar])
    # Its number among the processes of one parent, from 1.
    number: int = 1
    # The slots that workers on several brokers in one process share.
    slots: SharedSlots | None = None
    # Of workers on several brokers in one process all but the first: they run no steps of the application.
    is_secondary: bool = False
    # Its limit while it is a canary; None if it is none.
    canary: CanaryBounds | None = None
    # Nobody else reads its queues, as in tests: what its code does not know, none does, and nothing waits for that.
    reads_alone: bool = False


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a worker until cancelled; `done` is set when a burst is over.

    Raises:
        BrokerError: The broker cannot be reached at the start, or lets nobody in.
    """
    for sidecar in options.sidecars.values():
        if sidecar.start_error:
            log.event("sidecar:start-failed", "warning", why=sidecar.start_error, hint=_NO_SIDECAR)
        else:
            log.event("sidecar:started", "debug", pid=sidecar.pid)
    if not app.tasks:
        log.event("worker:tasks-not-found", "warning", hint=_NO_TASKS)
    multi_broker.check_worker_name(app, options.name)
    queues_by_broker = get_queues_by_broker(app, options)
    with noting_process(app, "worker", options.name, log, task_status) as status:
        if len(queues_by_broker) == 1:
            (broker,) = queues_by_broker
            await _run_on_broker(app, replace(options, broker=broker), log, done, status)
        else:
            await _BrokerWorkers(app, options, log).run(queues_by_broker, done, status)


def get_queues_by_broker(app: App, options: WorkerOptions) -> dict[str, tuple[str, ...]]:
    """Return the queues that this worker consumes, by their brokers."""
    return multi_broker.group_by_broker(app, list_queues(app, options))


class WorkerDegradedParts(ProcessParts):
    """What a worker runs for its first broker while that cannot be reached: on the others it has whole incarnations."""

    redis = part(open_redis)
    systemd = step(make_systemd)


class _BrokerWorkers:
    """The workers of one process, one for each broker, each with incarnations of its own.

    The first one notices when settings change; then the others begin again.
    """

    def __init__(self, app: App, options: WorkerOptions, log: Log) -> None:
        self._app = app
        self._log = log
        self._status = options.process_status or ProcessStatus(app=app.name)
        slots = SharedSlots(TASK_KINDS, resource_slots=_make_resource_slots(app, options))
        self._options = replace(options, process_status=self._status, slots=slots)
        self._secondary_scopes: list[trio.CancelScope] = []
        self._settings = app.settings

    async def run(
        self,
        queues_by_broker: Mapping[str, tuple[str, ...]],
        done: trio.Event,
        task_status: trio.TaskStatus[None],
    ) -> None:
        """Run all of them until cancelled. A burst is over when it is over for each."""
        burst, (first, *others) = self._options.burst, list(queues_by_broker)
        ends = {broker: trio.Event() for broker in queues_by_broker}
        if not burst:
            ends[first] = done
        runs = {first: self._make_first(first, queues_by_broker[first], ends[first])}
        for broker in others:
            runs[broker] = self._make_secondary(broker, queues_by_broker[broker], ends[broker])

        async def finish(end: trio.Event, awaited: Collection[trio.Event]) -> None:
            await end.wait()
            if all(event.is_set() for event in awaited):
                done.set()

        async with trio.open_nursery() as nursery:
            for broker, end in ends.items():
                if burst or broker != first:
                    nursery.start_soon(finish, end, ends.values() if burst else [end])
            await multi_broker.run_on_each_broker(
                runs, self._log, task_status, one_first=bool(select_steps(self._app.bootsteps, "worker"))
            )

    def _make_first(self, broker: str, queues: tuple[str, ...], end: trio.Event) -> multi_broker.RunOnBroker:
        options = replace(self._options, queues=queues, broker=broker)

        def make_degraded(name: str, next_incarnation: NextIncarnation) -> BootGraph:
            incarnation = Incarnation(name, self._log, end, next_incarnation)
            values = make_process_values(self._app, options, incarnation, kind="worker")
            return build(BootGraph, WorkerDegradedParts, values)

        degraded = DegradedOperation(broker, make_degraded, partial(reach_another, self._app, broker))
        return lambda status, on_unreachable: _run_on_broker(
            self._app, options, self._log, end, status, on_unreachable, self._restart_secondaries, degraded
        )

    def _make_secondary(
        self, broker: str, queues: tuple[str, ...], end: trio.Event
    ) -> multi_broker.RunOnBroker:
        options = replace(
            self._options,
            queues=queues,
            broker=broker,
            process_status=self._status.add_incarnation(broker),
            incarnation="",
            paused_queues=set[str](),
            earlier_shards=set[str](),
            performed_commands=dict[str, float](),
            reload=False,
            shares_process=True,
            has_router=False,
            restart_mode=RestartMode(),
            reload_signal=ReloadSignal(),
            is_secondary=True,
        )

        async def run(status: trio.TaskStatus[None], on_unreachable: Callable[[Exception], None]) -> None:
            log = Log(
                worker=name_for_broker(broker, options.name), app=self._app.name, writer=options.log_writer
            )
            try:
                while True:
                    with trio.CancelScope() as scope:
                        self._secondary_scopes.append(scope)
                        await _run_on_broker(self._app, options, log, end, status, on_unreachable)
                    self._secondary_scopes.remove(scope)
            finally:
                log.finish()

        return run

    def _restart_secondaries(self) -> None:
        """Have the others begin again when the first one begins with other settings."""
        if self._app.settings is not self._settings:
            self._settings = self._app.settings
            for scope in list(self._secondary_scopes):
                scope.cancel()


async def _run_on_broker(
    app: App,
    options: WorkerOptions,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None],
    on_unreachable: Callable[[Exception], None] | None = None,
    on_incarnation: Callable[[], None] = lambda: None,
    degraded: DegradedOperation | None = None,
) -> None:
    """Run a worker on one broker, one incarnation after the other."""
    status = options.process_status or ProcessStatus(app=app.name)
    options = replace(options, process_status=status)

    def make_boot(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        on_incarnation()
        log.event(
            "worker:boot-started", name=name, queues=list(list_queues(app, options)), tasks=len(app.tasks)
        )
        incarnation = Incarnation(name, log, done, next_incarnation)
        return build(BootGraph, WorkerParts, *make_incarnation_values(app, options, incarnation))

    await run_incarnations(
        "worker",
        make_boot,
        status,
        name=name_for_broker(options.broker, options.name),
        first_name=options.incarnation if options.broker == DEFAULT_BROKER else "",
        log=log,
        wait_for_broker=options.restart_mode.is_restarted,
        try_write=partial(try_write, app, options.broker),
        task_status=task_status,
        on_unreachable=on_unreachable,
        degraded=degraded,
    )


def check(app: App) -> None:
    """Check what runs in the workers of an application before any process runs. Raises Misconfigured."""
    get_all_checks(app)
    make_alert_rules(app)
    make_alert_webhook(app)
    check_triggers(app.timer.list_timers(app.settings.timezone))
    if app.bootsteps:
        incarnation = Incarnation("", NullLog(), trio.Event(), NextIncarnation())
        build(BootGraph, WorkerParts, *make_incarnation_values(app, WorkerOptions(), incarnation))


def make_incarnation_values(
    app: App, options: WorkerOptions, incarnation: Incarnation
) -> tuple[ProcessValues, WorkerValues]:
    """Return the values that one incarnation of a worker is built with."""
    settings, sidecar = app.settings, options.sidecars.get(options.broker)
    status = options.process_status or ProcessStatus(app=app.name)
    processors = _processors(app, options)
    member = options.name or incarnation.name
    memberships = [GroupMembership(processor.stream.name, processor.name, member) for processor in processors]
    sidecar_memory = None if sidecar is None else sidecar.begin_worker(memberships)
    lease = Lease(seconds=settings.lease, sidecar_memory=sidecar_memory)
    process_values = make_process_values(
        app,
        replace(options, process_status=status),
        incarnation,
        kind="worker",
        endpoint=app.brokers.get(options.broker).endpoint,
        lease=lease,
        status_line=status.format_summary,
    )
    if options.reads_alone:
        process_values = replace(process_values, settings=replace(settings, unknown_task_grace=0.0))
    if options.is_secondary:  # the first one reports the jobs of all
        process_values = replace(process_values, metrics_interval=0.0)
    queues = [
        shard
        for queue in list_queues(app, options)
        for shard in app.brokers.list_shards(queue, options.earlier_shards)
    ]
    resource_slots = options.slots.resource_slots if options.slots else _make_resource_slots(app, options)
    needs = find_needs(app, options.broker)
    lacking = {name: lack for name, need in needs.items() if (lack := resource_slots.find_lacking(need))}
    if lacking:
        incarnation.log.event(
            "worker:resources-lacking",
            "warning",
            why="; ".join(f"{name} takes {lack}" for name, lack in lacking.items()),
            hint=_suggest_capacity(resource_slots, [needs[name] for name in lacking]),
        )
    resource_slots.set_needs({name: need for name, need in needs.items() if name not in lacking})
    code = make_code_version(
        {
            name: mark_lacking(task.parameters.make_digest(), lacks=name in lacking)
            for name, task in app.tasks.items()
        }
    )
    status.set_code(code.version)
    return process_values, WorkerValues(
        tasks=app.tasks,
        broker=options.broker,
        code_version=code,
        consumed=tuple(app.queue(name) for name in queues),
        measured_queues=queues,
        earlier_shards=options.earlier_shards,
        has_shards=bool(app.brokers.shards),
        find_broker=app.brokers.broker_of_queue,
        used=_named(app),
        doubted=options.doubted_queues,
        awaited=(app.queue(EVENTS),) if options.has_router else (),
        paused=options.paused_queues,
        lease=lease,
        sidecar=sidecar,
        sidecar_memory=sidecar_memory,
        slots=options.slots,
        resource_slots=resource_slots,
        lacking=lacking,
        process=options.slots.process if options.slots else "",
        kind_rates=parse_kind_rates(settings.rate_limits),
        loop_blocks=status.loop,
        tally=status.jobs,
        ended_jobs=status.ended_jobs,
        keeps_history=bool(settings.job_history and settings.metrics_interval),
        is_measuring=settings.status_port is not None,
        reports=is_scaled(settings) or app.limit_rule.has_functions,
        added=() if options.is_secondary else select_steps(app.bootsteps, "worker"),
        recipients=get_all_recipients(app.tasks.values()),
        subscribed={} if options.is_secondary else app.events.group_subscriptions(),
        burst=options.burst,
        processors=processors,
        member=GroupMember(
            name=member,
            incarnation=incarnation.name,
            lease=settings.lease,
            is_named=bool(options.name),
            grace_period=settings.grace_period,
            max_deliveries=settings.max_deliveries,
            unknown_record_grace=settings.unknown_record_grace,
        ),
        archived_streams=_archived_streams(app, options),
        declared_timers=() if options.is_secondary else app.timer.list_timers(settings.timezone),
        timer_counts=status.timers,
        timer_standing=options.timer_standing,
        recycle_at=RecyclingLimits(settings.max_jobs, SIZE.parse_optional(settings.max_memory) or 0),
        restart_mode=options.restart_mode,
        recycling_name=_make_recycling_name(options, incarnation.name),
        canary_limit=CanaryLimit(
            options.canary, count_failures=status.count_failures, clock=trio.current_time
        ),
        when_unpublishable=app.unpublishable_fallback or settings.when_unpublishable,
    )


def _make_recycling_name(options: WorkerOptions, incarnation: str) -> str:
    """Return a name that a process shares only with the one that takes its place when it is recycled.

    It is the name of the worker, or the host and the process id, which a worker that restarts in place keeps. For one
    of several workers under a parent it is the process id of the parent and the number of the worker.
    """
    if options.processes > 1 and not options.name:
        return f"{socket.gethostname()}:{os.getppid()}.{options.number}"
    return get_inbox_name(incarnation)


def _make_resource_slots(app: App, options: WorkerOptions) -> ResourceSlots:
    """Return what owns the capacity of this process. Raises Misconfigured."""
    found = find_capacity(app.settings.capacity, options.number, options.processes)
    return ResourceSlots(found.amounts, found.devices)


def _suggest_capacity(resource_slots: ResourceSlots, needs: Iterable[Needs]) -> str:
    """Return what to do about tasks that take what this worker lacks: perhaps a name is misspelt."""
    names = dict.fromkeys(
        name for need in needs for name in need.total if name not in resource_slots.capacity
    )
    for name in names:
        if suggestion := did_you_mean(name, resource_slots.capacity):
            return f"{name}: {suggestion}"
    return "workers whose setting capacity has enough run these jobs; this worker passes the jobs to them"


def find_needs(app: App, broker: str) -> dict[str, Needs]:
    """Return what jobs take, by the names of the tasks whose jobs take anything."""
    return {
        name: Needs(
            task.amounts,
            tuple(
                SizedThing(make_key(broker, (resource, resource.get_kind(task.loop))), resource.size)
                for resource in dict.fromkeys(task.injected.values())
                if resource.size and resource.open not in REPLACED_RESOURCES
            ),
        )
        for name, task in app.tasks.items()
        if task.takes_resources
    }


def _runs_streams(app: App, options: WorkerOptions) -> bool:
    """Return whether there are streams, and the worker sees to them: not on a further broker, and not in a burst."""
    is_used = "streams" in vars(app)  # nothing is imported for an application without streams
    return is_used and not options.is_secondary and not options.burst


def _archived_streams(app: App, options: WorkerOptions) -> "tuple[Stream[Any], ...]":
    """Return the streams that have an archive."""
    if not _runs_streams(app, options):
        return ()
    return tuple(stream for stream in app.streams.values() if stream.keep.archive is not None)


def _processors(app: App, options: WorkerOptions) -> "tuple[Processor[Any], ...]":
    """Return the processors to run."""
    if not _runs_streams(app, options):
        return ()
    names = options.processors
    return tuple(
        processor for processor in app.streams.processors if names is None or processor.name in names
    )


def list_queues(app: App, options: WorkerOptions) -> tuple[str, ...]:
    """Return the queues to consume: those asked for, else all that the application uses."""
    if options.queues:
        return options.queues
    return tuple(sorted(_used(app)))


def _used(app: App) -> set[str]:
    """Return the queues that the application's tasks and their subscriptions name, and the default queue."""
    default = app.settings.default_queue
    named = (task.queue for task in app.tasks.values())
    return {default, *named, *app.events.list_queues()}


def _named(app: App) -> set[str]:
    """Return the queues that the application's tasks, their subscriptions and its settings name."""
    settings = app.settings
    order, priorities = parse_queue_order(settings.queue_order), parse_priorities(settings.priorities)
    in_settings = {*app.brokers.shards, *order.names, *order.weights, *priorities.by_queue} - {""}
    return _used(app) | app.brokers.used_queues() | in_settings


_NO_SIDECAR = "when this worker dies, its jobs are put back when its lease is over, not at once"
_NO_TASKS = (
    "this application has no tasks, so it can run no job: import the modules that define them where it is made, "
    "or name them in App(include=[...])"
)
