"""Worker: the wiring page of a worker process.

`run` keeps one incarnation of the worker after another alive (lives.py), each put together by `WorkerParts`
(worker_parts.py) and brought up by `Boot`. A worker that was taken for dead begins a new incarnation under a new
name.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from celery5.app import App
from celery5.bootsteps.boot import BootGraph
from celery5.broker.keys import EVENTS
from celery5.broker.timing import Timing
from celery5.health.checks import get_all_checks
from celery5.logs.log import Log, LogWriter, NullLog
from celery5.processes.connection_parts import ConnectionLog
from celery5.processes.lifecycle import multi_broker
from celery5.processes.lifecycle.incarnations import run_incarnations
from celery5.processes.lifecycle.multi_broker import name_for_broker
from celery5.processes.watch.sidecar import Understudy
from celery5.processes.worker_parts import WorkerParts, resolve_budgets
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.commands.replies import get_inbox_name
from celery5.protocol.process.recycling import RecyclingLimits, parse_bytes
from celery5.protocol.scaling.budget import KINDS
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.results.sinks import get_all_recipients
from celery5.services.commands.inbox import InboxAddress
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.recycling import RestartMode
from celery5.services.process.reloader import NextIncarnation, ReloadSignal
from celery5.services.process.systemd_notify import SystemdNotify, read_notify_settings
from celery5.services.worker.internal_queues import SharedSlots, TasksQueue
from celery5.services.worker.lease import Lease
from celery5.wiring import build


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told: the `queues` it consumes (none: all that its tasks name), whether it ends when all is done
    (`burst`), and its `name`, to which each incarnation adds a part of its own. Whoever wants to know the whole name of
    the first incarnation gives it as `incarnation`. Which queues are `paused`, and what it was `commanded`, holds for
    all of them. Who steps in for it is its `understudy`, if it has one. When a step does not end, `stuck` is called:
    this process will not be whole again. With `reload` a change of the configuration takes effect without a restart of
    the process. What runs `beside` another in its process leaves systemd to that one; with `routed` a Router runs
    beside it, whose events a burst waits for. It may be recycled, which `anew` says; then its first incarnation
    waits for Redis, if it was begun `again` for that. The `bell` rings when a signal asks for the configuration to be
    read. Who is `introduced` was started by another process of ours, which has said what there is to say about all.
    `broker` is where its queues are; of several lives in one process each has one of the `understudies` and a part of
    the `slots`, and the first is not `another`."""

    queues: tuple[str, ...] = ()
    burst: bool = False
    name: str = ""
    incarnation: str = ""
    paused_queues: set[str] = field(default_factory=set[str])
    performed_commands: dict[str, float] = field(default_factory=dict[str, float])
    sidecar: Understudy | None = None
    process_status: ProcessStatus | None = None
    log_writer: LogWriter | None = None
    processes: int = 1
    reload: bool = True
    shares_process: bool = False
    has_router: bool = False
    on_stuck: Callable[[], None] = lambda: None
    restart_mode: RestartMode = field(default_factory=RestartMode)
    reload_bell: ReloadSignal = field(default_factory=ReloadSignal)
    skips_startup_warnings: bool = False
    broker: str = DEFAULT_BROKER
    sidecars: Mapping[str, Understudy] = field(default_factory=dict[str, Understudy])
    slots: SharedSlots | None = None
    is_secondary: bool = False


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a worker until cancelled; `done` is set when a burst is over. Raises BrokerError when Redis lets nobody in."""
    if not app.tasks:
        log.event("worker:tasks-not-found", "warning", hint=_NO_TASKS)
    multi_broker.check_worker_name(app, options.name)
    homes = get_queues_by_broker(app, options)
    if len(homes) == 1:
        (broker,) = homes
        await _live(app, replace(options, broker=broker), log, done, task_status)
        return
    async with trio.open_nursery() as nursery:
        ends = [done, *[trio.Event() for _ in homes][1:]]
        if options.burst:
            ends[0] = trio.Event()
        lives = _Lives(app, options, log).all_of(homes, ends)
        for each in ends if options.burst else ends[1:]:
            nursery.start_soon(_pass_on, each, ends if options.burst else [each], done)
        await multi_broker.run_on_each_broker(lives, log, task_status, one_first=bool(app.bootsteps))


def get_queues_by_broker(app: App, options: WorkerOptions) -> dict[str, tuple[str, ...]]:
    """The queues that this worker consumes, by their brokers."""
    return multi_broker.group_by_broker(app, _queues(app, options))


async def _pass_on(end: trio.Event, all_of: Sequence[trio.Event], done: trio.Event) -> None:
    """A life has ended by itself: so has the process, when `all_of` them have."""
    await end.wait()
    if all(each.is_set() for each in all_of):
        done.set()


class _Lives:
    """The lives of one process, the first of which notices when settings change: the others begin again then."""

    def __init__(self, app: App, options: WorkerOptions, log: Log) -> None:
        self._app = app
        self._log = log
        self._vitals = options.process_status or ProcessStatus(app=app.name)
        self._options = replace(options, process_status=self._vitals, slots=SharedSlots(KINDS))
        self._others: list[trio.CancelScope] = []
        self._settings = app.settings

    def all_of(
        self, homes: Mapping[str, tuple[str, ...]], ends: Sequence[trio.Event]
    ) -> dict[str, multi_broker.RunOnBroker]:
        """One for each broker; each has an end of its own."""
        makes = [self._first, *[self._another] * (len(homes) - 1)]
        return {
            broker: make(broker, queues, end)
            for make, (broker, queues), end in zip(makes, homes.items(), ends, strict=True)
        }

    def _first(self, broker: str, queues: tuple[str, ...], end: trio.Event) -> multi_broker.RunOnBroker:
        told = replace(self._options, queues=queues, broker=broker)
        return lambda status, missed: _live(self._app, told, self._log, end, status, missed, self._begins)

    def _another(self, broker: str, queues: tuple[str, ...], end: trio.Event) -> multi_broker.RunOnBroker:
        options = self._options
        told = replace(
            options,
            queues=queues,
            broker=broker,
            process_status=self._vitals.add_incarnation(broker),
            incarnation="",
            paused_queues=set[str](),
            performed_commands=dict[str, float](),
            sidecar=options.sidecars.get(broker),
            reload=False,
            shares_process=True,
            has_router=False,
            restart_mode=RestartMode(),
            reload_bell=ReloadSignal(),
            is_secondary=True,
        )

        async def run(status: trio.TaskStatus[None], missed: Callable[[Exception], None]) -> None:
            log = Log(
                worker=name_for_broker(broker, options.name), app=self._app.name, writer=options.log_writer
            )
            try:
                while True:
                    with trio.CancelScope() as scope:
                        self._others.append(scope)
                        await _live(self._app, told, log, end, status, missed)
                    self._others.remove(scope)
            finally:
                log.finish()

        return run

    def _begins(self) -> None:
        """The first life begins, perhaps with other settings."""
        if self._app.settings is not self._settings:
            self._settings = self._app.settings
            for scope in list(self._others):
                scope.cancel()


async def _live(
    app: App,
    options: WorkerOptions,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None],
    missed: Callable[[Exception], None] | None = None,
    begins: Callable[[], None] = lambda: None,
) -> None:
    """Be a worker on one broker."""
    vitals = options.process_status or ProcessStatus(app=app.name)
    options = replace(options, process_status=vitals)
    name = name_for_broker(options.broker, options.name)

    def boot_of(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        begins()
        log.event("worker:starting", name=name, queues=list(_queues(app, options)), tasks=len(app.tasks))
        return build(BootGraph, WorkerParts, **_given(app, options, name, log, done, next_incarnation))

    await run_incarnations(
        "worker",
        boot_of,
        vitals,
        name=name,
        first_name=options.incarnation if options.broker == DEFAULT_BROKER else "",
        log=log,
        wait_for_broker=options.restart_mode.is_restarted,
        task_status=task_status,
        on_unreachable=missed,
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application's boot steps or health checks do not fit, before any process is there
    to find out."""
    get_all_checks(app)
    if app.bootsteps:
        build(
            BootGraph,
            WorkerParts,
            **_given(app, WorkerOptions(), "", NullLog(), trio.Event(), NextIncarnation()),
        )


