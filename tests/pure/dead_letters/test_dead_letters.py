"""Dead letters: what one says, which jobs a filter selects, and the new message of a replayed job."""

import json
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.dead_letters import (
    DeadJob,
    add_counts,
    check_group_by,
    is_entry_id,
    make_dead_job,
    parse_filter,
    sort_counts,
)
from celery5.protocol.job.messages import Command, Document, Failure, encode, make_replay, read_command
from tests.night import examples
from tests.pure.job.names import steady

LAST = Failure(type="ValueError", message="no such order 7", args=("7",), traceback="Traceback", attempt=2)
FIRST = Failure(type="OSError", message="away")
ENVELOPE = Command(
    v=1,
    id="a",
    task="shop.charge",
    args=msgspec.Raw(b'[7,{"x":1}]'),
    kwargs=msgspec.Raw(b'{"amount":"9.90"}'),
    sent=10.5,
    attempt=2,
    expires=99.0,
    failures=(FIRST, LAST),
    sections={"bank": 1},
    key="order-7",
    replays=1,
)
DOCUMENT = Document(
    v=1, id="a", task="shop.charge", state="DEAD", failure=LAST, reason="exhausted", attempt=2, worker="w"
)
ENTRY = "1763713000500-0"


def dead_letter(command: Command = ENVELOPE, document: Document = DOCUMENT) -> DeadJob:
    """A dead job, read."""
    return make_dead_job("mail", ENTRY, encode(command), encode(document))


def test_a_grave_tells_everything() -> None:
    job = dead_letter()
    assert (job.queue, job.entry, job.id, job.task) == ("mail", ENTRY, "a", "shop.charge")
    assert (job.args, job.kwargs) == ([7, {"x": 1}], {"amount": "9.90"})
    assert (job.attempt, job.replays, job.reason, job.worker) == (2, 1, "exhausted", "w")
    assert (job.type, job.message, job.error_args, job.traceback) == (
        "ValueError",
        "no such order 7",
        ("7",),
        "Traceback",
    )
    assert (job.error, job.died, job.sent) == ("ValueError: no such order 7", 1763713000.5, 10.5)
    assert job.failures == (FIRST, LAST)
    assert (job.key, job.lock, job.raw) == ("order-7", "shop.charge order-7", encode(ENVELOPE))


def test_a_workers_death_is_the_last_of_the_failures() -> None:
    died = Failure(type="WorkerDied", message="took its worker down 4 times")
    job = dead_letter(document=msgspec.structs.replace(DOCUMENT, reason="poisoned", failure=died))
    assert (job.reason, job.failures) == ("poisoned", (FIRST, LAST, died))


@pytest.mark.parametrize("message", [b"", b"\xff{", b"[]", b'{"v":7,"id":"a","task":"t"}'])
def test_what_is_no_message_is_corrupt_and_nothing_worse(message: bytes) -> None:
    untold = make_dead_job("mail", "1-0", message, b"nonsense")
    assert (untold.id, untold.task, untold.args, untold.reason, untold.type) == (
        *("", "", None),
        *("corrupt", "Corrupt"),
    )
    assert untold.message
    told = make_dead_job("mail", "1-0", message, encode(DOCUMENT))
    assert (told.id, told.task, told.reason, told.type) == ("a", "shop.charge", "exhausted", "ValueError")


def test_a_message_without_a_document_is_untold() -> None:
    job = make_dead_job("mail", "1-0", encode(ENVELOPE), b"")
    assert (job.id, job.reason, job.error, job.attempt) == ("a", "untold", "", 2)


@given(st.binary(max_size=80), st.binary(max_size=80))
@settings(max_examples=examples(100))
def test_any_bytes_can_be_looked_at(message: bytes, document: bytes) -> None:
    assert make_dead_job("mail", "1-0", message, document).raw == message


def test_arguments_that_cannot_be_decoded_are_none() -> None:
    deep = msgspec.structs.replace(ENVELOPE, args=msgspec.Raw(b"[" * 900 + b"]" * 900))
    assert dead_letter(deep).kwargs == {"amount": "9.90"}


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ({}, True),
        ({"task": None, "queue": None}, True),
        ({"task": "shop.charge"}, True),
        ({"task": "shop.*"}, True),
        ({"task": ["bank.*", "shop.ch?rge"]}, True),
        ({"task": "Shop.*"}, False),
        ({"task": "shop"}, False),
        ({"error": "ValueError"}, True),
        ({"error": "*Error"}, True),
        ({"error": "OSError"}, False),
        ({"reason": "exhausted"}, True),
        ({"reason": ["corrupt", "poisoned"]}, False),
        ({"ids": "a"}, True),
        ({"ids": [ENTRY]}, True),
        ({"ids": ["b"]}, False),
        ({"message": "order 7"}, True),
        ({"message": "order 8"}, False),
        ({"where": lambda job: job.args[0] == 7}, True),
        ({"where": lambda job: job.args[0] == 8}, False),
        ({"task": "shop.*", "error": "OSError"}, False),
    ],
    ids=steady,
)
def test_a_choice_means_what_it_says(choice: dict[str, Any], meant: bool) -> None:
    assert (dead_letter() in parse_filter(choice)) is meant


