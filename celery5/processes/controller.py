"""Controller: the page of a Controller process, which keeps a cluster alive.

It runs no job: it starts the processes that do, looks after them, and ends them in order. The cluster description says
what they are.
"""

import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.bootsteps.boot import BootGraph
from celery5.bootsteps.worker_steps import ChannelSubscriptions, LentConnection
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.kept_server import STOP_LIMIT
from celery5.config.scaling import get_autoscale
from celery5.config.settings import PREFIX, Settings, find_variable_fault, format_value, parse_value
from celery5.errors import BadBrokerURL, Misconfigured
from celery5.logs.log import Log
from celery5.platform import Platform
from celery5.processes import router, scheduler
from celery5.processes.foreground import ServeOptions, serve_in_process
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.options import ProcessOptions
from celery5.processes.own_broker import (
    ClusterBroker,
    StoppedBeforeReady,
    resolve_paths,
    running_own_broker,
    supervised_server,
)
from celery5.processes.platform_factory import make_platform
from celery5.processes.process_log import open_log
from celery5.processes.process_parts import (
    AuxiliaryParts,
    ChannelListener,
    Incarnation,
    ProcessValues,
    make_process_values,
    make_push,
    make_systemd,
    run_auxiliary_process,
)
from celery5.processes.scheduler import make_broker_connections
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
from celery5.protocol.masking import collapse_whitespace
from celery5.protocol.process.recycling import STARTS_SUCCESSOR, SUPERVISED_VARIABLE
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.commands.dispatcher import CommandHandler
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_retry import LogRetry
from celery5.services.controller.foreman import ClusterReady, Foreman, get_end_limit
from celery5.services.controller.foreman_commands import ForemanCommands
from celery5.services.controller.leadership import Leadership, LocalLeadership
from celery5.services.controller.member_ends import MemberEnds
from celery5.services.controller.members_reporter import MembersReporter
from celery5.services.controller.recycling_permits import RecyclingPermits
from celery5.services.health.vital_sources import QueueDepths
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.presence import Presence
from celery5.services.process.reloader import Reloader
from celery5.services.process.systemd_notify import notify, read_notify_settings
from celery5.wiring import build, part, step


class DescriptionChecker(ValueChecker):
    """Checks flags that are settings, and environment variables that hold settings."""

    def check_flag(self, kind: Kind, name: str, value: Any) -> str:
        """Return what is wrong with a flag: the value of a setting, or the names of queues."""
        setting = f"publisher_{name}" if name in PUBLISHER_FLAGS else name
        try:
            if name == "queues":
                for queue in value:
                    Options(queue=queue).checked()
            elif setting in Settings.__struct_fields__:
                _check_urls(setting, parse_value(setting, str(value) if name == "max_memory" else value))
        except (Misconfigured, BadBrokerURL) as error:
            return f"is {format_value(value)}: {error}"
        return ""

    def check_variable(self, name: str, value: str) -> str:
        """Return what is wrong with a variable: it is misspelt, or holds what its setting cannot be."""
        if fault := find_variable_fault(name, value):
            return fault
        setting = name.removeprefix(PREFIX).lower()
        try:
            if value and name in (f"{PREFIX}BROKER", f"{PREFIX}BROKERS"):
                _check_urls(setting, parse_value(setting, value))
        except BadBrokerURL as error:
            return f"is no broker: {error}"
        return ""


def _check_urls(setting: str, value: object) -> None:
    """Raises BadBrokerURL for a URL that is none."""
    if setting == "broker":
        Endpoint.from_url(str(value))
    elif setting == "brokers":
        for url in cast("Mapping[str, str]", value).values():
            Endpoint.from_url(url)


KIND = "controller"
STOP_SURPLUS = 20.0
"""Seconds beyond what all members may take to end after which the Controller is ended."""
NO_LIMIT = 10.0**9
"""Seconds: the whole cluster is waited for as long as it takes; systemd has its own limit."""
DEFAULT_FILE = "cluster.toml"


class ClusterOptions(msgspec.Struct, frozen=True):
    """What a Controller is started with."""

    # What names the application on command lines.
    target: str
    # The cluster description; "": cluster.toml in this folder, if there is one.
    file: str = ""
    # Flags that members get as well, where the description says nothing else.
    flags: Mapping[str, Any] | None = None


