"""Records of jobs are small and show no secrets, whatever the jobs are; and which attempts a process keeps."""

import math
from copy import copy
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, json

from celery5 import App
from celery5.dashboard.pages.jobs import tell_story
from celery5.errors import Misconfigured
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.history import (
    CUT,
    MAX_PACKED,
    MAX_VALUE,
    NO_SHAPE,
    CallShape,
    JobRecord,
    format_arguments,
    make_attempt_record,
    pack_record,
    read_arguments,
    shorten_arguments,
    unpack_record,
)
from celery5.protocol.job.messages import Command, Failure, encode
from celery5.protocol.job.search import SearchPosition, make_job_query, read_cursor
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobInspection, add_attempts, make_job_details
from celery5.protocol.job.verdict import Complete, RetryVerdict
from celery5.protocol.limits import AdmissionRule, Rate
from celery5.protocol.observability import ended_jobs
from celery5.protocol.observability.ended_jobs import BATCH, EndedJobs, SuccessWatch

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def test_arguments_are_shown_as_in_a_call() -> None:
    shape = CallShape(("a", "b"))
    positional = read_arguments(shape, Raw(b"[1,2,3,[4]]"), Raw(b'{"c":"x"}'))
    assert format_arguments(positional) == 'a=1, b=2, 3, [4], c="x"'
    assert format_arguments(read_arguments(NO_SHAPE, Raw(b"[1,2]"), Raw(b'{"c":3}'))) == "1, 2, c=3"
    assert format_arguments(read_arguments(NO_SHAPE, Raw(b"["), Raw(b"{}"))) == "(unreadable)"
    assert format_arguments({"a": 1, CUT: 3}) == f"a=1, {CUT} and 3 more"
    assert format_arguments({}) == ""


def test_found_jobs_are_arranged_by_time_or_by_how_long_they_ran() -> None:
    jobs = [
        JobRecord(id="later", queue="q", state="SCHEDULED", sent=1.0, due=90.0),
        JobRecord(id="old", queue="q", state="SUCCESS", sent=1.0, ended=2.0, ran=0.5),
        JobRecord(id="sooner", queue="q", state="SCHEDULED", sent=3.0, due=80.0),
        JobRecord(id="last", queue="q", state="SCHEDULED", sent=4.0, due=95.0),
        JobRecord(id="new", queue="q", state="SUCCESS", sent=1.0, ended=5.0, ran=0.1),
    ]
    by_time, by_run = make_job_query(), make_job_query(sort="ran")
    assert [job.id for job in by_time.arrange(jobs, 9)] == ["new", "old", "sooner", "later", "last"]
    assert [job.id for job in jobs if by_run.matches(job)] == ["old", "new"]
    assert [job.id for job in by_run.arrange(jobs[1::3], 9)] == ["old", "new"]
    assert [job.id for job in by_run.arrange(jobs[1::3], 1)] == ["old"]


@given(st.dictionaries(st.text(), VALUES))
def test_arguments_of_any_form_are_shortened_to_few_bytes(arguments: dict[str, Any]) -> None:
    read = read_arguments(NO_SHAPE, Raw(b"[]"), Raw(json.encode(arguments)))
    short = shorten_arguments(read)
    record = JobRecord(id="a", queue="q", state="DEAD", arguments=short)
    packed = pack_record(record)
    assert len(packed) <= MAX_PACKED
    unpacked = unpack_record(packed)
    assert unpacked is not None
    assert unpacked.arguments in (short, {CUT: len(short)})


@given(st.binary() | st.lists(VALUES).map(json.encode))
def test_what_is_no_record_is_read_as_none(packed: bytes) -> None:
    record = unpack_record(packed)
    assert record is None or isinstance(record, JobRecord)


def test_a_record_is_read_as_it_was_packed() -> None:
    record = JobRecord(
        id="r1~2",
        queue="till",
        state="DEAD",
        task="shop.pay",
        attempt=3,
        worker="w",
        sent=1.5,
        ended=2.25,
        waited=0.5,
        ran=0.25,
        error_type="ValueError",
        error_message="no",
        reason="exhausted",
        arguments={"order": {"id": 7}},
        run="r1",
        limit="shop.pay",
        trace="00-aa-bb-01",
        kept="failure",
    )
    assert unpack_record(pack_record(record)) == record


@pytest.mark.parametrize(
    ("worker", "is_found"),
    [
        ("web-1", True),
        ("web-1:Op3GcP", True),
        ("web-*", True),
        ("web", False),
        ("web-1:Op", False),
        ("web-[2]", False),
    ],
)
def test_a_worker_name_finds_the_jobs_of_all_its_incarnations(worker: str, is_found: bool) -> None:
    record = JobRecord(id="j", queue="default", state="DEAD", task="t", worker="web-1:Op3GcP")
    query = make_job_query(worker=worker)
    assert query.matches(record) is is_found
    assert not is_found or all(needle in pack_record(record) for needle in query.needles)


