"""Sink scripts: the step that ends a job hands documents to sinks, where they are taken, put off or dead-lettered."""

from typing import Any

import pytest

from celery5.broker.calls import cluster, jobs
from celery5.broker.calls import events as events_calls
from celery5.broker.calls.dead_letters import DONE, GONE
from celery5.protocol.job.delivery import Settlement, SinkDocument
from tests.redis.worker.one_queue import Queue, command, done, failed, failed_for_good

SINK = "table"


def waiting(queue: Queue, sink: str = SINK) -> list[Any]:
    """The documents for a sink."""
    found: list[Any] = queue.client.xrange(queue.keys.documents_for(sink))
    return [fields[b"document"] for _, fields in found]


def settle(queue: Queue, settlement: Settlement, *documents: tuple[bytes, str, bytes]) -> int:
    return int(
        queue(jobs.settle(queue.keys, "w", [settlement], [SinkDocument(*document) for document in documents]))
    )


def collect(
    queue: Queue, *, most: int = 10, room: int = 10**6, lease: float = 60.0
) -> events_calls.ClaimedDocuments:
    found = queue(
        events_calls.claim_documents(queue.keys, SINK, max_documents=most, max_bytes=room, lease=lease)
    )
    assert isinstance(found, events_calls.ClaimedDocuments)
    return found


def put(queue: Queue, *words: bytes) -> list[str]:
    """Documents for the sink, as they were settled."""
    key = queue.keys.documents_for(SINK)
    return [queue.client.xadd(key, {"document": word}).decode() for word in words]


def nothing_is_left(queue: Queue) -> bool:
    return not queue.client.exists(
        queue.keys.documents_for(SINK), queue.keys.claimed_documents(SINK), queue.keys.document_progress(SINK)
    )


