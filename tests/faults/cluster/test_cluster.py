"""Cluster: a Controller and all that it has started are killed, frozen and hung, one after the other, while jobs and
events come: nothing is lost, nothing doubled, and everybody is replaced.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery5 import examples
from tests.faults.cluster.clustered import LIMIT, Clustered, Load
from tests.redis.commands.staff import Staff, wait_until

pytestmark = pytest.mark.timeout(600)
"""Seconds: a test here is a dozen processes, some of them started again and again."""

ALL_KINDS = """
[routers.default]
[schedulers.default]
[workers.default]
count = 2
"""
TWO_WORKERS = """
restart_limit = 100
hung_after = 5
[workers.default]
count = 2
"""
WORKERS = ("worker-default-1", "worker-default-2")
ONE = WORKERS[0]
EXAMPLE = Path(examples.__file__).parent / "cluster" / "cluster.toml"

Starts = Callable[..., Clustered]


@pytest.fixture
def cluster_of(staff: Staff, tmp_path: Path) -> Iterator[Starts]:
    """Starts clusters by their descriptions; gives each when it is whole."""
    started: list[Clustered] = []

    def start(description: str = TWO_WORKERS, **settings: object) -> Clustered:
        path = tmp_path / "cluster.toml"
        path.write_text(description)
        started.append(Clustered(staff, path, **settings))
        started[-1].whole()
        return started[-1]

    yield start
    for controller in started:
        controller.ended()


def test_killed_members_and_controllers_lose_and_double_no_job(
    staff: Staff, cluster_of: Starts, short_path: Path
) -> None:
    description = (
        f'{EXAMPLE.read_text()}\n[publishers.default.environment]\nXDG_RUNTIME_DIR = "{short_path}"\n'
    )
    cluster = cluster_of(description)
    names = sorted(cluster.members)
    kinds = ["publisher-default-1", "router-default-1", "scheduler-default-1", *WORKERS]
    assert names == kinds
    (socket,) = short_path.rglob("*.sock")
    victims: set[int] = set()
    with Load(staff, publisher=f"unix://{socket}", backlog=100_000) as load:
        for name in names:
            wait_for_more(staff, load)
            victims.add(pid := cluster.kill(name))
            cluster.back(name, pid)
        wait_for_more(staff, load)
        before = set(cluster.members.values())
        cluster.controller.signal(signal.SIGKILL)
        cluster.controller.wait()
        wait_until(
            lambda: not before & set(cluster.members.values()), within=LIMIT
        )  # they end with it, in order
        cluster.start()
        cluster.whole()
        wait_for_more(staff, load)
    load.ended_well(victims=victims)
    assert sorted(cluster.members) == names
    assert cluster.stopped() == 0


def test_the_jobs_of_a_worker_that_is_killed_run_elsewhere_within_moments(
    staff: Staff, cluster_of: Starts, tmp_path: Path
) -> None:
    cluster = cluster_of()
    door = tmp_path / "door"
    sent = staff.app.send_many([staff.app.signature("gate", str(door)) for _ in range(8)])
    wait_until(lambda: len(staff.notes()) == 8, within=LIMIT)
    name, pid = max(
        cluster.members.items(), key=lambda worker: sum(note.pid == worker[1] for note in staff.notes())
    )
    held = {note.job for note in staff.notes() if note.pid == pid}
    began = time.time()
    cluster.kill(name)
    wait_until(lambda: len(staff.notes()) == 8 + len(held), within=LIMIT)
    took = max(note.at for note in staff.notes()[8:]) - began
    wait_until(lambda: bool(cluster.said("member:ended", name)))
    known = cluster.said("member:ended", name)[0]["timestamp"] - began
    measured("known", known)
    measured("elsewhere", took)
    assert took < 5
    assert known < 5
    door.touch()
    assert all(job.get(timeout=LIMIT) for job in sent)
    cluster.back(name, pid)


def test_a_worker_whose_loop_a_job_blocks_for_ever_is_replaced(staff: Staff, cluster_of: Starts) -> None:
    cluster = cluster_of(max_deliveries=1)
    (poison,) = staff.app.send_many([staff.app.signature("block", 3600.0)])
    wait_until(lambda: len(staff.notes()) == 1, within=LIMIT)
    pid = staff.notes()[0].pid
    (name,) = [name for name, member_pid in cluster.members.items() if member_pid == pid]
    wait_until(lambda: bool(cluster.said("member:killed", name)), within=LIMIT)
    cluster.back(name, pid)
    assert "said nothing" in cluster.said("member:killed", name)[0]["why"]
    wait_until(lambda: poison.status() == "DEAD", within=LIMIT)  # it has taken down two workers
    (job,) = staff.app.send_many([staff.app.signature("nap", 0.0)])
    assert job.get(timeout=LIMIT)


def test_a_worker_that_is_frozen_under_load_is_replaced_and_its_jobs_run_elsewhere(
    staff: Staff, cluster_of: Starts
) -> None:
    cluster = cluster_of()
    with Load(staff, events=False) as load:
        wait_for_more(staff, load)
        pid = cluster.kill(ONE, signal.SIGSTOP)
        wait_until(lambda: bool(cluster.said("member:killed", ONE)), within=LIMIT)
        cluster.back(ONE, pid)
        assert "said nothing" in cluster.said("member:killed", ONE)[0]["why"]
        wait_for_more(staff, load)
    load.ended_well(victims={pid})


def test_rolling_restart_under_load_loses_no_job_and_does_not_pause(staff: Staff, cluster_of: Starts) -> None:
    cluster = cluster_of()
    before = cluster.members
    with Load(staff, events=False) as load:
        wait_for_more(staff, load)
        assert cluster.tell("restart").process.returncode == 0
        for name, pid in before.items():
            cluster.back(name, pid)
        wait_for_more(staff, load)
    load.ended_well()  # no victims: each job ran once
    pause = load.longest_pause()
    measured("longest_pause", pause)
    assert pause < 5


def test_recycled_workers_of_a_cluster_do_not_count_as_dead(staff: Staff, cluster_of: Starts) -> None:
    cluster = cluster_of(TWO_WORKERS.replace("restart_limit = 100", "restart_limit = 1") + "max_jobs = 60\n")
    with Load(staff, events=False) as load:
        wait_until(lambda: len(cluster.controller.lines("worker:recycle-requested")) >= 3, within=LIMIT)
        wait_for_more(staff, load)
    load.ended_well()
    wait_until(lambda: len(cluster.members) == 2, within=LIMIT)
    assert cluster.said("member:abandoned") == []


def test_a_cluster_stops_under_load_in_order_and_what_has_begun_ends(
    staff: Staff, cluster_of: Starts
) -> None:
    cluster = cluster_of(ALL_KINDS)
    with Load(staff) as load:
        wait_for_more(staff, load)
        assert cluster.stopped() == 0
        kinds = [line["name"].partition("-")[0] for line in cluster.said("member:ended")]
    assert [kind for kind in kinds if kind != "publisher"] == ["scheduler", "router", "worker", "worker"]
    assert kinds[-1] == ("publisher" if "publisher" in kinds else "worker")
    begun, ended = (sorted(note.job for note in staff.notes(what)) for what in ("begin", "end"))
    assert begun == ended
    cluster.start()
    load.ended_well()


def test_cluster_is_unhealthy_when_a_member_keeps_dying(staff: Staff, cluster_of: Starts) -> None:
    cluster = cluster_of(TWO_WORKERS.replace("restart_limit = 100", "restart_limit = 3"))
    pid = 0
    for _ in range(3):
        wait_until(lambda pid=pid: cluster.members.get(ONE, pid) != pid, within=LIMIT)  # type: ignore[misc]
        pid = cluster.kill(ONE)
    wait_until(lambda: bool(cluster.said("member:abandoned", ONE)), within=LIMIT)
    assert ONE not in cluster.members
    (job,) = staff.app.send_many([staff.app.signature("nap", 0.0)])
    assert job.get(timeout=LIMIT)  # the other one works on
    status = cluster.tell("status")
    assert status.process.returncode == 1
    assert f"{ONE}: given up: it has died 3 times" in status.output.read_text()


def wait_for_more(staff: Staff, load: Load, count: int = 30) -> None:
    """Wait until this many more jobs have ended."""
    had = len(staff.notes("end"))
    wait_until(lambda: len(staff.notes("end")) >= had + count or load.error is not None, within=LIMIT)


def measured(what: str, seconds: float) -> None:
    """Tell a time to whoever runs the tests with `-rP`: what is asserted is much more, for busy machines."""
    sys.stderr.write(f"{what}: {seconds * 1000:.0f} ms\n")
