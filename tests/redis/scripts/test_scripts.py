"""Scripts: each of them against the real server, one state change at a time."""

import json
import time
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.calls import jobs, leases
from celery5.broker.calls.jobs import Entry
from celery5.protocol.job.delivery import Settlement, pack_terms
from tests.redis.worker.one_queue import (
    VERBS,
    Queue,
    QueueSize,
    command,
    done,
    failed,
    failed_for_good,
    released,
)

# Publishing


def test_a_job_is_published_once_however_often_the_trip_is_made(queue: Queue) -> None:
    assert queue.publish("a", "b") == 2
    assert queue.publish("a", "b", "c") == 1
    assert queue.size() == QueueSize(stream=3, in_workers=0, due=0, dead=0)
    queue.join("w")
    assert [(entry.message, entry.deliveries) for entry in queue.read("w")] == [
        (command(i), 0) for i in "abc"
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_that_is_known_or_has_ended_is_not_published_again(queue: Queue, verb: str) -> None:
    words, place = VERBS[verb]
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    assert (queue.publish("a"), queue.schedule("a", "+1")) == (0, 0)
    queue.settle("w", words(entry, "a"))
    before = queue.contents()
    assert (queue.publish("a"), queue.schedule("a", "+1")) == (0, 0)
    assert queue.where("a") == place
    assert queue.contents() == before


def test_jobs_twice_in_one_trip_are_one_job(queue: Queue) -> None:
    assert queue.publish("a", "a") == 1


def test_a_scheduled_job_waits_for_its_time_and_then_is_moved_once(queue: Queue) -> None:
    later = int(time.time() * 1000) + 60_000
    assert queue.schedule("late", str(later)) == 1
    assert queue.schedule("late", "+0") == queue.publish("late") == 0
    assert [queue.schedule(job_id, "+0") for job_id in "abc"] == [1, 1, 1]
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=4, dead=0)
    moved, due_in, _ = queue(jobs.promote_due_jobs(queue.keys, limit=2))
    assert (moved, due_in) == (2, 0)
    moved, due_in, _ = queue(jobs.promote_due_jobs(queue.keys, limit=2))
    assert moved == 1
    assert 30 < due_in <= 60
    assert queue(jobs.promote_due_jobs(queue.keys, limit=2))[0] == 0
    assert [queue.where(job_id) for job_id in ("late", "a", "b", "c")] == [
        "SCHEDULED",
        "SENT",
        "SENT",
        "SENT",
    ]
    assert queue.client.hkeys(queue.keys.waiting) == [b"late"]


def test_nothing_scheduled_is_nothing_to_wait_for(queue: Queue) -> None:
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10)) == (0, None, 0)


def test_a_scheduled_job_whose_command_is_gone_is_forgotten(queue: Queue) -> None:
    queue.schedule("a", "+0")
    queue.client.hdel(queue.keys.waiting, "a")
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1
    assert queue.where("a") == "UNKNOWN"
    assert queue.contents() == {}


def test_workers_are_woken_only_for_a_job_that_is_now_the_first(queue: Queue) -> None:
    with queue.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(queue.keys.wake)
        heard.get_message(timeout=5)
        queue.schedule("first", "+50000")
        queue.schedule("later", "+90000")
        queue.schedule("sooner", "+10000")
        queue.schedule("sooner", "+1")  # known
        queue.client.publish(queue.keys.wake, "0")  # whatever was said was said before this
        told = list(iter(lambda: (heard.get_message(timeout=30) or {"data": b"0"})["data"], b"0"))
    first, sooner = map(int, told)
    assert 10_000 < first - sooner <= 40_000


# Settling


@pytest.mark.parametrize("verb", VERBS)
def test_settling_twice_is_settling_once(queue: Queue, verb: str) -> None:
    words, place = VERBS[verb]
    queue.publish("a", "b")
    queue.join("w")
    entry, other = queue.read("w")
    assert queue.settle("w", words(entry, "a")) == 1
    assert queue.where("a") == place
    before = queue.contents()
    assert queue.settle("w", words(entry, "a")) == 0
    assert queue.contents() == before
    assert queue.where("b") == "EXECUTING"
    assert [owned.id for owned in queue.mine("w")] == [other.id]


def test_one_trip_settles_many_in_every_way(queue: Queue) -> None:
    queue.publish("a", "b", "c", "d", "e")
    queue.join("w")
    a, b, c, d, _ = queue.read("w")
    assert queue.settle("w", done(a, "a"), failed(b, "b"), failed_for_good(c, "c"), released(d, "d")) == 4
    assert [queue.where(job_id) for job_id in "abcde"] == ["ENDED", "RETRY", "DEAD", "SENT", "EXECUTING"]
    assert queue.size() == QueueSize(stream=2, in_workers=1, due=1, dead=1)


