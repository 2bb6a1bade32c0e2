"""Controller: the wiring page of a Controller process, which keeps a cluster alive (C87, C89, C91).

Floor: processes. Reads: the cluster description; the environment. Writes: nothing itself.

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
from typing import Any

import msgspec
import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import Boot, Step
from celery5.broker.kept_server import STOP_LIMIT, KeptServer
from celery5.broker.on_trio import TrioRedis
from celery5.errors import Misconfigured
from celery5.log import Log
from celery5.processes import router, scheduler
from celery5.processes.attendant_parts import GROUND, Listens, given
from celery5.processes.described import Meaning
from celery5.processes.foreground import ServeOptions, serve_here
from celery5.processes.lives import Page, live
from celery5.processes.own_broker import StoppedBefore, looked_after, own_broker, placed
from celery5.processes.own_log import own_log
from celery5.processes.platforms import platform_of
from celery5.processes.scaling_parts import make_ways
from celery5.processes.signals import Interruption
from celery5.processes.worker import WorkerOptions
from celery5.protocol.cluster import Cluster, Group, members, read
from celery5.protocol.cluster_words import FLAGS
from celery5.protocol.foreman import Crew
from celery5.protocol.members import Kind
from celery5.protocol.own_broker import VARIABLE
from celery5.protocol.recycling import SUPERVISED
from celery5.services.all_up import AllUp
from celery5.services.commands import Handler
from celery5.services.foreman import Foreman, end_limit
from celery5.services.foreman_commands import ForemanCommands
from celery5.services.inbox import Inbox
from celery5.services.leadership import Leadership
from celery5.services.log_again import LogAgain
from celery5.services.queue_depths import QueueDepths, Way
from celery5.services.reloader import Next
from celery5.services.systemd_notify import SystemdNotify, from_environment, notify
from celery5.services.vitals import Source, Vitals, VitalSigns
from celery5.strategies import autoscale_of
from celery5.wiring import build

KIND = "controller"
STOP_SURPLUS = 20.0
"""Seconds beyond what all members may take to end after which the Controller is ended."""
FOR_EVER = 10.0**9
"""Seconds: the whole cluster is waited for as long as it takes; systemd has a limit of its own."""
FILE = "cluster.toml"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What a Controller is told: where the description is (`file`; '': `cluster.toml` here, if there is one), the
    `target` that names the application on command lines, and the `flags` that its members get as well, where the
    description says nothing else."""

    target: str
    file: str = ""
    flags: Mapping[str, Any] | None = None


def describe(app: App, options: ClusterOptions) -> Cluster:
    """The cluster that is meant: by its description, else one worker, and a Router and a Scheduler where the
    application needs them. May block. Raises Misconfigured."""
    path = Path(options.file or FILE)
    if options.file or path.exists():
        try:
            cluster = _placed(read(path.read_bytes(), Meaning()), path)
        except Misconfigured as error:
            raise Misconfigured(f"cluster description {path}: {error}") from None
        except OSError as error:
            raise Misconfigured(f"cluster description {path} cannot be read: {error.strerror}") from None
    else:
        kinds: tuple[tuple[Kind, bool], ...] = (
            ("router", router.needed(app)),
            ("scheduler", scheduler.needed(app)),
        )
        groups = [Group(kind="worker"), *[Group(kind=kind) for kind, wanted in kinds if wanted]]
        cluster = Cluster(groups=tuple(groups))
    return replace_groups(cluster, options.flags or {})


def _placed(cluster: Cluster, file: Path) -> Cluster:
    if cluster.broker is None:
        return cluster
    return msgspec.structs.replace(cluster, broker=placed(cluster.broker, file.parent))


def replace_groups(cluster: Cluster, flags: Mapping[str, Any]) -> Cluster:
    """The same, with `flags` for all groups whose kind knows them and that do not say another thing."""
    groups = tuple(
        msgspec.structs.replace(
            each, flags={**{name: flags[name] for name in flags if name in FLAGS[each.kind]}, **each.flags}
        )
        for each in cluster.groups
    )
    return msgspec.structs.replace(cluster, groups=groups)


def make_listeners(inbox: Inbox) -> tuple[Listens, ...]:
    """Who is told what is said on channels."""
    return (inbox,)


def make_handlers(usual: dict[str, Handler], foreman_commands: ForemanCommands) -> dict[str, Handler]:
    """What this Controller does when it is told to."""
    return {**usual, **foreman_commands.handlers}


def make_more(foreman: Foreman, leadership: Leadership) -> tuple[Source, ...]:
    """Who else knows how this process does."""
    return (foreman, leadership)


