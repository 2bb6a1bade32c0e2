"""Controller: the wiring page of a Controller process, which keeps a cluster alive (C87, C89, C91).

It runs no job: it starts the processes that do, looks after them, and ends them in order. What they are is in the
cluster description.
"""

import os
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import BootGraph, Step
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.kept_server import STOP_LIMIT, KeptServer
from celery5.config.settings import PREFIX, Settings, find_variable_fault, format_value, parse_value
from celery5.errors import BadBrokerURL, Misconfigured
from celery5.logs.log import Log
from celery5.processes import router, scheduler
from celery5.processes.attendant_parts import BASE_PARTS, ChannelListener, make_common_values
from celery5.processes.lifecycle.foreground import ServeOptions, open_log, serve_in_process
from celery5.processes.lifecycle.incarnations import ProcessKind, run_incarnations
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.own_broker import (
    StoppedBeforeReady,
    resolve_paths,
    running_own_broker,
    supervised_server,
)
from celery5.processes.platforms import make_platform
from celery5.processes.scheduler import make_broker_connections
from celery5.processes.worker import WorkerOptions
from celery5.protocol.cluster.description import (
    FLAG_TYPES,
    PUBLISHER_FLAGS,
    Cluster,
    Group,
    ValueChecker,
    build_members,
    parse_cluster,
)
from celery5.protocol.cluster.foreman import ClusterState
from celery5.protocol.cluster.members import Kind
from celery5.protocol.cluster.own_broker import BROKER_VARIABLE
from celery5.protocol.job.job import Options
from celery5.protocol.process.recycling import SUPERVISED_VARIABLE
from celery5.scaling.strategies import get_autoscale
from celery5.services.commands.dispatcher import CommandHandler
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_again import LogRetry
from celery5.services.controller.cluster_ready import ClusterReady
from celery5.services.controller.foreman import Foreman, get_end_limit
from celery5.services.controller.foreman_commands import ForemanCommands
from celery5.services.controller.leadership import Leadership
from celery5.services.health.queue_depths import QueueDepths
from celery5.services.health.vitals import ProcessStatus, StatusPhase, StatusSource
from celery5.services.process.reloader import NextIncarnation
from celery5.services.process.systemd_notify import SystemdNotify, notify, read_notify_settings
from celery5.wiring import build


class DescriptionChecker(ValueChecker):
    """Judges flags that are settings, and variables that say settings, by what settings may be."""

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """About a flag: a setting's value, or the names of queues."""
        setting = f"publisher_{name}" if name in PUBLISHER_FLAGS else name
        try:
            if name == "queues":
                for each in value:
                    Options(queue=each).checked()
            elif setting in Settings.__struct_fields__:
                _brokers(setting, parse_value(setting, str(value) if name == "max_memory" else value))
        except (Misconfigured, BadBrokerURL) as error:
            return f"is {format_value(value)}: {error}"
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """About a variable: one of ours that is misspelt, or says what no such setting can be."""
        if fault := find_variable_fault(name, value):
            return fault
        setting = name.removeprefix(PREFIX).lower()
        try:
            if value and name in (f"{PREFIX}BROKER", f"{PREFIX}BROKERS"):
                _brokers(setting, parse_value(setting, value))
        except BadBrokerURL as error:
            return f"is no broker: {error}"
        return ""


def _brokers(setting: str, value: object) -> None:
    """Raises BadBrokerURL for a URL that is none."""
    if setting == "broker":
        Endpoint.from_url(str(value))
    elif setting == "brokers":
        for each in cast("Mapping[str, str]", value).values():
            Endpoint.from_url(each)