def test_parameters_are_named_masked_and_redacted() -> None:
    shape = CallShape(("order", "card"), {"card", "pin"})
    read = read_arguments(shape, Raw(b'[7,"4111","more"]'), Raw(b'{"pin":1,"api_key":"k","note":"n"}'))
    assert read == {"order": 7, "card": "***", "2": "more", "pin": "***", "api_key": "***", "note": "n"}
    assert read_arguments(shape, Raw(b"[" + b"1," * 10_000 + b"1]"), Raw(b"{}")) == {CUT: "20005 bytes"}
    assert read_arguments(shape, Raw(b"x"), Raw(b"{}")) == {CUT: "unreadable"}


@pytest.mark.parametrize(("redact", "words"), [(["crad"], "did you mean 'card'?"), ("card", "a list")])
def test_only_parameters_are_redacted(redact: Any, words: str) -> None:
    app = App("shop")
    with pytest.raises(Misconfigured, match="redact") as error:

        @app.task(redact=redact)
        async def pay(card: str) -> None: ...

    assert words in str(error.value)


def test_a_cursor_goes_on_where_it_was_made_and_only_for_its_search() -> None:
    query, other = make_job_query(task="a"), make_job_query(task="b")
    position = SearchPosition(query.digest, 2, "till", "f=1-1 o=2-2", 7, {"till": "3-0"})
    assert read_cursor(position.encode(), query) == position
    for cursor in (position.encode(), "%%%", "x", position.encode()[:-3]):
        with pytest.raises(Misconfigured):
            read_cursor(cursor, other)


def test_an_interval_keeps_the_slowest_and_one_sample_and_the_next_one_begins_anew() -> None:
    kept, watch, clock = EndedJobs("p", lambda: 0.5), SuccessWatch(), count()

    def succeed(seconds: float) -> None:
        ended = float(next(clock))
        if seconds > watch.slow_bar or ended >= watch.next_sample_at:
            kept.add_success(
                watch, seconds, ended,
                lambda is_slow: JobRecord(
                    id=str(seconds), queue="q", state="SUCCESS", kept="slow" if is_slow else "sample"
                ),
            )  # fmt: skip

    def take() -> list[tuple[str, str]]:
        kept.collect(next(clock), 10.0)
        batch = kept.make_batch()
        kept.acknowledge()
        records = [unpack_record(packed) for packed in batch.others] if batch else []
        return [(record.id, record.kept) for record in records if record]

    for seconds in (1, 2, 0.5, 3, 0.1, 9, 1):
        succeed(seconds)
    assert take() == [("3", "slow"), ("9", "slow"), ("0.5", "sample")]
    for seconds in (5, 4, 0.1, 0.2, 0.3, 0.4, 0.6):
        succeed(seconds)
    assert take() == [("4", "slow"), ("5", "slow"), ("0.3", "sample")]
    assert take() == []
    watch.close()
    assert watch.slow_bar == watch.next_sample_at == math.inf


def _return_record(record: JobRecord, _is_slow: bool) -> JobRecord:
    return record


def test_early_records_are_sent_once_and_busy_tasks_wait_for_the_report() -> None:
    kept, watch = EndedJobs("p", lambda: 0.5), SuccessWatch()

    def succeed(*durations: float) -> None:
        for seconds in durations:
            if seconds > watch.slow_bar or watch.next_sample_at <= 0:
                record = JobRecord(id=str(seconds), queue="q", state="SUCCESS")
                kept.add_success(watch, seconds, 0.0, partial(_return_record, record))

    def take() -> list[str]:
        batch = kept.make_batch()
        kept.acknowledge()
        records = [unpack_record(packed) for packed in batch.others] if batch else []
        return [record.id for record in records if record]

    succeed(1, 2)
    kept.collect_early()
    assert take() == ["1", "2"]
    succeed(1.5, 0.5)  # the first displaces one that was sent
    kept.collect_early()
    assert take() == []
    kept.collect(0.0, 10.0)
    assert take() == ["1.5", "0.5"]
    succeed(0.1)
    kept.collect_early()
    assert take() == ["0.1"]


def test_failures_are_sent_in_parts_each_again_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_jobs, "MAX_FAILURES", 250)
    monkeypatch.setattr(ended_jobs, "MAX_WAITING", 300)
    kept = EndedJobs("p", lambda: 0.5)
    for _ in range(2):  # intervals while Redis is unreachable
        for number in range(260):
            record = JobRecord(id=str(number), queue="q", state="DEAD")
            kept.add_failure(partial(copy, record))
        kept.collect(0.0, 10.0)
    first = kept.make_batch()
    assert first is not None
    assert kept.make_batch() is first
    assert (first.number, len(first.failures), first.lost) == (1, BATCH, 2 * 10 + 200)
    kept.acknowledge()
    second = kept.make_batch()
    assert second is not None
    assert (second.number, len(second.failures), second.lost) == (2, 100, 0)
    kept.acknowledge()
    assert kept.make_batch() is None


