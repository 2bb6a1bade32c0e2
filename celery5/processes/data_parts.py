"""Data Parts: what a Router is made of that has to do with documents: its data ingestion, and its Data Sinks (C109).

Floor: processes. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dependencies import value

from celery5.app import App
from celery5.bootsteps.boot import Step
from celery5.broker.keys import Keys
from celery5.broker.on_trio import TrioRedis
from celery5.log import Log
from celery5.processes.several import Afar
from celery5.protocol.routes import DEFAULT
from celery5.services.event_ingestion import Home
from celery5.services.sink_delivery import SinkDelivery
from celery5.services.source_ingestion import SourceIngestion
from celery5.sinks import Outlet, all_outlets, all_takers
from celery5.sources import subscriptions


def make_data_steps(sink_delivery: SinkDelivery, source_ingestion: SourceIngestion) -> tuple[Step, ...]:
    """Its part of the boot graph. A write that is under way when the Router stops has a moment to end."""
    return (
        Step("sinks", sink_delivery, ("publishing", "heartbeat", "listen"), stop_limit=30.0),
        Step("sources", source_ingestion, ("publishing", "heartbeat")),
    )


def make_routed(app: App, redis: TrioRedis) -> Any:
    """What reaches the broker of each queue: the process' own connection where there is one broker."""
    return Afar(app) if app.brokers.several else redis


def make_home(app: App) -> Home:
    """Which broker a queue is on; another application's count as being here."""

    def home(name: str, queue: str, /) -> str:
        return app.brokers.home(queue) if name == app.name else DEFAULT

    return home


def make_sink_delivery(
    routed: Any,
    keys: Keys,
    outlets: Sequence[Outlet],
    takers: Mapping[str, str],
    queue_names: Sequence[str],
    message_limit: int,
    log: Log,
) -> SinkDelivery:
    """What gives Data Sinks the documents of all brokers."""
    return SinkDelivery(
        redis=routed,
        keys=keys,
        outlets=outlets,
        takers=takers,
        queue_names=queue_names,
        message_limit=message_limit,
        log=log,
    )


DATA: Mapping[str, Any] = {
    "routed": value(make_routed),
    "home": value(make_home),
    "sink_delivery": value(make_sink_delivery),
    "source_ingestion": SourceIngestion,
}
"""The parts."""


def given_of_data(app: App) -> dict[str, Any]:
    """The values that they ask for by name. Raises Misconfigured when two sinks or sources have one name."""
    tasks = list(app.tasks.values())
    default = app.settings.default_queue
    return {
        "outlets": all_outlets(tasks),
        "takers": all_takers(tasks),
        "queue_names": sorted({default, *(task.queue for task in tasks)}),
        "subscriptions": subscriptions(tasks),
        "send": app.asend_jobs,
    }


def has_data(app: App) -> bool:
    """Whether any task has sinks, or is given what a source brings."""
    return any(task.sinks or task.sources for task in app.tasks.values())
