"""Scaling Parts: what a Scheduler is made of that looks at the whole cluster: autoscaling, and which tasks go first.

Floor: processes. Reads: the user's strategies, when they are named. Writes: nothing.
"""

from collections.abc import Mapping
from typing import Any

from dependencies import value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.protocol.autoscale import Autoscale
from celery5.protocol.limits import Gate
from celery5.protocol.prioritisation import Strategy
from celery5.services.autoscaler import Autoscaler
from celery5.services.orders import Orders
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


def make_scaling(autoscaler: Autoscaler) -> tuple[Step, ...]:
    """The part of the boot graph that looks at the whole cluster."""
    return (Step("autoscaler", autoscaler, ("presence",)),)


SCALING: Mapping[str, Any] = {
    "autoscale": value(make_autoscale),
    "prioritise": value(make_prioritise),
    "kinds": value(make_kinds),
    "gates": value(make_gates),
    "known_queues": value(make_known_queues),
    "orders": Orders,
    "telling": Telling,
    "autoscaler": Autoscaler,
    "scaling_steps": value(make_scaling),
}
"""Parts of a Scheduler."""
