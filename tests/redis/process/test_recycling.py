"""Recycling: worker processes that end when they have done enough, and begin again, while jobs come: none is lost, none
doubled, none interrupted.
"""

import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import redis

from celery5 import AsyncResult
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.foreground import RESTART_FOLDER_VARIABLE
from celery5.protocol.process.recycling import (
    IS_SPARE,
    RESTART_EXIT_CODE,
    STARTS_SUCCESSOR,
    SUPERVISED_VARIABLE,
)
from celery5.services.worker.recycling import TURN_LEASE
from tests.redis.commands.staff import Employee, Staff, wait_until


def send(staff: Staff, task: str, *args: object, count: int = 1) -> list[AsyncResult[int]]:
    """Send jobs."""
    return staff.app.send_many([staff.app.signature(task, *args) for _ in range(count)])


def each_ran_once(staff: Staff, sent: list[AsyncResult[int]]) -> bool:
    """Whether each of these has begun and ended exactly once."""
    once = Counter(job.id for job in sent)
    return all(Counter(note.job for note in staff.notes(what)) == once for what in ("begin", "end"))


def recycled(one: Employee) -> list[str]:
    """Why it was recycled, each time."""
    return [line["why"] for line in one.lines("worker:recycle-requested")]


def stopped(one: Employee) -> int:
    """Its exit code after SIGTERM."""
    one.signal(signal.SIGTERM)
    return one.wait(30)


def test_a_worker_without_a_parent_begins_anew_in_place_and_each_job_runs_once(staff: Staff) -> None:
    one = staff.start(max_jobs=20, concurrency=5)
    sent = send(staff, "nap", 0.01, count=150)
    assert {job.get(timeout=30) for job in sent} == {one.process.pid}
    assert each_ran_once(staff, sent)
    wait_until(lambda: len(recycled(one)) >= 1)
    more = send(staff, "nap", 0.01, count=50)
    assert {job.get(timeout=30) for job in more} == {one.process.pid}
    wait_until(lambda: len(recycled(one)) >= 2, within=30)
    assert each_ran_once(staff, [*sent, *more])
    assert all("(max_jobs)" in line for line in recycled(one))
    wait_until(lambda: len(one.lines("worker:started")) == len(recycled(one)) + 1)
    assert all(line["running"] <= 5 for line in one.lines("worker:recycle-requested"))
    assert stopped(one) == 0


def test_a_fleet_replaces_who_is_recycled_and_counts_no_death(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_jobs=20, concurrency=5)
    sent = send(staff, "nap", 0.01, count=200)
    pids = {job.get(timeout=30) for job in sent}
    wait_until(lambda: len(recycled(fleet)) >= 2, within=30)
    more = send(staff, "nap", 0.01, count=50)
    pids |= {job.get(timeout=30) for job in more}
    assert each_ran_once(staff, [*sent, *more])
    assert len(pids) > 2
    wait_until(lambda: len(fleet.lines("worker:started")) == len(recycled(fleet)) + 2)
    assert "ended with" not in fleet.output.read_text()
    assert stopped(fleet) == 0


def test_a_worker_that_takes_too_much_memory_is_recycled(staff: Staff) -> None:
    one = staff.start(max_memory="150 MiB")
    sent = send(staff, "hoard", 8 * 2**20, count=10)
    assert [job.get(timeout=30) for job in sent]
    more = send(staff, "hoard", 8 * 2**20, count=10)
    assert [job.get(timeout=30) for job in more]
    wait_until(lambda: len(recycled(one)) == 1)
    assert "(max_memory)" in recycled(one)[0]
    wait_until(lambda: len(one.lines("worker:started")) == 2)
    assert each_ran_once(staff, [*sent, *more])
    stats = staff.app.control.send("stats")[0].answer
    assert stats["memory"] < 130 * 2**20
    assert stats["done"] == 0
    assert stopped(one) == 0


