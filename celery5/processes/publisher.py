"""Publisher: the page of a Publisher daemon, which takes jobs from the processes of a host and publishes them.

What takes jobs and keeps them needs no broker: it is up before the broker is there and while it is unreachable. It is
stopped first of all, then what waits is published as far as the broker takes it; the rest stays in the backlog.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address

import msgspec
import trio

from celery5.app import App
from celery5.bootsteps.boot import BootGraph, Step
from celery5.bootsteps.retrying import BackgroundBoot
from celery5.bootsteps.worker_steps import ChannelSubscriptions
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.timing import Timing
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.supported_servers import check_servers
from celery5.processes.options import ProcessOptions
from celery5.processes.process_parts import (
    AuxiliaryParts,
    ChannelListener,
    ConnectionLog,
    Incarnation,
    make_process_values,
    make_push,
    make_systemd,
    run_auxiliary_process,
)
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.publisher.address import LOOPBACK_HOSTS, check_socket_path, parse_connections
from celery5.protocol.text_values import HOST_AND_PORT
from celery5.sending.bounded_queue import BacklogCapacity
from celery5.sending.messages_backlog import make_backlog
from celery5.sending.publisher_client import get_default_socket
from celery5.sending.publishing_checks import PublishingChecks
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_retry import LogRetry
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.observability.metrics_reporter import MetricsReporter
from celery5.services.process.presence import Presence
from celery5.services.process.reloader import Reloader
from celery5.services.process.step_status import StepStatus
from celery5.services.publisher.listener import Listener
from celery5.services.publisher.message_publisher import MessagePublisher, PublisherConnections
from celery5.services.publisher.messages_store import MessagesStore
from celery5.services.publisher.sockets import PublisherSockets, SocketPlan, get_inherited_sockets
from celery5.wiring import build, part, step, steps, steps_of

KIND = "publisher"
STOP_MARGIN = 10.0
"""Seconds that a step has to end beyond the grace period."""

Publishers = Mapping[str, MessagePublisher]
Stores = Mapping[str, MessagesStore]


class PublisherValues(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts of a Publisher ask for besides each other and what every process has."""

    app_name: str
    # Where it listens.
    plan: SocketPlan
    # The server of each broker, by the name of the broker, and what keeps the stores over incarnations.
    endpoints: Mapping[str, Endpoint]
    store_cache: "StoreCache"
    # Returns the broker of a queue.
    broker_of: Callable[[str], str]
    # Nobody here wants to know which Publishers are alive.
    presence_listeners: tuple[()] = ()


def make_listeners(inbox: Inbox) -> tuple[ChannelListener, ...]:
    """Return who hears channels."""
    return (inbox,)


def make_own_checks(app: App, keys: Keys, log: Log) -> PublishingChecks:
    """Return the checks that must pass before anything is published, to whatever broker."""
    return PublishingChecks(checks=list(app.publisher_check.known.values()), keys=keys, log=log)


def make_publishers(
    app: App,
    stores: Stores,
    endpoints: Mapping[str, Endpoint],
    keys: Keys,
    timing: Timing,
    name: str,
    watch: ConnectionLog,
    own_checks: PublishingChecks,
    grace_period: float,
    log: Log,
) -> Publishers:
    """Return a Message Publisher for each broker. Its connections look for a server for as long as it takes."""
    min_count, max_count = parse_connections(app.settings.publisher_connections)
    return {
        broker: MessagePublisher(
            store=stores[broker],
            keys=keys,
            connections=PublisherConnections(
                endpoint=endpoint,
                timing=msgspec.structs.replace(timing, first_connect=float("inf")),
                name=name,
                on_link_event=watch,
                min_count=min_count,
                max_count=max_count,
            ),
            own_checks=own_checks,
            drain_limit=grace_period,
            log=log,
        )
        for broker, endpoint in endpoints.items()
    }


def make_extra_sources(
    listener: Listener, stores: Stores, publishers: Publishers, own_checks: PublishingChecks
) -> tuple[StatusSource, ...]:
    """Return who else is asked for /readyz and /metrics."""
    return (listener, *stores.values(), *publishers.values(), own_checks)


class PublisherBrokerParts(AuxiliaryParts):
    """What needs the broker to be there: a boot graph within that of the process."""

    listeners = part(make_listeners)
    redis = step(open_redis)
    push = step(make_push, after=(redis,))
    listen = step(ChannelSubscriptions, after=(push,))
    presence = step(Presence, after=(redis,))
    inbox = step(Inbox, after=(listen,))
    metrics_reporter = step(MetricsReporter, name="metrics", after=(redis,))
    log_again = step(LogRetry, after=(redis,))


def make_broker_boot(
    broker_steps: Sequence[Step], step_status: StepStatus, log: Log, on_stuck: Callable[[], None]
) -> BootGraph:
    """Return the boot graph of what needs the broker to be there."""
    return BootGraph(steps=broker_steps, step_status=step_status, log=log, on_stuck=on_stuck)


def make_stores(store_cache: "StoreCache", app: App, endpoints: Mapping[str, Endpoint], log: Log) -> Stores:
    """Return what keeps the messages for each broker."""
    return store_cache.get_stores(app, endpoints, log)


