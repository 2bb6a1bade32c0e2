"""Durable revocations: they hold while no worker lives, and when the worker that has the job dies."""

import signal
from pathlib import Path
from typing import Any

import pytest

from celery5 import AsyncResult, TaskRevoked
from celery5.protocol.job.states import JobState
from tests.redis.commands.staff import Staff, wait_until

LEASE = 0.6
GATES = ("gate", "gate_asyncio", "gate_thread")


def send(staff: Staff, task: str, *args: object) -> AsyncResult[Any]:
    """Send one job."""
    return staff.app.send_many([staff.app.signature(task, *args)])[0]


def has_been_revoked(result: AsyncResult[Any]) -> None:
    """The job ends as revoked, for whoever asks."""
    with pytest.raises(TaskRevoked):
        result.get(timeout=30)
    assert result.status() is JobState.REVOKED


@pytest.mark.parametrize("gate", GATES)
def test_a_job_that_was_revoked_before_its_worker_died_is_not_run_again(
    staff: Staff, tmp_path: Path, gate: str
) -> None:
    worker = staff.start(lease=LEASE)
    job, other = send(staff, gate, str(tmp_path / "open")), send(staff, gate, str(tmp_path / "open"))
    wait_until(lambda: len(staff.notes()) == 2)
    worker.signal(signal.SIGSTOP)  # it cannot hear
    assert job.revoke() is True
    assert job.status() is JobState.EXECUTING
    worker.signal(signal.SIGKILL)
    worker.wait()
    (tmp_path / "open").touch()
    staff.start(lease=LEASE)
    assert isinstance(other.get(timeout=30), int)
    has_been_revoked(job)
    assert [note.job for note in staff.notes()].count(job.id) == 1
    assert [note.job for note in staff.notes()].count(other.id) == 2


def test_a_job_that_is_revoked_after_its_worker_died_is_not_run_again(staff: Staff, tmp_path: Path) -> None:
    worker = staff.start(lease=LEASE)
    job = send(staff, "gate", str(tmp_path / "open"))
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGKILL)
    worker.wait()
    assert job.revoke() is True
    (tmp_path / "open").touch()
    later = send(staff, "nap", 0.0)
    staff.start(lease=LEASE)
    later.get(timeout=30)
    has_been_revoked(job)
    assert [note.job for note in staff.notes()].count(job.id) == 1


def test_a_job_that_is_revoked_while_no_worker_lives_does_not_run(staff: Staff) -> None:
    job, scheduled = send(staff, "nap", 0.0), staff.app.tasks["nap"].options(countdown=0.1).delay(0.0)
    assert (job.revoke(), scheduled.revoke()) == (True, True)
    later = staff.app.tasks["nap"].options(countdown=0.3).delay(0.0)
    staff.start()
    later.get(timeout=30)
    has_been_revoked(job)
    has_been_revoked(scheduled)
    assert [note.job for note in staff.notes()] == [later.id]


def test_a_job_that_was_revoked_is_not_given_back_by_a_worker_that_stops(
    staff: Staff, tmp_path: Path
) -> None:
    worker = staff.start(grace_period=0.1)
    deaf = send(staff, "gate_thread", str(tmp_path / "open"))
    wait_until(lambda: len(staff.notes()) == 1)
    assert deaf.revoke() is True
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    has_been_revoked(deaf)


@pytest.mark.parametrize("gate", GATES[:2])
def test_a_job_that_runs_is_told_at_once_and_not_at_the_next_beat(
    staff: Staff, tmp_path: Path, gate: str
) -> None:
    staff.start(lease=300)  # the next beat is long away
    job = send(staff, gate, str(tmp_path / "open"))
    wait_until(lambda: len(staff.notes()) == 1)
    assert job.revoke() is True
    has_been_revoked(job)
