"""Worker: the wiring page of a worker process.

Floor: processes. Reads: the environment's systemd variables. Writes: nothing itself.

`run` keeps one incarnation of the worker after another alive (lives.py), each put together by `WorkerParts`
(worker_parts.py) and brought up by `Boot`. A worker that was taken for dead begins a new incarnation under a new
name.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from celery5.app import App
from celery5.bootsteps.boot import Boot
from celery5.broker.keys import EVENTS
from celery5.broker.on_trio import Timing
from celery5.checks import all_checks
from celery5.log import Journal, Log, Silence
from celery5.processes.link_log import LinkLog
from celery5.processes.lives import live
from celery5.processes.understudy import Understudy
from celery5.processes.worker_parts import WorkerParts, budgets_for
from celery5.protocol.budget import KINDS
from celery5.protocol.orders import inbox_of
from celery5.protocol.prefetch import Pace
from celery5.services.inbox import Address
from celery5.services.internal_queues import TasksQueue
from celery5.services.lease import Lease
from celery5.services.reloader import Next
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
    beside it, whose events a burst waits for."""

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


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a worker until cancelled; `done` is set when a burst is over. Raises BrokerError when Redis lets nobody in."""
    vitals = options.vitals or Vitals(app=app.name)
    options = replace(options, vitals=vitals)
    if not app.tasks:
        log.event("worker:no-tasks", "warning", hint=_NO_TASKS)

    def boot_of(name: str, next_life: Next) -> Boot:
        log.event("worker:starting", name=name, queues=list(_queues(app, options)), tasks=len(app.tasks))
        return build(Boot, WorkerParts, **_given(app, options, name, log, done, next_life))

    await live(
        "worker",
        boot_of,
        vitals,
        name=options.name,
        first=options.incarnation,
        log=log,
        task_status=task_status,
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
        "endpoint": app.connections.endpoint,
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
        "queues": {kind: TasksQueue() for kind in KINDS},
        "paces": {kind: Pace() for kind in KINDS},
        "budgets": budgets_for(app),
        **known_of(options, options.vitals or Vitals(app=app.name), lease, next_life),
        **{name: getattr(settings, name) for name in _SETTINGS},
        "used": _used(app),
        "takers": all_takers(app.tasks.values()),
        "subscribed": app.events.subscriptions(),
        "burst": options.burst,
        "awaited": (app.queue(EVENTS),) if options.routed else (),
        "paused": options.paused,
        "commanded": options.commanded,
        "configuration": app.configuration,
        "reload": options.reload,
        "next_life": next_life,
        "stuck": options.stuck,
        "checks": all_checks(app),
        "done": done,
    }


def known_of(options: WorkerOptions, vitals: Vitals, lease: Lease, next_life: Next) -> dict[str, Any]:
    """The values for those who tell others how the process does."""

    def another() -> bool:
        return lease.lost or next_life.due

    notification = from_environment({} if options.beside else os.environ, os.getpid())
    return {
        "vitals": vitals,
        "tally": vitals.jobs,
        "another": another,
        "systemd": SystemdNotify(**notification, status=vitals.line, leaving=lambda: not another()),
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
    named = (task.options_.queue or default for task in app.tasks.values())
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
)
"""The settings that parts ask for by name."""
_NO_TASKS = (
    "this application has no tasks, so it can run no job: import the modules that define them where it is made, "
    "or name them in App(include=[...])"
)
