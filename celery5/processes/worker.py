"""Worker: the wiring page of a worker process.

Floor: processes. Reads: the environment's systemd variables. Writes: nothing itself.

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
from celery5.bootsteps.boot import Boot
from celery5.broker.keys import EVENTS
from celery5.broker.on_trio import Timing
from celery5.checks import all_checks
from celery5.log import Journal, Log, Silence
from celery5.processes import several
from celery5.processes.link_log import LinkLog
from celery5.processes.lives import live
from celery5.processes.several import name_on
from celery5.processes.understudy import Understudy
from celery5.processes.worker_parts import WorkerParts, budgets_for
from celery5.protocol.budget import KINDS
from celery5.protocol.orders import inbox_of
from celery5.protocol.prefetch import Pace
from celery5.protocol.recycling import Limits, bytes_in
from celery5.protocol.routes import DEFAULT
from celery5.services.inbox import Address
from celery5.services.internal_queues import TasksQueue
from celery5.services.lease import Lease
from celery5.services.recycling import Anew
from celery5.services.reloader import Bell, Next
from celery5.services.shared_queues import SharedSlots
from celery5.services.systemd_notify import SystemdNotify, from_environment
from celery5.services.vitals import Vitals
from celery5.sinks import all_takers
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
    paused: set[str] = field(default_factory=set[str])
    commanded: dict[str, float] = field(default_factory=dict[str, float])
    understudy: Understudy | None = None
    vitals: Vitals | None = None
    journal: Journal | None = None
    processes: int = 1
    reload: bool = True
    beside: bool = False
    routed: bool = False
    stuck: Callable[[], None] = lambda: None
    anew: Anew = field(default_factory=Anew)
    bell: Bell = field(default_factory=Bell)
    introduced: bool = False
    broker: str = DEFAULT
    understudies: Mapping[str, Understudy] = field(default_factory=dict[str, Understudy])
    slots: SharedSlots | None = None
    another: bool = False


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
        log.event("worker:no-tasks", "warning", hint=_NO_TASKS)
    several.check_name(app, options.name)
    homes = brokers_of(app, options)
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
        await several.on_each(lives, log, task_status, one_first=bool(app.bootsteps))


def brokers_of(app: App, options: WorkerOptions) -> dict[str, tuple[str, ...]]:
    """The queues that this worker consumes, by their brokers."""
    return several.by_broker(app, _queues(app, options))


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
        self._vitals = options.vitals or Vitals(app=app.name)
        self._options = replace(options, vitals=self._vitals, slots=SharedSlots(KINDS))
        self._others: list[trio.CancelScope] = []
        self._settings = app.settings

    def all_of(
        self, homes: Mapping[str, tuple[str, ...]], ends: Sequence[trio.Event]
    ) -> dict[str, several.Run]:
        """One for each broker; each has an end of its own."""
        makes = [self._first, *[self._another] * (len(homes) - 1)]
        return {
            broker: make(broker, queues, end)
            for make, (broker, queues), end in zip(makes, homes.items(), ends, strict=True)
        }

    def _first(self, broker: str, queues: tuple[str, ...], end: trio.Event) -> several.Run:
        told = replace(self._options, queues=queues, broker=broker)
        return lambda status, missed: _live(self._app, told, self._log, end, status, missed, self._begins)

    def _another(self, broker: str, queues: tuple[str, ...], end: trio.Event) -> several.Run:
        options = self._options
        told = replace(
            options,
            queues=queues,
            broker=broker,
            vitals=self._vitals.one_beside(broker),
            incarnation="",
            paused=set[str](),
            commanded=dict[str, float](),
            understudy=options.understudies.get(broker),
            reload=False,
            beside=True,
            routed=False,
            anew=Anew(),
            bell=Bell(),
            another=True,
        )

        async def run(status: trio.TaskStatus[None], missed: Callable[[Exception], None]) -> None:
            log = Log(worker=name_on(broker, options.name), app=self._app.name, journal=options.journal)
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
    vitals = options.vitals or Vitals(app=app.name)
    options = replace(options, vitals=vitals)
    name = name_on(options.broker, options.name)

    def boot_of(name: str, next_life: Next) -> Boot:
        begins()
        log.event("worker:starting", name=name, queues=list(_queues(app, options)), tasks=len(app.tasks))
        return build(Boot, WorkerParts, **_given(app, options, name, log, done, next_life))

    await live(
        "worker",
        boot_of,
        vitals,
        name=name,
        first=options.incarnation if options.broker == DEFAULT else "",
        log=log,
        patient=options.anew.again,
        task_status=task_status,
        missed=missed,
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application's boot steps or health checks do not fit, before any process is there
    to find out."""
    all_checks(app)
    if app.bootsteps:
        build(Boot, WorkerParts, **_given(app, WorkerOptions(), "", Silence(), trio.Event(), Next()))


