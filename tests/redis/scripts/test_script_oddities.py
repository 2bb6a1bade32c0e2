"""Script oddities: what raw producers may put on a stream, and copies of jobs, lose nothing and stop no script."""

import json

import pytest
import redis

from celery5 import App, TaskFailed
from celery5.broker.calls import jobs, leases
from celery5.broker.calls.jobs import Entry, revoke
from celery5.protocol.job.delivery import Settlement, pack_terms
from celery5.protocol.job.messages import Command, encode
from celery5.protocol.job.states import ADMITTED, HIGH, NORMAL
from tests.redis.worker.one_queue import Queue, QueueSize, command, done
from tests.redis.worker.workers import until, working


def place(queue: Queue, job_id: str = "a") -> str:
    found = queue.client.hget(queue.keys.jobs, job_id)
    return found.decode() if isinstance(found, bytes) else ""


def document(queue: Queue, job_id: str = "a") -> dict[str, object]:
    raw = queue.client.get(queue.keys.result(job_id))
    return dict(json.loads(raw)) if isinstance(raw, bytes) else {}


def copied(queue: Queue) -> tuple[Entry, Entry]:
    """The job `a`, which `w1` has, and a copy of it, which `w2` has."""
    queue.publish("a")
    queue.join("w1")
    queue.join("w2")
    (first,) = queue.read("w1")
    queue.client.xadd(queue.keys.stream, {"job": command("a")})
    (copy,) = queue.read("w2")
    return first, copy


DEAD_TERMS = pack_terms(cause="", document="{}")
ODD = [
    b'{"v":1,"id":"a","task":"t","attempt":1e999}',
    b'{"v":1,"id":"a","task":"t","attempt":-1e999,"sent":1e999,"results_ttl":1e999}',
    b'{"v":1,"id":"a","task":"t","attempt":1.5,"sent":-1e999,"results_ttl":1e300}',
    b'{"v":1,"id":"a","key":"k"}',
    b'{"v":1,"id":"a","key":"k","task":5}',
    b'{"v":1,"id":"a","key":"k","task":{}}',
    b'{"v":1,"id":"a","key":[],"task":null,"attempt":"x","sent":{},"results_ttl":[]}',
]


@pytest.mark.parametrize("message", ODD, ids=repr)
def test_a_message_that_makes_no_sense_is_never_lost_with_its_worker(queue: Queue, message: bytes) -> None:
    queue.client.xadd(queue.keys.stream, {"job": message, "deliveries": 3})
    queue.publish("good")
    queue.join("w")
    assert len(queue.read("w")) == 2
    assert queue.recover("w") == leases.RecoveryResult(
        worker="w", requeued=1, dead_lettered=1, has_more=False
    )
    ((_, kept, dead_letter),) = queue(jobs.list_dead_jobs(queue.keys, count=9))
    assert kept == message
    assert document(queue) == json.loads(dead_letter)
    assert document(queue)["attempt"] == 1
    assert not queue.client.exists(queue.keys.leases)


@pytest.mark.parametrize("how", ["waiting", "due", "recovered", "released", "dead-lettered"])
@pytest.mark.parametrize("message", ODD, ids=repr)
def test_a_message_that_makes_no_sense_is_revoked_like_any_other(
    queue: Queue, message: bytes, how: str
) -> None:
    queue.join("w")
    if how == "due":
        queue(jobs.schedule(queue.keys, [("a", message, "+60000")]))
    else:
        queue(jobs.publish(queue.keys, [("a", message)]))
    entries = queue.read("w") if how in ("recovered", "released", "dead-lettered") else []
    (found,) = queue(revoke(queue.keys, ["a"], ttl=60))
    assert found == ("EXECUTING" if entries else "REVOKED")
    if how == "recovered":
        assert queue.recover("w").dead_lettered == 0
    for entry in entries if how != "recovered" else []:
        terms = 0 if how == "released" else DEAD_TERMS
        verb = "release" if how == "released" else "bury"
        assert queue.settle("w", Settlement(verb, entry.id, "a", message, 60_000, terms)) == 1
    assert document(queue)["state"] == "REVOKED"
    assert document(queue)["attempt"] == 1
    assert queue.where("a") == "ENDED"
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=0)
    assert 0 < int(queue.client.pttl(queue.keys.result("a"))) < 2e15


def test_a_copy_that_is_recovered_leaves_the_place_of_its_job_alone(queue: Queue) -> None:
    first, _ = copied(queue)
    assert queue.recover("w2").requeued == 1
    assert place(queue) == "S" + first.id.decode()
    queue.join("w3")
    queue.read("w3")
    assert queue.recover("w3", deliveries=0).dead_lettered == 1
    assert place(queue) == "S" + first.id.decode()
    assert document(queue) == {}
    assert queue.settle("w1", done(first, "a")) == 1


@pytest.mark.parametrize("verb", ["recover", "retry", "release", "bury"])
def test_a_copy_of_a_revoked_job_goes_and_the_job_stays_revoked(queue: Queue, verb: str) -> None:
    first, copy = copied(queue)
    assert queue(revoke(queue.keys, ["a"], ttl=60)) == ["EXECUTING"]
    if verb == "recover":
        assert queue.recover("w2") == leases.RecoveryResult(
            worker="w2", requeued=0, dead_lettered=0, has_more=False
        )
    else:
        terms = DEAD_TERMS if verb == "bury" else 60_000
        assert queue.settle("w2", Settlement(verb, copy.id, "a", command("a"), 60_000, terms)) == 1
    assert place(queue) == "V" + first.id.decode()
    assert document(queue) == {}
    assert queue.size() == QueueSize(stream=1, in_workers=1, due=0, dead=0)
    assert queue.settle("w1", Settlement("retry", first.id, "a", command("a"), 60_000, 0)) == 1
    assert document(queue)["state"] == "REVOKED"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("lane", [NORMAL, HIGH, ADMITTED])
