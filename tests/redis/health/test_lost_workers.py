"""A worker whose jobs are put back, though it has not left, was lost: that is noted for an hour, with what it held."""

import json
from typing import Any, cast

import pytest

from celery5.broker.calls import leases
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.queues import QueueState
from celery5.protocol.observability.queue_depth import QueueDepth
from tests.redis.worker.one_queue import Queue


def get_state(queue: Queue) -> QueueState:
    """The state of the queue."""
    state = queue(queue_calls.get_queue_state(queue.keys))
    assert isinstance(state, QueueState)
    return state


def get_depth(queue: Queue) -> QueueDepth:
    """What is measured of the queue."""
    depth = queue(queue_calls.get_queue_depth(queue.keys))
    assert isinstance(depth, QueueDepth)
    return depth


@pytest.mark.parametrize("held", [0, 1, 25])
def test_a_lost_worker_is_noted_once_with_what_became_of_its_jobs(queue: Queue, held: int) -> None:
    ids = [f"job-{number}" for number in range(held)]
    if ids:
        queue.publish(*ids)
    queue.join("w")
    begun = [entry.id for entry in queue.read("w")] if ids else []
    while queue.recover("w", limit=16, begun=begun[:3]).has_more:
        pass
    (record,) = get_state(queue).lost
    assert (record.worker, record.put_back, record.dead) == ("w", held, 0)
    assert [(job.id, job.fate) for job in record.jobs] == [(job_id, "put back") for job_id in ids[:3]]
    depth = get_depth(queue)
    assert (depth.lost, list(depth.lost_workers)) == (1, ["w"])
    queue.recover("w")  # safe to repeat: it has no lease any more
    assert get_depth(queue).lost == 1


def test_what_became_of_each_job_is_noted(queue: Queue) -> None:
    queue.publish("back", "gone", "revoked")
    queue.join("w")
    entries = dict(zip(("back", "gone", "revoked"), queue.read("w"), strict=True))
    queue.client.hset(queue.keys.jobs, "revoked", b"V" + entries["revoked"].id)
    queue.client.hdel(queue.keys.jobs, "gone")
    queue.client.set(queue.keys.result("gone"), b"{}", ex=60)
    queue.recover("w")
    (record,) = get_state(queue).lost
    fates = {job.id: job.fate for job in record.jobs}
    assert fates == {"back": "put back", "gone": "had ended", "revoked": "revoked"}
    queue.join("v")
    queue.read("v")
    queue.recover("v", deliveries=1)
    (other,) = (record for record in get_state(queue).lost if record.worker == "v")
    assert [(job.id, job.fate) for job in other.jobs] == [("back", "dead letter")]
    assert other.dead == 1


@pytest.mark.parametrize("how", ["left", "left and holding", "never joined", "jobs of nobody"])
def test_a_worker_that_left_is_not_lost(queue: Queue, how: str) -> None:
    queue.publish("a")
    if how != "never joined":
        queue.join("w")
    if how in ("left and holding", "jobs of nobody"):
        queue.read("w")
    if how == "jobs of nobody":
        queue.client.zrem(queue.keys.leases, "w")
    elif how != "never joined":
        queue(leases.leave_queue(queue.keys, "w"))
    queue.recover("w" if how != "jobs of nobody" else "")
    assert get_state(queue).lost == ()
    assert (get_depth(queue).lost, get_depth(queue).lost_workers) == (0, {})


