"""Fleet: a parent that keeps several workers alive through jobs that end them, and is held up by nothing."""

import os
import signal
import sys

import pytest

from celery5 import AsyncResult
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.commands.staff import Staff, wait_until


def send(staff: Staff, task: str, *args: object) -> AsyncResult[int]:
    """Send one job."""
    return staff.app.send_many([staff.app.signature(task, *args)])[0]


def test_a_child_that_dies_early_with_an_exit_code_does_not_end_the_fleet(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_deliveries=1)
    send(staff, "leave", 3)
    wait_until(lambda: len(staff.notes()) == 2)  # two workers went down with it
    assert send(staff, "nap", 0.0).get(timeout=30)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def test_many_deaths_within_a_minute_do_not_end_the_fleet(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_deliveries=9)
    send(staff, "leave", 3)
    wait_until(lambda: len(staff.notes()) == 10, within=60)
    assert send(staff, "nap", 0.0).get(timeout=30)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def test_child_that_exits_with_0_is_replaced_and_its_jobs_requeued(staff: Staff) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_deliveries=2, lease=60)
    send(staff, "leave", 0)
    wait_until(lambda: len(staff.notes()) == 3)
    assert send(staff, "nap", 0.0).get(timeout=30)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait() == 0


def test_a_fleet_that_was_told_to_stop_kills_those_who_do_not(staff: Staff) -> None:
    script = (
        "from celery5.processes import foreground\n"
        "from celery5.processes.lifecycle import fleet\n"
        "from tests.redis.events.historian import app\n"
        "fleet.KILL_AFTER = 0.2\n"
        "raise SystemExit(foreground.serve(app, foreground.ServeOptions(processes=2)))\n"
    )
    fleet = staff.launch([sys.executable, "-c", script], grace_period=0.1)
    wait_until(lambda: len(fleet.lines("worker:started")) == 2)
    send(staff, "deaf", 20.0)
    wait_until(lambda: len(staff.notes()) == 1)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait(30) == 1
    assert "ended with -9" in fleet.output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_fleet_whose_worker_is_blocked(staff: Staff, number: signal.Signals) -> None:
    fleet = staff.start("--processes", "2", ready=2, grace_period=120)
    send(staff, "block", 120.0)
    wait_until(lambda: len(staff.notes()) == 1)
    fleet.signal(signal.SIGTERM)
    wait_until(lambda: len(fleet.lines("worker:stopped")) == 1)  # the other one
    fleet.signal(number)
    assert fleet.wait() == 128 + number


def test_a_parent_is_not_held_up_by_a_broker_that_hangs(own_staff: Staff, own_server: EmbeddedServer) -> None:
    fleet = own_staff.start("--processes", "2", ready=2, grace_period=0.1)
    send(own_staff, "nap", 20.0)
    wait_until(lambda: len(own_staff.notes()) == 1)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        os.kill(own_staff.notes()[0].pid, signal.SIGKILL)
        wait_until(lambda: len(fleet.lines("worker:recovery-failed")) == 1)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
