"""Rows of `worker list`: what is known of a worker that has not answered."""

import pytest

from celery5.cli.commands.worker import make_worker_row
from celery5.commands.control import Reply
from celery5.protocol.observability.overview import NO_REPORT_YET, WorkerOverview

NOBODY = Reply(worker="one", ok=False, reason="no-answer", why="it has not answered within 5 s")


def see(**known: object) -> WorkerOverview:
    """What is known of the worker without asking it."""
    fields = {"name": "one", "queues": (), "running": 0, "health": "ok", **known}
    return WorkerOverview(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (see(health=NO_REPORT_YET), "starting"),
        (see(), "no-answer"),
        (see(health="silent for 9 s", standing="silent"), "silent"),
        (None, "no-answer"),
    ],
    ids=["no report yet", "has reported", "silent", "not known"],
)
def test_a_worker_that_has_never_reported_and_does_not_answer_starts(
    seen: WorkerOverview | None, state: str
) -> None:
    assert make_worker_row(NOBODY, seen, wants_json=True)["state"] == state
