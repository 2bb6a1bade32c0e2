"""Several: a worker of several brokers: a life for each of them, in one process.

Floor: processes. Reads: nothing. Writes: log messages.

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
from celery5.connections import AwaitingRedis
from celery5.errors import Misconfigured
from celery5.log import Log
from celery5.protocol.orders import inbox_of
from celery5.protocol.routes import DEFAULT

T = TypeVar("T")


def by_broker(app: App, queues: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The queues of each broker that has any of them, the default one first. Raises Misconfigured."""
    homes: dict[str, list[str]] = {}
    for queue in queues:
        homes.setdefault(app.brokers.home(queue), []).append(queue)
    order = sorted(homes, key=lambda name: name != DEFAULT)
    return {name: tuple(homes[name]) for name in order}


def name_on(broker: str, name: str) -> str:
    """What a process that is called `name`, if it is, is called on a broker: commands find it by that."""
    if broker == DEFAULT:
        return name
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}@{broker}"


def check_name(app: App, name: str) -> None:
    """Raises Misconfigured for a name that looks like one on another broker: commands would not find it."""
    end = inbox_of(f"{name}:").rpartition("@")[2]
    if "@" in name and end in app.brokers.names:
        raise Misconfigured(f"the name {name!r} ends like those on broker {end!r}: use another one")


@dataclass
class Roll:
    """Which lives are up. `answered` when each of them has come up, or has found that its broker is away."""

    awaited: set[str]
    up: set[str] = field(default_factory=set[str])
    errors: list[Exception] = field(default_factory=list[Exception])
    answered: trio.Event = field(default_factory=trio.Event)
    first: trio.Event = field(default_factory=trio.Event)

    def is_up(self, broker: str) -> None:
        """This one is."""
        self.up.add(broker)
        self._heard(broker)

    def missed(self, broker: str, error: Exception) -> None:
        """This one is not, for now."""
        self.errors.append(error)
        self._heard(broker)

    def _heard(self, broker: str) -> None:
        self.awaited.discard(broker)
        self.first.set()
        if not self.awaited:
            self.answered.set()


class _Up(trio.TaskStatus[None]):
    """Tells the roll of one life."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told

    def started(self, value: None = None) -> None:
        self._told()


Run = Callable[[trio.TaskStatus[None], Callable[[Exception], None]], Awaitable[None]]
"""One life: says when it is up, and with which error its broker was away before that."""


async def on_each(
    lives: Mapping[str, Run], log: Log, task_status: trio.TaskStatus[None], *, one_first: bool
) -> None:
    """Live on all brokers until cancelled; started as soon as each has answered or is known to be away. With
    `one_first` the others begin when the first is up, and it must be. Raises the BrokerError when all are away."""
    roll = Roll(set(lives))
    async with trio.open_nursery() as nursery:
        for number, (broker, run) in enumerate(lives.items()):
            nursery.start_soon(_one, broker, run, roll, log)
            if one_first and number == 0:
                await roll.first.wait()
                if not roll.up:
                    raise roll.errors[0]
        await roll.answered.wait()
        if not roll.up:
            raise roll.errors[0]
        task_status.started()


async def _one(broker: str, run: Run, roll: Roll, log: Log) -> None:
    def up() -> None:
        roll.is_up(broker)

    def missed(error: Exception) -> None:
        log.event(
            "broker:away", "warning", broker=broker, why=str(error), hint="the others are served meanwhile"
        )
        roll.missed(broker, error)

    await run(_Up(up), missed)


class Afar:
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

    async def _reach(self) -> AwaitingRedis:
        app = self._app
        return await (app.brokers.of(self._broker) if self._broker else app.connections).awaiting()
