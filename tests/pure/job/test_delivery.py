"""Delivery: the words that settle a job, for each verdict."""

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from celery5.protocol.job.delivery import MIN_DOCUMENT_TTL, Delivery, is_requeue, make_settlement
from celery5.protocol.job.error_text import make_group_id
from celery5.protocol.job.messages import Command, Document, Failure, encode, read_command, read_document
from celery5.protocol.job.verdict import (
    Complete,
    Expire,
    FailForGood,
    Postpone,
    Reason,
    Release,
    RetryVerdict,
    Verdict,
)

FAILURE = Failure(type="ValueError", message="no", args=("no",), traceback="...")


def delivery(**more: Any) -> Delivery:
    """A job in its second attempt that has run from 20 to 21.5."""
    command = Command(v=1, id="a", task="shop.t", args=Raw(b"[1]"), sent=10.0, attempt=2, **more)
    message = encode(command)[:-1] + b',"later":true}'
    return Delivery("mail", b"5-1", message, 1, command, "trio", 15.0, 20.0, 21.5)


def unpack(terms: bytes | int) -> dict[str, str]:
    """Return the fields of terms that are packed."""
    assert isinstance(terms, bytes)
    return msgspec.msgpack.decode(terms, type=dict[str, str])


DOCUMENT = Document(
    v=1, id="a", task="shop.t", state="SUCCESS", attempt=2, worker="w", sent=10.0, started=20.0, finished=21.5
)


def test_complete_stores_the_result() -> None:
    verb, entry, job, message, ttl, terms = make_settlement(Complete(b"[7]"), delivery(), worker="w", ttl=60)
    assert (verb, entry, job, ttl, terms) == ("complete", b"5-1", "a", 60_000, b"")
    document = read_document(message)
    assert bytes(document.value) == b"[7]"
    assert {**json.loads(message), "value": None} == {**json.loads(encode(DOCUMENT)), "value": None}


def test_an_ignored_result_leaves_a_tombstone_without_it() -> None:
    _, _, _, message, ttl, _ = make_settlement(
        Complete(b"[7]"), delivery(ignore_result=True), worker="w", ttl=1e6
    )
    assert ttl == MIN_DOCUMENT_TTL * 1000
    assert json.loads(message).get("value") is None


@pytest.mark.parametrize(
    "verdict", [Complete(b"7"), Expire(), FailForGood(Reason.EXHAUSTED, FAILURE)], ids=repr
)
def test_a_job_that_has_ended_is_remembered_however_short_results_are_kept(verdict: Verdict) -> None:
    assert make_settlement(verdict, delivery(), worker="w", ttl=0.5).ttl == MIN_DOCUMENT_TTL * 1000


def test_results_ttl_of_a_message_is_bounded_by_redis() -> None:
    words = make_settlement(Complete(b"7"), delivery(results_ttl=1e300), worker="w", ttl=60)
    assert words[4] == 10**12


def test_a_retry_is_the_next_attempt_with_the_failure_in_it() -> None:
    verb, entry, job, message, ttl, terms = make_settlement(
        RetryVerdict(1.25, FAILURE), delivery(), worker="w", ttl=60
    )
    assert (verb, entry, job, ttl, terms) == ("retry", b"5-1", "a", 60_000, 1250)
    command = read_command(message)
    assert command.attempt == 3
    (failure,) = command.failures
    assert (failure.type, failure.attempt, failure.worker, failure.at) == ("ValueError", 2, "w", 21.5)
    assert json.loads(message)["later"] is True


def test_a_release_gives_the_very_message_back_and_counts_nothing() -> None:
    given = delivery()
    assert make_settlement(Release(), given, worker="w", ttl=60) == (
        "release",
        b"5-1",
        "a",
        given.message,
        60_000,
        1,
    )


def test_postponed_job_keeps_its_attempt_and_its_error() -> None:
    held = delivery()
    verb, entry, job_id, message, ttl, delay = make_settlement(
        Postpone(1.5, FAILURE), held, worker="w", ttl=60
    )
    assert (verb, entry, job_id, delay, ttl) == ("retry", b"5-1", "a", 1500, 60_000)
    before, after = json.loads(held.message), json.loads(message)
    kept = after.pop("failures")
    assert (kept[-1]["type"], kept[-1]["attempt"], kept[-1]["worker"]) == ("ValueError", 2, "w")
    assert after == {name: value for name, value in before.items() if name != "failures"}


