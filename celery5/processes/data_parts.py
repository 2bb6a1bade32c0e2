"""Data Parts: what a Router is made of that has to do with documents: its data ingestion, and its Data Sinks (C109).

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping
from typing import Any

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.services.sink_delivery import SinkDelivery
from celery5.services.source_ingestion import SourceIngestion
from celery5.sinks import all_outlets, all_takers
from celery5.sources import subscriptions


def make_data_steps(sink_delivery: SinkDelivery, source_ingestion: SourceIngestion) -> tuple[Step, ...]:
    """Its part of the boot graph. A write that is under way when the Router stops has a moment to end."""
    return (
        Step("sinks", sink_delivery, ("publishing", "heartbeat", "listen"), stop_limit=30.0),
        Step("sources", source_ingestion, ("publishing", "heartbeat")),
    )


DATA: Mapping[str, Any] = {"sink_delivery": SinkDelivery, "source_ingestion": SourceIngestion}
"""The parts."""


def given_of_data(app: App) -> dict[str, Any]:
    """The values that they ask for by name. Raises Misconfigured when two sinks or sources have one name."""
    tasks = list(app.tasks.values())
    default = app.settings.default_queue
    return {
        "outlets": all_outlets(tasks),
        "takers": all_takers(tasks),
        "queue_names": sorted({default, *(task.options_.queue or default for task in tasks)}),
        "subscriptions": subscriptions(tasks),
        "send": app.asend_jobs,
    }


def has_data(app: App) -> bool:
    """Whether any task has sinks, or is given what a source brings."""
    return any(task.sinks or task.sources for task in app.tasks.values())
