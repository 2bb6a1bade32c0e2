"""Which steps of each process only observe: those stand behind the fence, and end no process."""

from collections.abc import Iterator
from typing import get_type_hints

import pytest

from celery5.processes.controller import ControllerParts
from celery5.processes.publisher import PublisherBrokerParts, PublisherParts
from celery5.processes.router import RouterParts
from celery5.processes.scheduler import SchedulerParts
from celery5.processes.worker_parts import WorkerParts
from celery5.wiring import list_step_parts

PROCESSES = (
    *(WorkerParts, RouterParts, SchedulerParts),
    *(ControllerParts, PublisherParts, PublisherBrokerParts),
)
OBSERVE = {
    *("progress", "metrics", "history", "alerts", "notices", "member-ends", "members", "ended"),
    *("log-again", "depths", "lags", "reporter", "vitals", "systemd"),
}
ACT = {
    # the broker, and being there
    *("redis", "reader", "push", "listen", "publishing", "join", "heartbeat", "presence", "leadership"),
    # jobs, and what decides on them
    *("recoverer", "mover", "inbox", "pauses", "limits", "budget", "asyncio", "boxes", "deadlines", "timer"),
    *("revocations", "health", "results", "runs", "foreign", "admission", "timer-runs", "processors"),
    *(
        "execution",
        "resources",
        "consumer",
        "timers",
        "timer-leader",
        "processors-stop",
        "subscriptions",
        "burst",
    ),
    *("archives", "shards"),
    *("events", "sinks", "sources"),
    # schedules and scaling
    *("declarations", "timetable", "expirations", "schedules", "autoscaler"),
    # processes and messages
    *("foreman", "hangup", "all-up", "reloader", "recycling", "recycling-permits"),
    *("checks", "meanwhile", "store", "publisher", "listener"),
}


def list_steps(parts: type) -> Iterator[tuple[str, bool]]:
    """The name of each step of a process, and whether its service only observes."""
    for step in list_step_parts(parts):
        service = step.make if isinstance(step.make, type) else get_type_hints(step.make)["return"]
        yield step.step_name, bool(getattr(service, "only_observes", False))


@pytest.mark.parametrize("parts", PROCESSES, ids=lambda parts: parts.__name__)
def test_each_step_that_only_observes_stands_behind_the_fence(parts: type) -> None:
    steps = dict(list_steps(parts))
    assert steps == {name: name in OBSERVE for name in steps}


def test_each_step_is_known_to_observe_or_to_act() -> None:
    names = {name for parts in PROCESSES for name, _ in list_steps(parts)}
    assert names == OBSERVE | ACT
    assert not OBSERVE & ACT