KIND = "controller"
STOP_SURPLUS = 20.0
"""Seconds beyond what all members may take to end after which the Controller is ended."""
NO_LIMIT = 10.0**9
"""Seconds: the whole cluster is waited for as long as it takes; systemd has a limit of its own."""
DEFAULT_FILE = "cluster.toml"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What a Controller is told: where the description is (`file`; '': `cluster.toml` here, if there is one), the
    `target` that names the application on command lines, and the `flags` that its members get as well, where the
    description says nothing else."""

    target: str
    file: str = ""
    flags: Mapping[str, Any] | None = None


def load_cluster(app: App, options: ClusterOptions) -> Cluster:
    """The cluster that is meant: by its description, else one worker, and a Router and a Scheduler where the
    application needs them. May block. Raises Misconfigured."""
    path = Path(options.file or DEFAULT_FILE)
    if options.file or path.exists():
        try:
            cluster = _placed(parse_cluster(path.read_bytes(), DescriptionChecker()), path)
        except Misconfigured as error:
            raise Misconfigured(f"cluster description {path}: {error}") from None
        except OSError as error:
            raise Misconfigured(f"cluster description {path} cannot be read: {error.strerror}") from None
    else:
        kinds: tuple[tuple[Kind, bool], ...] = (
            ("router", router.is_needed(app)),
            ("scheduler", scheduler.is_needed(app)),
        )
        groups = [Group(kind="worker"), *[Group(kind=kind) for kind, wanted in kinds if wanted]]
        cluster = Cluster(groups=tuple(groups))
    return apply_flags(cluster, options.flags or {})


def _placed(cluster: Cluster, file: Path) -> Cluster:
    if cluster.broker is None:
        return cluster
    return msgspec.structs.replace(cluster, broker=resolve_paths(cluster.broker, file.parent))


def apply_flags(cluster: Cluster, flags: Mapping[str, Any]) -> Cluster:
    """The same, with `flags` for all groups whose kind knows them and that do not say another thing."""
    groups = tuple(
        msgspec.structs.replace(
            each,
            flags={**{name: flags[name] for name in flags if name in FLAG_TYPES[each.kind]}, **each.flags},
        )
        for each in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


def make_listeners(inbox: Inbox) -> tuple[ChannelListener, ...]:
    """Who is told what is said on channels."""
    return (inbox,)


def make_handlers(
    common_handlers: dict[str, CommandHandler], foreman_commands: ForemanCommands
) -> dict[str, CommandHandler]:
    """What this Controller does when it is told to."""
    return {**common_handlers, **foreman_commands.handlers}


def make_extra_sources(foreman: Foreman, leadership: Leadership) -> tuple[StatusSource, ...]:
    """Who else knows how this process does."""
    return (foreman, leadership)


def make_depth_connections(app: App, redis: TrioRedis) -> dict[str, AsyncDriver]:
    """Return the ways to all brokers: a Controller measures all queues."""
    return dict(make_broker_connections(app, redis))


def make_leadership(leadership: Leadership) -> Leadership:
    """Who says whether this Controller is the one that acts."""
    return leadership


def make_steps(
    base_steps: tuple[Step, ...],
    leadership: Leadership,
    foreman: Foreman,
    foreman_commands: ForemanCommands,
    status_phase: StatusPhase,
    cluster_ready: ClusterReady,
    systemd: SystemdNotify,
    log_again: LogRetry,
    queue_depths: QueueDepths,
    cluster: Cluster,
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom. The members are the first to go: until the last of them
    has ended this process answers and is there."""
    limit = get_end_limit(build_members(cluster)) + STOP_SURPLUS
    return (
        *base_steps,
        Step("log-again", log_again, ("redis",)),
        Step("vitals", status_phase, ("presence", "inbox")),
        Step("leadership", leadership, ("redis",)),
        Step("foreman", foreman, ("vitals", "log-again", "leadership"), stop_limit=limit),
        Step("depths", queue_depths, ("redis",)),
        Step("hangup", foreman_commands, ("foreman",)),
        Step("all-up", cluster_ready, ("foreman",), start_limit=NO_LIMIT),
        Step("systemd", systemd, ("all-up",)),
    )


ControllerParts = Injector(
    **BASE_PARTS,
    listeners=value(make_listeners),
    handlers=value(make_handlers),
    presence_listeners=(),
    extra_sources=value(make_extra_sources),
    required_steps=(),
    leadership=Leadership,
    leader=value(make_leadership),
    foreman=Foreman,
    foreman_commands=ForemanCommands,
    cluster_ready=ClusterReady,
    depth_brokers=value(make_depth_connections),
    measured_queues=None,
    queue_depths=QueueDepths,
    steps=value(make_steps),
)
"""Every part of a Controller. A part is built from the names of its constructor's parameters."""


