"""Attendant Parts: what a process is made of that attends to the workers and runs no jobs, as a Scheduler does.

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
from celery5.bootsteps.boot import BootGraph, Step
from celery5.bootsteps.worker_steps import ChannelHandler, ChannelSubscriptions
from celery5.broker.connection.push import PushRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.timing import Timing
from celery5.logs.log import Log
from celery5.processes.connection_parts import ConnectionLog, ReconnectObserver, make_push
from celery5.processes.lifecycle.incarnations import run_incarnations
from celery5.processes.worker import WorkerOptions, make_inbox_address
from celery5.services.commands.dispatcher import CommandHandler, CommandRegistry
from celery5.services.commands.inbox import Inbox, SelfCommandQueue
from celery5.services.commands.log_again import LogRetry, log_handlers
from celery5.services.commands.process_commands import ProcessCommands
from celery5.services.health.vital_sources import CommandMetrics, ConnectionStatus, LogMetrics
from celery5.services.health.vitals import ProcessStatus, StatusPhase, StatusSource
from celery5.services.process.presence import Presence
from celery5.services.process.reloader import NextIncarnation, Reloader
from celery5.services.process.step_status import RETRY_COMMAND, StepStatus
from celery5.services.process.systemd_notify import SystemdNotify, read_notify_settings
from celery5.wiring import build

StepNames = tuple[str, ...]


class ChannelListener(ReconnectObserver, Protocol):
    """A part that is told what is said on channels, and looks again when something may have been missed."""

    @property
    def channels(self) -> list[str]: ...

    def on_message(self, channel: bytes, payload: bytes, /) -> None: ...


def make_channel_handlers(listeners: Sequence[ChannelListener]) -> dict[bytes, ChannelHandler]:
    """Which channel is whose."""
    return {channel.encode(): each.on_message for each in listeners for channel in each.channels}


def make_reconnect_observers(listeners: Sequence[ChannelListener]) -> Sequence[ReconnectObserver]:
    """Who looks again when something may have been said while nobody listened."""
    return listeners


def make_common_handlers(
    process_commands: ProcessCommands, reloader: Reloader, step_status: StepStatus, log: Log
) -> dict[str, CommandHandler]:
    """The commands that all such processes know."""
    return {
        **process_commands.handlers,
        "reload": reloader.handle_command,
        RETRY_COMMAND: step_status.handle_command,
        **log_handlers(log),
    }


def make_sources(
    redis: TrioRedis,
    push: PushRedis,
    command_counts: Mapping[str, int],
    log: Log,
    extra_sources: Sequence[StatusSource],
) -> tuple[StatusSource, ...]:
    """Who is asked for /readyz and /metrics."""
    return (
        ConnectionStatus(redis=redis, push=push),
        CommandMetrics(command_counts),
        LogMetrics(log),
        *extra_sources,
    )


def make_base_steps(
    redis: TrioRedis, push: PushRedis, listen: ChannelSubscriptions, presence: Presence, inbox: Inbox
) -> tuple[Step, ...]:
    """The first part of the boot graph."""
    return (
        Step("redis", redis),
        Step("push", push, ("redis",)),
        Step("listen", listen, ("push",)),
        Step("presence", presence, ("redis",)),
        Step("inbox", inbox, ("listen",)),
    )


def make_final_steps(
    log_again: LogRetry,
    status_phase: StatusPhase,
    systemd: SystemdNotify,
    reloader: Reloader,
    required_steps: StepNames,
) -> tuple[Step, ...]:
    """The last part: `last` are the steps without which the process is not up."""
    return (
        Step("log-again", log_again, ("redis",)),
        Step("vitals", status_phase, required_steps),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, required_steps),
    )


BASE_PARTS: Mapping[str, Any] = {
    "redis": TrioRedis,
    "push": value(make_push),
    "channel_handlers": value(make_channel_handlers),
    "reconnect_observers": value(make_reconnect_observers),
    "listen": ChannelSubscriptions,
    "presence": Presence,
    "step_status": StepStatus,
    "process_commands": ProcessCommands,
    "common_handlers": value(make_common_handlers),
    "commands": CommandRegistry,
    "self_commands": SelfCommandQueue,
    "inbox": Inbox,
    "log_again": LogRetry,
    "sources": value(make_sources),
    "status_phase": StatusPhase,
    "reloader": Reloader,
    "base_steps": value(make_base_steps),
    "final_steps": value(make_final_steps),
}
"""A process page adds `listeners`, `handlers` (with `usual` in it), `follows`, `more`, `last` and `steps`."""


def make_common_values(
    app: App,
    options: WorkerOptions,
    name: str,
    log: Log,
    done: trio.Event,
    next_incarnation: NextIncarnation,
    *,
    kind: str,
) -> dict[str, Any]:
    """The values that the parts in `GROUND` ask for by name."""
    vitals = options.process_status or ProcessStatus(app=app.name)

    def another() -> bool:
        return next_incarnation.is_due

    notification = read_notify_settings({} if options.shares_process else os.environ, os.getpid())
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
        "watch": ConnectionLog(log=log),
        "address": make_inbox_address(app, options, name),
        "keyring": app.control.keyring,
        "command_counts": Counter[str](),
        "performed_commands": options.performed_commands,
        "configuration": app.configuration,
        "reload": options.reload,
        "next_incarnation": next_incarnation,
        "reload_signal": options.reload_bell,
        "stuck": options.on_stuck,
        "stop_requested": done,
        "process_status": vitals,
        "is_restarting": another,
        "systemd": SystemdNotify(
            **notification, status=lambda: _line(vitals), is_exiting=lambda: not another()
        ),
    }


async def run_auxiliary_process(
    app: App,
    options: WorkerOptions,
    kind: str,
    parts: Injector,
    make_values: Callable[[App, WorkerOptions, str, Log, trio.Event, NextIncarnation], dict[str, Any]],
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None],
) -> None:
    """Be a process of that kind until cancelled: each life is built of its `parts` and what they are `given`."""
    vitals = options.process_status or ProcessStatus(app=app.name)
    options = replace(options, process_status=vitals)

    def boot_of(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        log.event(f"{kind}:starting", name=name)
        return build(BootGraph, parts, **make_values(app, options, name, log, done, next_incarnation))

    await run_incarnations(
        kind,
        boot_of,
        vitals,
        name=options.name,
        first_name=options.incarnation,
        log=log,
        task_status=task_status,
    )


def _line(process_status: ProcessStatus) -> str:
    wrong = "; ".join(
        f"{name}: {why}" for name, why in process_status.get_readiness().conditions.items() if why
    )
    return wrong or "ready"
