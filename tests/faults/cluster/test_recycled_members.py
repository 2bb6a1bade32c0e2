"""Recycled members of a cluster: one at a time, and none counts as failed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import AsyncResult, gather
from celery5.protocol.process.recycling import RESTART_EXIT_CODE
from tests.faults.cluster.clustered import LIMIT, Clustered, Load
from tests.redis.commands.staff import Staff, wait_until

pytestmark = pytest.mark.timeout(600)

THREE_WORKERS = """
restart_limit = 1
hung_after = 5
[workers.default]
count = 3
max_jobs = 60
"""
LONG = 7.0
"""Seconds of some jobs. A worker that is recycled waits for them, so it takes no jobs for a longer time than this."""
ORDER_MARGIN = 0.5
"""Seconds by which a process may log its start late: others may see it earlier."""


@pytest.fixture
def cluster(staff: Staff, tmp_path: Path) -> Iterator[Clustered]:
    """A cluster whose workers are recycled after a few jobs."""
    path = tmp_path / "cluster.toml"
    path.write_text(THREE_WORKERS)
    cluster = Clustered(staff, path)
    cluster.whole()
    yield cluster
    cluster.ended()


def read_status(cluster: Clustered) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the answer of `controller status`."""
    command = cluster.tell("status", "--json")
    lines = command.output.read_text().splitlines()
    return command.wait(), json.loads(lines[0])[0]


def list_readers(lines: dict[str, list[dict[str, Any]]]) -> list[int]:
    """Return how many workers read jobs after each time at which one stopped to read."""
    starts = [line["timestamp"] - ORDER_MARGIN for line in lines["worker:started"]]
    ends = sorted(line["timestamp"] for line in lines["worker:recycle-requested"])
    return [sum(at <= end for at in starts) - number for number, end in enumerate(ends, 1)]


def test_one_member_at_a_time_is_recycled_and_none_counts_as_failed(staff: Staff, cluster: Clustered) -> None:
    long, seen = list[AsyncResult[int]](), list[dict[str, Any]]()
    with Load(staff, events=False) as load:
        while len(cluster.controller.lines("worker:recycle-requested")) < 6:
            long += staff.app.send_many([staff.app.signature("nap", LONG)] * 3)
            code, answer = read_status(cluster)
            assert code == 0, answer
            seen.append(answer)
    load.ended_well()
    assert all(isinstance(pid, int) for pid in gather(long, timeout=LIMIT))
    begun = [note.job for note in staff.notes()]
    assert sorted(begun) == sorted(job.id for job in (*load.sent, *long)), "none is lost, none runs twice"
    names = ("worker:started", "worker:recycle-requested")
    readers = list_readers({name: cluster.controller.lines(name) for name in names})
    assert min(readers) == 3, "another worker reads before one ceases to"
    members = [[member for member in answer["members"] if not member["replaces"]] for answer in seen]
    shown = [[member["phase"] for member in found if member["wanted"]] for found in members]
    assert {phase for phases in shown for phase in phases} == {"up", "recycling"}
    assert max(phases.count("recycling") for phases in shown) == 1
    reasons = {member["recycling"] for found in members for member in found} - {""}
    assert reasons
    assert all(why.startswith("it has done ") and why.endswith("(max_jobs)") for why in reasons)
    assert {answer["line"] for answer in seen} == {"3 of 3 members up", "2 of 3 members up, 1 recycling"}
    assert {member["deaths"] for answer in seen for member in answer["members"]} == {0}
    ends = cluster.controller.lines("member:ended")
    assert ends
    wanted = {f"worker-default-{number}" for number in (1, 2, 3)}
    assert all(line["how"].startswith("recycled: it has done ") for line in ends if line["name"] in wanted)
    assert all(line["code"] == RESTART_EXIT_CODE for line in ends)
    assert "ended with 75" not in cluster.controller.output.read_text()


def test_status_in_text_shows_a_member_that_is_recycling(
    staff: Staff, cluster: Clustered, tmp_path: Path
) -> None:
    door = tmp_path / "door"
    staff.app.send_many([staff.app.signature("gate", str(door))] * 9)
    wait_until(lambda: len(staff.notes()) == 9, within=LIMIT)
    staff.app.send_many([staff.app.signature("nap", 0.0)] * 300)

    def is_shown() -> bool:
        command = cluster.tell("status")
        assert command.process.returncode == 0
        head, *members = command.output.read_text().splitlines()
        shown = [line for line in members if " recycling " in line]
        return "1 recycling" in head and any("  recycling: it has done " in line for line in shown)

    wait_until(is_shown, within=LIMIT)
    door.touch()
