"""Scripts for workers: they join, beat, leave and die, and whatever they held goes on."""

import json
import time

import pytest

from celery5.broker.calls import jobs, leases
from celery5.broker.keys import GROUP
from celery5.errors import BrokerReplied
from celery5.protocol.job.messages import read_job_id
from tests.redis.worker.one_queue import Queue, QueueSize, command, done, held, released


@pytest.mark.plants
def test_joining_twice_changes_nothing_but_the_lease(queue: Queue) -> None:
    queue.join("w", lease=1)
    queue.publish("a")
    assert len(queue.read("w")) == 1
    queue.join("w", lease=1000)
    assert len(queue.mine("w")) == 1
    lease = queue.client.zscore(queue.keys.leases, "w")
    assert lease is not None
    assert lease / 1000 > time.time() + 900


def test_joining_something_that_is_no_stream_fails(queue: Queue) -> None:
    queue.client.set(queue.keys.stream, "x", px=60_000)
    with pytest.raises(BrokerReplied, match="WRONGTYPE"):
        queue(leases.join_queue(queue.keys, "w", lease=1))


def test_jobs_published_before_the_first_worker_are_not_lost(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    assert len(queue.read("w")) == 1


def test_a_beat_renews_the_lease_and_tells_the_news(queue: Queue) -> None:
    queue.join("w", lease=1)
    before = time.time_ns() // 1_000_000
    first = queue(leases.renew_lease(queue.keys, "w", lease=500))
    assert first == leases.HeartbeatReply(alive=True, lapsed=0, due_in=None, at=first.at)
    assert before - 1000 <= first.at <= time.time() * 1000 + 1000
    assert (queue.client.zscore(queue.keys.leases, "w") or 0) / 1000 > time.time() + 400
    queue.schedule("a", "+20000")
    queue.join("other")
    queue.lapse("other")
    pulse = queue(leases.renew_lease(queue.keys, "w", lease=5))
    assert (pulse.alive, pulse.lapsed) == (True, 1)
    assert 15 < pulse.due_in <= 20


@pytest.mark.parametrize(
    "state", ["never joined", "left", "left and holding", "recovered", "being recovered"]
)
@pytest.mark.plants
def test_a_beat_of_a_worker_without_a_lease_says_so_and_gives_it_none(queue: Queue, state: str) -> None:
    if state != "never joined":
        queue.join("w")
    if state == "left and holding":
        queue.publish("a")
        queue.read("w")
    if state.startswith("left"):
        queue(leases.leave_queue(queue.keys, "w"))
    if state == "recovered":
        queue.recover("w")
    if state == "being recovered":
        queue.client.zadd(queue.keys.leases, {"w": -1})
    before = queue.contents()
    assert queue(leases.renew_lease(queue.keys, "w", lease=5)).alive is False
    assert queue.contents() == before


def test_a_beat_removes_consumers_that_hold_neither_a_lease_nor_a_job(queue: Queue) -> None:
    queue.join("w")
    queue.join("idle")
    queue.publish("a")
    queue.read("reading after its recovery")
    queue.client.xgroup_createconsumer(queue.keys.stream, GROUP, "nobody")
    beat = queue(leases.renew_lease(queue.keys, "w", lease=5))
    assert (beat.lapsed, beat.strays, beat.workers) == (0, 1, 2)
    assert queue.recover(with_strays=False).worker == ""
    names = {consumer["name"] for consumer in queue.client.xinfo_consumers(queue.keys.stream, GROUP)}
    assert names == {b"w", b"idle", b"reading after its recovery"}


def test_one_of_many_workers_looks_for_jobs_without_a_lease_for_all_of_them(queue: Queue) -> None:
    workers = [f"w{number}" for number in range(100)]
    for worker in workers:
        queue.join(worker, lease=60)
    queue.publish("a")
    queue.read("gone")

    def count_lookups() -> int:
        return int(queue.client.info("commandstats").get("cmdstat_zscore", {}).get("calls", 0))

    before, strays, checked = count_lookups(), [], queue.keys.consumers_checked
    for worker in workers:
        beat = queue(leases.renew_lease(queue.keys, worker, lease=60))
        strays.append(beat.strays)
        assert beat.workers == 100
        if worker == "w0":
            (seconds, microseconds), left = queue.client.pipeline().time().pttl(checked).execute()
            until = seconds * 1000 + microseconds // 1000 + left
            assert 15_090 < until - beat.at < 15_111, "a quarter of a lease, and a ms for each consumer"
    assert strays == [1] + [0] * 99
    assert count_lookups() - before <= 100 + 101, "each looks for its own lease, and one for those of all"
    queue.client.delete(checked)
    assert queue(leases.renew_lease(queue.keys, "w7", lease=60)).strays == 1


def test_a_beat_looks_for_jobs_without_a_lease_on_each_lane_and_for_consumers_of_the_outbox(
    queue: Queue,
) -> None:
    queue.join("w")
    outbox = f"{queue.keys.jobs}:to-send"
    queue.client.xgroup_create(outbox, GROUP, mkstream=True)
    queue.client.xgroup_createconsumer(outbox, GROUP, "gone")
    for stream in queue.keys.other_streams:
        queue.client.xadd(stream, {"m": command(stream)})
        queue.client.xgroup_create(stream, GROUP, "0")
        queue.client.xreadgroup(GROUP, "gone", {stream: ">"})
    assert queue(leases.renew_lease(queue.keys, "w", lease=5)).strays == 3
    assert queue.client.xinfo_consumers(outbox, GROUP) == []


def test_only_what_a_dead_worker_had_begun_is_counted_where_that_is_known(queue: Queue) -> None:
    queue.publish("a", "b", "c")
    queue.join("w1")
    first, *_ = queue.read("w1")
    assert queue.recover("w1", begun=[first.id, b"0-1"]).requeued == 3
    queue.join("w2")
    read = {read_job_id(entry.message): entry for entry in queue.read("w2")}
    assert [read[job_id].deliveries for job_id in "abc"] == [1, 0, 0]
    assert queue.recover("w2", begun=[read["b"].id], deliveries=0).dead_lettered == 1
    queue.join("w3")
    assert sorted(entry.deliveries for entry in queue.read("w3")) == [
        0,
        1,
    ]  # one was blamed before, and is not now


def test_a_worker_that_leaves_with_nothing_leaves_nothing(queue: Queue) -> None:
    queue.join("w")
    assert queue(leases.leave_queue(queue.keys, "w")) == 0
    assert queue.client.xinfo_consumers(queue.keys.stream, GROUP) == []
    assert not queue.client.exists(queue.keys.leases)
    assert queue(leases.leave_queue(queue.keys, "w")) == 0


def test_what_a_leaving_worker_holds_is_recovered_at_once(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    queue.join("other")
    queue.read("w")
    assert queue(leases.leave_queue(queue.keys, "w")) > 0
    assert queue(leases.renew_lease(queue.keys, "other", lease=5)).lapsed == 1
    assert queue.recover() == leases.RecoveryResult(worker="w", requeued=2, dead_lettered=0, has_more=False)


def test_leaving_does_not_undo_the_fence(queue: Queue) -> None:
    queue.publish(*[f"j{n}" for n in range(5)])
    queue.join("w")
    *_, last = queue.read("w")
    assert queue.recover("w", limit=2).has_more
    queue(leases.leave_queue(queue.keys, "w"))
    assert queue.settle("w", done(last, "j4")) == -1


def test_a_dead_workers_jobs_come_back_in_portions_with_a_count(queue: Queue) -> None:
    queue.publish(*[f"j{n}" for n in range(5)])
    queue.join("w")
    queue.join("other")
    assert queue.recover() == leases.RecoveryResult(worker="", requeued=0, dead_lettered=0, has_more=False)
    assert len(queue.read("w")) == 5
    queue.lapse("w")
    for expected in ((2, True), (2, True), (1, False)):
        found = queue.recover(limit=2)
        assert (found.worker, found.requeued, found.has_more) == ("w", *expected)
        assert queue(leases.renew_lease(queue.keys, "w", lease=5)).alive is False
    assert queue.recover().worker == ""
    assert [entry.deliveries for entry in queue.read("other")] == [1] * 5
    names = [consumer["name"] for consumer in queue.client.xinfo_consumers(queue.keys.stream, GROUP)]
    assert names == [b"other"]


# ---- who may have another worker recovered


NOBODY = leases.RecoveryResult(worker="", requeued=0, dead_lettered=0, has_more=False)


def test_a_worker_has_one_recovered_whose_lease_had_lapsed_by_its_heartbeat(queue: Queue) -> None:
    queue.publish("a")
    queue.join("dead")
    queue.join("judge")
    queue.read("dead")
    queue.lapse("dead")
    judge = queue.judge("judge")
    assert queue.recover(judge=judge) == leases.RecoveryResult(
        worker="dead", requeued=1, dead_lettered=0, has_more=False
    )
    assert queue.recover(judge=judge) == NOBODY


def test_a_worker_whose_own_lease_has_lapsed_has_nobody_recovered(queue: Queue) -> None:
    """The server was frozen with the call on its way: all leases have lapsed."""
    queue.publish("a")
    for worker in ("healthy", "judge"):
        queue.join(worker)
    queue.read("healthy")
    judge = queue.judge("judge", lease=3, ago=4)
    queue.lapse("healthy")
    assert queue.recover(judge=judge) == queue.recover("healthy", judge=judge) == NOBODY
    assert queue(leases.renew_lease(queue.keys, "healthy", lease=5)).alive


def test_an_old_recovery_decision_is_void_when_the_lease_was_renewed(queue: Queue) -> None:
    """By the sidecar, say, on its own connection."""
    for worker in ("healthy", "judge"):
        queue.join(worker)
    judge = queue.judge("judge", lease=3, ago=4)
    queue.judge("judge", lease=3)
    queue.lapse("healthy")
    assert queue.recover(judge=judge) == queue.recover("healthy", judge=judge) == NOBODY
    assert queue(leases.renew_lease(queue.keys, "healthy", lease=5)).alive


def test_who_lapsed_after_the_heartbeat_is_not_recovered_by_it(queue: Queue) -> None:
    """A freeze that was shorter than the judge's lease, and longer than what the other had left."""
    for worker in ("healthy", "judge"):
        queue.join(worker)
    judge = queue.judge("judge", lease=30, ago=2)
    queue.client.zadd(queue.keys.leases, {"healthy": judge.at + 1000})
    assert queue.recover(judge=judge) == queue.recover("healthy", judge=judge) == NOBODY
    assert queue(leases.renew_lease(queue.keys, "healthy", lease=5)).alive


@pytest.mark.parametrize("state", ["never joined", "left", "recovered", "being recovered"])
def test_a_worker_without_a_lease_has_nobody_recovered(queue: Queue, state: str) -> None:
    queue.publish("a", "b")
    queue.join("judge")
    judge = queue.judge("judge")
    if state == "left":
        queue(leases.leave_queue(queue.keys, "judge"))
    elif state == "being recovered":
        queue.read("judge")
        assert queue.recover("judge", limit=1).has_more
    elif state == "recovered":
        queue.recover("judge")
    else:
        queue.recover("judge")
        judge = leases.HeartbeatEvidence("stranger", judge.at, judge.lease)
    queue.join("healthy")
    queue.lapse("healthy")
    assert queue.recover("healthy", judge=judge) == NOBODY
    queue.client.zrem(queue.keys.leases, "judge")
    queue.judge("healthy")


def test_nobody_has_itself_recovered(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    judge = queue.judge("w")
    assert queue.recover(judge=judge) == queue.recover("w", judge=judge) == NOBODY
    queue.lapse("w")
    assert queue.recover(judge=judge) == queue.recover("w", judge=judge) == NOBODY
    assert queue(leases.renew_lease(queue.keys, "w", lease=5)).alive


def test_whoever_knows_that_a_process_has_ended_waits_for_no_lease(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    assert queue.recover("w") == leases.RecoveryResult(
        worker="w", requeued=1, dead_lettered=0, has_more=False
    )


def test_giving_a_job_back_neither_adds_to_its_deliveries_nor_forgets_them(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    queue.recover("w")
    queue.join("other")
    for _ in range(3):
        (entry,) = queue.read("other")
        assert entry.deliveries == 1
        queue.settle("other", released(entry, "a"))


def test_holding_a_job_neither_adds_to_its_deliveries_nor_forgets_them(queue: Queue) -> None:
    queue.publish("a")
    queue.join("w")
    queue.read("w")
    queue.recover("w")
    queue.join("other")
    for _ in range(3):
        (entry,) = queue.read("other")
        assert entry.deliveries == 1
        queue.settle("other", held(entry, "a"))
        assert queue(jobs.promote_due_jobs(queue.keys, limit=10))[0] == 1


def test_the_last_portion_may_be_full(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    queue.read("w")
    assert queue.recover("w", limit=2).has_more
    assert queue.recover("w", limit=2) == leases.RecoveryResult(
        worker="w", requeued=0, dead_lettered=0, has_more=False
    )


def test_job_that_kills_too_many_workers_dies_as_poisoned(queue: Queue) -> None:
    queue.publish("a")
    for death in range(1, 4):
        queue.join(f"w{death}")
        (entry,) = queue.read(f"w{death}")
        assert entry.deliveries == death - 1
        found = queue.recover(f"w{death}", deliveries=2)
        assert (found.requeued, found.dead_lettered) == ((0, 1) if death == 3 else (1, 0))
    place = queue(jobs.locate_job(queue.keys, "a"))
    document = json.loads(place.document)
    assert (place.state, document["state"], document["reason"]) == ("DEAD", "DEAD", "poisoned")
    assert (document["id"], document["task"], document["attempt"]) == ("a", "shop.t", 1)
    assert document["failure"]["worker"] == document["worker"] == "w3"
    assert "3 times" in document["failure"]["message"]
    assert abs(document["finished"] - time.time()) < 60
    ((_, message, dead_letter),) = queue(jobs.list_dead_jobs(queue.keys, count=9))
    assert (read_job_id(message), json.loads(dead_letter)) == ("a", document)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        b"5",
        b"true",
        b"null",
        b'"text"',
        b"[1]",
        b"{}",
        b'{"id":{}}',
        b'{"id":5,"task":[]}',
        b"[" * 2000,
    ],
    ids=repr,
)
def test_corrupt_message_is_requeued_then_becomes_a_dead_letter(queue: Queue, message: bytes) -> None:
    queue.client.xadd(queue.keys.stream, {"job": message})
    for death in range(1, 3):
        queue.join(f"w{death}")
        (entry,) = queue.read(f"w{death}")
        assert entry.message == message
        found = queue.recover(f"w{death}", deliveries=1)
        assert (found.requeued, found.dead_lettered) == ((1, 0) if death == 1 else (0, 1))
    ((_, kept, document),) = queue(jobs.list_dead_jobs(queue.keys, count=9))
    assert kept == message
    assert json.loads(document)["reason"] == "poisoned"
    assert not queue.client.exists(queue.keys.jobs)


@pytest.mark.plants
def test_an_entry_that_was_deleted_while_it_was_pending_is_only_acknowledged(queue: Queue) -> None:
    queue.publish("a", "b")
    queue.join("w")
    first, _ = queue.read("w")
    queue.client.xdel(queue.keys.stream, first.id)
    assert [entry.message for entry in queue.mine("w")] == [b"", command("b")]
    assert queue.recover("w").requeued == 1
    assert queue.size() == QueueSize(stream=1, in_workers=0, due=0, dead=0)


def test_recovering_a_worker_of_whom_nothing_is_known_does_nothing(queue: Queue) -> None:
    assert queue.recover("nobody") == leases.RecoveryResult(
        worker="nobody", requeued=0, dead_lettered=0, has_more=False
    )
    assert queue.contents() == {}


def test_a_job_read_in_the_name_of_a_worker_already_recovered_is_found(queue: Queue) -> None:
    queue.join("dead")
    queue.join("other")
    queue.recover("dead")
    queue.publish("a")
    assert len(queue.read("dead")) == 1  # its blocked read was served after its recovery
    pulse = queue(leases.renew_lease(queue.keys, "other", lease=5))
    assert (pulse.alive, pulse.lapsed, pulse.strays) == (True, 0, 1)
    queue.publish("b")
    queue.read("dead")
    assert queue.recover(limit=1).has_more
    assert queue.recover(limit=1) == leases.RecoveryResult(
        worker="dead", requeued=1, dead_lettered=0, has_more=True
    )
    assert queue.recover().worker == "dead"
    assert queue.recover().worker == ""
    # Nobody begins a job without a lease, so it counts for nothing.
    assert [entry.deliveries for entry in queue.read("other")] == [0, 0]


def renew(queue: Queue, worker: str, *, idle_lease: float | None = None) -> leases.HeartbeatReply:
    """Renew a lease of 8 seconds, or an idle worker's lease for its own length."""
    reply = queue(leases.renew_lease(queue.keys, worker, lease=8, idle_lease=idle_lease))
    assert isinstance(reply, leases.HeartbeatReply)
    return reply


def lease_left(queue: Queue, worker: str) -> float:
    """Return the seconds that a lease still lasts."""
    return (queue.client.zscore(queue.keys.leases, worker) or 0) / 1000 - time.time()


def check_again(queue: Queue) -> None:
    """Have the next heartbeat look at all consumers."""
    queue.client.delete(queue.keys.consumers_checked)


@pytest.mark.plants
def test_the_lease_of_an_idle_worker_is_short_as_soon_as_a_job_is_given_to_it(queue: Queue) -> None:
    for worker in ("dead", "idle", "busy"):
        queue.join(worker, lease=8)
    for worker in ("dead", "idle"):
        renew(queue, worker, idle_lease=90)
    check_again(queue)
    renew(queue, "busy")
    assert min(lease_left(queue, worker) for worker in ("dead", "idle")) > 80, "neither has a job"
    queue.publish("a")
    assert len(queue.read("dead")) == 1
    check_again(queue)
    renew(queue, "busy")
    assert 2 < lease_left(queue, "dead") <= 4.1, "half of a usual lease, until it renews it"
    assert lease_left(queue, "idle") > 80
    renew(queue, "dead")
    check_again(queue)
    renew(queue, "busy")
    assert 6 < lease_left(queue, "dead") <= 8.1, "it was alive"


def test_a_busy_worker_keeps_its_lease_whatever_it_was_before(queue: Queue) -> None:
    for worker in ("w", "other"):
        queue.join(worker, lease=8)
    renew(queue, "w", idle_lease=90)
    renew(queue, "w")
    queue.publish("a")
    assert len(queue.read("w")) == 1
    check_again(queue)
    renew(queue, "other")
    assert 6 < lease_left(queue, "w") <= 8.1


@pytest.mark.plants
def test_idle_workers_that_are_gone_are_forgotten(queue: Queue) -> None:
    queue.join("w", lease=8)
    renew(queue, "w", idle_lease=90)
    queue.client.zadd(queue.keys.idle_leases, {"gone": 1})
    check_again(queue)
    renew(queue, "w", idle_lease=90)
    assert queue.client.zrange(queue.keys.idle_leases, 0, -1) == [b"w"]
    assert 80_000 < queue.client.pttl(queue.keys.idle_leases) <= 90_000


def test_a_beat_says_for_how_long_beats_have_come_without_a_gap(queue: Queue) -> None:
    queue.join("w", lease=8)
    assert renew(queue, "w").steady_for == 0
    assert 0 < queue.client.pttl(queue.keys.steady_since) <= 4800, "a gap of 0.6 of a lease ends it"
    queue.client.set(queue.keys.steady_since, int(time.time() * 1000) - 7000, px=60_000)
    assert 6 < renew(queue, "w", idle_lease=90).steady_for < 9
    queue.client.set(
        queue.keys.steady_since, int(time.time() * 1000) + 7000, px=60_000
    )  # the clock was set back
    assert renew(queue, "w").steady_for == 0


@pytest.mark.plants
def test_a_beat_renews_the_lease_whatever_is_in_the_keys_beside_it(queue: Queue) -> None:
    queue.join("w", lease=8)
    for idle_lease in (None, 90):
        queue.client.set(queue.keys.idle_leases, "x", px=60_000)
        queue.client.delete(queue.keys.steady_since)
        queue.client.rpush(queue.keys.steady_since, "x")
        check_again(queue)
        assert renew(queue, "w", idle_lease=idle_lease).alive
        assert lease_left(queue, "w") > 6


def test_what_many_workers_look_for_costs_as_much_as_what_few_do(queue: Queue) -> None:
    def count_calls() -> int:
        stats = queue.client.info("commandstats")
        return sum(
            stat["calls"] for name, stat in stats.items() if name not in ("cmdstat_info", "cmdstat_del")
        )

    queue.publish("a", "b")
    for number in range(200):
        queue.join(f"w{number}", lease=60)
    assert len(queue.read("w7", count=1)) == 1
    check_again(queue)
    before = count_calls()
    renew(queue, "w0")
    assert count_calls() - before < 40
    queue.client.xgroup_createconsumer(queue.keys.stream, GROUP, "gone")
    check_again(queue)
    renew(queue, "w0")
    names = {consumer["name"] for consumer in queue.client.xinfo_consumers(queue.keys.stream, GROUP)}
    assert b"gone" not in names
    assert len(names) == 200
