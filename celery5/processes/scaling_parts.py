"""Scaling Parts: what a Scheduler is made of that looks at the whole cluster: autoscaling, and which tasks go first.

Floor: processes. Reads: the user's strategies, when they are named. Writes: nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dependencies import value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.broker.junction import AsyncBrokerRouter, BrokerMap
from celery5.broker.keys import Keys
from celery5.broker.on_trio import TrioRedis
from celery5.log import Log
from celery5.processes.several import RemoteRedis
from celery5.protocol.autoscale import Autoscale
from celery5.protocol.limits import DeclaredLimits
from celery5.protocol.prioritisation import PrioritisationStrategy
from celery5.protocol.routes import DEFAULT_BROKER
from celery5.services.autoscaler import Autoscaler
from celery5.services.inbox import InboxAddress
from celery5.services.orders import CommandSender, SigningKeys
from celery5.services.outlook import ClusterObserver, Redis
from celery5.services.promptly import TimeLimitedDriver
from celery5.services.telling import ScalingCommands
from celery5.strategies import get_autoscale, get_prioritisation


def make_autoscale(app: App) -> Autoscale | None:
    """How it is scaled."""
    return get_autoscale(app.settings)


def make_prioritise(app: App) -> PrioritisationStrategy | None:
    """Which tasks go first."""
    return get_prioritisation(app.settings)


def make_kinds(app: App) -> dict[str, str]:
    """The kind of each of its tasks."""
    return {name: task.kind for name, task in app.tasks.items()}


def make_admission_rules(app: App) -> dict[str, DeclaredLimits]:
    """The gates of those that have one."""
    return {name: task.limits.declared for name, task in app.tasks.items() if task.limits is not None}


def make_task_queues(app: App) -> frozenset[str]:
    """The queues that its tasks name, which are looked at before others."""
    return frozenset(task.queue for task in app.tasks.values())


def make_broker_connections(app: App, redis: TrioRedis) -> dict[str, Redis]:
    """The ways to all brokers, by their names."""
    further = {
        name: TimeLimitedDriver(redis=RemoteRedis(app, name), broker=name) for name in app.brokers.names[1:]
    }
    return {DEFAULT_BROKER: redis, **further}


def make_home(app: App) -> Callable[[str], str]:
    """Which broker a queue is on."""
    return app.brokers.broker_of_queue


def make_command_sender(
    app: App,
    broker_connections: dict[str, Redis],
    keys: Keys,
    keyring: SigningKeys,
    address: InboxAddress,
    log: Log,
) -> CommandSender:
    """What posts commands to the workers of all brokers: an inbox is on that of its worker's life."""

    async def reach(broker: str) -> Redis:
        return broker_connections[broker]

    chart = BrokerMap(app.brokers.names, app.brokers.broker_of_queue, app.name)
    junction = AsyncBrokerRouter(chart, reach)
    return CommandSender(redis=junction, keys=keys, keyring=keyring, address=address, log=log)


def make_scaling_steps(autoscaler: Autoscaler) -> tuple[Step, ...]:
    """The part of the boot graph that looks at the whole cluster."""
    return (Step("autoscaler", autoscaler, ("presence",)),)


SCALING_PARTS: Mapping[str, Any] = {
    "autoscale": value(make_autoscale),
    "prioritise": value(make_prioritise),
    "kinds": value(make_kinds),
    "gates": value(make_admission_rules),
    "known_queues": value(make_task_queues),
    "broker_connections": value(make_broker_connections),
    "home": value(make_home),
    "observer": ClusterObserver,
    "orders": value(make_command_sender),
    "scaling_commands": ScalingCommands,
    "autoscaler": Autoscaler,
    "scaling_steps": value(make_scaling_steps),
}
"""Parts of a Scheduler."""
