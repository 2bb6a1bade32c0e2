"""Routers killed: whenever a Router is killed, no document is lost, and an idempotent sink has each once."""

import json
import random
import signal
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.publisher.shipping import ship as real

LONG = 80.0
"""Seconds that a step may take: a busy machine starts six processes and waits for the lease of a dead Router."""
TARGET = [sys.executable, "-m", "celery5", "-A", "tests.redis.publisher.shipping:app"]


def start(staff: Staff, kind: str) -> Employee:
    """A process of that kind, without waiting for it."""
    return staff.launch([*TARGET, kind, "start"])


def shipped(folder: Path) -> list[str]:
    """The jobs in the table."""
    with suppress(sqlite3.OperationalError):
        db = sqlite3.connect(folder / "shipping.db", timeout=10)
        try:
            return [row[0] for row in db.execute("SELECT id FROM shipments")]
        finally:
            db.close()
    return []


def lines(folder: Path) -> list[str]:
    """The jobs in the file, each as often as it is there."""
    with suppress(FileNotFoundError):
        return [json.loads(line)["id"] for line in (folder / "shipments.jsonl").read_text().splitlines()]
    return []


def test_routers_are_killed_and_every_sink_has_every_document(staff: Staff) -> None:
    app = staff.app
    ship = app.task(name="ship")(real.function)
    start(staff, "worker")
    routers = [start(staff, "router"), start(staff, "router")]
    sent = []
    for _ in range(4):
        sent += app.send_many([ship.s(number) for number in range(100)])
        before = len(shipped(staff.folder))
        wait_until(lambda before=before: len(shipped(staff.folder)) > before, within=LONG)  # type: ignore[misc]
        time.sleep(random.uniform(0.0, 0.2))
        one = routers.pop(0)
        one.signal(signal.SIGKILL)
        one.wait()
        routers.append(start(staff, "router"))
    well = {job.id for n, job in enumerate(sent) if n % 100 % 10 != 3}
    wait_until(lambda: len(set(shipped(staff.folder))) == len(well), within=LONG)
    wait_until(lambda: len(set(lines(staff.folder))) == len(sent), within=LONG)
    assert set(shipped(staff.folder)) == well
    assert len(shipped(staff.folder)) == len(well)  # the table has each once
    assert set(lines(staff.folder)) == {job.id for job in sent}  # also those that died
    app.dlq.purge()


def test_a_source_that_one_router_runs_is_taken_over_when_that_is_killed(staff: Staff) -> None:
    folder = staff.folder
    start(staff, "worker")
    routers = {router.process.pid: router for router in (start(staff, "router"), start(staff, "router"))}
    wait_until(lambda: (folder / "first").exists(), within=LONG)
    (pid,) = [int(line) for line in (folder / "runs").read_text().split()]
    routers[pid].signal(signal.SIGKILL)
    wait_until(lambda: len((folder / "runs").read_text().split()) == 2, within=LONG)
    assert int((folder / "runs").read_text().split()[1]) != pid
    for name in ("first", "second"):
        wait_until(lambda name=name: len((folder / name).read_text().split()) >= 40, within=LONG)  # type: ignore[misc]
    time.sleep(0.2)
    for name in ("first", "second"):
        assert sorted(map(int, (folder / name).read_text().split())) == list(range(40))
