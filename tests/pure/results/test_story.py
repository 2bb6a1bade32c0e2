"""Story: what is known of a job in each of its states, from whatever bytes there are."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.cli.commands.job_details import format_job_details as people
from celery5.protocol.job.messages import Command, Document, Failure, encode
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails, JobInspection, make_job_details
from tests.night import examples

MESSAGE = encode(
    Command(
        v=1,
        id="a",
        task="shop.t",
        args=msgspec.Raw(b"[1]"),
        kwargs=msgspec.Raw(b'{"x":2}'),
        sent=5.0,
        attempt=2,
        expires=9.0,
        retry=RetryPolicy(max_retries=4),
        failures=(Failure("OSError", "away"),),
        key="k",
        replays=1,
    )
)
END = Document(
    v=1,
    id="a",
    task="shop.t",
    state="DEAD",
    reason="exhausted",
    attempt=3,
    worker="w",
    failure=Failure("E", "e"),
)


@pytest.mark.parametrize(
    ("place", "worker", "document", "state"),
    [
        ("S1-0", "", b"", "SENT"),
        ("S1-0", "w", b"", "EXECUTING"),
        ("V1-0", "w", b"", "EXECUTING"),
        ("D", "", b"", "SCHEDULED"),
        ("R", "", b"", "RETRY"),
        ("H", "", b"", "HELD"),
        ("X1-0", "", b"", "DEAD"),
        ("X1-0", "", encode(END), "DEAD"),
        ("S1-0", "", encode(END), "SENT"),  # replayed, and its old end is still about
        ("", "", encode(END), "DEAD"),
        ("", "", b'{"v":1,"id":"a","task":"t","state":"FROM THE FUTURE"}', "UNKNOWN"),
        ("", "", b"", "UNKNOWN"),
        ("?", "", b"", "UNKNOWN"),
    ],
)
def test_the_state_follows_from_the_place_and_the_document(
    place: str, worker: str, document: bytes, state: str
) -> None:
    story = make_job_details(
        "a", "mail", JobInspection(place=place, message=MESSAGE, document=document, worker=worker)
    )
    assert story.state == JobState(state)
    assert story.has_ended is (state == "DEAD")
    assert story.revoked is place.startswith("V")


def test_a_living_job_tells_what_its_message_says() -> None:
    assert make_job_details(
        "a", "mail", JobInspection(place="R", message=MESSAGE, document=b"", due=7.0, deliveries=1)
    ) == JobDetails(
        "a",
        "mail",
        JobState.RETRY,
        task="shop.t",
        attempt=2,
        max_retries=4,
        replays=1,
        deliveries=1,
        key="k",
        args=[1],
        kwargs={"x": 2},
        sent=5.0,
        due=7.0,
        expires=9.0,
        failures=(Failure("OSError", "away"),),
    )


def test_a_dead_job_tells_its_end_and_what_it_was_called_with() -> None:
    story = make_job_details("a", "mail", JobInspection(place="X1-0", message=MESSAGE, document=encode(END)))
    assert (story.args, story.attempt, story.max_retries, story.worker, story.dead_entry) == (
        [1],
        3,
        4,
        "w",
        "1-0",
    )
    assert (story.reason, story.failure, len(story.failures)) == ("exhausted", Failure("E", "e"), 1)


@pytest.mark.parametrize("state", ["SUCCESS", "EXPIRED", "REVOKED"])
def test_a_job_that_expired_has_not_started_and_a_revoked_one_was_revoked(state: str) -> None:
    end = encode(Document(v=1, id="a", task="shop.t", state=state, started=6.0, finished=7.0))
    story = make_job_details("a", "mail", JobInspection(place="", message=b"", document=end))
    assert (story.started > 0, story.revoked) == (state != "EXPIRED", state == "REVOKED")
    shown = "\n".join(people(story, 8.0))
    assert re.search(rf"(?m)^state +{state}$", shown)
    assert ("took" in shown) is (state != "EXPIRED")


@given(st.binary(max_size=50), st.binary(max_size=50), st.sampled_from(["", "S1-0", "X1-0", "R"]))
@settings(max_examples=examples(50))
def test_any_bytes_have_a_story(message: bytes, document: bytes, place: str) -> None:
    assert (
        make_job_details("a", "mail", JobInspection(place=place, message=message, document=document)).id
        == "a"
    )


def test_the_attempts_of_sections_are_told_of_beside_those_of_the_task() -> None:
    command = Command(
        v=1, id="a", task="shop.t", attempt=6, retry=RetryPolicy(max_retries=2), sections={"b": 3, "c": 1}
    )
    story = make_job_details("a", "mail", JobInspection(place="R", message=encode(command), document=b""))
    assert story.sections == {"b": 3, "c": 1}
    shown = "\n".join(people(story, 0.0))
    assert re.search(r"(?m)^attempt +6 of 7$", shown)
    assert re.search(r"(?m)^sections +3 for b, 1 for c$", shown)
