"""Scaling Parts: what a Scheduler is made of that looks at the whole cluster: autoscaling, and which tasks go first.

Floor: processes. Reads: the user's strategies, when they are named. Writes: nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dependencies import value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.broker.junction import AwaitedJunction, Map
from celery5.broker.keys import Keys
from celery5.broker.on_trio import TrioRedis
from celery5.log import Log
from celery5.processes.several import Afar
from celery5.protocol.autoscale import Autoscale
from celery5.protocol.limits import Gate
from celery5.protocol.prioritisation import Strategy
from celery5.protocol.routes import DEFAULT
from celery5.services.autoscaler import Autoscaler
from celery5.services.inbox import Address
from celery5.services.orders import Keyring, Orders
from celery5.services.outlook import Outlook, Redis
from celery5.services.promptly import Promptly
from celery5.services.telling import Telling
from celery5.strategies import autoscale_of, prioritise_of


def make_autoscale(app: App) -> Autoscale | None:
    """How it is scaled."""
    return autoscale_of(app.settings)


def make_prioritise(app: App) -> Strategy | None:
    """Which tasks go first."""
    return prioritise_of(app.settings)


def make_kinds(app: App) -> dict[str, str]:
    """The kind of each of its tasks."""
    return {name: task.kind for name, task in app.tasks.items()}


def make_gates(app: App) -> dict[str, Gate]:
    """The gates of those that have one."""
    return {name: task.gated.gate for name, task in app.tasks.items() if task.gated is not None}


def make_known_queues(app: App) -> frozenset[str]:
    """The queues that its tasks name, which are looked at before others."""
    return frozenset(task.queue for task in app.tasks.values())


def make_ways(app: App, redis: TrioRedis) -> dict[str, Redis]:
    """The ways to all brokers, by their names."""
    further = {name: Promptly(redis=Afar(app, name), broker=name) for name in app.brokers.names[1:]}
    return {DEFAULT: redis, **further}


def make_home(app: App) -> Callable[[str], str]:
    """Which broker a queue is on."""
    return app.brokers.home


def make_orders(
    app: App, ways: dict[str, Redis], keys: Keys, keyring: Keyring, address: Address, log: Log
) -> Orders:
    """What posts commands to the workers of all brokers: an inbox is on that of its worker's life."""

    async def reach(broker: str) -> Redis:
        return ways[broker]

    chart = Map(app.brokers.names, app.brokers.home, app.name)
    junction = AwaitedJunction(chart, reach)
    return Orders(redis=junction, keys=keys, keyring=keyring, address=address, log=log)


def make_scaling(autoscaler: Autoscaler) -> tuple[Step, ...]:
    """The part of the boot graph that looks at the whole cluster."""
    return (Step("autoscaler", autoscaler, ("presence",)),)


SCALING: Mapping[str, Any] = {
    "autoscale": value(make_autoscale),
    "prioritise": value(make_prioritise),
    "kinds": value(make_kinds),
    "gates": value(make_gates),
    "known_queues": value(make_known_queues),
    "ways": value(make_ways),
    "home": value(make_home),
    "outlook": Outlook,
    "orders": value(make_orders),
    "telling": Telling,
    "autoscaler": Autoscaler,
    "scaling_steps": value(make_scaling),
}
"""Parts of a Scheduler."""