def make_depth_ways(app: App, redis: TrioRedis) -> dict[str, Way]:
    """Return the ways to all brokers: a Controller measures all queues."""
    return dict(make_ways(app, redis))


def make_leads(leadership: Leadership) -> Leadership:
    """Who says whether this Controller is the one that acts."""
    return leadership


def make_steps(
    ground: tuple[Step, ...],
    leadership: Leadership,
    foreman: Foreman,
    foreman_commands: ForemanCommands,
    vital_signs: VitalSigns,
    all_up: AllUp,
    systemd: SystemdNotify,
    log_again: LogAgain,
    queue_depths: QueueDepths,
    cluster: Cluster,
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom. The members are the first to go: until the last of them
    has ended this process answers and is there."""
    limit = end_limit(members(cluster)) + STOP_SURPLUS
    return (
        *ground,
        Step("log-again", log_again, ("redis",)),
        Step("vitals", vital_signs, ("presence", "inbox")),
        Step("leadership", leadership, ("redis",)),
        Step("foreman", foreman, ("vitals", "log-again", "leadership"), stop_limit=limit),
        Step("depths", queue_depths, ("redis",)),
        Step("hangup", foreman_commands, ("foreman",)),
        Step("all-up", all_up, ("foreman",), start_limit=FOR_EVER),
        Step("systemd", systemd, ("all-up",)),
    )


ControllerParts = Injector(
    **GROUND,
    listeners=value(make_listeners),
    handlers=value(make_handlers),
    follows=(),
    more=value(make_more),
    last=(),
    leadership=Leadership,
    leads=value(make_leads),
    foreman=Foreman,
    foreman_commands=ForemanCommands,
    all_up=AllUp,
    depth_ways=value(make_depth_ways),
    measured=None,
    queue_depths=QueueDepths,
    steps=value(make_steps),
)
"""Every part of a Controller. A part is built from the names of its constructor's parameters."""


def given_of_cluster(
    app: App, options: ClusterOptions, log: Log | None = None, server: KeptServer | None = None
) -> dict[str, Any]:
    """The values about its cluster that the parts ask for by name; members use its own `server`, if it has one. Raises
    Misconfigured."""
    cluster = describe(app, options)
    broker = {} if server is None else {VARIABLE: server.url}
    return {
        "cluster": cluster,
        "describe": partial(describe, app, options),
        "crew": Crew(cluster, chance=random.random),
        "platform": platform_of(cluster, app.name, os.environ, log),
        "surroundings": {"CELERY5_APP": options.target, SUPERVISED: "1", **broker},
        "grace": app.settings.grace_period,
        "autoscale": autoscale_of(app.settings),
        "home": app.brokers.home,
        "measures": app.settings.status_port is not None,
        "tell": _Status(from_environment(os.environ, os.getpid())["address"]),
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
    vitals = options.vitals or Vitals(app=app.name)
    options = replace(options, vitals=vitals, reload=False)  # its members do that themselves
    of_cluster = given_of_cluster(app, cluster_options, log, server)
    status: _Status = of_cluster["tell"]

    def boot_of(name: str, next_life: Next) -> Boot:
        log.event("controller:starting", name=name)
        told = given(app, options, name, log, done, next_life, kind=KIND)
        notification = from_environment(os.environ, os.getpid())
        told["systemd"] = SystemdNotify(
            **notification, status=lambda: status.line, leaving=lambda: not next_life.due
        )
        return build(Boot, ControllerParts, **{**told, **of_cluster})

    async with looked_after(server, of_cluster["cluster"].hung_after, log):
        await live(
            KIND,
            boot_of,
            vitals,
            name=options.name,
            first=options.incarnation,
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
    if not cluster_options.file and Path(FILE).exists():
        # Should it be gone at a reload, that is a mistake.
        cluster_options = replace(cluster_options, file=FILE)
    cluster = describe(app, cluster_options)
    platform_of(cluster, app.name, os.environ)
    limit = end_limit(members(cluster, grace=app.settings.grace_period)) + 2 * STOP_SURPLUS
    limit += STOP_LIMIT if cluster.broker else 0
    with (
        suppress(StoppedBefore),
        Interruption(limit=limit) as interruption,
        own_broker(app, cluster.broker, lambda: interruption.came) as server,
        own_log(app, options.log_format, options.log_level, name=options.name) as journal,
    ):
        page = Page(KIND, partial(run, cluster_options=cluster_options, server=server), lambda _app: None)
        told = WorkerOptions(name=options.name, reload=False, journal=journal)
        trio.run(partial(serve_here, page=page), app, told, interruption)
    return 0
