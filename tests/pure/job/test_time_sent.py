"""Time sent: a message that goes straight on its queue leaves it to its entry there, and gets it when it moves."""

import json
import time

import pytest
from msgspec import UNSET

from celery5 import App
from celery5.broker.wall_clock import WALL_CLOCK
from celery5.middleware.jobs import IncomingJob
from celery5.protocol.events.messages import make_job_template
from celery5.protocol.job.delivery import Delivery, make_drop, make_settlement
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import Command, Failure, Refusal, encode, read_command, read_document
from celery5.protocol.job.story import JobInspection, make_job_details
from celery5.protocol.job.verdict import (
    Complete,
    FailForGood,
    HandOver,
    Hold,
    Postpone,
    Reason,
    Release,
    RetryVerdict,
    Verdict,
)
from celery5.protocol.publisher.frames import make_job_message

ENTRY, TIME = b"1763713000123-4h", 1763713000.123
FAILURE = Failure(type="ValueError", message="no")


def make_delivery(entry: bytes = ENTRY, **fields: object) -> Delivery:
    """A job that has run, whose producer wrote nothing that is not in `fields`, and a line break at the end."""
    message = encode({"v": 1, "id": "a", "task": "shop.t", **fields}) + b"\n"
    return Delivery("mail", entry, message, 0, read_command(message), started=TIME + 1, finished=TIME + 2)


def read_sent(message: bytes) -> float:
    return read_command(message).sent


@pytest.fixture
def job() -> Job:
    app = App("t", broker="redis://127.0.0.1:1/0")

    @app.task(name="t.nop", expires=60)
    def nop() -> None: ...

    return nop.job()


def test_only_a_job_that_goes_straight_on_its_queue_leaves_out_when_it_was_sent() -> None:
    app = App("t", broker="redis://127.0.0.1:1/0")

    @app.task(name="t.nop")
    def nop() -> None: ...

    @app.task(name="t.limited", limit=1, fair_key=lambda: "tenant")
    def limited() -> None: ...

    assert "sent" not in json.loads(nop.job().message)
    assert "sent" not in json.loads(nop.options(priority="high", key="k").job().message)
    for waits in (nop.options(countdown=5).job(), limited.job()):
        assert waits.sent is UNSET
        assert read_sent(waits.message) == pytest.approx(time.time(), abs=60)
    WALL_CLOCK.set_virtual_time(5e9)
    try:
        assert read_sent(nop.job().message) == 5e9
    finally:
        WALL_CLOCK.set_virtual_time(None)


def test_a_job_that_waits_before_it_is_sent_says_when_it_was_made(job: Job) -> None:
    assert job.sent is not UNSET
    moment = pytest.approx(job.sent, abs=0.001)
    stored = Job.from_bytes(job.to_bytes())
    assert read_sent(stored.message) == moment
    assert stored.sent is UNSET
    assert Job.from_bytes(stored.to_bytes()) == stored
    assert read_sent(make_job_message(job).message) == moment


def test_the_jobs_of_a_subscriber_expire_as_long_after_their_event_as_its_task_says(job: Job) -> None:
    template, expires_in = make_job_template(job)
    assert expires_in == pytest.approx(60, abs=0.01)
    assert b"sent" not in template.to_bytes()


@pytest.mark.parametrize(
    "verdict",
    [
        RetryVerdict(1.0, FAILURE),
        Postpone(1.0, FAILURE),
        Hold(1.0, "no"),
        HandOver(1.0, "no", Refusal()),
        Release(),
        FailForGood(Reason.EXHAUSTED, FAILURE),
    ],
    ids=repr,
)
def test_a_message_that_leaves_its_first_entry_says_when_it_was_sent(verdict: Verdict) -> None:
    settlement = make_settlement(verdict, make_delivery(kwargs={"sent": 7}), worker="w", ttl=60)
    assert read_sent(settlement.payload) == TIME
    assert json.loads(settlement.payload)["kwargs"] == {"sent": 7}
    settlement = make_settlement(verdict, make_delivery(sent=10.5), worker="w", ttl=60)
    assert settlement.payload.count(b"sent") == 1
    assert read_sent(settlement.payload) == 10.5


def test_a_duplicate_that_is_the_job_after_all_says_when_it_was_sent() -> None:
    assert read_sent(make_drop(make_delivery()).payload) == TIME


@pytest.mark.parametrize(
    ("delivery", "sent"),
    [
        (make_delivery(), TIME),
        (make_delivery(sent=10.5), 10.5),
        (make_delivery(attempt=2), 0.0),  # a worker of an older version has moved it
        (make_delivery(replays=1), 0.0),
        (make_delivery(b"5-1"), 0.0),  # put on its queue by hand
    ],
)
def test_a_document_has_the_time_of_the_entry_where_the_message_has_none(
    delivery: Delivery, sent: float
) -> None:
    document = make_settlement(Complete(b"7"), delivery, worker="w", ttl=60).payload
    assert read_document(document).sent == IncomingJob(delivery, "w").sent == sent


@pytest.mark.parametrize(
    ("place", "sent"),
    [("S" + ENTRY.decode(), TIME), ("V" + ENTRY.decode(), TIME), ("D", 0.0), ("X" + ENTRY.decode(), 0.0)],
)
def test_details_of_a_job_have_the_time_of_its_entry(place: str, sent: float) -> None:
    found = JobInspection(place=place, message=encode(Command(v=1, id="a", task="t")), document=b"")
    assert make_job_details("a", "mail", found).sent == sent
