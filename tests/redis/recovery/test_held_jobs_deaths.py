"""Holding and deaths: jobs that an open circuit breaker holds outlive every worker, and each of them runs once."""

import signal
from collections import Counter
from typing import Any

import pytest
import redis

from celery5 import AsyncResult, TaskFailed, gather
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import leftovers


def send(staff: Staff, *jobs: list[str]) -> list[AsyncResult[object]]:
    """Jobs of the task with the breaker."""
    task = staff.app.tasks["guarded"].options(max_retries=0)
    return staff.app.send_many([task.s(acts) for acts in jobs])


def trip(staff: Staff) -> None:
    """One job fails, and so the breaker is open."""
    (job,) = send(staff, ["fail"])
    with pytest.raises(TaskFailed, match="run 1"):
        job.get(timeout=30)


def fall_due(staff: Staff, client: "redis.Redis") -> None:
    """Let the time come to which jobs are held."""
    due = staff.app.queue("default").due
    members: Any = client.zrange(due, 0, -1)
    client.zadd(due, dict.fromkeys(members, 1))


def assert_each_ran_once(staff: Staff, sent: list[AsyncResult[object]]) -> None:
    """None is lost, none is doubled, and to be held is no attempt."""
    assert gather(sent, timeout=30) == [1] * len(sent)
    ids = {job.id for job in sent}
    begun = [note for note in staff.notes() if note.job in ids]
    assert Counter(note.job for note in begun) == dict.fromkeys(ids, 1)
    assert {note.attempt for note in begun} == {1}


def assert_nothing_is_left(staff: Staff, client: "redis.Redis") -> None:
    names = {key.rpartition(":")[2] for key in leftovers(client, staff.app) if ":result:" not in key}
    assert not names & {"due", "waiting"}
    assert redis_jobs(staff, client) == {b"X"}  # the one that tripped the breaker


def redis_jobs(staff: Staff, client: "redis.Redis") -> set[bytes]:
    """The kinds of places of all jobs that have one."""
    places: Any = client.hvals(staff.app.queue("default").jobs)
    return {place[:1] for place in places}


def test_held_jobs_outlive_the_worker_that_held_them(
    staff: Staff, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUARDED_RESET", "600")
    first = staff.start()
    trip(staff)
    sent = send(staff, *[["return"]] * 30)
    wait_until(lambda: redis_client.hlen(staff.app.queue("default").waiting) == 30)
    state = staff.app.info()
    assert state.unfinished == state.queues["default"].scheduled == 30
    first.signal(signal.SIGKILL)
    first.wait()
    assert {job.status().value for job in sent} == {"HELD"}
    fall_due(staff, redis_client)
    staff.start()  # whose own breaker is closed: it runs what falls due
    assert_each_ran_once(staff, sent)
    assert_nothing_is_left(staff, redis_client)


def test_a_worker_that_dies_while_it_holds_jobs_loses_none_and_doubles_none(
    staff: Staff, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUARDED_RESET", "600")
    first = staff.start()
    trip(staff)
    keys = staff.app.queue("default")
    sent = send(staff, *[["return"]] * 3000)
    wait_until(lambda: redis_client.hlen(keys.waiting) > 0)
    first.signal(signal.SIGKILL)
    first.wait()
    assert redis_client.hlen(keys.waiting) > 0  # some are held, some are with it, some are on the stream
    fall_due(staff, redis_client)
    staff.start()
    assert_each_ran_once(staff, sent)
    assert_nothing_is_left(staff, redis_client)


def test_a_probe_that_takes_its_worker_down_is_recovered_and_holds_up_nobody(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    one, two = staff.start(), staff.start()
    trip(staff)
    (probe,) = send(staff, ["die", "return"])
    others = send(staff, *[["return"]] * 20)
    assert probe.get(timeout=30) == 2
    assert_each_ran_once(staff, others)
    wait_until(lambda: sum(worker.process.poll() is not None for worker in (one, two)) == 1)
    assert_nothing_is_left(staff, redis_client)