def test_what_a_job_returns_is_handed_on_in_the_same_step_and_once(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b")
    first, second = queue.read("w")
    words = done(first, "a")
    for _ in range(2):
        settle(queue, words, (first.id, f"{SINK} file", b""))
    assert waiting(queue) == waiting(queue, "file") == [words[3]]
    settle(queue, done(second, "b"), (second.id, SINK, b"with its value"))
    assert waiting(queue) == [words[3], b"with its value"]


def test_who_has_lost_its_lease_hands_nothing_on(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a")
    (entry,) = queue.read("w")
    queue.client.zrem(queue.keys.leases, "w")
    assert settle(queue, done(entry, "a"), (entry.id, SINK, b"")) == -1
    assert waiting(queue) == []
    queue.join("w")


def test_a_dead_job_is_handed_on_and_one_that_is_tried_again_is_not(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b")
    first, second = queue.read("w")
    settle(queue, failed_for_good(first, "a"), (first.id, SINK, b""))
    settle(queue, failed(second, "b"))
    ((_, _, document),) = queue(jobs.list_dead_jobs(queue.keys, count=2))
    assert waiting(queue) == [document]


def test_job_that_killed_its_workers_is_released_without_its_task(queue: Queue) -> None:
    queue(events_calls.declare_recipients(queue.keys, {"DEAD shop.t": SINK, "REVOKED shop.t": ""}))
    queue.publish("a")
    for worker in ("w", "x"):
        queue.join(worker)
        assert queue.read(worker)
        queue.lapse(worker)
        queue.recover(deliveries=1)
    (document,) = waiting(queue)
    assert b'"poisoned"' in document
    assert b'"DEAD"' in document


@pytest.mark.parametrize("has_it", [False, True])
def test_a_revoked_job_is_handed_on_whether_a_worker_has_it_or_not(queue: Queue, has_it: bool) -> None:
    queue(events_calls.declare_recipients(queue.keys, {"REVOKED shop.t": SINK}))
    queue.join("w")
    queue.publish("a")
    entries = queue.read("w") if has_it else []
    queue(jobs.revoke(queue.keys, ["a"], ttl=60))
    for entry in entries:
        assert waiting(queue) == []
        settle(queue, failed(entry, "a"))
    (document,) = waiting(queue)
    assert b'"REVOKED"' in document
    queue(events_calls.declare_recipients(queue.keys, {"REVOKED shop.t": ""}))
    assert not queue.client.exists(queue.keys.documents)


def test_claimed_entry_goes_to_no_other_until_its_time_is_over(queue: Queue) -> None:
    put(queue, b"1", b"2", b"3")
    assert [document.document for document in collect(queue, most=2).documents] == [b"1", b"2"]
    found = collect(queue)
    assert [document.document for document in found.documents] == [b"3"]
    assert found.retry_in == pytest.approx(60, abs=30)
    queue.client.zadd(
        queue.keys.claimed_documents(SINK),
        dict.fromkeys(queue.client.zrange(queue.keys.claimed_documents(SINK), 0, 1), 1),
    )
    assert [document.document for document in collect(queue).documents] == [b"1", b"2"]


def test_a_batch_is_bounded_in_bytes_unless_one_alone_is_larger(queue: Queue) -> None:
    put(queue, b"x" * 60, b"x" * 50, b"x" * 500)
    assert [len(collect(queue, room=100).documents) for _ in range(4)] == [1, 1, 1, 0]


def test_what_is_delivered_goes_and_then_nothing_is_left(queue: Queue) -> None:
    entries = put(queue, b"1", b"2", b"3")
    collect(queue)
    for count in (2, 0):
        assert queue(events_calls.acknowledge_documents(queue.keys, SINK, entries[:2])) == count
    assert not nothing_is_left(queue)
    assert queue(events_calls.acknowledge_documents(queue.keys, SINK, entries)) == 1
    assert nothing_is_left(queue)
    # Also when the clock has gone back meanwhile: nothing is remembered that would hide what comes now.
    queue.client.xadd(queue.keys.documents_for(SINK), {"document": b"old"}, id="5-0")
    assert [document.document for document in collect(queue).documents] == [b"old"]


def test_what_is_put_off_is_given_again_then_and_counted_if_it_was_tried(queue: Queue) -> None:
    (entry,) = put(queue, b"1")
    collect(queue)
    assert queue(events_calls.defer_documents(queue.keys, SINK, [entry], delay=0, tried=False)) == 1
    assert [document.tries for document in collect(queue).documents] == [0]
    queue(events_calls.defer_documents(queue.keys, SINK, [entry], delay=0, tried=True))
    assert [document.tries for document in collect(queue).documents] == [1]
    queue(events_calls.defer_documents(queue.keys, SINK, [entry], delay=60, tried=True))
    assert collect(queue).documents == []
    queue(events_calls.acknowledge_documents(queue.keys, SINK, [entry]))
    assert queue(events_calls.defer_documents(queue.keys, SINK, [entry], delay=0, tried=True)) == 0
    assert nothing_is_left(queue)


def test_dead_document_is_redelivered_once(queue: Queue) -> None:
    (entry,) = put(queue, b"1")
    collect(queue)
    assert [queue(events_calls.dead_letter_document(queue.keys, SINK, entry, b"{}")) for _ in range(2)] == [
        1,
        0,
    ]
    assert nothing_is_left(queue)
    ((grave, fields),) = queue.client.xrange(queue.keys.dead)
    assert fields == {b"sink": b"table", b"document": b"1", b"failure": b"{}"}
    assert [queue(events_calls.redeliver_documents(queue.keys, [grave.decode()])) for _ in range(2)] == [
        [DONE],
        [GONE],
    ]
    assert [document.document for document in collect(queue).documents] == [b"1"]
    assert not queue.client.exists(queue.keys.dead)


def test_a_dead_job_is_no_document_that_could_be_given_again(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a")
    (entry,) = queue.read("w")
    settle(queue, failed_for_good(entry, "a"))
    ((grave, _),) = queue.client.xrange(queue.keys.dead)
    assert queue(events_calls.redeliver_documents(queue.keys, [grave.decode()])) == [GONE]
    assert queue.where("a") == "DEAD"
    assert command("a")


def test_what_one_holds_no_other_does(queue: Queue) -> None:
    key = queue.keys.documents_for("lease")
    assert queue(cluster.acquire_lease(key, "one", lease=60)).wait == 0
    assert 30 < queue(cluster.acquire_lease(key, "two", lease=60)).wait <= 60
    assert queue(cluster.acquire_lease(key, "one", lease=120)).wait == 0
    assert queue.client.pttl(key) > 60_000
    assert queue(cluster.release_lease(key, "two")) == 0
    assert queue(cluster.release_lease(key, "one")) == 1
    assert queue(cluster.acquire_lease(key, "two", lease=5)).wait == 0
    assert queue(cluster.release_lease(key, "two")) == 1