def load_cluster(app: App, options: ClusterOptions) -> Cluster:
    """Return the cluster by its description, else one worker, and a Router and a Scheduler where the application needs
    them. May block. Raises Misconfigured."""
    path = Path(options.file or DEFAULT_FILE)
    if options.file or path.exists():
        try:
            cluster = _resolve_broker_paths(parse_cluster(path.read_bytes(), DescriptionChecker()), path)
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


def _resolve_broker_paths(cluster: Cluster, file: Path) -> Cluster:
    if cluster.broker is None:
        return cluster
    return msgspec.structs.replace(cluster, broker=resolve_paths(cluster.broker, file.parent))


def apply_flags(cluster: Cluster, flags: Mapping[str, Any]) -> Cluster:
    """Return the cluster with `flags` for all groups whose kind knows them and that do not set them themselves."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            flags={**{name: flags[name] for name in flags if name in FLAG_TYPES[group.kind]}, **group.flags},
        )
        for group in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


class ControllerValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a Controller ask for besides each other and what every process has."""

    cluster: Cluster
    # Reads the description again.
    load_cluster: Callable[[], Cluster]
    # What the members are, kept over incarnations.
    cluster_state: ClusterState
    # Where members run.
    platform: Platform
    # What members get in their environment.
    member_environment: Mapping[str, str]
    # Returns the broker of a queue.
    find_broker: Callable[[str], str]
    # The queues to measure; None: all.
    measured_queues: None
    # Whether they are measured.
    is_measuring: bool
    # Hears the state of the cluster in one line.
    on_status: "ClusterStatusLine"
    # Nobody here wants to know which Controllers are alive.
    presence_listeners: tuple[()] = ()


def make_cluster_values(
    app: App, options: ClusterOptions, log: Log | None = None, server: ClusterBroker | None = None
) -> ControllerValues:
    """Return the values about a cluster; its members use the Controller's own `server`, if it has one.

    Raises:
        Misconfigured: The description is wrong.
    """
    cluster = load_cluster(app, options)
    broker = {} if server is None else {BROKER_VARIABLE: server.url}
    return ControllerValues(
        cluster=cluster,
        load_cluster=partial(load_cluster, app, options),
        cluster_state=ClusterState(cluster, random=random.random),
        platform=make_platform(cluster, app.name, os.environ, log),
        member_environment={"CELERY5_APP": options.target, SUPERVISED_VARIABLE: STARTS_SUCCESSOR, **broker},
        find_broker=app.brokers.broker_of_queue,
        measured_queues=None,
        is_measuring=app.settings.status_port is not None,
        on_status=ClusterStatusLine(read_notify_settings(os.environ, os.getpid())["address"]),
    )


def make_listeners(inbox: Inbox) -> tuple[ChannelListener, ...]:
    """Return who hears channels."""
    return (inbox,)


def make_cluster_handlers(
    common_handlers: dict[str, CommandHandler], foreman_commands: ForemanCommands
) -> dict[str, CommandHandler]:
    """Return the commands that a Controller knows."""
    return {**common_handlers, **foreman_commands.handlers}


def make_leader(leadership: Leadership) -> Leadership:
    """Return what knows whether this Controller is the one that acts."""
    return leadership


def make_extra_sources(foreman: Foreman, leadership: Leadership) -> tuple[StatusSource, ...]:
    """Return who else is asked for /readyz and /metrics."""
    return (foreman, leadership)


def make_foreman_limit(cluster: Cluster) -> float:
    """Return the seconds that the Foreman may take to end: those of all members, and a surplus."""
    return get_end_limit(build_members(cluster)) + STOP_SURPLUS


class NoConnection:
    """A broker that cannot be reached: the deaths of members that need it do not count."""

    @property
    def connected(self) -> bool:
        """Return that it is not connected."""
        return False


def make_local_leadership(cluster: Cluster, platform: Platform) -> LocalLeadership:
    """Return what leads while nobody can tell who leads."""
    return LocalLeadership(
        may_act=not any(platform.outlives(member.name) for member in build_members(cluster))
    )