def _given(
    app: App,
    options: WorkerOptions,
    worker: str,
    log: Log,
    done: trio.Event,
    next_incarnation: NextIncarnation,
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    settings, understudy = app.settings, options.sidecar
    black_box = None if understudy is None else understudy.begin_worker()
    lease = Lease(seconds=settings.lease, sidecar_memory=black_box)
    return {
        "app": app,
        "kind": "worker",
        "tasks": app.tasks,
        "keys": app.keys,
        "consumed": tuple(app.queue(name) for name in _queues(app, options)),
        "endpoint": app.brokers.get(options.broker).endpoint,
        "broker": options.broker,
        "steps_here": not options.is_secondary,
        "timing": Timing(),
        "name": f"celery5:{worker}",
        "worker": worker,
        "log": log,
        "watch": ConnectionLog(log=log),
        "lease": lease,
        "address": make_inbox_address(app, options, worker),
        "keyring": app.control.keyring,
        "command_counts": Counter[str](),
        "sidecar": understudy,
        "sidecar_memory": black_box,
        "queues": options.slots.make_queues() if options.slots else {kind: TasksQueue() for kind in KINDS},
        "process": options.slots.process if options.slots else "",
        "duration_estimates": {kind: DurationEstimate() for kind in KINDS},
        "budgets": resolve_budgets(app),
        **_measuring(app),
        **make_status_values(
            options, options.process_status or ProcessStatus(app=app.name), lease, next_incarnation
        ),
        **{name: getattr(settings, name) for name in _SETTINGS},
        "used": _used(app),
        "recipients": get_all_recipients(app.tasks.values()),
        "subscribed": app.events.group_subscriptions() if not options.is_secondary else {},
        "burst": options.burst,
        "restart_mode": options.restart_mode,
        "recycle_at": RecyclingLimits(settings.max_jobs, parse_bytes(settings.max_memory)),
        "awaited": (app.queue(EVENTS),) if options.has_router else (),
        "paused": options.paused_queues,
        "performed_commands": options.performed_commands,
        "configuration": app.configuration,
        "reload": options.reload,
        "next_incarnation": next_incarnation,
        "reload_signal": options.reload_bell,
        "stuck": options.on_stuck,
        "checks": get_all_checks(app),
        "stop_requested": done,
    }


def _measuring(app: App) -> dict[str, Any]:
    """Return the values for whoever measures the queues."""
    return {"find_broker": app.brokers.broker_of_queue, "is_measuring": app.settings.status_port is not None}


def make_status_values(
    options: WorkerOptions, process_status: ProcessStatus, lease: Lease, next_incarnation: NextIncarnation
) -> dict[str, Any]:
    """The values for those who tell others how the process does."""

    def another() -> bool:
        return lease.is_lost or next_incarnation.is_due

    def leaving() -> bool:
        return not another() and not (options.restart_mode.is_due and options.restart_mode.in_place)

    notification = read_notify_settings({} if options.shares_process else os.environ, os.getpid())
    return {
        "process_status": process_status,
        "loop_blocks": process_status.loop,
        "tally": process_status.jobs,
        "is_restarting": another,
        "systemd": SystemdNotify(**notification, status=process_status.format_summary, is_exiting=leaving),
    }


def make_inbox_address(app: App, options: WorkerOptions, worker: str) -> InboxAddress:
    """Where this process is commanded."""
    settings, lasting = app.settings, bool(options.name)
    return InboxAddress(
        app.name,
        get_inbox_name(worker),
        is_open=settings.inbox,
        is_signed=settings.inbox_signatures,
        is_durable=lasting,
    )


def _queues(app: App, options: WorkerOptions) -> tuple[str, ...]:
    """The queues to consume: those asked for, else all that the application's tasks name."""
    if options.queues:
        return options.queues
    return tuple(sorted(_used(app)))


def _used(app: App) -> set[str]:
    """The queues that the application's tasks and their subscriptions name, and the default queue."""
    default = app.settings.default_queue
    named = (task.queue for task in app.tasks.values())
    return {default, *named, *app.events.list_queues()}


_SETTINGS = (
    "grace_period",
    "time_limit",
    "soft_time_limit",
    "results_ttl",
    "message_limit",
    "max_deliveries",
    "when_unpublishable",
    "recent_jobs",
    "read_block",
    "priorities",
    "queue_order",
    "default_queue",
    "health_store",
    "subscription_ttl",
    "event_catch_up",
    "breaker_suspends",
    "retry_tracebacks",
)
"""The settings that parts ask for by name."""
_NO_TASKS = (
    "this application has no tasks, so it can run no job: import the modules that define them where it is made, "
    "or name them in App(include=[...])"
)