def test_what_runs_is_not_interrupted_however_long_it_takes(staff: Staff, tmp_path: Path) -> None:
    one = staff.start(max_jobs=2, grace_period=0.1)
    door = tmp_path / "door"
    (long,) = send(staff, "gate", str(door))
    wait_until(lambda: len(staff.notes()) == 1)
    short = [*send(staff, "nap", 0.0), *send(staff, "nap", 0.0)]
    assert [job.get(timeout=30) for job in short]
    wait_until(lambda: len(recycled(one)) == 1)
    (row,) = [reply.answer for reply in staff.app.control.send("stats")]  # it still answers
    assert row["recycling"]
    (late,) = send(staff, "nap", 0.0)
    wait_until(lambda: late.status() == "SENT")  # nobody reads it
    door.touch()
    assert long.get(timeout=30)
    assert late.get(timeout=30)
    assert each_ran_once(staff, [long, *short, late])
    assert stopped(one) == 0


def test_who_is_told_to_stop_meanwhile_does_not_begin_anew(staff: Staff, tmp_path: Path) -> None:
    one = staff.start(max_jobs=1)
    door = tmp_path / "door"
    (long,) = send(staff, "gate", str(door))
    wait_until(lambda: len(staff.notes()) == 1)
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    wait_until(lambda: len(recycled(one)) == 1)
    one.signal(signal.SIGTERM)
    door.touch()
    assert one.wait(30) == 0
    assert long.get(timeout=30)
    assert len(one.lines("worker:started")) == 1


def test_under_a_controller_it_ends_with_a_code_that_asks_for_the_next_one(staff: Staff) -> None:
    command = staff.start(max_jobs=1, **{SUPERVISED_VARIABLE.removeprefix("CELERY5_"): 1})
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    assert command.wait(30) == RESTART_EXIT_CODE