def test_the_last_attempt_is_told_also_when_two_ended_in_the_same_millisecond() -> None:
    first = JobRecord(id="a", queue="till", state="RETRY", attempt=1, ended=7.001)
    second = JobRecord(id="a", queue="till", state="SUCCESS", attempt=2, ended=7.001)
    for records in ([first, second], [second, first]):
        story = add_attempts(None, records)
        assert story is not None
        assert (story.state, story.attempt) == (JobState.SUCCESS, 2)
        assert [attempt.attempt for attempt in story.attempts] == [1, 2]


def test_last_attempt_is_shown_when_the_history_has_only_earlier_ones() -> None:
    document = json.encode(
        {"v": 1, "id": "a", "task": "pay", "state": "SUCCESS", "replays": 1, "finished": 9.0}
    )
    details = make_job_details("a", "till", JobInspection(place="", message=b"", document=document))
    story = add_attempts(details, [JobRecord(id="a", queue="till", state="DEAD", ended=7.0)])
    assert story is not None
    assert [(attempt.replays, attempt.state, attempt.ended) for attempt in story.attempts] == [
        (0, "DEAD", 7.0),
        (1, "SUCCESS", 9.0),
    ]


def test_the_last_attempt_of_a_dead_job_is_shown_once_while_the_history_lags() -> None:
    failures = [
        {"attempt": attempt, "at": 6.0 + attempt, "type": "OSError", "message": ""} for attempt in (1, 2)
    ]
    document = json.encode(
        {
            "v": 1,
            "id": "a",
            "task": "pay",
            "state": "DEAD",
            "attempt": 2,
            "finished": 8.5,
            "reason": "exhausted",
        }
    )
    message = json.encode({"v": 1, "id": "a", "task": "pay", "attempt": 2, "failures": failures})
    details = make_job_details("a", "till", JobInspection(place="X1-0", message=message, document=document))
    assert details is not None
    assert [failure.attempt for failure in details.failures] == [1, 2]
    story = add_attempts(details, [JobRecord(id="a", queue="till", state="RETRY", attempt=1, ended=7.0)])
    assert story is not None
    assert [(attempt.attempt, attempt.state) for attempt in story.attempts] == [(1, "RETRY"), (2, "DEAD")]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_an_integer_beyond_what_can_be_packed_is_shown_as_its_text(number: int) -> None:
    shown = shorten_arguments({"a": number, "b": [{"c": number}], "d": 2**64 - 1})
    text = str(number) if len(str(number)) <= MAX_VALUE else f"{str(number)[: MAX_VALUE - 1]}{CUT}"
    assert shown == {"a": text, "b": [{"c": text}], "d": 2**64 - 1}


def test_a_record_is_packed_whatever_its_fields_hold() -> None:
    arguments = {"n": 2**70, "half \udc80": "\ud800", "all": {1, 2}, "nan": float("nan")}
    record = JobRecord(id="a\udc80", queue="q", state="DEAD", arguments=arguments)
    unpacked = unpack_record(pack_record(record))
    assert unpacked is not None
    assert unpacked.id == "a\\udc80"
    assert unpacked.arguments["n"] == str(2**70)


@pytest.mark.parametrize(
    ("rule", "limit"),
    [
        (AdmissionRule("shop.pay", max_running=2), "shop.pay"),
        (AdmissionRule("shop.pay", kind="io", kind_rate=Rate("3/s")), "shop.pay"),
        (AdmissionRule("shop.pay"), ""),  # as of a job that waited for a slot of its saturated kind
        (AdmissionRule("shop.pay", suspended=True), ""),
        (None, ""),
    ],
)
def test_an_attempt_of_a_task_without_a_limit_names_none(rule: AdmissionRule | None, limit: str) -> None:
    delivery = Delivery(
        "till", b"1800000000000-0g", b"", command=Command(v=1, id="a", task="shop.pay"), rule=rule
    )
    delivery.start(1_800_000_001.0)
    delivery.finish(1_800_000_002.0)
    made = make_attempt_record(delivery, Complete(b"1"), NO_SHAPE, worker="w", waited=1.0, kept="sample")
    assert made.limit == limit


def test_a_retried_attempt_says_how_long_it_ran_and_when_it_is_tried_again() -> None:
    delivery = Delivery("till", b"1800000000000-0", b"", command=Command(v=1, id="a", task="shop.pay"))
    delivery.start(1_800_000_001.0)
    delivery.finish(1_800_000_001.5)
    verdict = RetryVerdict(delay=2.0, failure=Failure("ValueError", "no"))
    made = make_attempt_record(delivery, verdict, NO_SHAPE, worker="w", waited=1.0, kept="failure")
    record = unpack_record(pack_record(made))
    assert record is not None
    details = make_job_details(
        "a", "till", JobInspection(place="R", message=encode(Command(v=1, id="a", task="t")), document=b"")
    )
    story = add_attempts(details, [record])
    assert story is not None
    lines = [line.text for line in tell_story(story, 1_800_000_002.0)]
    assert "attempt 1 began on w after 1 s on the queue" in lines
    assert "attempt 1 failed after 500 ms, to be tried again in 2 s: ValueError: no" in lines