def test_a_result_is_stored_announced_and_expires(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    a, b = queue.read("w")
    with queue.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(queue.keys.result("a"), queue.keys.result("b"))
        heard.get_message(timeout=5)
        queue.settle("w", done(a, "a", 60_000), failed_for_good(b, "b", 1))
        told = [message["channel"] for message in [heard.get_message(timeout=1) for _ in range(4)] if message]
    assert told == [queue.keys.result(job_id).encode() for job_id in "ab"]
    assert 30_000 < queue.client.pttl(queue.keys.result("a")) <= 60_000
    expired(queue, "b")
    assert queue.where("b") == "DEAD"  # for as long as it is in the dead-letter queue
    assert queue(jobs.delete_results(queue.keys, ["a", "b"])) == 1
    assert queue.where("a") == "UNKNOWN"


def expired(queue: Queue, job_id: str) -> None:
    """Wait until the document of a job is gone."""
    end = time.monotonic() + 30
    while queue.client.exists(queue.keys.result(job_id)):
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lease", ["none", "being recovered"])
def test_a_worker_without_a_lease_settles_nothing(queue: Queue, verb: str, lease: str) -> None:
    words, _ = VERBS[verb]
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    if lease == "none":
        queue.client.zrem(queue.keys.leases, "w")
    else:
        queue.client.zadd(queue.keys.leases, {"w": -1})
    before = queue.contents()
    assert queue.settle("w", words(entry, "a")) == -1
    assert queue.contents() == before
    assert queue.where("a") == "EXECUTING"


@pytest.mark.parametrize("verb", VERBS)
def test_what_was_given_to_another_is_left_alone(queue: Queue, verb: str) -> None:
    words, _ = VERBS[verb]
    queue.publish("a")
    queue.join("old")
    queue.join("new")
    (entry,) = queue.read("old")
    assert queue.recover("old").requeued == 1
    (again,) = queue.read("new")
    queue.join("old")  # back again, under its old name
    before = queue.contents()
    assert queue.settle("old", words(entry, "a")) == 0
    assert queue.contents() == before
    assert queue.settle("new", done(again, "a")) == 1


def test_lapsed_worker_may_settle_until_it_is_recovered(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    queue.lapse("w")
    assert queue.settle("w", done(entry, "a")) == 1


def test_a_retry_comes_back_with_its_new_message(queue: Queue) -> None:
    queue.publish("a")
    queue.join("dead")
    queue.read("dead")
    queue.recover("dead")
    queue.join("w")
    (entry,) = queue.read("w")
    assert entry.deliveries == 1
    queue.settle("w", Settlement("retry", entry.id, "a", b"second", 0, 0))
    assert queue.where("a") == "RETRY"
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1
    (again,) = queue.read("w")
    assert (again.message, again.deliveries) == (b"second", 0)


def test_a_retry_waits_for_its_delay(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    queue.settle("w", Settlement("retry", entry.id, "a", b"second", 0, 60_000))
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 0
    assert queue.where("a") == "RETRY"


def test_returned_job_goes_behind_what_was_sent_later(queue: Queue) -> None:
    queue.join("w1")
    queue.publish("a", "b", "c")
    first, second = queue.read("w1", count=2)
    queue.settle("w1", released(first, "a"), failed(second, "b", delay=0))
    queue(jobs.promote_due_jobs(queue.keys, limit=10))
    assert [json.loads(entry.message)["id"] for entry in queue.read("w1")] == ["c", "a", "b"]


def test_corrupt_message_becomes_a_dead_letter_without_an_id(queue: Queue) -> None:
    queue.client.xadd(queue.keys.stream, {"job": b"\xff"})
    queue.client.xadd(queue.keys.stream, {"nonsense": "x"})
    queue.join("w")
    first, second = queue.read("w")
    assert (first.message, second.message) == (b"\xff", b"")
    queue.settle(
        "w",
        Settlement("bury", first.id, "", b"\xff", 1000, pack_terms(cause="", document="why")),
        released(second, ""),
    )
    assert queue(jobs.list_dead_jobs(queue.keys, count=9))[0][1:] == (b"\xff", b"why")
    assert not queue.client.exists(queue.keys.jobs)


def test_no_queue_is_ever_trimmed(queue: Queue) -> None:
    ids, portion = [f"j{number}" for number in range(1500)], 100
    assert sum(queue.publish(*ids[at : at + portion]) for at in range(0, 1400, portion)) == 1400
    assert sum(queue.publish(job_id) for job_id in ids[1400:]) == 100
    assert queue.size().stream == 1500
    queue.join("w")
    for _ in range(0, 1500, portion):
        taken = queue.read("w", portion)
        queue.settle("w", *(failed_for_good(entry, json.loads(entry.message)["id"]) for entry in taken))
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=1500)
    places = queue.client.hgetall(queue.keys.jobs)
    dead_letters = queue(jobs.list_dead_jobs(queue.keys, count=2000))
    assert [places[job_id.encode()].decode() for job_id in ids] == [
        f"X{entry}" for entry, _, _ in dead_letters
    ]


def test_settling_many_leaves_what_others_have_and_what_nobody_has_read(queue: Queue) -> None:
    ids = [f"j{number}" for number in range(300)]
    queue.publish(*ids[:150])
    queue.publish(*ids[150:])
    queue.join("w")
    queue.join("other")
    first = queue.read("w", 100)
    between = queue.read("other", 3)
    later = queue.read("w", 100)

    def settle(*entries: Entry) -> int:
        return queue.settle("w", *(done(entry, json.loads(entry.message)["id"]) for entry in entries))

    def left() -> list[bytes]:
        return [entry for entry, _ in queue.client.xrange(queue.keys.stream)]

    unread = left()[203:]
    assert settle(*first[1:]) == 99  # an earlier entry is pending
    assert left() == [first[0].id, *(entry.id for entry in (*between, *later)), *unread]
    assert settle(first[0], *later[:49]) == 50  # all before those of the other worker, and some behind them
    assert left() == [entry.id for entry in (*between, *later[49:])] + unread
    assert settle(*later[49:]) == 51
    assert left() == [entry.id for entry in between] + unread
    assert [entry.id for entry in queue.mine("other")] == [entry.id for entry in between]
    assert len(queue.read("other", 1000)) == len(unread) == 97


# Looking


def test_where_a_job_is_in_every_state(queue: Queue) -> None:
    assert queue.where("a") == "UNKNOWN"
    queue.publish("a")
    assert queue.where("a") == "SENT"
    queue.join("w")
    (entry,) = queue.read("w")
    assert queue(jobs.locate_job(queue.keys, "a")) == jobs.LocatedJob("EXECUTING", "w", b"")
    queue.settle("w", done(entry, "a"))
    place = queue(jobs.locate_job(queue.keys, "a"))
    assert (place.state, json.loads(place.document)["state"]) == ("ENDED", "SUCCESS")
    queue.client.hset(queue.keys.jobs, "h", "H")
    queue.client.hset(queue.keys.waiting, "h", b"{}")
    queue.client.zadd(queue.keys.due, {"h": 1})
    assert queue.where("h") == "HELD"


def test_states_and_progress_of_many_jobs_are_read_in_one_call(queue: Queue) -> None:
    def states(*ids: str) -> list[tuple[str, float | None]]:
        found = queue(jobs.read_states(queue.keys, ids))
        return [(state.state, state.progress.done if state.progress else None) for state in found]

    def report(job_id: str, worker: str) -> None:
        fields = {"done": 3, "total": "", "note": "", "attempt": 1, "at": 1, "worker": worker}
        queue.client.hset(queue.keys.progress(job_id), mapping=fields)
        queue.client.expire(queue.keys.progress(job_id), 60)

    queue.publish("a", "b")
    queue.join("w")
    assert states("a", "b", "c") == [("SENT", None), ("SENT", None), ("UNKNOWN", None)]
    first, _ = queue.read("w")
    report("a", "w")
    report("b", "another")  # that had it before
    assert states("c", "b", "a") == [("UNKNOWN", None), ("EXECUTING", None), ("EXECUTING", 3)]
    queue.settle("w", done(first, "a"))
    assert states("a", "b") == [("ENDED", None), ("EXECUTING", None)]


def test_an_empty_queue_measures_nothing(queue: Queue) -> None:
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=0)
    assert queue.size().unfinished == 0
    assert queue.contents() == {}


# What is left, and what it weighs


def test_when_all_is_settled_and_expired_only_the_stream_is_left(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b")
    queue.schedule("c", "+0")
    queue(jobs.promote_due_jobs(queue.keys, limit=9))
    for number in range(4):
        for entry in queue.read("w"):
            job_id = json.loads(entry.message)["id"]
            queue.settle("w", failed(entry, job_id, 0) if number < 2 else done(entry, job_id, 1))
        queue(jobs.promote_due_jobs(queue.keys, limit=9))
    queue(leases.leave_queue(queue.keys, "w"))
    for job_id in "abc":
        expired(queue, job_id)
    assert list(queue.contents()) == [queue.keys.stream]
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=0)


def test_every_key_is_a_queues_own_or_expires(queue: Queue) -> None:
    queue.join("w")
    queue.publish("a", "b", "c")
    queue.schedule("d", "+60000")
    a, b, _ = queue.read("w")
    queue.settle("w", done(a, "a"), failed_for_good(b, "b"))
    keys = queue.keys
    own = {keys.stream, keys.jobs, keys.due, keys.waiting, keys.dead, keys.leases}
    found = set(queue.contents())
    assert found == own | {keys.result("a"), keys.result("b")}
    assert all(queue.client.pttl(key) > 0 for key in found - own)


def test_a_queued_job_takes_at_most_300_bytes(own_server: Any, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task(name="shop.tasks.charge")
    async def charge(order: int, amount: float) -> None: ...

    with redis.Redis.from_url(own_server.url) as client:
        app.send_many([charge.s(0, 9.9)])
        before = client.info("memory")["used_memory_dataset"]
        app.send_many([charge.s(number, 9.9) for number in range(10_000)])
        each = (client.info("memory")["used_memory_dataset"] - before) / 10_000
    app.close()
    assert each <= 300, f"{each:.0f} bytes"
