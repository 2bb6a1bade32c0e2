"""Boxed deaths: no box outlives its worker, nor what the box has started, and its job runs again."""

import os
import signal
from pathlib import Path

import pytest

from tests.redis.commands.staff import Employee, Staff, is_alive, wait_until


def nested(staff: Staff, path: Path, task: str = "nest") -> list[int]:
    """Send a job whose box has a child; gives the process ids of both once they are there."""
    staff.app.tasks[task].delay(str(path))
    wait_until(path.exists, within=30)
    return [int(number) for number in path.read_text().split()]


def assert_they_end(pids: list[int]) -> None:
    """All of them, soon."""
    wait_until(lambda: not any(map(is_alive, pids)), within=30)


def test_a_box_and_all_that_it_has_started_end_with_a_worker_that_is_killed(
    staff: Staff, tmp_path: Path
) -> None:
    worker = staff.start()
    pids = nested(staff, tmp_path / "first")
    worker.signal(signal.SIGKILL)
    worker.wait()
    assert_they_end(pids)
    (tmp_path / "first").unlink()
    another = staff.start()  # the job was put back, and counted
    wait_until((tmp_path / "first").exists, within=30)
    assert [note.attempt for note in staff.notes()] == [1, 1]
    again = [int(number) for number in (tmp_path / "first").read_text().split()]
    another.signal(signal.SIGKILL)
    assert_they_end(again)


@pytest.mark.parametrize("task", ["nest", "nest_in_shell"])
def test_the_kernel_ends_a_box_when_there_is_nobody_else_to_do_it(
    staff: Staff, tmp_path: Path, task: str
) -> None:
    worker: Employee = staff.start("--log-level", "debug")
    box, child = nested(staff, tmp_path / "box", task)
    worker.lose_its_machine()
    try:
        assert_they_end([box])
    finally:
        wait_until(lambda: _kill(child))


@pytest.mark.parametrize("task", ["nest", "nest_in_shell"])
@pytest.mark.parametrize("grace", ["0", "0.2"])
def test_a_worker_that_is_told_to_stop_ends_its_boxes(
    staff: Staff, tmp_path: Path, grace: str, task: str
) -> None:
    worker = staff.start(grace_period=grace)
    pids = nested(staff, tmp_path / "box", task)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert not any(map(is_alive, pids))


def test_a_worker_that_is_told_to_stop_twice_ends_its_boxes_too(staff: Staff, tmp_path: Path) -> None:
    worker = staff.start()
    pids = nested(staff, tmp_path / "box")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: bool(worker.lines("process:stop-requested")))
    worker.signal(signal.SIGTERM)
    worker.wait(30)
    assert_they_end(pids)


def _kill(pid: int) -> bool:
    """What nobody else ends. Gives whether it is gone."""
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
    return not is_alive(pid)