@pytest.mark.parametrize(
    ("verdict", "back"),
    [
        (Release(), True),
        (Postpone(1.5, FAILURE), True),
        (RetryVerdict(1.5, FAILURE), False),
        (Complete(b"7"), False),
        (FailForGood(Reason.EXHAUSTED, FAILURE), False),
    ],
    ids=repr,
)
def test_only_the_same_attempt_goes_back(verdict: Verdict, back: bool) -> None:
    held = delivery()
    assert is_requeue(make_settlement(verdict, held, worker="w", ttl=60), held) is back


def test_postponed_attempts_do_not_displace_failures_from_the_history() -> None:
    held = delivery(failures=(Failure(type="KeyError", message="old"),))
    for count in range(20):
        away = Failure(type="BrokerUnavailable", message=f"away for {count} s")
        held.message = make_settlement(Postpone(1.0, away), held, worker="w", ttl=60)[3]
    words = make_settlement(RetryVerdict(0, FAILURE), held, worker="w", ttl=60)
    kept = [(failure.attempt, failure.message) for failure in read_command(words[3]).failures]
    assert kept == [(1, "old"), (2, "away for 19 s"), (2, "no")]


def test_an_expired_job_leaves_a_document_that_says_so() -> None:
    verb, _, _, message, ttl, _ = make_settlement(Expire(), delivery(), worker="w", ttl=60)
    assert (verb, ttl) == ("complete", 60_000)
    assert read_document(message).state == "EXPIRED"


@pytest.mark.parametrize("reason", Reason)
def test_dead_letter_keeps_message_failures_and_reason(reason: Reason) -> None:
    verb, entry, job, message, ttl, terms = make_settlement(
        FailForGood(reason, FAILURE), delivery(), worker="w", ttl=60
    )
    command = read_command(message)
    cause = make_group_id(command.task, "ValueError", "no")
    assert (verb, entry, job, ttl) == ("bury", b"5-1", "a", 60_000)
    assert (command.attempt, command.failures[-1].message) == (2, "no")
    assert json.loads(message)["later"] is True
    unpacked = unpack(terms)
    assert unpacked["cause"] == cause
    document = read_document(unpacked["document"].encode())
    assert (document.state, document.reason, document.attempt) == ("DEAD", reason.value, 2)
    assert document.failure is not None
    assert document.failure.worker == "w"


def test_bytes_that_are_no_command_become_a_dead_letter() -> None:
    corrupt = Delivery("mail", b"5-1", b"\xff{", finished=3.0)
    verb, entry, job, message, _, terms = make_settlement(
        FailForGood(Reason.CORRUPT, FAILURE), corrupt, worker="w", ttl=60
    )
    assert (verb, entry, job, message) == ("bury", b"5-1", "", b"\xff{")
    assert read_document(unpack(terms)["document"].encode()).reason == "corrupt"


@pytest.mark.parametrize(
    ("message", "job_id"),
    [
        (b'{"v":2,"id":"a","task":"t","args":5}', "a"),
        (b'{"v":1,"id":"a"}', "a"),
        (b'{"v":1,"id":"a","task":"t","attempt":1e999}', "a"),
        (b'{"v":1,"id":5}', ""),
        (b'{"v":1,"id":""}', ""),
        (b'{"v":1,"id":"' + b"x" * 201 + b'"}', ""),
        (b"[" * 2000, ""),
    ],
    ids=repr,
)
def test_unreadable_message_becomes_a_dead_letter_of_its_id(message: bytes, job_id: str) -> None:
    words = make_settlement(
        FailForGood(Reason.CORRUPT, FAILURE), Delivery("mail", b"5-1", message), worker="w", ttl=60
    )
    assert words[2:4] == (job_id, message)
    assert read_document(unpack(words.terms)["document"].encode()).id == job_id
