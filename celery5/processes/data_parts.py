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
from celery5.processes.several import RemoteRedis
from celery5.protocol.routes import DEFAULT_BROKER
from celery5.services.event_ingestion import BrokerLookup
from celery5.services.sink_delivery import SinkDelivery
from celery5.services.source_ingestion import SourceIngestion
from celery5.sinks import SinkOptions, get_all_recipients, get_all_sink_options
from celery5.sources import group_by_source


def make_data_steps(sink_delivery: SinkDelivery, source_ingestion: SourceIngestion) -> tuple[Step, ...]:
    """Its part of the boot graph. A write that is under way when the Router stops has a moment to end."""
    return (
        Step("sinks", sink_delivery, ("publishing", "heartbeat", "listen"), stop_limit=30.0),
        Step("sources", source_ingestion, ("publishing", "heartbeat")),
    )


def make_routing_redis(app: App, redis: TrioRedis) -> Any:
    """What reaches the broker of each queue: the process' own connection where there is one broker."""
    return RemoteRedis(app) if app.brokers.is_multi_broker else redis


def make_home(app: App) -> BrokerLookup:
    """Which broker a queue is on; another application's count as being here."""

    def home(name: str, queue: str, /) -> str:
        return app.brokers.broker_of_queue(queue) if name == app.name else DEFAULT_BROKER

    return home


def make_sink_delivery(
    routing_redis: Any,
    keys: Keys,
    outlets: Sequence[SinkOptions],
    recipients: Mapping[str, str],
    queue_names: Sequence[str],
    message_limit: int,
    log: Log,
) -> SinkDelivery:
    """What gives Data Sinks the documents of all brokers."""
    return SinkDelivery(
        redis=routing_redis,
        keys=keys,
        sink_options=outlets,
        recipients=recipients,
        queue_names=queue_names,
        message_limit=message_limit,
        log=log,
    )


DATA_PARTS: Mapping[str, Any] = {
    "routing_redis": value(make_routing_redis),
    "home": value(make_home),
    "sink_delivery": value(make_sink_delivery),
    "source_ingestion": SourceIngestion,
}
"""The parts."""


def make_data_values(app: App) -> dict[str, Any]:
    """The values that they ask for by name. Raises Misconfigured when two sinks or sources have one name."""
    tasks = list(app.tasks.values())
    default = app.settings.default_queue
    return {
        "outlets": get_all_sink_options(tasks),
        "takers": get_all_recipients(tasks),
        "queue_names": sorted({default, *(task.queue for task in tasks)}),
        "subscriptions": group_by_source(tasks),
        "send": app.asend_jobs,
    }


def has_data(app: App) -> bool:
    """Whether any task has sinks, or is given what a source brings."""
    return any(task.sinks or task.sources for task in app.tasks.values())
