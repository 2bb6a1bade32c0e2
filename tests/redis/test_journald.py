"""Journald: what real workers write into a real systemd journal, while it is there, and after it was away.

Floor: tests. Reads: what journalctl finds. Writes: jobs, for real worker processes; a journal of the tests' own.
"""

import signal
import sys
from collections.abc import Iterator

import pytest

from celery5.journald import Journald
from celery5.log import Journal
from tests.redis.journal_daemon import JournalDaemon, journal_daemon
from tests.redis.staff import Employee, Staff, wait_until
from tests.redis.test_probes import numbers
from tests.trio.test_status_port import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")

START = [sys.executable, "-m", "celery5", "-A", "tests.redis.historian:app", "worker", "start"]


@pytest.fixture
def journal() -> Iterator[JournalDaemon]:
    with journal_daemon() as one:
        yield one


def started(staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch) -> Employee:
    """A worker as systemd starts one: its stderr is the journal."""
    with journal.stream() as (stderr, named):
        monkeypatch.setenv("JOURNAL_STREAM", named)
        worker = staff.launch(START, stderr=stderr, journal_socket=journal.socket)
    wait_until(
        lambda: journal.entries("CELERY5_EVENT=worker:ready") != [] or worker.process.poll() is not None
    )
    assert worker.process.poll() is None, worker.output.read_text()
    return worker


def test_a_worker_whose_stderr_is_the_journal_writes_fields_that_can_be_searched(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started(staff, journal, monkeypatch)
    jobs = [staff.app.tasks["quiet"].delay(n) for n in range(3)]
    failed = staff.app.tasks["fail"].options(max_retries=0).delay()
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=job")) == 4)
    for each in jobs:
        (entry,) = journal.entries(f"CELERY5_JOB={each.id}")
        assert (entry["CELERY5_TASK"], entry["CELERY5_STATE"]) == ("quiet", "SUCCESS")
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
    assert journal.entries("CELERY5_EVENT=worker:stopped") != []


def test_a_variable_that_was_inherited_does_not_make_a_file_the_journal(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journal.stream() as (_, named):
        monkeypatch.setenv("JOURNAL_STREAM", named)
        worker = staff.start(journal_socket=journal.socket)
    assert worker.lines("worker:ready") != []
    assert journal.entries("SYSLOG_IDENTIFIER=celery5") == []


def test_the_journal_can_be_asked_for_by_name(staff: Staff, journal: JournalDaemon) -> None:
    worker = staff.launch([*START, "--log-format", "journal"], journal_socket=journal.socket)
    wait_until(lambda: journal.entries("CELERY5_EVENT=worker:ready") != [])
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    lost = staff.launch([*START, "--log-format", "journal"], journal_socket=str(staff.folder / "none"))
    assert lost.wait() == 2
    (line,) = lost.output.read_text().splitlines()
    assert "no journal listens" in line
    assert "use --log-format json" in line


def test_while_the_journal_is_away_jobs_run_and_what_was_not_written_is_brought_again(
    staff: Staff, journal: JournalDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("CELERY5_STATUS_PORT", str(port))
    started(staff, journal, monkeypatch)
    journal.kill()
    jobs = [staff.app.tasks["quiet"].delay(n) for n in range(5)]
    assert [each.get(timeout=10) for each in jobs] == [0, 1, 2, 3, 4]
    wait_until(lambda: numbers(port)["celery5_log_again_total"] >= 5)
    journal.start()
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=job")) == 5)
    found = journal.entries("CELERY5_EVENT=job")
    assert sorted(each["CELERY5_JOB"] for each in found) == sorted(each.id for each in jobs)
    assert {each["CELERY5_AGAIN"] for each in found} <= {"1", "2"}
    assert numbers(port)["celery5_log_lost_total"] == 0


def test_what_is_too_large_for_a_datagram_arrives_whole(journal: JournalDaemon) -> None:
    with Journal(Journald(journal.socket)) as log:
        log._buffer.clear()
        log({"message_type": "celery5:x", "level": "info", "worker": "w", "blob": "y\n" * 500_000})
    wait_until(lambda: journal.entries("CELERY5_EVENT=x") != [])
    (entry,) = journal.entries("CELERY5_EVENT=x")
    assert entry["CELERY5_BLOB"] == "y\n" * 500_000
    assert log.counts.lost == 0


def test_thousands_of_messages_at_once_are_all_there_in_order(journal: JournalDaemon) -> None:
    with Journal(Journald(journal.socket)) as log:
        log._buffer.clear()
        for n in range(3000):
            log({"message_type": "celery5:x", "level": "info", "worker": "w", "n": n})
    wait_until(lambda: len(journal.entries("CELERY5_EVENT=x")) == 3000)
    assert [int(each["CELERY5_N"]) for each in journal.entries("CELERY5_EVENT=x")] == list(range(3000))
