"""Scale the number of jobs that a worker runs at once, and the number of workers of a cluster."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.protocol.scaling.autoscale import Load, Scale
    from celery5.protocol.scaling.budget import Budget, BudgetStrategy, ByLoad, ByMemory, Demand, Growth
    from celery5.protocol.scaling.snapshot import ClusterSnapshot

__all__ = [
    "Budget",
    "BudgetStrategy",
    "ByLoad",
    "ByMemory",
    "ClusterSnapshot",
    "Demand",
    "Growth",
    "Load",
    "Scale",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Budget": "celery5.protocol.scaling.budget",
            "BudgetStrategy": "celery5.protocol.scaling.budget",
            "ByLoad": "celery5.protocol.scaling.budget",
            "ByMemory": "celery5.protocol.scaling.budget",
            "ClusterSnapshot": "celery5.protocol.scaling.snapshot",
            "Demand": "celery5.protocol.scaling.budget",
            "Growth": "celery5.protocol.scaling.budget",
            "Load": "celery5.protocol.scaling.autoscale",
            "Scale": "celery5.protocol.scaling.autoscale",
        },
    )
