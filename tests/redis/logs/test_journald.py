"""Journald: what real workers write into a real systemd journal, while it is there, and after it was away."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5.logs.journald import JournaldDestination
from celery5.logs.log import LogWriter
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.health.test_probes import numbers
from tests.redis.logs.journal_daemon import JournalDaemon, journal_daemon
from tests.trio.health.test_status_port import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")

CELERY5 = [sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian:app"]
START = [*CELERY5, "worker", "start"]
ROLES = ("worker", "router", "scheduler", "publisher", "controller")


@pytest.fixture
def journal() -> Iterator[JournalDaemon]:
    with journal_daemon() as one:
        yield one


def started(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch, role: str = "worker"
) -> Employee:
    """A process as systemd starts one: its stderr is the journal."""
    with journal.stream() as (stderr, named):
        monkeypatch.setenv("JOURNAL_STREAM", named)
        worker = staff.launch([*CELERY5, role, "start"], stderr=stderr, journal_socket=journal.socket)
    wait_until(
        lambda: (
            journal.entries(f"CELERY5_EVENT=celery5:{role}:started") != []
            or worker.process.poll() is not None
        ),
        within=30,
    )
    assert worker.process.poll() is None, worker.output.read_text()
    return worker


def test_a_worker_whose_stderr_is_the_journal_writes_fields_that_can_be_searched(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(staff, journal, monkeypatch)
    jobs = [staff.app.tasks["quiet"].delay(n) for n in range(3)]
    failed = staff.app.tasks["fail"].options(max_retries=0).delay()
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=celery5:job")) == 4)
    for job in jobs:
        (entry,) = journal.entries(f"CELERY5_JOB={job.id}")
        assert (entry["CELERY5_TASK"], entry["CELERY5_STATE"]) == ("quiet", "SUCCESS")
        assert (entry["CELERY5_QUEUE"], entry["CELERY5_ATTEMPT"]) == ("default", "1")
        assert float(entry["CELERY5_DURATION"]) >= 0
        assert entry["MESSAGE"].startswith("quiet SUCCESS in ")
        assert entry in journal.entries(f"CELERY5_WORKER={entry['CELERY5_WORKER']}", "CELERY5_QUEUE=default")
        assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("6", "celery5")
        assert entry["_TRANSPORT"] == "journal"
        assert entry["_PID"] == str(worker.process.pid), "of the process itself, by the kernel's word"
    (entry,) = journal.entries(f"CELERY5_JOB={failed.id}")
    assert (entry["CELERY5_STATE"], entry["PRIORITY"]) == ("DEAD", "3")
    assert "ValueError: no" in entry["CELERY5_TRACEBACK"]
    assert entry["CELERY5_TRACEBACK"].count("\n") > 1
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert worker.output.read_text() == "", "not a line of it twice"
    assert journal.entries("CELERY5_EVENT=celery5:worker:stopped") != []


@pytest.mark.parametrize("role", ROLES)
def test_journal_has_role_and_action_of_each_line(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch, short_path: Path, role: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))  # where a Publisher opens its socket
    one = started(staff, journal, monkeypatch, role)
    (ready,) = journal.entries(f"CELERY5_EVENT=celery5:{role}:started")
    assert (ready["PRIORITY"], ready["SYSLOG_IDENTIFIER"]) == ("6", "celery5")
    assert ready["MESSAGE"].startswith(f"{role}:started")
    assert (ready["_PID"], ready["_TRANSPORT"]) == (str(one.process.pid), "journal")
    of_its_action = journal.entries(f"CELERY5_TASK_UUID={ready['CELERY5_TASK_UUID']}")
    (first,) = [line for line in of_its_action if line["CELERY5_TASK_LEVEL"] == "/1"]
    assert first["CELERY5_EVENT"] == "celery5:process:started"
    assert (first["CELERY5_PROCESS"], first["CELERY5_APP"]) == (role, staff.app.name)
    levels = [line["CELERY5_TASK_LEVEL"] for line in of_its_action]
    assert len(levels) == len(set(levels)) > 1
    one.signal(signal.SIGTERM)
    assert one.wait(60) == 0
    assert one.output.read_text() == "", "not a line of it twice"
    (left,) = journal.entries(f"CELERY5_EVENT=celery5:{role}:stopped", f"_PID={one.process.pid}")
    assert left["CELERY5_TASK_UUID"] == ready["CELERY5_TASK_UUID"]


def test_a_members_jobs_are_in_the_journal_beside_its_controller(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = started(staff, journal, monkeypatch, "controller")
    job = staff.app.tasks["quiet"].delay(1)
    wait_until(lambda: journal.entries(f"CELERY5_JOB={job.id}") != [], within=30)
    (entry,) = journal.entries(f"CELERY5_JOB={job.id}", "CELERY5_EVENT=celery5:job")
    assert entry["_PID"] != str(one.process.pid)
    assert entry["CELERY5_WORKER"].startswith("worker-default-1:")


def test_a_variable_that_was_inherited_does_not_make_a_file_the_journal(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journal.stream() as (_, named):
        monkeypatch.setenv("JOURNAL_STREAM", named)
        worker = staff.start(journal_socket=journal.socket)
    assert worker.lines("worker:started") != []
    assert journal.entries("SYSLOG_IDENTIFIER=celery5") == []


def test_the_journal_can_be_asked_for_by_name(staff: Staff, journal: JournalDaemon) -> None:
    worker = staff.launch([*START, "--log-format", "journal"], journal_socket=journal.socket)
    wait_until(lambda: journal.entries("CELERY5_EVENT=celery5:worker:started") != [])
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    lost = staff.launch([*START, "--log-format", "journal"], journal_socket=str(staff.folder / "none"))
    assert lost.wait() == 2
    (line,) = lost.output.read_text().splitlines()
    assert "no journal listens" in line
    assert "use --log-format json" in line


def test_jobs_run_and_lines_are_kept_while_the_journal_is_down(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("CELERY5_STATUS_PORT", str(port))
    started(staff, journal, monkeypatch)
    journal.kill()
    jobs = [staff.app.tasks["quiet"].delay(n) for n in range(5)]
    assert [job.get(timeout=30) for job in jobs] == [0, 1, 2, 3, 4]
    wait_until(lambda: numbers(port)["celery5_log_retried_total"] >= 5)
    journal.start()
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=celery5:job")) == 5)
    found = journal.entries("CELERY5_EVENT=celery5:job")
    assert sorted(line["CELERY5_JOB"] for line in found) == sorted(job.id for job in jobs)
    assert {line["CELERY5_AGAIN"] for line in found} <= {"1", "2"}
    assert numbers(port)["celery5_log_lost_total"] == 0


def test_what_is_too_large_for_a_datagram_arrives_whole(journal: JournalDaemon) -> None:
    with LogWriter(JournaldDestination(journal.socket)) as log:
        log._buffer.clear()
        log({"message_type": "celery5:x", "level": "info", "worker": "w", "blob": "y\n" * 500_000})
    wait_until(lambda: journal.entries("CELERY5_EVENT=celery5:x") != [])
    (entry,) = journal.entries("CELERY5_EVENT=celery5:x")
    assert entry["CELERY5_BLOB"] == "y\n" * 500_000
    assert log.counts.lost == 0


def test_thousands_of_messages_at_once_are_all_there_in_order(journal: JournalDaemon) -> None:
    with LogWriter(JournaldDestination(journal.socket)) as log:
        log._buffer.clear()
        for n in range(3000):
            log({"message_type": "celery5:x", "level": "info", "worker": "w", "n": n})
        wait_until(lambda: log.counts.written == 3000)  # at its end it would give up, if the journal is slow
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=celery5:x")) == 3000)
    assert [int(entry["CELERY5_N"]) for entry in journal.entries("CELERY5_EVENT=celery5:x")] == list(
        range(3000)
    )
