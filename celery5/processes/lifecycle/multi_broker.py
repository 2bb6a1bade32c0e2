"""Multi-broker: a worker of several brokers has incarnations on each of them, in one process.

Each is a whole worker on its broker, with connections, leases, an inbox and recovery of its own, so that a broker that
is unreachable or slow delays only its own jobs. They share the slots of the process. The first of them, on the default
broker if that has any of the queues, runs the application's own steps and speaks to systemd.
"""

import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import trio

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.services.health.vital_sources import QueueDepths
from celery5.services.health.vitals import ProcessStatus

T = TypeVar("T")


def group_by_broker(app: App, queues: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the queues of each broker that has any of them, the default one first. Raises Misconfigured."""
    queues_by_broker: dict[str, list[str]] = {}
    for queue in queues:
        queues_by_broker.setdefault(app.brokers.broker_of_queue(queue), []).append(queue)
    order = sorted(queues_by_broker, key=lambda name: name != DEFAULT_BROKER)
    return {name: tuple(queues_by_broker[name]) for name in order}


def name_for_broker(broker: str, name: str) -> str:
    """Return what a process of this name is called on a broker: commands find it by that."""
    if broker == DEFAULT_BROKER:
        return name
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}@{broker}"


def check_worker_name(app: App, name: str) -> None:
    """Raises Misconfigured for a name that looks like one on another broker: commands would not find it."""
    end = get_inbox_name(f"{name}:").rpartition("@")[2]
    if "@" in name and end in app.brokers.names:
        raise Misconfigured(f"the name {name!r} ends like those on broker {end!r}: use another one")


class StartupStatus(msgspec.Struct):
    """On which brokers the worker is up. `answered` is set when it is up on each, or the broker is unreachable."""

    pending: set[str]
    up: set[str] = msgspec.field(default_factory=set[str])
    errors: list[Exception] = msgspec.field(default_factory=list[Exception])
    answered: trio.Event = msgspec.field(default_factory=trio.Event)
    first_answered: trio.Event = msgspec.field(default_factory=trio.Event)

    def mark_up(self, broker: str) -> None:
        """It is up on this broker."""
        self.up.add(broker)
        self._mark_answered(broker)

    def mark_unreachable(self, broker: str, error: Exception) -> None:
        """This broker is unreachable for now."""
        self.errors.append(error)
        self._mark_answered(broker)

    def _mark_answered(self, broker: str) -> None:
        self.pending.discard(broker)
        self.first_answered.set()
        if not self.pending:
            self.answered.set()


class _BrokerStarted(trio.TaskStatus[None]):
    """Marks one broker as up."""

    def __init__(self, mark_up: Callable[[], None]) -> None:
        self._mark_up = mark_up

    def started(self, value: None = None) -> None:
        self._mark_up()


RunOnBroker = Callable[[trio.TaskStatus[None], Callable[[Exception], None]], Awaitable[None]]
"""Runs the worker on one broker; reports when it is up, and the error when the broker is unreachable before that."""


async def run_on_each_broker(
    incarnations: Mapping[str, RunOnBroker], log: Log, task_status: trio.TaskStatus[None], *, one_first: bool
) -> None:
    """Run on all brokers until cancelled; started as soon as each has answered or is known to be unreachable.

    With `one_first` the others begin when the first is up, and it must be. Raises BrokerError when all are unreachable.
    """
    startup = StartupStatus(set(incarnations))
    async with trio.open_nursery() as nursery:
        for number, (broker, run) in enumerate(incarnations.items()):
            nursery.start_soon(_run_on, broker, run, startup, log)
            if one_first and number == 0:
                await startup.first_answered.wait()
                if not startup.up:
                    raise startup.errors[0]
        await startup.answered.wait()
        if not startup.up:
            raise startup.errors[0]
        task_status.started()


async def _run_on(broker: str, run: RunOnBroker, startup: StartupStatus, log: Log) -> None:
    def mark_up() -> None:
        startup.mark_up(broker)

    def mark_unreachable(error: Exception) -> None:
        log.event(
            "broker:connect-failed",
            "warning",
            broker=broker,
            why=str(error),
            hint="the others are served meanwhile",
        )
        startup.mark_unreachable(broker, error)

    await run(_BrokerStarted(mark_up), mark_unreachable)


class RemoteRedis:
    """A connection to one broker, for what runs on another; without a name to the broker of each call."""

    def __init__(self, app: App, broker: str = "") -> None:
        self._app = app
        self._broker = broker

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call there."""
        return await (await self._connect()).perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls there, in one write."""
        return await (await self._connect()).perform_all(calls)

    async def _connect(self) -> AsyncDriver:
        app = self._app
        return await (app.brokers.get(self._broker) if self._broker else app.connections).get_async_driver()


def connect_all_brokers(app: App, default_redis: AsyncDriver) -> dict[str, AsyncDriver]:
    """Return the connections to all brokers, by name; that to the default one is there already."""
    return {
        DEFAULT_BROKER: default_redis,
        **{name: RemoteRedis(app, name) for name in app.brokers.names if name != DEFAULT_BROKER},
    }


def make_queue_depths(
    app: App, all_brokers: dict[str, AsyncDriver], keys: Keys, process_status: ProcessStatus, log: Log
) -> QueueDepths:
    """Return what measures all queues for /metrics: those that no worker reads have nobody else."""
    return QueueDepths(
        depth_brokers=all_brokers,
        find_broker=app.brokers.broker_of_queue,
        keys=keys,
        measured_queues=None,
        is_measuring=app.settings.status_port is not None,
        process_status=process_status,
        log=log,
    )
