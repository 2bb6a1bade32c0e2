"""A worker that is recycled under a Controller goes on until another one has taken its place, whatever is killed."""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import AsyncResult
from tests.faults.cluster.clustered import LIMIT, Clustered
from tests.redis.commands.staff import Staff, wait_until

pytestmark = pytest.mark.timeout(600)

ONE, SPARE = "worker-default-1", "worker-default-2"
JOBS = 10


@pytest.fixture
def door(tmp_path: Path) -> Path:
    """What members pass before they start."""
    return tmp_path / "door"


@pytest.fixture
def limit() -> str:
    """The limit of the worker."""
    return f"max_jobs = {JOBS}"


@pytest.fixture
def cluster(staff: Staff, tmp_path: Path, door: Path, limit: str) -> Iterator[Clustered]:
    """A cluster of one worker that is recycled after a few jobs."""
    path = tmp_path / "cluster.toml"
    path.write_text(f'[environment]\nBREAD_DOOR = "{door}"\n[workers.default]\n{limit}\n')
    cluster = Clustered(staff, path)
    cluster.whole()
    yield cluster
    cluster.ended()


def send(staff: Staff, count: int = JOBS + 2) -> list[AsyncResult[int]]:
    """Send short jobs, and wait for their results."""
    sent = staff.app.send_many([staff.app.signature("nap", 0.0)] * count)
    assert all(job.get(timeout=LIMIT) for job in sent)
    return sent


def ran_once(staff: Staff, sent: list[AsyncResult[int]]) -> bool:
    """Return whether each of these has run exactly once."""
    return Counter(note.job for note in staff.notes()) == Counter(job.id for job in sent)


def wait_for_one_alone(cluster: Clustered, besides: int) -> None:
    """Wait until the worker is another process than `besides`, and there is no successor."""

    def is_alone() -> bool:
        members = cluster.members
        return set(members) == {ONE} and members[ONE] != besides

    wait_until(is_alone, within=LIMIT)


def await_successor(cluster: Clustered, staff: Staff, door: Path) -> list[AsyncResult[int]]:
    """Bring the worker to its limit, so that its successor starts, which is held up."""
    door.touch()
    sent = send(staff)
    wait_until(lambda: SPARE in cluster.members, within=LIMIT)
    return sent


def is_started_first(cluster: Clustered) -> bool:
    """Return whether a successor was up when the worker stopped to read jobs."""
    successor = cluster.said("member:started", SPARE)[0]["timestamp"]
    return bool(successor <= cluster.controller.lines("worker:recycle-requested")[0]["timestamp"])


def is_ready(cluster: Clustered, name: str) -> bool:
    """Return whether the Controller has logged that a member is up."""
    return bool(cluster.said("member:started", name))


@pytest.mark.parametrize("limit", ['max_memory = "150 MiB"'])
def test_successor_reads_jobs_before_a_worker_exceeds_its_memory(cluster: Clustered, staff: Staff) -> None:
    worker, sent = cluster.members[ONE], list[AsyncResult[int]]()

    def is_limit_reached() -> bool:
        rows = [reply.answer for reply in staff.app.control.send("stats", to=[ONE])]
        return any(row["memory"] >= row["max_memory"] for row in rows)

    while not is_limit_reached():
        sent += staff.app.send_many([staff.app.signature("hoard", 2 * 2**20)])
        assert sent[-1].get(timeout=LIMIT)
    wait_for_one_alone(cluster, worker)
    end = cluster.controller.lines("worker:recycle-requested")[0]
    assert "(max_memory)" in end["why"]
    assert float(end["memory"].split()[0]) < 150
    assert is_started_first(cluster)
    assert ran_once(staff, [*sent, *send(staff, 2)])
    assert cluster.said("member:successor-failed") == []


def test_running_jobs_of_a_worker_and_its_successor_are_not_interrupted(
    cluster: Clustered, staff: Staff, tmp_path: Path
) -> None:
    worker, gates = cluster.members[ONE], [tmp_path / "first", tmp_path / "second"]
    (first,) = staff.app.send_many([staff.app.signature("gate", str(gates[0]))])
    wait_until(lambda: len(staff.notes()) == 1, within=LIMIT)
    sent = [first, *send(staff)]
    wait_until(lambda: len(cluster.controller.lines("worker:recycle-requested")) == 1, within=LIMIT)
    (second,) = staff.app.send_many([staff.app.signature("gate", str(gates[1]))])
    wait_until(lambda: len(staff.notes()) == len(sent) + 1, within=LIMIT)
    gates[0].touch()
    assert first.get(timeout=LIMIT) == worker
    wait_until(lambda: len(cluster.controller.lines("worker:recycle-requested")) == 2, within=LIMIT)
    more = send(staff, 2)
    assert SPARE in cluster.members, "it is there as long as its job runs"
    gates[1].touch()
    assert second.get(timeout=LIMIT) not in (worker, cluster.members[ONE])
    wait_for_one_alone(cluster, worker)
    assert ran_once(staff, [*sent, second, *more])
    wait_until(lambda: len(cluster.said("member:ended", SPARE)) == 1, within=LIMIT)
    assert cluster.said("member:ended", SPARE)[0]["code"] == 75


