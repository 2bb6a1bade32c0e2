"""Several: a worker of several brokers: a life for each of them, in one process.

Each life is a whole worker on its broker: with connections, leases, an inbox and recovery of its own, so that a broker
that is away or slow is felt by nobody but its own jobs. They share the slots of the process. The first of them, on the
default broker if that has any of the queues, runs the application's own steps, and is the one that systemd hears.
"""

import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.driver import AsyncDriver
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.commands.replies import get_inbox_name

T = TypeVar("T")


def group_by_broker(app: App, queues: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The queues of each broker that has any of them, the default one first. Raises Misconfigured."""
    homes: dict[str, list[str]] = {}
    for queue in queues:
        homes.setdefault(app.brokers.broker_of_queue(queue), []).append(queue)
    order = sorted(homes, key=lambda name: name != DEFAULT_BROKER)
    return {name: tuple(homes[name]) for name in order}


def name_for_broker(broker: str, name: str) -> str:
    """What a process that is called `name`, if it is, is called on a broker: commands find it by that."""
    if broker == DEFAULT_BROKER:
        return name
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}@{broker}"


def check_worker_name(app: App, name: str) -> None:
    """Raises Misconfigured for a name that looks like one on another broker: commands would not find it."""
    end = get_inbox_name(f"{name}:").rpartition("@")[2]
    if "@" in name and end in app.brokers.names:
        raise Misconfigured(f"the name {name!r} ends like those on broker {end!r}: use another one")


@dataclass
class StartupStatus:
    """Which lives are up. `answered` when each of them has come up, or has found that its broker is away."""

    pending: set[str]
    up: set[str] = field(default_factory=set[str])
    errors: list[Exception] = field(default_factory=list[Exception])
    answered: trio.Event = field(default_factory=trio.Event)
    first_answered: trio.Event = field(default_factory=trio.Event)

    def mark_up(self, broker: str) -> None:
        """This one is."""
        self.up.add(broker)
        self._heard(broker)

    def mark_unreachable(self, broker: str, error: Exception) -> None:
        """This one is not, for now."""
        self.errors.append(error)
        self._heard(broker)

    def _heard(self, broker: str) -> None:
        self.pending.discard(broker)
        self.first_answered.set()
        if not self.pending:
            self.answered.set()


class _Up(trio.TaskStatus[None]):
    """Tells the roll of one life."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told

    def started(self, value: None = None) -> None:
        self._told()


RunOnBroker = Callable[[trio.TaskStatus[None], Callable[[Exception], None]], Awaitable[None]]
"""One life: says when it is up, and with which error its broker was away before that."""


async def run_on_each_broker(
    incarnations: Mapping[str, RunOnBroker], log: Log, task_status: trio.TaskStatus[None], *, one_first: bool
) -> None:
    """Live on all brokers until cancelled; started as soon as each has answered or is known to be away. With
    `one_first` the others begin when the first is up, and it must be. Raises the BrokerError when all are away."""
    roll = StartupStatus(set(incarnations))
    async with trio.open_nursery() as nursery:
        for number, (broker, run) in enumerate(incarnations.items()):
            nursery.start_soon(_one, broker, run, roll, log)
            if one_first and number == 0:
                await roll.first_answered.wait()
                if not roll.up:
                    raise roll.errors[0]
        await roll.answered.wait()
        if not roll.up:
            raise roll.errors[0]
        task_status.started()


async def _one(broker: str, run: RunOnBroker, roll: StartupStatus, log: Log) -> None:
    def up() -> None:
        roll.mark_up(broker)

    def missed(error: Exception) -> None:
        log.event(
            "broker:connect-failed",
            "warning",
            broker=broker,
            why=str(error),
            hint="the others are served meanwhile",
        )
        roll.mark_unreachable(broker, error)

    await run(_Up(up), missed)


class RemoteRedis:
    """One broker, for what has no life there. Without one: that of each call."""

    def __init__(self, app: App, broker: str = "") -> None:
        self._app = app
        self._broker = broker

    async def perform(self, call: Call[T], /) -> T:
        """Make one trip there."""
        return await (await self._reach()).perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Make several trips there, in one write."""
        return await (await self._reach()).perform_all(calls)

    async def _reach(self) -> AsyncDriver:
        app = self._app
        return await (app.brokers.get(self._broker) if self._broker else app.connections).get_async_driver()
