"""Publisher: the wiring page of a Publisher daemon (C76 to C83): takes jobs from a host's processes, publishes them.

What takes jobs and keeps them needs no Redis, and is up before Redis is there and while it is away. It is stopped first
of all, then what waits is published, as far as Redis takes it; the rest is in the backlog for the next one.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Any

import trio
from dependencies import Injector, value

from celery5.app import App
from celery5.bootsteps.boot import BootGraph, Step
from celery5.bootsteps.retrying import BackgroundBoot
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.timing import Timing
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.processes import attendant_parts
from celery5.processes.attendant_parts import BASE_PARTS, ChannelListener
from celery5.processes.connection_parts import ConnectionLog
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.worker import WorkerOptions
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.publisher.address import (
    LOOPBACK_HOSTS,
    check_socket_path,
    parse_connections,
    parse_optional_tcp,
)
from celery5.sending.messages_backlog import BacklogCapacity, make_backlog
from celery5.sending.publisher_client import get_default_socket
from celery5.services.commands.dispatcher import CommandHandler
from celery5.services.commands.inbox import Inbox
from celery5.services.commands.log_again import LogRetry
from celery5.services.health.vitals import StatusPhase, StatusSource
from celery5.services.process.reloader import NextIncarnation, Reloader
from celery5.services.process.step_status import StepStatus
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.publisher.listener import Listener
from celery5.services.publisher.message_publisher import MessagePublisher
from celery5.services.publisher.messages_store import MessagesStore
from celery5.services.publisher.publishing_checks import PublishingChecks
from celery5.services.publisher.sockets import PublisherSockets, SocketPlan, get_inherited_sockets

KIND = "publisher"
STOP_MARGIN = 10.0
"""Seconds that a step has to end beyond the grace period."""

Publishers = Mapping[str, MessagePublisher]
Stores = Mapping[str, MessagesStore]


def make_listeners(inbox: Inbox) -> tuple[ChannelListener, ...]:
    """Who is told what is said on channels."""
    return (inbox,)


def make_handlers(common_handlers: dict[str, CommandHandler]) -> dict[str, CommandHandler]:
    """What this Publisher does when it is told to."""
    return {**common_handlers}


def make_own_checks(app: App, keys: Keys, log: Log) -> PublishingChecks:
    """The checks that the application wants to be good before anything is published, to whatever broker."""
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
    log: Log,
) -> Publishers:
    """One Message Publisher for each broker. Its connections look for a server for as long as it takes."""
    make = partial(
        MessagePublisher,
        keys=keys,
        timing=replace(timing, first_connect=float("inf")),
        name=name,
        on_link_event=watch,
        own_checks=own_checks,
        connections=parse_connections(app.settings.publisher_connections),
        drain_limit=app.settings.grace_period,
        log=log,
    )
    return {broker: make(store=stores[broker], endpoint=endpoint) for broker, endpoint in endpoints.items()}


def make_extra_sources(
    listener: Listener, stores: Stores, publishers: Publishers, own_checks: PublishingChecks
) -> tuple[StatusSource, ...]:
    """Who else knows how this process does."""
    return (listener, *stores.values(), *publishers.values(), own_checks)


def make_broker_boot(
    base_steps: tuple[Step, ...], log_again: LogRetry, step_status: StepStatus, log: Log, stuck: Any
) -> BootGraph:
    """What needs Redis to be there."""
    return BootGraph(
        steps=(*base_steps, Step("log-again", log_again, ("redis",))),
        step_status=step_status,
        log=log,
        on_stuck=stuck,
    )


def make_final_steps(
    status_phase: StatusPhase, systemd: SystemdNotify, reloader: Reloader
) -> tuple[Step, ...]:
    """The last part of the boot graph."""
    return (
        Step("vitals", status_phase, ("listener",)),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, ("listener",)),
    )


def make_steps(
    app: App,
    stores: Stores,
    own_checks: PublishingChecks,
    publishers: Publishers,
    listener: Listener,
    meanwhile: BackgroundBoot,
    final_steps: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    limit = app.settings.grace_period + STOP_MARGIN
    return (
        Step("checks", own_checks),
        Step("meanwhile", meanwhile),
        *[Step(f"store-{each}", store) for each, store in stores.items()],
        *[
            Step(f"publisher-{each}", publisher, (f"store-{each}", "checks"), stop_limit=limit)
            for each, publisher in publishers.items()
        ],
        Step("listener", listener, [f"publisher-{each}" for each in publishers], stop_limit=limit),
        *final_steps,
    )


_PARTS: Mapping[str, Any] = {
    **BASE_PARTS,
    "listeners": value(make_listeners),
    "handlers": value(make_handlers),
    "own_checks": value(make_own_checks),
    "publishers": value(make_publishers),
    "sockets": PublisherSockets,
    "listener": Listener,
    "broker_boot": value(make_broker_boot),
    "meanwhile": BackgroundBoot,
    "extra_sources": value(make_extra_sources),
    "final_steps": value(make_final_steps),
    "steps": value(make_steps),
}
PublisherParts = Injector(**_PARTS)
"""Every part of a Publisher. A part is built from the names of its constructor's parameters."""


