"""Stopping: a worker that is told twice ends at once, whatever its jobs do; one that was told once ends in the end."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from celery5 import AsyncResult
from tests.redis.commands.staff import Employee, Staff, wait_until


def send(staff: Staff, task: str, *args: object) -> AsyncResult[int]:
    """Send one job."""
    return staff.app.send_many([staff.app.signature(task, *args)])[0]


def ended_by(worker: Employee, number: signal.Signals) -> bool:
    """Whether it has ended, after one signal more. Of two that come before it has taken the first it hears one."""
    worker.signal(number)
    with suppress(subprocess.TimeoutExpired):
        worker.wait(0.5)
    return worker.process.poll() is not None


def test_a_second_signal_ends_a_worker_whose_loop_is_blocked(staff: Staff) -> None:
    worker = staff.start(grace_period=30)
    send(staff, "block", 60.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    time.sleep(0.1)  # it can say nothing: its loop is blocked
    assert worker.process.poll() is None
    wait_until(lambda: ended_by(worker, signal.SIGTERM))
    assert worker.wait() == 128 + signal.SIGTERM
    assert "for the second time: exiting at once" in worker.output.read_text()


def test_a_second_ctrl_c_ends_a_worker_that_is_finishing_its_jobs(staff: Staff) -> None:
    worker = staff.start(grace_period=30)
    send(staff, "nap", 60.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGINT)
    wait_until(lambda: len(worker.lines("process:stop-requested")) == 1)
    worker.signal(signal.SIGINT)
    assert worker.wait() == 128 + signal.SIGINT


def hasty(staff: Staff) -> Employee:
    """A worker that ends 0.4 s after it was told to stop, whatever holds it up."""
    script = (
        "from celery5.processes import foreground\n"
        "from tests.redis.events.historian import app\n"
        "foreground.STOP_LIMIT = 0.3\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    worker = staff.launch([sys.executable, "-c", script], grace_period=0.1)
    wait_until(lambda: len(worker.lines("worker:started")) == 1)
    return worker


def test_a_worker_whose_job_takes_no_notice_ends_in_the_end(staff: Staff) -> None:
    worker = hasty(staff)
    send(staff, "deaf", 20.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 128 + signal.SIGTERM
    assert "not stopped" in worker.output.read_text()


def test_a_worker_whose_loop_is_blocked_ends_in_the_end_without_a_second_signal(staff: Staff) -> None:
    worker = hasty(staff)
    send(staff, "block", 20.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 128 + signal.SIGTERM


def stubborn(staff: Staff, config: str = "") -> Employee:
    """A worker like that, with a service that takes no notice of being cancelled."""
    script = (
        "import trio\n"
        "from celery5 import service\n"
        "from celery5.processes import foreground\n"
        "from tests.redis.events.historian import app\n"
        "async def stay(*, task_status):\n"
        "    task_status.started()\n"
        "    with trio.CancelScope(shield=True):\n"
        "        await trio.sleep(60)\n"
        "app.bootsteps = (service(stay, stop_limit=0.1),)\n"
        f"app.use_config({config!r}) if {config!r} else None\n"
        "foreground.STOP_LIMIT = 0.3\n"
        "foreground.serve(app, foreground.ServeOptions(name='w'))\n"
    )
    worker = staff.launch([sys.executable, "-c", script], grace_period=0.1)
    wait_until(lambda: len(worker.lines("worker:started")) == 1)
    return worker


def test_commanded_stop_ends_the_worker_whatever_a_service_does(staff: Staff) -> None:
    worker = stubborn(staff)
    (reply,) = staff.app.control.send("shutdown", to="w")
    assert reply.ok, reply
    assert worker.wait(30) == 128 + signal.SIGTERM
    assert worker.lines("step:stuck")[0]["step"] == "stay"
    assert "not stopped" in worker.output.read_text()


def test_worker_is_ended_when_a_service_blocks_its_restart(staff: Staff, tmp_path: Path) -> None:
    config = tmp_path / "celery5.toml"
    config.write_text("concurrency = 2")
    worker = stubborn(staff, str(config))
    config.write_text("concurrency = 33")
    assert worker.wait(30) == 128 + signal.SIGTERM
    assert worker.lines("step:stuck")


@pytest.mark.parametrize("deaf", ["shield", "swallow"])
def test_a_mandatory_step_that_goes_on_after_its_start_limit_ends_its_worker(staff: Staff, deaf: str) -> None:
    script = (
        "import trio\n"
        "from celery5 import BootStep\n"
        "from celery5.processes import foreground\n"
        "from tests.redis.events.historian import app\n"
        "async def shield():\n"
        "    with trio.CancelScope(shield=True):\n"
        "        await trio.sleep(60)\n"
        "async def swallow():\n"
        "    while True:\n"
        "        try:\n"
        "            await trio.sleep(0.1)\n"
        "        except trio.Cancelled:\n"
        "            pass\n"
        f"app.bootsteps = (BootStep('mine', {deaf}, start_limit=0.3, stop_limit=0.1),)\n"
        "foreground.STOP_LIMIT = 0.3\n"
        "foreground.serve(app, foreground.ServeOptions(name='w'))\n"
    )
    worker = staff.launch([sys.executable, "-c", script], grace_period=0.1)
    assert worker.wait(30) == 128 + signal.SIGTERM
    (failed,) = worker.lines("step:failed")
    assert failed["why"] == "not up after 0.3 s, and it takes no notice of being cancelled"
    assert failed["step"] == "mine"
    assert "Traceback" not in worker.output.read_text()


def test_a_worker_does_not_wait_for_threads_that_its_jobs_left_behind(staff: Staff) -> None:
    worker = staff.start(grace_period=0.1)
    send(staff, "linger", 60.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert len(worker.lines("worker:stopped")) == 1, "and what it had to say is written"


def test_a_process_that_a_job_has_forked_ends_by_sigterm_and_its_worker_goes_on(staff: Staff) -> None:
    worker = staff.start()
    assert send(staff, "spawn").get(timeout=30) == -signal.SIGTERM
    assert send(staff, "nap", 0.0).get(timeout=30) == worker.process.pid
    assert worker.lines("process:stop-requested") == []