def test_a_worker_that_ended_in_order_and_could_not_leave_is_not_lost(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    call = leases.recover(
        queue.keys, worker="w", max_deliveries=0, limit=10, ttl=60, message_limit=1_000_000, has_left=True
    )
    assert queue(call).requeued == 1
    assert (get_state(queue).lost, get_depth(queue).deaths) == ((), {})


def test_a_worker_whose_lease_is_over_is_lost_before_anybody_puts_its_jobs_back(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    queue.lapse("w")
    state = get_state(queue)
    assert [worker.lapsed is not None for worker in state.workers] == [True]
    assert (state.workers[0].running, state.lost) == (1, ())
    assert get_depth(queue).lost == 1
    queue.recover("w")
    assert get_depth(queue).lost == 1
    assert get_state(queue).lost[0].put_back == 1


def test_a_lease_that_nobody_recovers_is_forgotten_after_an_hour(queue: Queue) -> None:
    queue.join("w")
    now = cast("Any", queue.client.time())[0] * 1000
    queue.client.zadd(queue.keys.leases, {"w": now - 3_700_000})
    assert (get_depth(queue).lost, get_depth(queue).lost_workers) == (0, {})
    queue.client.zadd(queue.keys.leases, {"w": now - 3_500_000})
    assert (get_depth(queue).lost, list(get_depth(queue).lost_workers)) == (1, ["w"])


def test_the_lease_says_that_a_sidecar_renews_it_until_the_worker_does(queue: Queue) -> None:
    queue.join("w")
    for silent_for in (None, 0.0, 3.9, 95.0, 4093.0, 1e6, None):
        assert queue(leases.renew_lease(queue.keys, "w", lease=30, silent_for=silent_for)).alive
        if silent_for is None:
            queue.client.zincrby(queue.keys.leases, -1000, "w")  # a second ago
        (worker,) = get_state(queue).workers
        assert worker.is_blocked == (silent_for is not None)
        expected = None if silent_for is None else min(int(silent_for), 4094)
        assert worker.silent_for == expected
        assert get_depth(queue).silent_workers == ({} if expected is None else {"w": expected})
        assert worker.alive
    assert get_depth(queue).lost == 0


def test_two_hundred_lost_workers_are_noted_at_most_and_none_for_longer_than_an_hour(queue: Queue) -> None:
    for number in range(205):
        queue.join(f"w{number}")
        queue.recover(f"w{number}")
    for size in (queue.client.zcard(queue.keys.lost_workers), queue.client.hlen(queue.keys.lost_work)):
        assert size == 200
    assert get_depth(queue).lost == 200
    state = get_state(queue)
    assert (state.lost_count, len(state.lost), state.lost[0].worker) == (200, 200, "w204")
    hour_ago = state.lost[0].at * 1000 - 3_601_000
    queue.client.zadd(queue.keys.lost_workers, {f"w{number}": hour_ago for number in range(150)})
    assert get_depth(queue).lost == 55
    queue.join("last")
    queue.recover("last")
    assert queue.client.hlen(queue.keys.lost_work) == queue.client.zcard(queue.keys.lost_workers) == 56
    for key in (queue.keys.lost_workers, queue.keys.lost_work):
        assert 0 < queue.client.ttl(key) <= 3600


@pytest.mark.parametrize(
    ("ago", "silent_for", "is_idle", "is_blocked"),
    [(0, 8.5, False, False), (0, 0.5, False, False), (9, 8.5, False, True), (0, 8.5, True, True)],
)
def test_late_call_of_a_sidecar_says_nothing_of_a_worker_that_renewed_since(
    queue: Queue, ago: int, silent_for: float, is_idle: bool, is_blocked: bool
) -> None:
    # A server that was frozen runs the heartbeat of the worker, and then the call of its sidecar.
    queue.join("w")
    idle_lease = 90.0 if is_idle else None  # of an idle worker nobody can see when it was renewed
    queue(leases.renew_lease(queue.keys, "w", lease=30, idle_lease=idle_lease))
    queue.client.zincrby(queue.keys.leases, -ago * 1000, "w")
    assert queue(leases.renew_lease(queue.keys, "w", lease=30, silent_for=silent_for)).alive
    (worker,) = get_state(queue).workers
    assert worker.is_blocked == is_blocked
    assert worker.lease > 29


def test_dead_letters_of_others_are_none_of_a_lost_worker(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    queue.read("w")
    assert queue.recover("w", deliveries=0).dead_lettered == 2
    first, last = (entry for entry, _ in cast("Any", queue.client.xrange(queue.keys.dead)))

    def is_left() -> bool:
        return get_state(queue).lost[0].has_dead_left

    assert is_left()
    queue.client.xdel(queue.keys.dead, first)
    assert is_left()
    queue.client.xdel(queue.keys.dead, last)
    queue.client.hdel(queue.keys.jobs, "a", "b")
    queue.client.xadd(queue.keys.dead, {"job": "{}"})  # it is of another job
    assert get_state(queue).dead == 1
    assert not is_left()
    note = json.loads(cast("Any", queue.client.hget(queue.keys.lost_work, "w")))
    del note["first_dead"], note["last_dead"]
    queue.client.hset(queue.keys.lost_work, "w", json.dumps(note))
    assert is_left(), "an older worker does not note which they are"


def lose(queue: Queue, worker: str) -> None:
    """Let a worker join, and recover it."""
    queue.join(worker)
    assert queue.recover(worker).worker == worker


def get_repairs(queue: Queue) -> dict[str, bool]:
    """Whether each loss is noted as repaired."""
    return {record.worker: record.repaired_at is not None for record in get_state(queue).lost}


def test_loss_is_repaired_for_ever_once_a_worker_of_its_name_joins(queue: Queue) -> None:
    lose(queue, "till:a")
    lose(queue, "desk:a")
    queue.join("tills:a")  # another name, though it begins so
    assert get_repairs(queue) == {"till:a": False, "desk:a": False}
    queue.join("till:b")
    (since,) = [record.repaired_at for record in get_state(queue).lost if record.worker == "till:a"]
    assert get_repairs(queue) == {"till:a": True, "desk:a": False}
    queue(leases.leave_queue(queue.keys, "till:b"))
    queue.join("till:c")
    assert get_repairs(queue) == {"till:a": True, "desk:a": False}
    assert [record.repaired_at for record in get_state(queue).lost if record.worker == "till:a"] == [since]
    queue.recover("till:c")  # a loss of its own
    assert get_repairs(queue) == {"till:a": True, "desk:a": False, "till:c": False}
    assert 0 < cast("Any", queue.client.pttl(queue.keys.lost_work)) <= 3_600_000


def test_loss_noted_after_its_successor_has_joined_is_repaired(queue: Queue) -> None:
    queue.join("till:a")
    queue.join("till:b")
    queue.recover("till:a")
    queue(leases.leave_queue(queue.keys, "till:b"))
    assert get_repairs(queue) == {"till:a": True}


def test_losses_are_read_beside_processes_of_an_older_version(queue: Queue) -> None:
    lose(queue, "till:a")
    note = json.loads(cast("Any", queue.client.hget(queue.keys.lost_work, "till:a")))
    assert "repaired_at" not in note, "it is what an older worker notes"
    queue.client.zadd(queue.keys.leases, {"till:b": 2**41})  # as an older worker joins: nothing is noted
    assert get_repairs(queue) == {"till:a": False}
    queue.client.zrem(queue.keys.leases, "till:b")
    queue.join("till:c")
    note = json.loads(cast("Any", queue.client.hget(queue.keys.lost_work, "till:a")))
    assert note.pop("repaired_at") > 10**12
    assert note == {"put_back": 0, "dead": 0, "why": "", "tasks": {}}, "an older reader finds what it knows"


@pytest.mark.parametrize("note", [b"{", b"[]", b"null", b"7"])
def test_worker_joins_though_the_note_of_a_loss_cannot_be_read(queue: Queue, note: bytes) -> None:
    lose(queue, "till:a")
    queue.client.hset(queue.keys.lost_work, "till:a", note)
    queue.join("till:b")
    assert [worker.name for worker in get_state(queue).workers] == ["till:b"]
    queue.client.set(queue.keys.lost_work, "spoilt", ex=60)
    queue.join("till:c")