def make_listen_plan(app: App) -> SocketPlan:
    """Where it listens, by the application's settings. Raises Misconfigured."""
    settings, tcp = app.settings, parse_optional_tcp(app.settings.publisher_tcp)
    if tcp and not settings.publisher_certificate and not settings.publisher_plain and not _is_here(tcp[0]):
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


def _is_here(host: str) -> bool:
    try:
        return host in LOOPBACK_HOSTS or ip_address(host).is_loopback
    except ValueError:
        return False


def get_endpoints(app: App) -> Mapping[str, Endpoint]:
    """The application's brokers, by name."""
    return {name: app.brokers.get(name).endpoint for name in app.brokers.names}


class StoreCache:
    """The stores of one process: what is in memory outlives an incarnation."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], tuple[MessagesStore, BacklogCapacity]] = {}

    def get_stores(self, app: App, brokers: Mapping[str, Endpoint], log: Log) -> Stores:
        """The store of each broker, as the settings want them now."""
        settings, found = app.settings, dict[str, MessagesStore]()
        for broker in brokers:
            where = (broker, settings.publisher_backlog)
            if where not in self._stores:
                room = BacklogCapacity(settings.publisher_backlog_messages, settings.publisher_backlog_bytes)
                backlog = make_backlog(settings.publisher_backlog, app=app.name, broker=broker, capacity=room)
                self._stores[where] = MessagesStore(broker=broker, backlog=backlog, log=log), room
            found[broker], room = self._stores[where]
            room.max_messages, room.max_bytes = (
                settings.publisher_backlog_messages,
                settings.publisher_backlog_bytes,
            )
        return found


def make_values(
    app: App,
    options: WorkerOptions,
    name: str,
    log: Log,
    done: trio.Event,
    next_incarnation: NextIncarnation,
    store_cache: StoreCache,
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    endpoints = get_endpoints(app)
    return {
        **attendant_parts.make_common_values(app, options, name, log, done, next_incarnation, kind=KIND),
        "app_name": app.name,
        "presence_listeners": (),
        "plan": make_listen_plan(app),
        "endpoints": endpoints,
        "stores": store_cache.get_stores(app, endpoints, log),
        "broker_of": app.brokers.broker_of_queue,
        "message_limit": app.settings.message_limit,
    }


async def run(
    app: App,
    options: WorkerOptions,
    *,
    log: Log,
    done: trio.Event,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Be a Publisher until cancelled; `done` is set when a command has it end. Of the options those about queues and
    jobs mean nothing to it."""
    known = partial(make_values, store_cache=StoreCache())
    await attendant_parts.run_auxiliary_process(
        app, options, KIND, PublisherParts, known, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application's settings make no Publisher."""
    make_listen_plan(app)
    make_backlog(
        app.settings.publisher_backlog, app=app.name, broker=DEFAULT_BROKER, capacity=BacklogCapacity(1, 1)
    )
    for each in app.publisher_check.known.values():
        if each.scope != "local":
            raise Misconfigured(
                f"publisher check {each.name}: it is looked at by each Publisher: scope is 'local'"
            )


PUBLISHER = ProcessKind(KIND, run, check)
"""What publishes for the processes of a host."""
