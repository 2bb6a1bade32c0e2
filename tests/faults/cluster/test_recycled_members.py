"""Recycled members of a cluster: one at a time is out, and nobody takes it for one that has failed."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from celery5 import AsyncResult, gather
from tests.faults.cluster.clustered import LIMIT, Clustered, Load
from tests.redis.commands.staff import Staff, staffed, wait_until

pytestmark = pytest.mark.timeout(600)

THREE_WORKERS = """
restart_limit = 1
hung_after = 5
[workers.default]
count = 3
max_jobs = 60
"""
LONG = 7.0
"""Seconds that some jobs take: a worker that is recycled ends them first, so it is out for longer than that."""
ORDER_MARGIN = 0.5
"""Seconds by which a process may log late that it works: others may see it earlier."""


@pytest.fixture
def staff(url: str, app_name: str, tmp_path: Path) -> Iterator[Staff]:
    """Who starts processes for one application over the shared server, and keeps its history."""
    with staffed(url, app_name, tmp_path) as one:
        yield one


@pytest.fixture
def cluster(staff: Staff, tmp_path: Path) -> Iterator[Clustered]:
    """A cluster whose workers are recycled after a few jobs."""
    path = tmp_path / "cluster.toml"
    path.write_text(THREE_WORKERS)
    one = Clustered(staff, path)
    one.whole()
    yield one
    one.ended()


def read_status(cluster: Clustered) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the answer of `controller status`."""
    command = cluster.tell("status", "--json")
    lines = command.output.read_text().splitlines()
    return command.wait(), json.loads(lines[0])[0]


def list_outs(cluster: Clustered) -> list[tuple[float, float]]:
    """Return from when until when each recycled worker took no jobs, the first one first."""
    started = cluster.controller.lines("worker:started")
    found = []
    for line in cluster.controller.lines("worker:recycle-requested"):
        member, since = get_member(line), line["timestamp"]
        back = [at["timestamp"] for at in started if get_member(at) == member and at["timestamp"] > since]
        found.append((since, min(back, default=float("inf"))))
    return sorted(found)


def get_member(line: dict[str, Any]) -> str:
    """Return the name of the member that has logged this line."""
    return str(line["worker"]).rpartition(":")[0]


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
    outs = list_outs(cluster)
    assert len(outs) >= 6
    overlaps = [(first, second) for first, second in pairwise(outs) if first[1] > second[0] + ORDER_MARGIN]
    assert overlaps == []
    shown = [[member["phase"] for member in answer["members"]] for answer in seen]
    assert {phase for phases in shown for phase in phases} == {"up", "recycling"}
    assert max(phases.count("recycling") for phases in shown) == 1
    reasons = {member["recycling"] for answer in seen for member in answer["members"]} - {""}
    assert reasons
    assert all(why.startswith("it has done ") and why.endswith("(max_jobs)") for why in reasons)
    assert {answer["line"] for answer in seen} == {"3 of 3 members up", "2 of 3 members up, 1 recycling"}
    assert {member["deaths"] for answer in seen for member in answer["members"]} == {0}
    ends = cluster.controller.lines("member:ended")
    assert ends
    assert all(line["how"].startswith("recycled: it has done ") for line in ends)
    assert "ended with 75" not in cluster.controller.output.read_text()


def test_status_says_for_people_that_a_member_is_recycling(
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
