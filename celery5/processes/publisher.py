"""Publisher: the wiring page of a Publisher daemon (C76 to C83): takes jobs from a host's processes, publishes them.

Floor: processes. Reads: the environment's systemd variables. Writes: nothing itself.

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
from celery5.bootsteps.boot import Boot, Step
from celery5.bootsteps.meanwhile import Meanwhile
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.broker.on_trio import Timing
from celery5.daemon_line import usual_socket
from celery5.errors import Misconfigured
from celery5.log import Log
from celery5.messages_backlog import Room, backlog_for
from celery5.processes import attendant_parts
from celery5.processes.attendant_parts import GROUND, Listens
from celery5.processes.link_log import LinkLog
from celery5.processes.lives import Page
from celery5.processes.worker import WorkerOptions
from celery5.protocol.daemon_address import LOOPBACK, connections_in, door_in, fitting
from celery5.protocol.routes import DEFAULT
from celery5.services.board import Board
from celery5.services.commands import Handler
from celery5.services.doors import Doors, Plan, inherited
from celery5.services.inbox import Inbox
from celery5.services.listener import Listener
from celery5.services.log_again import LogAgain
from celery5.services.message_publisher import MessagePublisher
from celery5.services.messages_store import MessagesStore
from celery5.services.publishing_checks import PublishingChecks
from celery5.services.reloader import Next, Reloader
from celery5.services.systemd_notify import SystemdNotify
from celery5.services.vitals import Source, VitalSigns

KIND = "publisher"
FAREWELL = 10.0
"""Seconds that a step has to end beyond the grace period."""

Publishers = Mapping[str, MessagePublisher]
Stores = Mapping[str, MessagesStore]


def make_listeners(inbox: Inbox) -> tuple[Listens, ...]:
    """Who is told what is said on channels."""
    return (inbox,)


def make_handlers(usual: dict[str, Handler]) -> dict[str, Handler]:
    """What this Publisher does when it is told to."""
    return {**usual}


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
    watch: LinkLog,
    own_checks: PublishingChecks,
    log: Log,
) -> Publishers:
    """One Message Publisher for each broker. Its connections look for a server for as long as it takes."""
    make = partial(
        MessagePublisher,
        keys=keys,
        timing=replace(timing, first_connect=float("inf")),
        name=name,
        watch=watch,
        own_checks=own_checks,
        connections=connections_in(app.settings.publisher_connections),
        drain=app.settings.grace_period,
        log=log,
    )
    return {broker: make(store=stores[broker], endpoint=endpoint) for broker, endpoint in endpoints.items()}


def make_more(
    listener: Listener, stores: Stores, publishers: Publishers, own_checks: PublishingChecks
) -> tuple[Source, ...]:
    """Who else knows how this process does."""
    return (listener, *stores.values(), *publishers.values(), own_checks)


def make_company(ground: tuple[Step, ...], log_again: LogAgain, board: Board, log: Log, stuck: Any) -> Boot:
    """What needs Redis to be there."""
    return Boot(steps=(*ground, Step("log-again", log_again, ("redis",))), board=board, log=log, stuck=stuck)


def make_top(vital_signs: VitalSigns, systemd: SystemdNotify, reloader: Reloader) -> tuple[Step, ...]:
    """The last part of the boot graph."""
    return (
        Step("vitals", vital_signs, ("listener",)),
        Step("systemd", systemd, ("vitals",)),
        Step("reloader", reloader, ("listener",)),
    )


def make_steps(
    app: App,
    stores: Stores,
    own_checks: PublishingChecks,
    publishers: Publishers,
    listener: Listener,
    meanwhile: Meanwhile,
    top: tuple[Step, ...],
) -> tuple[Step, ...]:
    """The boot graph: up from the top, down from the bottom."""
    limit = app.settings.grace_period + FAREWELL
    return (
        Step("checks", own_checks),
        Step("meanwhile", meanwhile),
        *[Step(f"store-{each}", store) for each, store in stores.items()],
        *[
            Step(f"publisher-{each}", publisher, (f"store-{each}", "checks"), stop_limit=limit)
            for each, publisher in publishers.items()
        ],
        Step("listener", listener, [f"publisher-{each}" for each in publishers], stop_limit=limit),
        *top,
    )


_PARTS: Mapping[str, Any] = {
    **GROUND,
    "listeners": value(make_listeners),
    "handlers": value(make_handlers),
    "own_checks": value(make_own_checks),
    "publishers": value(make_publishers),
    "doors": Doors,
    "listener": Listener,
    "company": value(make_company),
    "meanwhile": Meanwhile,
    "more": value(make_more),
    "top": value(make_top),
    "steps": value(make_steps),
}
PublisherParts = Injector(**_PARTS)
"""Every part of a Publisher. A part is built from the names of its constructor's parameters."""