def make_cluster_values(
    app: App, options: ClusterOptions, log: Log | None = None, server: KeptServer | None = None
) -> dict[str, Any]:
    """The values about its cluster that the parts ask for by name; members use its own `server`, if it has one. Raises
    Misconfigured."""
    cluster = load_cluster(app, options)
    broker = {} if server is None else {BROKER_VARIABLE: server.url}
    return {
        "cluster": cluster,
        "load_cluster": partial(load_cluster, app, options),
        "cluster_state": ClusterState(cluster, random=random.random),
        "platform": make_platform(cluster, app.name, os.environ, log),
        "member_environment": {"CELERY5_APP": options.target, SUPERVISED_VARIABLE: "1", **broker},
        "grace": app.settings.grace_period,
        "autoscale": get_autoscale(app.settings),
        "find_broker": app.brokers.broker_of_queue,
        "is_measuring": app.settings.status_port is not None,
        "on_status": _Status(read_notify_settings(os.environ, os.getpid())["address"]),
    }


async def run(
    app: App,
    options: WorkerOptions,
    cluster_options: ClusterOptions,
    *,
    server: KeptServer | None = None,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a Controller until cancelled, and look after a `server` of its own until the last is done. Raises BrokerError
    when Redis lets nobody in."""
    vitals = options.process_status or ProcessStatus(app=app.name)
    options = replace(options, process_status=vitals, reload=False)  # its members do that themselves
    of_cluster = make_cluster_values(app, cluster_options, log, server)
    status: _Status = of_cluster["on_status"]

    def boot_of(name: str, next_incarnation: NextIncarnation) -> BootGraph:
        log.event("controller:starting", name=name)
        told = make_common_values(app, options, name, log, done, next_incarnation, kind=KIND)
        notification = read_notify_settings(os.environ, os.getpid())
        told["systemd"] = SystemdNotify(
            **notification, status=lambda: status.line, is_exiting=lambda: not next_incarnation.is_due
        )
        return build(BootGraph, ControllerParts, **{**told, **of_cluster})

    async with supervised_server(server, of_cluster["cluster"].hung_after, log):
        await run_incarnations(
            KIND,
            boot_of,
            vitals,
            name=options.name,
            first_name=options.incarnation,
            log=log,
            task_status=task_status,
        )


class _Status:
    """What systemd shows in one line."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.line = ""

    def __call__(self, line: str) -> None:
        """It is this from now on."""
        self.line = " ".join(line.split())
        notify(self._address, f"STATUS={self.line}")


def serve(app: App, options: ServeOptions, cluster_options: ClusterOptions) -> int:
    """Keep the cluster alive until stopped; gives the exit code. Raises BrokerError, Misconfigured."""
    if not cluster_options.file and Path(DEFAULT_FILE).exists():
        # Should it be gone at a reload, that is a mistake.
        cluster_options = replace(cluster_options, file=DEFAULT_FILE)
    cluster = load_cluster(app, cluster_options)
    make_platform(cluster, app.name, os.environ)
    limit = get_end_limit(build_members(cluster, grace=app.settings.grace_period)) + 2 * STOP_SURPLUS
    limit += STOP_LIMIT if cluster.broker else 0
    with (
        suppress(StoppedBeforeReady),
        Interruption(limit=limit) as interruption,
        running_own_broker(app, cluster.broker, lambda: interruption.was_requested) as server,
        open_log(app, options.log_format, options.log_level, name=options.name) as journal,
    ):
        page = ProcessKind(
            KIND, partial(run, cluster_options=cluster_options, server=server), lambda _app: None
        )
        told = WorkerOptions(name=options.name, reload=False, log_writer=journal)
        trio.run(partial(serve_in_process, kind=page), app, told, interruption)
    return 0
