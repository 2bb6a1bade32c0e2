"""Control of processes: real workers end warm and cold when they are told to, and come back paused as they were."""

import time
from pathlib import Path

import pytest

from tests.redis.commands.staff import Staff, wait_until


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_a_worker_process_ends_as_it_was_told(staff: Staff, tmp_path: Path, how: str) -> None:
    worker = staff.start("--name", "w1")
    gate = tmp_path / "gate"
    staff.app.tasks["gate"].delay(str(gate))
    wait_until(lambda: len(staff.notes()) == 1)
    (reply,) = staff.app.control.send("shutdown", {"how": how}, to="w1")
    assert reply.answer == {"how": how, "running": 1}
    if how == "warm":
        time.sleep(0.3)
        assert worker.process.poll() is None
        gate.touch()
    assert worker.wait(30) == 0
    assert len(staff.notes("end")) == (how == "warm")
    sizes = staff.app.info().queues["default"]
    assert (sizes.waiting, sizes.running) == ((0, 0) if how == "warm" else (1, 0))


def test_a_warm_stop_that_takes_too_long_is_made_a_cold_one(staff: Staff, tmp_path: Path) -> None:
    worker = staff.start("--name", "w1")
    staff.app.tasks["gate"].delay(str(tmp_path / "never"))
    wait_until(lambda: len(staff.notes()) == 1)
    assert staff.app.control.send("shutdown", to="w1")[0].ok
    assert staff.app.control.send("shutdown", {"how": "cold"}, to="w1")[0].ok
    assert worker.wait(30) == 0
    assert staff.app.info().queues["default"].waiting == 1


def test_fleet_processes_get_commands_one_by_one(staff: Staff) -> None:
    fleet = staff.start("--name", "w", "--processes", "2", ready=2)
    control = staff.app.control
    assert control.workers() == ("w.1", "w.2")
    assert [reply.ok for reply in control.ping()] == [True, True]
    assert control.send("shutdown", to="w.1")[0].ok
    wait_until(lambda: control.workers() == ("w.2",))
    time.sleep(0.5)  # a parent that replaces it would have by now
    assert control.workers() == ("w.2",)
    assert control.send("shutdown", to="w.2")[0].ok
    assert fleet.wait(30) == 0


def test_a_paused_queue_stays_paused_when_its_worker_is_started_anew(staff: Staff) -> None:
    worker = staff.start("--name", "w1")
    assert staff.app.control.send("pause-queue", {"queue": "default"})[0].ok
    assert staff.app.control.send("shutdown")[0].ok
    assert worker.wait(30) == 0
    staff.start("--name", "w1")
    (reply,) = staff.app.control.send("stats", to="w1")
    assert reply.answer["queues"] == {"default": "paused"}
    handle = staff.app.tasks["quiet"].delay(3)
    staff.app.control.send("resume-queue", {"queue": "default"})
    assert handle.get(timeout=30) == 3