def plan_of(app: App) -> Plan:
    """Where it listens, by the application's settings. Raises Misconfigured."""
    settings, tcp = app.settings, door_in(app.settings.publisher_tcp)
    if tcp and not settings.publisher_certificate and not settings.publisher_plain and not _is_here(tcp[0]):
        raise Misconfigured(
            f"publisher_tcp is {settings.publisher_tcp!r}: what comes from other hosts speaks TLS; give it a "
            "certificate (--certificate, --key, --client-ca), or say --plain if the network is as safe as this host"
        )
    if settings.publisher_client_ca and not settings.publisher_certificate:
        raise Misconfigured("publisher_client_ca is for TLS: give a publisher_certificate, too")
    path = fitting(settings.publisher_socket) if settings.publisher_socket else str(usual_socket(app.name))
    return Plan(
        path,
        tcp,
        settings.publisher_certificate,
        settings.publisher_key,
        settings.publisher_client_ca,
        inherited(os.environ, os.getpid()),
        settings.publisher_plain,
    )


def _is_here(host: str) -> bool:
    try:
        return host in LOOPBACK or ip_address(host).is_loopback
    except ValueError:
        return False


def endpoints_of(app: App) -> Mapping[str, Endpoint]:
    """The application's brokers, by name."""
    return {name: app.brokers.of(name).endpoint for name in app.brokers.names}


class Larder:
    """The stores of one process: what is in memory outlives an incarnation."""

    def __init__(self) -> None:
        self._stores: dict[tuple[str, str], tuple[MessagesStore, Room]] = {}

    def of(self, app: App, brokers: Mapping[str, Endpoint], log: Log) -> Stores:
        """The store of each broker, as the settings want them now."""
        settings, found = app.settings, dict[str, MessagesStore]()
        for broker in brokers:
            where = (broker, settings.publisher_backlog)
            if where not in self._stores:
                room = Room(settings.publisher_backlog_messages, settings.publisher_backlog_bytes)
                backlog = backlog_for(settings.publisher_backlog, app=app.name, broker=broker, room=room)
                self._stores[where] = MessagesStore(broker=broker, backlog=backlog, log=log), room
            found[broker], room = self._stores[where]
            room.messages, room.bytes = settings.publisher_backlog_messages, settings.publisher_backlog_bytes
        return found


def given(
    app: App, options: WorkerOptions, name: str, log: Log, done: trio.Event, next_life: Next, larder: Larder
) -> dict[str, Any]:
    """The values that the parts ask for by name."""
    endpoints = endpoints_of(app)
    return {
        **attendant_parts.given(app, options, name, log, done, next_life, kind=KIND),
        "app_name": app.name,
        "follows": (),
        "plan": plan_of(app),
        "endpoints": endpoints,
        "stores": larder.of(app, endpoints, log),
        "broker_of": app.brokers.home,
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
    known = partial(given, larder=Larder())
    await attendant_parts.attend(
        app, options, KIND, PublisherParts, known, log=log, done=done, task_status=task_status
    )


def check(app: App) -> None:
    """Raises Misconfigured when the application's settings make no Publisher."""
    plan_of(app)
    backlog_for(app.settings.publisher_backlog, app=app.name, broker=DEFAULT, room=Room(1, 1))
    for each in app.publisher_check.known.values():
        if each.scope != "local":
            raise Misconfigured(
                f"publisher check {each.name}: it is looked at by each Publisher: scope is 'local'"
            )


PUBLISHER = Page(KIND, run, check)
"""What publishes for the processes of a host."""