class ControllerParts(AuxiliaryParts):
    """Every part of a Controller, and its boot graph: its steps start from the top and stop from the bottom.

    The members are the first to go: until the last of them has ended this process answers and is there.
    """

    # connections and commands
    listeners = part(make_listeners)
    handlers = part(make_cluster_handlers)
    redis = step(open_redis)
    push = step(make_push, after=(redis,))
    listen = step(ChannelSubscriptions, after=(push,))
    publishing = step(LentConnection, after=(redis,))
    asyncio_runner = step(AsyncioRunner, name="asyncio")
    presence = step(Presence, after=(redis,))
    inbox = step(Inbox, after=(listen,))
    log_again = step(LogRetry, after=(redis,))
    reloader = part(Reloader)
    # members
    autoscale = part(get_autoscale)
    extra_sources = part(make_extra_sources)
    status_phase = step(StatusPhase, name="vitals", after=(presence, inbox))
    leader = part(make_leader)
    leadership = step(Leadership, after=(redis,))
    foreman_limit = part(make_foreman_limit)
    foreman = step(Foreman, after=(status_phase, log_again, leadership), stop_limit=foreman_limit)
    # metrics
    depth_brokers = part(make_broker_connections)
    queue_depths = step(QueueDepths, name="depths", after=(redis,))
    metrics_reporter = step(MetricsReporter, name="metrics", after=(redis,))
    # what follows the Foreman
    member_ends = step(MemberEnds, after=(foreman,))
    members_reporter = step(MembersReporter, name="members", after=(foreman,))
    recycling_permits = step(RecyclingPermits, after=(foreman,))
    foreman_commands = step(ForemanCommands, name="hangup", after=(foreman,))
    cluster_ready = step(ClusterReady, name="all-up", after=(foreman,), start_limit=NO_LIMIT)
    systemd = step(make_systemd, after=(cluster_ready,))


class ControllerDegradedParts(ControllerParts):
    """What a Controller runs while the default broker cannot be reached: members that end with it."""

    systemd = step(make_systemd)
    foreman = step(Foreman, stop_limit=ControllerParts.foreman_limit)


async def run(
    app: App,
    options: ProcessOptions,
    cluster_options: ClusterOptions,
    *,
    server: ClusterBroker | None = None,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a Controller until cancelled, and look after a `server` of its own until the last member has ended.

    Raises:
        BrokerError: The broker lets nobody in.
    """
    cluster_values = make_cluster_values(app, cluster_options, log, server)

    def make_common_values(options: ProcessOptions, incarnation: Incarnation) -> ProcessValues:
        status_line = cluster_values.on_status
        return make_process_values(app, options, incarnation, kind=KIND, status_line=lambda: status_line.line)

    def make_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        log.event("controller:boot-started", name=incarnation.name)
        return build(BootGraph, ControllerParts, make_common_values(options, incarnation), cluster_values)

    def make_degraded_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        values = make_common_values(options, incarnation)
        leader = make_local_leadership(cluster_values.cluster, cluster_values.platform)
        return build(
            BootGraph,
            ControllerDegradedParts,
            values,
            cluster_values,
            redis=NoConnection(),
            leader=leader,
            added=(),
        )

    async with supervised_server(server, cluster_values.cluster.hung_after, log):
        await run_auxiliary_process(
            app,
            replace(options, reload=False),  # its members do that themselves
            make_boot,
            make_degraded_boot,
            kind=KIND,
            log=log,
            done=done,
            task_status=task_status,
        )


class ClusterStatusLine:
    """What systemd shows of the cluster, in one line."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.line = ""

    def __call__(self, line: str) -> None:
        """Show this line from now on."""
        self.line = collapse_whitespace(line)
        notify(self._address, f"STATUS={self.line}")


def serve(app: App, options: ServeOptions, cluster_options: ClusterOptions) -> int:
    """Keep the cluster alive until stopped; return the exit code. Raises BrokerError, Misconfigured."""
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
        open_log(app, name=options.name) as journal,
    ):
        kind = ProcessKind(
            KIND, partial(run, cluster_options=cluster_options, server=server), lambda _app: None
        )
        process_options = ProcessOptions(name=options.name, reload=False, log_writer=journal)
        trio.run(partial(serve_in_process, kind=kind), app, process_options, interruption)
    return 0
