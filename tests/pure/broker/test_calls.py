"""Calls: what is sent, and how the answers of both protocol versions are read."""

from hashlib import sha1
from typing import Any

import pytest

from celery5.broker.calls import jobs, leases, queues
from celery5.broker.calls.jobs import Entry
from celery5.broker.keys import Keys
from celery5.protocol.job.delivery import Settlement

SHOP = Keys("shop")
MAIL, SMS = SHOP.for_queue("mail"), SHOP.for_queue("sms")
STREAM = MAIL.stream.encode()
ENTRIES: list[Any] = [
    [b"1-0", [b"job", b"{}"]],
    [b"2-0", [b"job", b"{}", b"deliveries", b"2"]],
    [b"3-0", [b"deliveries", b"many", b"job", b"x"]],
    [b"4-0", [b"nonsense", b"x"]],
    [b"5-0", None],
    [b"6-0", []],
]
READ = [
    Entry("mail", b"1-0", b"{}", 0),
    Entry("mail", b"2-0", b"{}", 2),
    Entry("mail", b"3-0", b"x", 0),
    Entry("mail", b"4-0", b"", 0),
    Entry("mail", b"5-0", b"", 0),
    Entry("mail", b"6-0", b"", 0),
]


@pytest.mark.parametrize("raw", [{STREAM: ENTRIES}, [[STREAM, ENTRIES]]], ids=["RESP3", "RESP2"])
def test_jobs_are_read_from_either_protocol_whatever_is_in_an_entry(raw: Any) -> None:
    assert jobs.read_jobs([MAIL], "w", count=9, block_seconds=1).decode(raw) == READ
    assert jobs.read_pending(MAIL, "w", after=b"0", count=9).decode(raw) == READ


@pytest.mark.parametrize("raw", [None, {}, []])
def test_nothing_to_read_is_no_job(raw: Any) -> None:
    assert jobs.read_jobs([MAIL], "w", count=9, block_seconds=1).decode(raw) == []


def test_a_read_of_several_queues_tells_them_apart_and_says_how_long_it_may_block() -> None:
    call = jobs.read_jobs([MAIL, SMS], "w", count=5, block_seconds=2.5)
    assert call.words == (
        *("XREADGROUP", "GROUP", "workers", "w", "COUNT", 5, "BLOCK", 2500),
        *("STREAMS", MAIL.stream, SMS.stream, ">", ">"),
    )
    assert call.blocks == 2.5
    found = call.decode({SMS.stream.encode(): ENTRIES[:1], STREAM: ENTRIES[:1]})
    assert [entry.queue for entry in found] == ["sms", "mail"]


def test_a_read_never_blocks_for_ever() -> None:
    assert jobs.read_jobs([MAIL], "w", count=1, block_seconds=0.0001).words[7] == 1  # 0 would be for ever


def test_only_what_cannot_be_done_twice_is_not_repeatable() -> None:
    assert not jobs.read_jobs([MAIL], "w", count=1, block_seconds=1).repeatable
    others = [
        jobs.publish(MAIL, [("a", b"")]),
        jobs.schedule(MAIL, [("a", b"", "+1")]),
        jobs.settle(MAIL, "w", [Settlement("complete", b"1-0", "a", b"", 1, 0)]),
        leases.recover(MAIL, worker="", max_deliveries=3, limit=9, ttl=1, message_limit=9),
        jobs.locate_job(MAIL, "a"),
        leases.leave_queue(MAIL, "w"),
        leases.join_queue(MAIL, "w", lease=1),
        leases.renew_lease(MAIL, "w", lease=1),
    ]
    assert all(call.repeatable for call in others)


def test_a_script_goes_by_its_hash_and_in_full_when_the_server_does_not_know_it() -> None:
    call = jobs.publish(MAIL, [("a", b"message")])
    assert call.script is jobs.PUBLISH
    sha = sha1(jobs.PUBLISH.body.encode(), usedforsecurity=False).hexdigest()
    rest = (3, MAIL.stream, MAIL.jobs, MAIL.result("a"), "a", b"message")
    assert call.words == ("EVALSHA", sha, *rest)
    assert call.with_script_text == ("EVAL", jobs.PUBLISH.body, *rest)
    assert queues.register_queue(SHOP, "mail").with_script_text == ("SADD", SHOP.queues, "mail")


def test_times_go_as_whole_milliseconds_and_come_back_as_seconds() -> None:
    beat = leases.renew_lease(MAIL, "w", lease=2.5)
    assert 2500 in beat.words
    assert beat.decode([1, 2, 1500, 700, b"hl", [b"t"], 12, 3, 4, 5, 6, 7000]) == leases.HeartbeatReply(
        alive=True,
        lapsed=2,
        due_in=1.5,
        lapse_in=0.7,
        lanes="hl",
        limited_tasks=("t",),
        at=12,
        run_records=3,
        run_outbox=4,
        strays=5,
        workers=6,
        steady_for=7.0,
    )
    assert beat.decode([0, 0, -1, -1, b"", [], 12, 0, 0, 0, 1, 0]) == leases.HeartbeatReply(
        alive=False, lapsed=0, due_in=None, at=12
    )
    assert jobs.promote_due_jobs(MAIL, limit=3).decode([3, 0, 2]) == (3, 0.0, 2)


def test_dead_jobs_are_read_whatever_is_in_their_entry() -> None:
    raw: list[Any] = [[b"1-0", [b"job", b"j", b"document", b"d"]], [b"2-0", [b"other", b"x"]]]
    assert jobs.list_dead_jobs(MAIL, count=9).decode(raw) == [("1-0", b"j", b"d"), ("2-0", b"", b"")]


DEPTH: list[Any] = [5, 2, 3, 9, 4, -1, 0, 0, 7, 1, [], [], [1, None, None, None, b""], 0, [], []]
"""A reply of `measure`: of five jobs on the streams workers have two; three wait for their time, four at limits."""


def test_what_is_unfinished_is_on_the_stream_or_waits() -> None:
    depth = queues.get_queue_depth(MAIL).decode(DEPTH)
    assert (depth.running, depth.dead, depth.unfinished) == (2, 9, 12)
