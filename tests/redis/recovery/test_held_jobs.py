"""Holding: what Redis does with a job that its worker may not begin now: it waits as it is, and counts nothing."""

import pytest

from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry
from celery5.protocol.job.delivery import Settlement
from tests.redis.worker.one_queue import Queue, QueueSize, command

KEPT = 60_000


def holding(entry: Entry, delay: int = 0) -> Settlement:
    """The words that hold what was read, for this many ms."""
    return Settlement("hold", entry.id, "a", entry.message, KEPT, delay)


def held(queue: Queue, delay: int = 0) -> Entry:
    """The job `a`, read and held."""
    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    assert queue.settle("w", holding(entry, delay)) == 1
    return entry


def test_a_held_job_waits_for_its_time_and_is_the_same_message_then(queue: Queue) -> None:
    held(queue, delay=60_000)
    assert queue.where("a") == "HELD"
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=1, dead=0)
    moved, due_in, _ = queue(jobs.promote_due_jobs(queue.keys, limit=10))
    assert moved == 0
    assert 30 < due_in <= 60
    assert queue.where("a") == "HELD"
    queue.fall_due("a")
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1
    (again,) = queue.read("w")
    assert (again.message, again.deliveries) == (command("a"), 0)
    assert not queue.client.exists(queue.keys.waiting)
    assert not queue.client.exists(queue.keys.due)


def test_settling_it_twice_holds_it_once(queue: Queue) -> None:
    entry = held(queue)
    before = queue.contents()
    assert queue.settle("w", holding(entry)) == 0
    assert queue.contents() == before
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1
    assert queue.settle("w", holding(entry)) == 0
    assert queue.where("a") == "SENT"


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_held_job_keeps_how_many_workers_went_down_with_it(queue: Queue, deaths: int) -> None:
    queue.publish("a")
    for _ in range(deaths):
        queue.join("w")
        queue.read("w")
        queue.recover("w")
    queue.join("w")
    (entry,) = queue.read("w")
    queue.settle("w", holding(entry))
    assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1
    (again,) = queue.read("w")
    assert again.deliveries == deaths


def test_a_job_that_was_revoked_while_a_worker_had_it_is_not_held(queue: Queue) -> None:

    queue.publish("a")
    queue.join("w")
    (entry,) = queue.read("w")
    assert queue(jobs.revoke(queue.keys, ["a"], ttl=60)) == ["EXECUTING"]
    assert queue.settle("w", holding(entry)) == 1
    assert queue.where("a") == "ENDED"
    assert not queue.client.exists(queue.keys.due)