def test_ages_are_seconds_or_timedeltas() -> None:
    meant = parse_filter({"older_than": timedelta(hours=2), "newer_than": 86400})
    assert (meant.older_than, meant.newer_than) == (7200.0, 86400.0)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"tasks": "t"}, "not chosen by 'tasks', but by queue, task, "),
        ({"task": ""}, "task is '': give a text"),
        ({"task": 7}, "task is 7: give a text"),
        ({"ids": []}, r"ids is \[\]: give a text"),
        ({"ids": [1]}, "give a text, or several"),
        ({"reason": "exhuasted"}, "did you mean 'exhausted'"),
        ({"reason": "zzz"}, "use one of exhausted, not-retried, poisonous"),
        ({"older_than": -1}, "older_than is -1: give seconds"),
        ({"older_than": "2h"}, "older_than is '2h'"),
        ({"newer_than": float("nan")}, "newer_than is nan"),
        ({"newer_than": True}, "newer_than is True"),
        ({"limit": 0}, "limit is 0: give a number of jobs"),
        ({"limit": 1.5}, r"limit is 1\.5"),
        ({"where": 7}, "give a plain function"),
        ({"message": 7}, "message is 7"),
    ],
    ids=steady,
)
def test_a_choice_that_makes_no_sense_is_refused(choice: dict[str, Any], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        parse_filter(choice)


def test_a_choice_that_must_be_awaited_is_refused() -> None:
    async def where(job: DeadJob) -> bool:
        return False

    with pytest.raises(Misconfigured, match="plain function"):
        parse_filter({"where": where})


def test_dead_jobs_are_counted_by_what_they_have_in_common() -> None:
    other = msgspec.structs.replace(ENVELOPE, task="shop.mail")
    jobs = [dead_letter(), dead_letter(), dead_letter(other), make_dead_job("sms", "1-0", b"{", b"")]
    for by, counts in {
        "reason": {"exhausted": 3, "corrupt": 1},
        "task": {"shop.charge": 2, "": 1, "shop.mail": 1},
        "error": {"ValueError": 3, "Corrupt": 1},
        "queue": {"mail": 3, "sms": 1},
        "cause": {
            "shop.charge exhausted ValueError": 2,
            "corrupt Corrupt": 1,
            "shop.mail exhausted ValueError": 1,
        },
    }.items():
        found: dict[str, int] = {}
        add_counts(found, jobs, check_group_by(by))
        assert list(sort_counts(found).items()) == list(counts.items())
    with pytest.raises(Misconfigured, match="not counted by 'day', but by reason, task"):
        check_group_by("day")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("1-0", True), ("1", False), ("a-1", False), ("-1", False), ("²-1", False), ("1-", False)],
)
def test_the_id_of_an_entry(text: str, is_one: bool) -> None:
    assert is_entry_id(text) is is_one


def test_a_replayed_message_is_fresh_but_for_the_number_of_its_replays() -> None:
    command = read_command(make_replay(encode(ENVELOPE)))
    fresh = {"attempt": 1, "failures": (), "sections": None, "expires": None, "replays": 2}
    assert command == msgspec.structs.replace(ENVELOPE, **fresh)


def test_a_replayed_message_keeps_everything_else_to_the_last_digit() -> None:
    args = '[12345678901234567890.123456789012345678, 1.10, "\\u00e9"]'
    raw = f'{{"v":1,"id":"a","task":"t","attempt":3,"args":{args},"later":{{"price":0.10}}}}'.encode()
    again = make_replay(make_replay(raw))
    assert bytes(read_command(again).args).decode() == args
    assert b'"price":0.10' in again
    assert json.loads(again)["replays"] == 2


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"v":2,"id":"a","task":"t"}'])
def test_what_is_no_message_cannot_be_replayed(raw: bytes) -> None:
    with pytest.raises(Corrupt):
        make_replay(raw)
