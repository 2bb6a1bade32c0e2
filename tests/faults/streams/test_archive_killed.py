"""A worker is killed while it archives: the next one archives the same portion again, and no record is there twice."""

import gzip
import json
import signal
import sys
from pathlib import Path

import pytest

from celery5 import App
from celery5.broker.calls import streams as calls
from celery5.streams import Stream
from tests.faults.streams.archiving import RECORDS, declare_readings
from tests.redis.commands.staff import Employee, Staff, wait_until


def start(staff: Staff, name: str) -> Employee:
    """Start a worker that archives."""
    target = ("-m", "celery5", "-A", "tests.faults.streams.archiving:app")
    return staff.launch([sys.executable, *target, "worker", "start", "--name", name])


def begin_group(app: App, readings: Stream[int]) -> None:
    """Have a group that reads nothing."""
    call = calls.renew_membership(
        *(readings.keys, "nobody"),
        member="gone",
        incarnation="gone",
        lease=0.001,
        is_joining=True,
        start="0-0",
        partitions=1,
    )
    app.perform(call)


def read_files(folder: Path) -> list[int]:
    """Return what is in all files that are whole."""
    files = (folder / "archive").glob("readings.*.jsonl.gz")
    return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def test_a_portion_whose_worker_was_killed_is_archived_again_and_replaces_its_file(
    staff: Staff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARCHIVE_FOLDER", str(tmp_path))
    readings = declare_readings(staff.app, tmp_path)
    begin_group(staff.app, readings)
    readings.send(*range(RECORDS + 100))
    (tmp_path / "hang").touch()
    one = start(staff, "one")
    wait_until(lambda: len(read_files(tmp_path)) == 100)
    # More of them wait now than the portion had.
    readings.send(*range(RECORDS + 100, RECORDS + 200))
    one.signal(signal.SIGKILL)
    (tmp_path / "hang").unlink()
    start(staff, "two")
    wait_until(lambda: not staff.app.streams.info("readings")[0].waiting_for_archive)
    assert sorted(read_files(tmp_path)) == list(range(200))
    assert len(list((tmp_path / "archive").iterdir())) == 2
