"""Attendant Parts: what a process is made of that attends to the workers and runs no jobs, as a Scheduler does.

Floor: processes. Reads: the environment's systemd variables. Writes: nothing.

`GROUND` are the parts, `given` the values that they ask for, `make_ground` and `make_top` the two ends of the boot
graph; what lies between is on the process' own page. With all that, `attend` is such a process.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import Boot, Step
from celery5.bootsteps.listen import Hears, Listen
from celery5.broker.on_trio import PushRedis, Timing, TrioRedis
from celery5.log import Log
from celery5.processes.connection_parts import LooksAgain, make_push
from celery5.processes.link_log import LinkLog
from celery5.processes.lives import live
from celery5.processes.worker import WorkerOptions, address_of
from celery5.services.board import RETRY, Board
from celery5.services.commands import Commands, Handler
from celery5.services.inbox import Inbox, OwnPost
from celery5.services.log_again import LogAgain, log_handlers
from celery5.services.presence import Presence
from celery5.services.process_commands import ProcessCommands
from celery5.services.reloader import Next, Reloader
from celery5.services.systemd_notify import SystemdNotify, from_environment
from celery5.services.vital_sources import Commanded, Connections, LogKept
from celery5.services.vitals import Source, Vitals, VitalSigns
from celery5.wiring import build

Known = tuple[str, ...]


class Listens(LooksAgain, Protocol):
    """A part that is told what is said on channels, and looks again when something may have been missed."""

    @property
    def channels(self) -> list[str]: ...

    def hear(self, channel: bytes, payload: bytes, /) -> None: ...


def make_hearers(listeners: Sequence[Listens]) -> dict[bytes, Hears]:
    """Which channel is whose."""
    return {channel.encode(): each.hear for each in listeners for channel in each.channels}


def make_lookers(listeners: Sequence[Listens]) -> Sequence[LooksAgain]:
    """Who looks again when something may have been said while nobody listened."""
    return listeners


def make_usual(
    process_commands: ProcessCommands, reloader: Reloader, board: Board, log: Log
) -> dict[str, Handler]:
    """The commands that all such processes know."""
    return {
        **process_commands.handlers,
        "reload": reloader.handle,
        RETRY: board.retry,
        **log_handlers(log),
    }


def make_sources(
    redis: TrioRedis, push: PushRedis, inbox_counts: Mapping[str, int], log: Log, more: Sequence[Source]
) -> tuple[Source, ...]:
    """Who is asked for /readyz and /metrics."""
    return (Connections(redis=redis, push=push), Commanded(inbox_counts), LogKept(log), *more)


def make_ground(
    redis: TrioRedis, push: PushRedis, listen: Listen, presence: Presence, inbox: Inbox
) -> tuple[Step, ...]:
    """The first part of the boot graph."""
    return (
        Step("redis", redis),
        Step("push", push, ("redis",)),
        Step("listen", listen, ("push",)),
        Step("presence", presence, ("redis",)),
        Step("inbox", inbox, ("listen",)),
    )


def make_top(
    log_again: LogAgain, vital_signs: VitalSigns, systemd: SystemdNotify, reloader: Reloader, last: Known
) -> tuple[Step, ...]:
    """The last part: `last` are the steps without which the process is not up."""
    return (
        Step("log-again", log_again, ("redis",)),
        Step("vitals", vital_signs, last),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, last),
    )


GROUND: Mapping[str, Any] = {
    "redis": TrioRedis,
    "push": value(make_push),
    "hearers": value(make_hearers),
    "lookers": value(make_lookers),
    "listen": Listen,
    "presence": Presence,
    "board": Board,
    "process_commands": ProcessCommands,
    "usual": value(make_usual),
    "commands": Commands,
    "posts": OwnPost,
    "inbox": Inbox,
    "log_again": LogAgain,
    "sources": value(make_sources),
    "vital_signs": VitalSigns,
    "reloader": Reloader,
    "ground": value(make_ground),
    "top": value(make_top),
}
"""A process page adds `listeners`, `handlers` (with `usual` in it), `follows`, `more`, `last` and `steps`."""


def given(
    app: App, options: WorkerOptions, name: str, log: Log, done: trio.Event, next_life: Next, *, kind: str
) -> dict[str, Any]:
    """The values that the parts in `GROUND` ask for by name."""
    vitals = options.vitals or Vitals(app=app.name)

    def another() -> bool:
        return next_life.due

    notification = from_environment({} if options.beside else os.environ, os.getpid())
    return {
        "app": app,
        "kind": kind,
        "keys": app.keys,
        "endpoint": app.connections.endpoint,
        "timing": Timing(),
        "name": f"celery5:{name}",
        "worker": name,
        "lease_seconds": app.settings.lease,
        "log": log,
        "watch": LinkLog(log=log),
        "address": address_of(app, options, name),
        "keyring": app.control.keyring,
        "inbox_counts": Counter[str](),
        "commanded": options.commanded,
        "configuration": app.configuration,
        "reload": options.reload,
        "next_life": next_life,
        "bell": options.bell,
        "stuck": options.stuck,
        "done": done,
        "vitals": vitals,
        "another": another,
        "systemd": SystemdNotify(**notification, status=lambda: _line(vitals), leaving=lambda: not another()),
    }


async def attend(
    app: App,
    options: WorkerOptions,
    kind: str,
    parts: Injector,
    given: Callable[[App, WorkerOptions, str, Log, trio.Event, Next], dict[str, Any]],
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None],
) -> None:
    """Be a process of that kind until cancelled: each life is built of its `parts` and what they are `given`."""
    vitals = options.vitals or Vitals(app=app.name)
    options = replace(options, vitals=vitals)

    def boot_of(name: str, next_life: Next) -> Boot:
        log.event(f"{kind}:starting", name=name)
        return build(Boot, parts, **given(app, options, name, log, done, next_life))

    await live(
        kind, boot_of, vitals, name=options.name, first=options.incarnation, log=log, task_status=task_status
    )


def _line(vitals: Vitals) -> str:
    wrong = "; ".join(f"{name}: {why}" for name, why in vitals.ready().conditions.items() if why)
    return wrong or "ready"