def _given(
    app: App, options: WorkerOptions, worker: str, log: Log, done: trio.Event, next_life: Next
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    settings, understudy = app.settings, options.understudy
    black_box = None if understudy is None else understudy.started()
    lease = Lease(seconds=settings.lease, black_box=black_box)
    return {
        "app": app,
        "kind": "worker",
        "tasks": app.tasks,
        "keys": app.keys,
        "consumed": tuple(app.queue(name) for name in _queues(app, options)),
        "endpoint": app.brokers.of(options.broker).endpoint,
        "broker": options.broker,
        "steps_here": not options.another,
        "timing": Timing(),
        "name": f"celery5:{worker}",
        "worker": worker,
        "log": log,
        "watch": LinkLog(log=log),
        "lease": lease,
        "address": address_of(app, options, worker),
        "keyring": app.control.keyring,
        "inbox_counts": Counter[str](),
        "understudy": understudy,
        "black_box": black_box,
        "queues": options.slots.queues() if options.slots else {kind: TasksQueue() for kind in KINDS},
        "process": options.slots.process if options.slots else "",
        "paces": {kind: Pace() for kind in KINDS},
        "budgets": budgets_for(app),
        **_measuring(app),
        **known_of(options, options.vitals or Vitals(app=app.name), lease, next_life),
        **{name: getattr(settings, name) for name in _SETTINGS},
        "used": _used(app),
        "takers": all_takers(app.tasks.values()),
        "subscribed": app.events.subscriptions() if not options.another else {},
        "burst": options.burst,
        "anew": options.anew,
        "recycle_at": Limits(settings.max_jobs, bytes_in(settings.max_memory)),
        "awaited": (app.queue(EVENTS),) if options.routed else (),
        "paused": options.paused,
        "commanded": options.commanded,
        "configuration": app.configuration,
        "reload": options.reload,
        "next_life": next_life,
        "bell": options.bell,
        "stuck": options.stuck,
        "checks": all_checks(app),
        "done": done,
    }


def _measuring(app: App) -> dict[str, Any]:
    """Return the values for whoever measures the queues."""
    return {"home": app.brokers.home, "measures": app.settings.status_port is not None}


def known_of(options: WorkerOptions, vitals: Vitals, lease: Lease, next_life: Next) -> dict[str, Any]:
    """The values for those who tell others how the process does."""

    def another() -> bool:
        return lease.lost or next_life.due

    def leaving() -> bool:
        return not another() and not (options.anew.due and options.anew.in_place)

    notification = from_environment({} if options.beside else os.environ, os.getpid())
    return {
        "vitals": vitals,
        "loop_blocks": vitals.loop,
        "tally": vitals.jobs,
        "another": another,
        "systemd": SystemdNotify(**notification, status=vitals.line, leaving=leaving),
    }


def address_of(app: App, options: WorkerOptions, worker: str) -> Address:
    """Where this process is commanded."""
    settings, lasting = app.settings, bool(options.name)
    return Address(
        app.name, inbox_of(worker), open=settings.inbox, signed=settings.inbox_signatures, lasting=lasting
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
    return {default, *named, *app.events.queues()}


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