def make_drain_stop_limit(grace_period: float) -> float:
    """Return the seconds that what publishes all that waits may take to end."""
    return grace_period + STOP_MARGIN


class PublisherParts(PublisherBrokerParts):
    """Every part of a Publisher, and its boot graph: its steps start from the top and stop from the bottom."""

    broker_steps = steps_of(PublisherBrokerParts)
    broker_boot = part(make_broker_boot)
    sockets = part(PublisherSockets)
    drain_stop_limit = part(make_drain_stop_limit)
    extra_sources = part(make_extra_sources)
    own_checks = step(make_own_checks, name="checks")
    meanwhile = step(BackgroundBoot)
    stores = steps(make_stores, name="store")
    publishers = steps(
        make_publishers, name="publisher", after=(stores, own_checks), stop_limit=drain_stop_limit
    )
    listener = step(Listener, after=(publishers,), stop_limit=drain_stop_limit)
    status_phase = step(StatusPhase, name="vitals", after=(listener,))
    systemd = step(make_systemd, after=(status_phase,))
    reloader = step(Reloader, after=(listener,))


def make_listen_plan(app: App) -> SocketPlan:
    """Return where it listens, by the application's settings. Raises Misconfigured."""
    settings, tcp = app.settings, HOST_AND_PORT.parse_optional(app.settings.publisher_tcp)
    if (
        tcp
        and not settings.publisher_certificate
        and not settings.publisher_plain
        and not _is_loopback(tcp.host)
    ):
        raise Misconfigured(
            f"publisher_tcp is {settings.publisher_tcp!r}: what comes from other hosts speaks TLS; give it a "
            "certificate (--certificate, --key, --client-ca), or say --plain if the network is as safe as this host"
        )
    if settings.publisher_client_ca and not settings.publisher_certificate:
        raise Misconfigured("publisher_client_ca is for TLS: give a publisher_certificate, too")
    path = (
        check_socket_path(settings.publisher_socket)
        if settings.publisher_socket
        else str(get_default_socket(app.name))
    )
    return SocketPlan(
        path,
        tcp,
        settings.publisher_certificate,
        settings.publisher_key,
        settings.publisher_client_ca,
        get_inherited_sockets(os.environ, os.getpid()),
        settings.publisher_plain,
    )


def _is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK_HOSTS or ip_address(host).is_loopback
    except ValueError:
        return False


def get_endpoints(app: App) -> Mapping[str, Endpoint]:
    """Return the application's brokers, by name."""
    return {name: app.brokers.get(name).endpoint for name in app.brokers.names}


class StoreCache:
    """The stores of one process: messages in memory are kept over incarnations."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], tuple[MessagesStore, BacklogCapacity]] = {}

    def get_stores(self, app: App, brokers: Mapping[str, Endpoint], log: Log) -> Stores:
        """Return the store of each broker, with the capacities that the settings say now."""
        settings, stores = app.settings, dict[str, MessagesStore]()
        for broker in brokers:
            key = (broker, settings.publisher_backlog)
            if key not in self._stores:
                capacity = BacklogCapacity(
                    settings.publisher_backlog_messages, settings.publisher_backlog_bytes
                )
                backlog = make_backlog(
                    settings.publisher_backlog, app=app.name, broker=broker, capacity=capacity
                )
                self._stores[key] = MessagesStore(broker=broker, backlog=backlog, log=log), capacity
            stores[broker], capacity = self._stores[key]
            capacity.resize(settings.publisher_backlog_messages, settings.publisher_backlog_bytes)
        return stores


def make_values(app: App, store_cache: StoreCache) -> PublisherValues:
    """Return the values that only a Publisher has. Raises Misconfigured."""
    return PublisherValues(
        app_name=app.name,
        plan=make_listen_plan(app),
        endpoints=get_endpoints(app),
        store_cache=store_cache,
        broker_of=app.brokers.broker_of_queue,
    )


async def run(
    app: App,
    options: ProcessOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a Publisher until cancelled; `done` is set when a command ends it.

    Raises:
        BrokerUnsupported: It could never publish what it would accept.
    """
    await check_servers(app)
    store_cache = StoreCache()

    def make_boot(options: ProcessOptions, incarnation: Incarnation) -> BootGraph:
        log.event("publisher:boot-started", name=incarnation.name)
        values = make_process_values(app, options, incarnation, kind=KIND)
        return build(BootGraph, PublisherParts, values, make_values(app, store_cache))

    await run_auxiliary_process(
        app, options, make_boot, kind=KIND, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Check the settings of a Publisher. Raises Misconfigured."""
    make_listen_plan(app)
    make_backlog(
        app.settings.publisher_backlog, app=app.name, broker=DEFAULT_BROKER, capacity=BacklogCapacity(1, 1)
    )
    for publisher_check in app.publisher_check.known.values():
        if publisher_check.scope != "local":
            raise Misconfigured(
                f"publisher check {publisher_check.name}: each Publisher performs it: its scope must be 'local'"
            )


PUBLISHER = ProcessKind(KIND, run, check)
