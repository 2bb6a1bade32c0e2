"""Claiming: the script that lets at most one job of a task and key live, one state change at a time."""

import time

import pytest

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls.jobs import Entry
from celery5.protocol.job.delivery import Settlement, pack_terms
from celery5.protocol.job.messages import Command, encode
from tests.redis.worker.one_queue import Queue, done, released

LOCK = "shop.t k"


def message(job_id: str, key: str = "k") -> bytes:
    """The message of a job that has a key."""
    return encode(Command(v=1, id=job_id, task="shop.t", key=key))


def claim(
    queue: Queue, *ids: str, at: str = "", key: str = "k", unique_for: float | None = None
) -> dict[str, str]:
    """Send jobs of one key; gives for each that was not sent the one that was in the way."""
    lock = f"shop.t {key}" if key else ""
    jobs = [(job_id, message(job_id, key), at, lock, unique_for) for job_id in ids]
    found: dict[str, str] = queue(jobs_calls.publish_unique(queue.keys, jobs))
    return found


def holder(queue: Queue) -> bytes | None:
    """Who has the key, by Redis."""
    found: bytes | None = queue.client.hget(queue.keys.unique, LOCK)
    return found


def ended(state: str, entry: Entry) -> Settlement:
    """The words by which a job ends in this state."""
    document = f'{{"v":1,"id":"a","task":"shop.t","state":"{state}"}}'
    if state == "DEAD":
        return Settlement(
            "bury", entry.id, "a", entry.message, 60_000, pack_terms(cause="", document=document)
        )
    return Settlement("complete", entry.id, "a", document.encode(), 60_000, LOCK.encode())


def retried(entry: Entry) -> Settlement:
    """The words by which a job is tried again at once."""
    return Settlement("retry", entry.id, "a", entry.message, 60_000, 0)


def test_one_job_of_a_key_is_sent_and_the_others_are_given_its_id(queue: Queue) -> None:
    assert claim(queue, "a") == {}
    assert claim(queue, "b", "c") == {"b": "a", "c": "a"}
    assert (queue.size().stream, holder(queue)) == (1, b"a")
    assert (queue.where("a"), queue.where("b")) == ("SENT", "UNKNOWN")


def test_a_key_is_a_tasks_and_a_queues_own(queue: Queue) -> None:
    assert claim(queue, "a") == claim(queue, "b", key="other") == {}
    other = [("c", message("c"), "", "shop.other k", None)]
    assert queue(jobs_calls.publish_unique(queue.keys, other)) == {}
    assert queue.size().stream == 3


def test_jobs_of_one_key_in_one_trip_are_one_job(queue: Queue) -> None:
    assert claim(queue, "a", "b", "a") == {"b": "a"}
    assert queue.size().stream == 1


def test_a_job_without_a_key_goes_along_in_its_place(queue: Queue) -> None:
    plain = [(job_id, message(job_id, ""), "", "", None) for job_id in ("x", "y")]
    keyed = [(job_id, message(job_id), "", LOCK, None) for job_id in ("a", "b")]
    assert queue(jobs_calls.publish_unique(queue.keys, [plain[0], keyed[0], plain[1], keyed[1]])) == {
        "b": "a"
    }
    queue.join("w")
    assert [entry.message for entry in queue.read("w")] == [plain[0][1], keyed[0][1], plain[1][1]]


@pytest.mark.parametrize("at", ["", "+60000"])
def test_a_trip_that_is_made_twice_gives_the_same_answer_and_sends_nothing_more(
    queue: Queue, at: str
) -> None:
    first = claim(queue, "a", "b", at=at, unique_for=60)
    before = queue.contents()
    assert claim(queue, "a", "b", at=at, unique_for=60) == first == {"b": "a"}
    assert queue.contents().keys() == before.keys()
    assert queue.size().unfinished == 1


def test_the_answer_is_the_same_when_the_job_has_ended_meanwhile(queue: Queue) -> None:
    queue.join("w")
    claim(queue, "a")
    queue.settle("w", ended("SUCCESS", queue.read("w")[0]))
    assert claim(queue, "a") == {}
    assert (queue.size().unfinished, holder(queue)) == (0, None)


@pytest.mark.parametrize("state", ["SUCCESS", "DEAD", "EXPIRED", "REJECTED", "REVOKED"])
def test_a_key_is_free_when_its_job_has_ended(queue: Queue, state: str) -> None:
    queue.join("w")
    claim(queue, "a")
    queue.settle("w", ended(state, queue.read("w")[0]))
    assert not queue.client.exists(queue.keys.unique)
    assert claim(queue, "b") == {}
    assert holder(queue) == b"b"


def test_a_key_is_kept_through_retries_and_what_is_given_back_and_recovered(queue: Queue) -> None:
    def others() -> dict[str, str]:
        return claim(queue, f"x{time.monotonic_ns()}")

    queue.join("w")
    claim(queue, "a")
    queue.settle("w", retried(queue.read("w")[0]))
    assert queue.where("a") == "RETRY"
    assert list(others().values()) == ["a"]
    queue(jobs_calls.promote_due_jobs(queue.keys, limit=10))
    queue.settle("w", released(queue.read("w")[0], "a"))
    assert (queue.where("a"), list(others().values())) == ("SENT", ["a"])
    queue.read("w")
    assert (queue.where("a"), list(others().values())) == ("EXECUTING", ["a"])
    queue.lapse("w")
    assert queue.recover().requeued == 1
    assert (queue.where("a"), list(others().values())) == ("SENT", ["a"])
    assert queue.size().unfinished == 1


