"""Recovery: workers are killed, frozen and blocked; none of their jobs is lost, none runs after it has ended."""

import itertools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import redis

from celery5 import App, AsyncResult, JobState, TaskFailed, gather
from celery5.broker.calls import leases
from celery5.broker.keys import GROUP
from celery5.protocol.job.messages import read_document
from tests.redis.commands.staff import Staff, is_alive, wait_until
from tests.redis.worker.workers import entries, held, leftovers, working

LEASE = 1.0


def send(staff: Staff, task: str, *args: object, count: int = 1) -> list[AsyncResult[int]]:
    """Send jobs."""
    return staff.app.send_many([staff.app.signature(task, *args) for _ in range(count)])


def assert_each_job_ended_with_its_last_run(
    staff: Staff, client: "redis.Redis", sent: list[AsyncResult[int]]
) -> None:
    """None lost, and none run once more after it was settled: the run that settled it began last."""
    begins = staff.notes("begin")
    assert {note.job for note in begins} == {result.id for result in sent}
    last = {note.job: note for note in begins}
    for job in sent:
        raw = client.get(job.key)
        assert isinstance(raw, bytes)
        document = read_document(raw)
        assert document.state == "SUCCESS"
        assert int(document.value) == last[job.id].pid
        # What is noted first is noted a moment later; an earlier run began a whole lease before.
        assert document.started <= last[job.id].at
        assert all(
            note.at < document.started for note in begins if note.job == job.id and note != last[job.id]
        )