def test_supervised_worker_goes_on_until_its_controller_permits_its_end(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = staff.start("--name", "w", max_jobs=1, supervised=STARTS_SUCCESSOR)
    permit = staff.app.keys.recycling_permit("w")
    redis_client.set(permit, "granted", px=20_000)  # to the process before this one
    sent = send(staff, "nap", 0.0)
    wait_until(lambda: len(worker.lines("worker:successor-requested")) == 1)
    redis_client.set(permit, "wait", px=20_000)
    sent += send(staff, "nap", 0.0, count=20)
    assert {job.get(timeout=30) for job in sent} == {worker.process.pid}
    assert recycled(worker) == []
    redis_client.set(permit, "granted", px=20_000)
    assert worker.wait(30) == RESTART_EXIT_CODE
    assert len(recycled(worker)) == 1
    assert not redis_client.exists(staff.app.keys.recycling), "another process has its place"


def test_spare_finishes_its_jobs_and_ends_when_its_controller_permits_it(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    permit, door = staff.app.keys.recycling_permit("w"), tmp_path / "door"
    redis_client.set(permit, "granted", px=20_000)  # to the spare before this one
    spare = staff.start("--name", "w", grace_period=0.1, supervised=IS_SPARE)
    wait_until(lambda: not redis_client.exists(permit))
    (long,) = send(staff, "gate", str(door))
    wait_until(lambda: len(staff.notes()) == 1)
    redis_client.set(permit, "granted", px=20_000)
    wait_until(lambda: len(recycled(spare)) == 1)
    (late,) = send(staff, "nap", 0.0)
    door.touch()
    assert long.get(timeout=30) == spare.process.pid
    assert spare.wait(30) == RESTART_EXIT_CODE
    assert late.status() == "SENT"


def test_worker_with_capacity_asks_its_controller_for_no_successor(staff: Staff) -> None:
    worker = staff.start(max_jobs=1, capacity="gpu=2", supervised=STARTS_SUCCESSOR)
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    assert worker.wait(30) == RESTART_EXIT_CODE
    assert worker.lines("worker:successor-requested") == []


def test_a_limit_below_what_it_takes_at_first_is_told_of_and_not_followed(staff: Staff) -> None:
    one = staff.start(max_memory="10 MiB")
    wait_until(lambda: len(one.lines("worker:memory-limit-dropped")) == 1)
    assert [job.get(timeout=30) for job in send(staff, "nap", 0.0, count=3)]
    assert staff.app.control.send("stats")[0].answer["max_memory"] is None
    assert recycled(one) == []
    assert stopped(one) == 0


def test_a_worker_that_begins_anew_waits_for_a_broker_that_is_away(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    os.kill(own_server.pid, signal.SIGSTOP)
    os.environ[RESTART_FOLDER_VARIABLE] = os.getcwd()
    try:
        flags = ["-m", "celery5", "-A", "tests.redis.events.historian:app", "worker", "start"]
        one = own_staff.launch([sys.executable, *flags])
        wait_until(lambda: bool(one.lines("worker:restarted")), within=60)
    finally:
        del os.environ[RESTART_FOLDER_VARIABLE]
        os.kill(own_server.pid, signal.SIGCONT)
    wait_until(lambda: bool(one.lines("worker:started")), within=60)
    assert send(own_staff, "nap", 0.0)[0].get(timeout=30)
    assert stopped(one) == 0


def test_systemd_hears_of_no_end_when_a_worker_begins_anew_in_place(staff: Staff, short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(short_path / "notify"))
        ear.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = str(short_path / "notify")
        try:
            one = staff.start(max_jobs=1)
        finally:
            del os.environ["NOTIFY_SOCKET"]
        assert b"READY=1" in ear.recv(4096)
        assert send(staff, "nap", 0.0)[0].get(timeout=30)
        assert ear.recv(4096) == b"WATCHDOG=1"
        assert b"READY=1" in ear.recv(4096)  # the next word, from the same process
        assert stopped(one) == 0
        assert b"STOPPING=1" in ear.recv(4096)


@pytest.mark.timeout(300)
def test_workers_that_reach_their_limits_together_are_recycled_one_by_one(staff: Staff) -> None:
    fleet = staff.start("--processes", "4", ready=4, max_jobs=10, concurrency=2)
    stats = [reply.answer for reply in staff.app.control.send("stats")]
    assert all(8 <= stat["max_jobs"] <= 10 for stat in stats)
    sent = send(staff, "nap", 0.02, count=200)
    assert [job.get(timeout=60) for job in sent]
    wait_until(lambda: len(recycled(fleet)) >= 3, within=60)
    wait_until(lambda: len(fleet.lines("worker:started")) >= 4 + 3)
    started = [line["timestamp"] for line in fleet.lines("worker:started")]
    for number, line in enumerate(fleet.lines("worker:successor-requested")):
        until = line["timestamp"] + 0.1  # others hear that a process works before the log does
        assert sum(at <= until for at in started) >= 4 + number, "the one before is replaced"
    assert each_ran_once(staff, sent)
    assert stopped(fleet) == 0


def test_recycling_turn_ends_when_the_next_process_reads_jobs(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    key, supervised = staff.app.keys.recycling, SUPERVISED_VARIABLE.removeprefix("CELERY5_")
    first = staff.start("--name", "w", max_jobs=1, **{supervised: 1})
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    assert first.wait(30) == RESTART_EXIT_CODE
    assert redis_client.get(key) == b"w", "it keeps its turn until its place is taken again"
    assert 0 < redis_client.pttl(key) <= TURN_LEASE * 1000
    following = staff.start("--name", "w", max_jobs=1, **{supervised: 1})
    wait_until(lambda: not redis_client.exists(key), within=TURN_LEASE / 3)
    assert stopped(following) == 0


def test_recycling_turn_of_a_worker_that_restarts_in_place_ends_when_it_reads(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = staff.start(max_jobs=1)
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    wait_until(lambda: len(worker.lines("worker:started")) == 2)
    wait_until(lambda: not redis_client.exists(staff.app.keys.recycling), within=TURN_LEASE / 3)
    assert stopped(worker) == 0


def test_worker_waits_for_its_recycling_turn_at_most_for_one_lease(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = staff.start(max_jobs=1)
    redis_client.set(staff.app.keys.recycling, "lost", px=4000)
    assert send(staff, "nap", 0.0)[0].get(timeout=30)
    early = 0
    while redis_client.get(staff.app.keys.recycling) == b"lost":
        early = len(recycled(worker))
        time.sleep(0.05)
    assert early == 0
    wait_until(lambda: len(recycled(worker)) == 1)
    wait_until(lambda: len(worker.lines("worker:started")) == 2)
    assert stopped(worker) == 0


def test_the_list_of_workers_shows_jobs_memory_and_limits(staff: Staff) -> None:
    staff.start("--name", "w", max_jobs=1000, max_memory="2 GiB")
    assert [job.get(timeout=30) for job in send(staff, "nap", 0.0, count=3)]
    target = [sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian:app", "worker", "list"]
    shown, plain = staff.launch(target), staff.launch([*target, "--json"])
    assert (shown.wait(30), plain.wait(30)) == (0, 0)
    head, line = shown.output.read_text().splitlines()
    assert head.split()[:7] == ["worker", "state", "up", "jobs", "running", "memory", "report"]
    assert line.startswith("w ")
    assert "3 of " in line
    assert "GiB" not in line
    assert " MiB of " in line
    (row,) = json.loads(plain.output.read_text())
    assert (row["done"], row["running"], row["state"]) == (3, 0, "working")
    assert 800 <= row["max_jobs"] <= 1000
    assert row["memory"] < row["max_memory"] <= 2 * 2**30


def test_a_fleet_starts_the_next_process_before_one_stops_reading(staff: Staff, tmp_path: Path) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_jobs=10, grace_period=0.1)
    door = tmp_path / "door"
    (long,) = send(staff, "gate", str(door))
    wait_until(lambda: len(staff.notes()) == 1)
    sent = send(staff, "nap", 0.01, count=60)
    assert all(job.get(timeout=30) for job in sent)
    wait_until(lambda: len(recycled(fleet)) >= 1, within=40)
    door.touch()
    assert long.get(timeout=30), "what runs is not interrupted"
    assert each_ran_once(staff, [long, *sent])
    wait_until(lambda: len(fleet.lines("worker:started")) >= 3)
    started = [line["timestamp"] for line in fleet.lines("worker:started")]
    for number, line in enumerate(fleet.lines("worker:recycle-requested")):
        until = line["timestamp"] + 0.1  # its parent hears that the next one works before the log does
        assert sum(at <= until for at in started) >= 2 + number + 1
    for line in fleet.lines("worker:recycle-requested") + fleet.lines("worker:successor-requested"):
        assert line["why"].startswith(f"it has done {line['jobs']} jobs")
    assert stopped(fleet) == 0


def test_a_fleet_starts_the_next_process_before_one_exceeds_its_memory(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_memory="150 MiB")
    sent = list[AsyncResult[int]]()

    def is_limit_reached() -> bool:
        rows = [reply.answer for reply in staff.app.control.send("stats")]
        return any(row["memory"] >= row["max_memory"] for row in rows)

    while not is_limit_reached():
        sent += send(staff, "hoard", 4 * 2**20)
        assert sent[-1].get(timeout=30)
    wait_until(lambda: len(recycled(fleet)) >= 1, within=30)
    line = fleet.lines("worker:recycle-requested")[0]
    assert "(max_memory)" in line["why"]
    assert float(line["memory"].split()[0]) < 150
    wait_until(lambda: len(fleet.lines("worker:started")) >= 3)
    started = [started_line["timestamp"] for started_line in fleet.lines("worker:started")]
    assert sum(at <= line["timestamp"] + 0.1 for at in started) >= 3
    assert each_ran_once(staff, sent)
    assert stopped(fleet) == 0


def test_a_worker_with_capacity_ends_before_the_next_one_takes_it(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_jobs=10, capacity="gpu=2")
    sent = send(staff, "nap", 0.01, count=40)
    assert all(job.get(timeout=30) for job in sent)
    wait_until(lambda: len(recycled(fleet)) >= 1, within=30)
    assert fleet.lines("worker:successor-requested") == []
    assert stopped(fleet) == 0
