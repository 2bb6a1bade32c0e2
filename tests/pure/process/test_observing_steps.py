"""Which steps of each process only observe: those stand behind the fence, and end no process."""

from collections.abc import Iterator
from dataclasses import fields
from typing import get_type_hints

import pytest

from celery5.processes.controller import ControllerBootTable
from celery5.processes.publisher import BrokerBootTable, PublisherBootTable
from celery5.processes.router import RouterBootTable
from celery5.processes.scheduler import SchedulerBootTable
from celery5.processes.worker_parts import WorkerBootTable
from celery5.wiring import BootTable

TABLES: tuple[type[BootTable], ...] = (
    WorkerBootTable,
    RouterBootTable,
    SchedulerBootTable,
    ControllerBootTable,
    PublisherBootTable,
    BrokerBootTable,
)
OBSERVE = {
    *("progress", "metrics", "history", "alerts", "notices", "member-ends", "ended"),
    *("log-again", "depths", "lags", "reporter", "vitals", "systemd"),
}
ACT = {
    # the broker, and being there
    *("redis", "reader", "push", "listen", "publishing", "join", "heartbeat", "presence", "leadership"),
    # jobs, and what decides on them
    *("recoverer", "mover", "inbox", "pauses", "limits", "budget", "asyncio", "boxes", "deadlines", "timer"),
    *("revocations", "health", "results", "runs", "foreign", "admission", "timer-runs", "processors"),
    *("execution", "consumer", "timers", "timer-leader", "processors-stop", "subscriptions", "burst"),
    *("archives",),
    *("events", "sinks", "sources"),
    # schedules and scaling
    *("declarations", "timetable", "expirations", "schedules", "autoscaler"),
    # processes and messages
    *("foreman", "hangup", "all-up", "reloader", "recycling"),
    *("checks", "meanwhile", "store", "publisher", "listener"),
}


def list_steps(table: type[BootTable]) -> Iterator[tuple[str, bool]]:
    """The name of each step of a process, and whether its service only observes."""
    services = get_type_hints(table)
    for each in fields(table):
        if each.metadata:
            yield each.metadata["row"].name, bool(getattr(services[each.name], "only_observes", False))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_step_that_only_observes_stands_behind_the_fence(table: type[BootTable]) -> None:
    steps = dict(list_steps(table))
    assert steps == {name: name in OBSERVE for name in steps}


def test_each_step_is_known_to_observe_or_to_act() -> None:
    names = {name for table in TABLES for name, _ in list_steps(table)}
    assert names == OBSERVE | ACT
    assert not OBSERVE & ACT