def test_jobs_of_a_worker_whose_machine_is_lost_are_finished_by_another(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    """Of every kind: three that have begun, one of each, and many short ones."""
    victim = staff.start("--log-level", "debug", lease=LEASE, concurrency=4)
    gates = [send(staff, kind, str(tmp_path / "gate"))[0] for kind in ("gate", "gate_asyncio", "gate_thread")]
    wait_until(lambda: len(staff.notes()) == 3)
    other = staff.start(lease=LEASE, concurrency=4)
    sent = [*gates, *send(staff, "nap", 0.02, count=200)]
    wait_until(lambda: len(staff.notes("end")) > 50)
    victim.lose_its_machine()
    settled = {job.id for job in sent if redis_client.exists(job.key)}
    once = Counter(note.job for note in staff.notes("begin"))
    (tmp_path / "gate").touch()
    gather(sent, timeout=30)
    assert_each_job_ended_with_its_last_run(staff, redis_client, sent)
    runs = Counter(note.job for note in staff.notes("begin"))
    assert [runs[gate.id] for gate in gates] == [2, 2, 2]
    # Nothing runs again but what had begun and was not settled when its worker was lost.
    assert {job for job, times in runs.items() if times > 1} <= set(once) - settled
    wait_until(lambda: sum(line["requeued"] for line in other.lines("recoverer:recovered")) >= 3)
    assert list(held(redis_client, staff.app)) == [other.lines("worker:boot-started")[0]["name"]]


def test_job_that_kills_its_workers_dies_as_poisonous(staff: Staff, redis_client: "redis.Redis") -> None:
    fleet = staff.start("--processes", "2", ready=2, max_deliveries=2)
    (poison,) = send(staff, "die")
    with pytest.raises(TaskFailed, match="poisoned"):
        poison.get(timeout=30)
    begins = staff.notes()
    assert len(begins) == 3
    assert [note.attempt for note in begins] == [1, 1, 1]  # a worker's death is no attempt
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    wait_until(lambda: len(children(staff, fleet.process.pid)) == 2)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def test_job_that_kills_one_machine_after_another_dies(staff: Staff, tmp_path: Path) -> None:
    """Nobody is left to tell of such a death: others notice it by the lease, for jobs of every kind, and count it."""
    kinds = ("gate", "gate_asyncio", "gate_thread")
    sent = [send(staff, kind, str(tmp_path / "gate"))[0] for kind in kinds]
    for begun in (3, 4):  # those that could fail for good next run one at a time
        victim = staff.start("--log-level", "debug", lease=0.6, max_deliveries=1)
        wait_until(lambda begun=begun: len(staff.notes()) == begun)  # type: ignore[misc]
        victim.lose_its_machine()
    poison = staff.notes()[-1].job
    (tmp_path / "gate").touch()
    other = staff.start(lease=0.6, max_deliveries=1)
    failed = {
        job.id: got
        for job, got in zip(sent, gather(sent, timeout=30), strict=True)
        if isinstance(got, TaskFailed)
    }
    assert failed[poison].reason == "poisoned"
    assert {got.reason for got in failed.values()} == {"poisoned"}  # whom the second machine held
    wait_until(
        lambda: sum(line["dead_lettered"] for line in other.lines("recoverer:recovered")) == len(failed)
    )
    assert [note.attempt for note in staff.notes()] == [1] * (4 + 3 - len(failed))


def test_jobs_beside_a_poisonous_one_do_not_die_with_it(staff: Staff) -> None:
    poison = send(staff, "poison", 0.1)[0]
    innocents = send(staff, "nap", 0.15, count=20)
    for death in range(1, 5):
        staff.start(ready=0).wait(30)
        if death <= 2:  # they ran beside it, and are counted; from then on they are suspects, too
            assert len(staff.notes()) == 21 * death
    assert len(staff.notes()) == 44  # poison is first in the lane, and ran alone
    wait_until(lambda: poison.status() is JobState.DEAD)  # by the sidecar, which has a look after each death
    staff.start()
    gather(innocents, timeout=30)
    assert Counter(note.job for note in staff.notes()) == {
        poison.id: 4,
        **dict.fromkeys([innocent.id for innocent in innocents], 3),
    }
    begins = [note.at for note in staff.notes()[44:]]
    assert min(later - earlier for earlier, later in itertools.pairwise(begins)) > 0.14  # one at a time


def test_a_frozen_worker_is_fenced_off_and_works_again_under_a_new_name(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    two = [staff.start(lease=LEASE), staff.start(lease=LEASE)]
    (sent,) = send(staff, "gate", str(tmp_path / "gate"))
    wait_until(lambda: len(staff.notes()) == 1)
    frozen, other = sorted(two, key=lambda worker: worker.process.pid != staff.notes()[0].pid)
    frozen.signal(signal.SIGSTOP)
    wait_until(lambda: len(staff.notes()) == 2)
    (tmp_path / "gate").touch()
    pid = sent.get(timeout=30)
    assert pid == other.process.pid
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: len(frozen.lines("worker:restarted")) == 1)
    assert_each_job_ended_with_its_last_run(staff, redis_client, [sent])
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
    assert send(staff, "nap", 0.0)[0].get(timeout=30) == frozen.process.pid
    names = [line["name"] for line in frozen.lines("worker:boot-started")]
    assert len(set(names)) == 2
    wait_until(lambda: [line["worker"] for line in frozen.lines("worker:started")] == names)
    # Valkey makes the old name's consumer again when its blocked read ends; the next beat removes it.
    wait_until(lambda: list(held(redis_client, staff.app)) == [names[1]])


def test_what_a_fenced_worker_finished_is_dropped_and_told_of(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    two = [staff.start(lease=LEASE), staff.start(lease=LEASE)]
    (sent,) = send(staff, "block", 0.8)
    wait_until(lambda: len(staff.notes()) == 1)
    frozen, other = sorted(two, key=lambda worker: worker.process.pid != staff.notes()[0].pid)
    frozen.signal(signal.SIGSTOP)  # in the middle of the job, with the loop blocked
    assert sent.get(timeout=30) == other.process.pid
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: len(frozen.lines("worker:restarted")) == 1)
    ended = [note for note in staff.notes("end") if note.pid == frozen.process.pid]
    if ended:  # it ended before the heart noticed: its outcome must have been dropped
        assert sent.id in frozen.lines("results:dropped")[0]["jobs"]
    assert_each_job_ended_with_its_last_run(staff, redis_client, [sent])


def test_jobs_read_by_a_worker_already_taken_for_dead_are_not_lost(staff: Staff) -> None:
    frozen = staff.start(lease=LEASE)
    frozen.signal(signal.SIGSTOP)  # its blocked read still waits at the server
    other = staff.start(lease=LEASE)
    wait_until(lambda: len(other.lines("recoverer:recovered")) == 1)
    sent = send(staff, "nap", 0.0, count=20)
    assert set(gather(sent, timeout=30)) == {other.process.pid}


def test_a_stopped_worker_finishes_what_runs_and_gives_back_the_rest(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    worker = staff.start(lease=LEASE, concurrency=2, grace_period=60)
    warm = send(staff, "nap", 0.001, count=20)  # it has learnt that jobs are short, and holds some ahead
    gather(warm, timeout=30)
    sent = send(staff, "gate", str(tmp_path / "gate"), count=10)
    wait_until(lambda: len(staff.notes()) == 22)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: sum(held(redis_client, staff.app).values()) == 2)  # the rest it has given back
    (tmp_path / "gate").touch()
    assert worker.wait() == 0
    assert Counter(job.status() for job in sent) == {JobState.SUCCESS: 2, JobState.SENT: 8}
    assert len(staff.notes()) == 22
    assert held(redis_client, staff.app) == {}
    assert not redis_client.exists(staff.app.queue("default").leases)
    assert worker.lines("worker:stopped")


def test_a_job_longer_than_the_grace_period_is_given_back_uncounted(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    worker = staff.start(lease=LEASE, grace_period=0.2)
    kinds = ("gate", "gate_asyncio", "gate_thread")
    sent = [send(staff, kind, str(tmp_path / "gate"))[0] for kind in kinds]
    wait_until(lambda: len(staff.notes()) == 3)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0  # though they would run for ever
    assert [job.status() for job in sent] == [JobState.SENT] * 3
    for fields in entries(redis_client, staff.app.queue("default").stream):
        assert json.loads(fields[b"job"]).get("attempt", 1) == 1
        assert fields[b"deliveries"] == b"0"
    assert held(redis_client, staff.app) == {}
    (tmp_path / "gate").touch()
    staff.start(lease=LEASE)
    gather(sent, timeout=30)
    assert [note.attempt for note in staff.notes()] == [1] * 6


def test_a_second_signal_ends_the_worker_at_once(staff: Staff, tmp_path: Path) -> None:
    worker = staff.start(grace_period=30)
    send(staff, "gate", str(tmp_path / "gate"))
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: len(worker.lines("process:stop-requested")) == 1)
    assert worker.process.poll() is None
    worker.signal(signal.SIGTERM)
    assert worker.wait() != 0


def test_a_burst_that_is_done_ends_with_success(staff: Staff, redis_client: "redis.Redis") -> None:
    sent = send(staff, "nap", 0.0, count=100)
    worker = staff.start("--burst", ready=0)
    assert worker.wait() == 0
    assert {job.status() for job in sent} == {JobState.SUCCESS}
    left = leftovers(redis_client, staff.app)
    expiring = (":result:", ":metrics:", ":history:", ":code", ":flow", ":checked", ":steady")
    kept = {key for key in left if not any(part in key for part in expiring)}
    assert {key.rpartition(":")[2] for key in kept} == {"stream", "queues"}


async def test_a_lapsed_lease_is_noticed_when_it_lapses_and_not_a_beat_later(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, lease=180)  # a beat in a minute

    @app.task
    async def nothing() -> None:
        pass

    keys = app.queue("default")
    await app.aperform(leases.join_queue(keys, "ghost", lease=3))
    sent = await nothing.adelay()
    redis_client.xreadgroup(GROUP, "ghost", {keys.stream: ">"})
    async with working(app):
        await sent.aget(timeout=30)


def test_a_killed_child_is_replaced_and_its_jobs_are_put_back_at_once(staff: Staff, tmp_path: Path) -> None:
    fleet = staff.start("--processes", "2", ready=2, lease=60)
    (sent,) = send(staff, "gate", str(tmp_path / "gate"))
    wait_until(lambda: len(staff.notes()) == 1)
    (first,) = staff.notes()
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: len(staff.notes()) == 2)
    wait_until(lambda: len(fleet.lines("worker:started")) == 3)
    (tmp_path / "gate").touch()
    assert sent.get(timeout=30) == staff.notes()[1].pid
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def children(staff: Staff, worker_pid: int) -> list[int]:
    """The processes that a worker has forked."""
    return [
        int(child) for child in Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()
    ]


def test_a_stopped_fleet_ends_all_its_children(staff: Staff, redis_client: "redis.Redis") -> None:
    fleet = staff.start("--processes", "2", ready=2)
    pids = children(staff, fleet.process.pid)
    assert len(pids) == 2
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert held(redis_client, staff.app) == {}


def test_children_of_a_killed_fleet_end_by_themselves(staff: Staff, redis_client: "redis.Redis") -> None:
    fleet = staff.start("--processes", "2", ready=2)
    pids = children(staff, fleet.process.pid)
    fleet.signal(signal.SIGKILL)
    fleet.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert held(redis_client, staff.app) == {}


def test_a_fleet_whose_children_cannot_start_gives_up(staff: Staff) -> None:
    script = (
        "import os, sys\n"
        "from celery5 import App\n"
        "from celery5.processes.foreground import ServeOptions, serve\n"
        "app = App('nobody', broker=os.environ['CELERY5_BROKER'].replace('://', '://nobody:wrong@'))\n"
        "sys.exit(serve(app, ServeOptions(processes=2)))\n"
    )
    fleet = staff.launch([sys.executable, "-c", script])
    assert fleet.wait() == 1
    assert "giving up" in fleet.output.read_text()