def test_key_is_released_when_its_job_dies_as_poisonous(queue: Queue) -> None:
    queue.join("w")
    claim(queue, "a")
    queue.read("w")
    queue.lapse("w")
    assert queue.recover(deliveries=0).dead_lettered == 1
    assert holder(queue) is None
    assert claim(queue, "b") == {}


def test_a_key_is_free_when_its_worker_died_with_a_job_that_was_revoked(queue: Queue) -> None:
    queue.join("w")
    claim(queue, "a")
    (entry,) = queue.read("w")
    queue.client.hset(queue.keys.jobs, "a", b"V" + entry.id)
    queue.lapse("w")
    queue.recover()
    assert (queue.where("a"), holder(queue)) == ("ENDED", None)
    assert claim(queue, "b") == {}


@pytest.mark.plants
def test_a_job_that_ends_frees_no_others_key(queue: Queue) -> None:
    queue.join("w")
    claim(queue, "a")
    (entry,) = queue.read("w")
    queue.client.hset(queue.keys.unique, LOCK, "b")
    queue.settle("w", ended("SUCCESS", entry))
    assert holder(queue) == b"b"


@pytest.mark.parametrize("place", [None, "X1-1"])
@pytest.mark.plants
def test_a_key_whose_job_is_gone_or_dead_keeps_nobody_away(queue: Queue, place: str | None) -> None:
    queue.client.hset(queue.keys.unique, LOCK, "ghost")
    if place:
        queue.client.hset(queue.keys.jobs, "ghost", place)
    assert claim(queue, "a") == {}
    assert holder(queue) == b"a"


def test_a_scheduled_job_has_its_key_from_the_moment_it_is_sent(queue: Queue) -> None:
    listening = queue.client.pubsub()
    listening.subscribe(queue.keys.wake)
    assert claim(queue, "a", at="+60000") == {}
    assert claim(queue, "b") == claim(queue, "b", at="+1") == {"b": "a"}
    assert (queue.where("a"), queue.size().due, queue.size().stream) == ("SCHEDULED", 1, 0)
    heard: list[bytes] = []
    while not heard:
        told = listening.get_message(timeout=5)
        heard = [told["data"]] if told and told["type"] == "message" else []
    assert abs(int(heard[0]) / 1000 - time.time() - 60) < 30
    listening.close()
    earlier = str(int(time.time() * 1000) - 1)
    assert claim(queue, "c", at=earlier, key="other") == {}
    moved, due_in, _ = queue(jobs_calls.promote_due_jobs(queue.keys, limit=10))
    assert moved == 1
    assert 30 < due_in <= 60
    assert queue.where("c") == "SENT"


def test_unique_for_keeps_others_away_when_the_job_has_ended_until_its_time_is_over(queue: Queue) -> None:
    queue.join("w")
    assert claim(queue, "a", unique_for=60) == {}
    queue.settle("w", ended("SUCCESS", queue.read("w")[0]))
    assert holder(queue) is None
    assert claim(queue, "b", unique_for=60) == claim(queue, "b") == {"b": "a"}
    window = queue.keys.unique_window(LOCK)
    assert 30_000 < queue.client.pttl(window) <= 60_000, "those who came later did not prolong it"
    queue.client.pexpire(window, 1)
    while queue.client.exists(window):
        time.sleep(0.001)
    assert claim(queue, "c", unique_for=60) == {}
    assert queue.client.get(window) == b"c"


def test_unique_for_that_is_over_sends_nobody_while_the_job_lives(queue: Queue) -> None:
    claim(queue, "a", unique_for=0.001)
    while queue.client.exists(queue.keys.unique_window(LOCK)):
        time.sleep(0.001)
    assert claim(queue, "b", unique_for=60) == {"b": "a"}
    assert not queue.client.exists(queue.keys.unique_window(LOCK))


def test_nothing_is_left_of_keys_when_their_jobs_have_ended(queue: Queue) -> None:
    queue.join("w")
    for first in range(0, 10_000, 1000):
        ids = [str(number) for number in range(first, first + 1000)]
        jobs = [(job_id, message(job_id, job_id), "", f"shop.t {job_id}", 0.001) for job_id in ids]
        assert queue(jobs_calls.publish_unique(queue.keys, jobs)) == {}
        words = [done(entry, job_id, 1)._replace(terms=f"shop.t {job_id}".encode()) for entry, job_id in
                 zip(queue.read("w", 1000), ids, strict=True)]  # fmt: skip
        assert queue.settle("w", *words) == 1000
    queue(lease_calls.leave_queue(queue.keys, "w"))
    left = set(queue.contents())
    give_up = time.monotonic() + 30
    while len(left) > 1 and time.monotonic() < give_up:
        left = set(queue.contents())
    assert left == {queue.keys.stream}