def test_second_raw_entry_of_an_id_changes_nothing(queue: Queue, lane: str, together: bool) -> None:
    queue.keys = queue.keys.on_lane(lane)
    for _ in range(2):
        queue.client.xadd(queue.keys.stream, {"job": command("a")})
    queue.join("w")
    first, second = queue.read("w")
    other = done(second, "a")._replace(payload=b'{"v":1,"id":"a","task":"t","state":"REJECTED"}')
    outcomes = [done(first, "a"), other]
    assert (
        sum(
            queue.settle("w", *batch)
            for batch in ([outcomes] if together else [[outcome] for outcome in outcomes])
        )
        == 2
    )
    assert (place(queue), document(queue)["state"]) == ("", "SUCCESS")
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=0)


def test_only_the_right_one_of_two_entries_ends_the_job(queue: Queue) -> None:
    first, copy = copied(queue)
    assert queue.settle("w2", done(copy, "a")) == 1
    assert (place(queue), document(queue)) == ("S" + first.id.decode(), {})
    assert queue.settle("w1", done(first, "a")) == 1
    assert (place(queue), document(queue)["state"]) == ("", "SUCCESS")


@pytest.mark.parametrize("verb", ["retry", "release", "hold"])
def test_a_copy_does_not_come_back_and_its_job_goes_on(queue: Queue, verb: str) -> None:
    first, copy = copied(queue)
    assert queue.settle("w2", Settlement(verb, copy.id, "a", command("a"), 60_000, 0)) == 1
    assert place(queue) == "S" + first.id.decode()
    assert queue.size() == QueueSize(stream=1, in_workers=1, due=0, dead=0)
    assert queue.settle("w1", done(first, "a")) == 1
    assert (place(queue), document(queue)["state"]) == ("", "SUCCESS")


def test_a_copy_of_a_job_that_has_ended_is_not_put_back(queue: Queue) -> None:
    first, _ = copied(queue)
    queue.settle("w1", done(first, "a"))
    assert queue.recover("w2") == leases.RecoveryResult(
        worker="w2", requeued=0, dead_lettered=0, has_more=False
    )
    assert queue.size() == QueueSize(stream=0, in_workers=0, due=0, dead=0)
    assert (place(queue), document(queue)["state"]) == ("", "SUCCESS")


def test_what_a_worker_left_behind_in_order_counts_for_nobody(queue: Queue) -> None:
    queue.publish(*[f"j{n}" for n in range(5)])
    queue.join("reader")
    for deploy in range(5):
        queue.join(f"w{deploy}")
        read = queue.read(f"w{deploy}")
        assert [entry.deliveries for entry in read] == [0] * 5
        queue(leases.leave_queue(queue.keys, f"w{deploy}"))
        # By others, in portions, or by its own sidecar, which knows what it had begun.
        name = "" if deploy % 2 else f"w{deploy}"
        begun = [entry.id for entry in read] if deploy == 2 else None
        assert queue.recover(name, limit=2, deliveries=0, begun=begun).has_more
        assert queue.recover("" if name else f"w{deploy}", deliveries=0).requeued == 3


async def test_a_job_that_no_worker_here_can_read_ends_as_dead_and_frees_its_key(
    app: App, queue: Queue, redis_client: "redis.Redis"
) -> None:
    keys = app.queue("default")
    new = b'{"v":2,"id":"a","task":"t","key":"k"}'
    odd = b'{"v":1,"id":"b","task":"t","attempt":1e999}'
    queue(jobs.publish_unique(keys, [("a", new, "", "t k", None)]))
    redis_client.xadd(keys.stream, {"job": odd})
    async with working(app):
        with pytest.raises(TaskFailed, match="version 2"):
            await app.result("a").aget(timeout=30)
        await until(lambda: redis_client.xlen(keys.dead) == 2)
        redis_client.xadd(keys.stream, {"job": b'{"v":2,"id":"a","task":"t"}'})  # a copy: touches nothing
        await until(lambda: redis_client.xlen(keys.dead) == 3)
        assert [await app.result(job_id).astatus() for job_id in "ab"] == ["DEAD", "DEAD"]
    assert not redis_client.exists(keys.unique)
    (dead_letter, *_), *_ = queue(jobs.list_dead_jobs(keys, count=9))
    assert redis_client.hget(keys.jobs, "a") == b"X" + dead_letter.encode()


def test_revoking_a_job_whose_message_is_gone_frees_its_key(queue: Queue) -> None:
    keys = queue.keys
    for job_id, lock in (("a", "t k"), ("b", "t other")):
        message = encode(Command(v=1, id=job_id, task="t", key=lock[2:]))
        assert queue(jobs.publish_unique(keys, [(job_id, message, "", lock, None)])) == {}
    entry = place(queue)[1:]
    queue.client.xdel(keys.stream, entry)
    assert queue(revoke(keys, ["a"], ttl=60)) == ["REVOKED"]
    assert queue.client.hgetall(keys.unique) == {b"t other": b"b"}
    assert document(queue)["state"] == "REVOKED"