def test_worker_goes_on_while_no_successor_can_be_imported(
    cluster: Clustered, staff: Staff, door: Path
) -> None:
    worker = cluster.members[ONE]
    door.write_text("closed")
    sent = send(staff)
    wait_until(lambda: len(cluster.said("member:start-requested", SPARE)) >= 3, within=LIMIT)
    more = staff.app.send_many([staff.app.signature("nap", 0.0)] * 3)
    assert {job.get(timeout=LIMIT) for job in more} == {worker}
    status = cluster.tell("status")
    assert status.process.returncode == 0, status.output.read_text()
    (failure,) = cluster.said("member:successor-failed", ONE)
    assert failure["successor"] == SPARE
    assert "the bakery is closed" in failure["why"]
    assert cluster.controller.lines("worker:recycle-requested") == []
    door.unlink()
    wait_for_one_alone(cluster, worker)
    assert ran_once(staff, [*sent, *more])


def test_killed_successor_is_started_again_before_the_worker_ends(
    cluster: Clustered, staff: Staff, door: Path
) -> None:
    worker = cluster.members[ONE]
    sent = await_successor(cluster, staff, door)
    cluster.kill(SPARE)
    wait_until(lambda: len(cluster.said("member:successor-failed")) == 1, within=LIMIT)
    wait_until(lambda: len(cluster.said("member:start-requested", SPARE)) == 2, within=LIMIT)
    assert cluster.members[ONE] == worker
    sent += send(staff, 2)
    door.unlink()
    wait_for_one_alone(cluster, worker)
    assert ran_once(staff, sent)
    assert is_started_first(cluster)
    wait_until(lambda: len(cluster.said("member:ended", ONE)) == 1, within=LIMIT)
    assert cluster.said("member:ended", ONE)[0]["code"] == 75


def test_killed_worker_comes_back_and_leaves_no_successor(
    cluster: Clustered, staff: Staff, door: Path
) -> None:
    sent = await_successor(cluster, staff, door)
    worker = cluster.kill(ONE)
    wait_until(lambda: cluster.members.get(ONE, worker) != worker, within=LIMIT)
    door.unlink()
    wait_until(lambda: len(cluster.said("member:started", ONE)) == 2, within=LIMIT)
    wait_for_one_alone(cluster, worker)
    assert ran_once(staff, [*sent, *send(staff, 2)])


@pytest.mark.parametrize("is_ready_before", [False, True])
def test_killed_controller_leaves_no_successor_to_the_next_one(
    cluster: Clustered, staff: Staff, door: Path, tmp_path: Path, is_ready_before: bool
) -> None:
    worker, gate = cluster.members[ONE], tmp_path / "gate"
    sent = staff.app.send_many([staff.app.signature("gate", str(gate))])
    wait_until(lambda: len(staff.notes()) == 1, within=LIMIT)
    await_successor(cluster, staff, door)
    if is_ready_before:
        door.unlink()
        wait_until(lambda: is_ready(cluster, SPARE), within=LIMIT)
    cluster.controller.signal(signal.SIGKILL)
    gate.touch()
    door.unlink(missing_ok=True)
    wait_until(lambda: not cluster.members, within=LIMIT)
    cluster.start()
    cluster.whole()
    wait_for_one_alone(cluster, worker)
    assert sent[0].get(timeout=LIMIT)
    assert cluster.said("member:start-requested", SPARE) == []


def test_order_to_stop_ends_a_worker_and_its_successor(cluster: Clustered, staff: Staff, door: Path) -> None:
    await_successor(cluster, staff, door)
    door.unlink()
    wait_until(lambda: is_ready(cluster, SPARE), within=LIMIT)
    assert cluster.stopped() == 0


def test_reload_during_a_recycling_ends_with_the_new_version_alone(
    cluster: Clustered, staff: Staff, door: Path
) -> None:
    worker = cluster.members[ONE]
    sent = await_successor(cluster, staff, door)
    cluster.description.write_text(cluster.description.read_text() + "concurrency = 3\n")
    assert cluster.tell("reload").process.returncode == 0
    door.unlink()
    wait_for_one_alone(cluster, worker)
    pid = cluster.members[ONE]
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert command[command.index(b"--concurrency") + 1] == b"3"
    assert ran_once(staff, [*sent, *send(staff, 2)])
