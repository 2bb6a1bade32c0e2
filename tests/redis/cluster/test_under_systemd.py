"""Under systemd: what a real worker says on a real notification socket, and as which process."""

import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis.commands.staff import Employee, Staff, wait_until

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")


class Systemd:
    """systemd's end of the socket, with NotifyAccess=main: what others than the main process say does not count."""

    def __init__(self, path: Path, line: socket.socket) -> None:
        self._line = line
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._line.bind(str(path))
        self._line.setblocking(False)
        self._said: list[tuple[int, str]] = []

    def heard(self, what: str, main: Employee) -> int:
        """How often the main process has said `what`. Nobody else may have said anything."""
        while True:
            try:
                text, extras, _, _ = self._line.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                break
            ((_, _, credentials),) = extras
            self._said.append((CREDENTIALS.unpack(credentials)[0], text.decode()))
        assert {pid for pid, _ in self._said} <= {main.process.pid}
        return sum(what in text.split("\n") for _, text in self._said)


@pytest.fixture
def systemd(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    """Every worker that is started thinks that it was systemd that did."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        yield Systemd(short_path / "notify", line)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_main_process_says_that_it_is_ready_alive_and_stopping(
    staff: Staff, systemd: Systemd, processes: int
) -> None:
    worker = staff.start("--processes", str(processes), ready=processes)
    wait_until(lambda: systemd.heard("READY=1", worker) == 1)
    wait_until(lambda: systemd.heard("WATCHDOG=1", worker) >= 3)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: systemd.heard("STOPPING=1", worker) == 1)  # read on: ten messages fill the socket
    assert worker.wait() == 0
    assert systemd.heard("READY=1", worker) == 1
    assert systemd.heard("STOPPING=1", worker) == 1


def test_a_fleet_is_ready_when_all_of_it_is(staff: Staff, systemd: Systemd) -> None:
    fleet = staff.start("--processes", "3")
    wait_until(lambda: systemd.heard("READY=1", fleet) == 1)
    wait_until(lambda: len(fleet.lines("worker:started")) == 3)
    assert systemd.heard("STATUS=3 of 3 worker processes at work", fleet) >= 1


def test_a_fleet_whose_worker_is_replaced_does_not_begin_again(staff: Staff, systemd: Systemd) -> None:
    fleet = staff.start("--processes", "2", ready=2, max_deliveries=1)
    wait_until(lambda: systemd.heard("READY=1", fleet) == 1)
    staff.app.send_many([staff.app.signature("die")])
    wait_until(lambda: len(fleet.lines("worker:started")) >= 3)
    fleet.signal(signal.SIGTERM)
    wait_until(lambda: systemd.heard("STOPPING=1", fleet) == 1)  # read on: ten messages fill the socket
    assert fleet.wait() == 0
    assert systemd.heard("READY=1", fleet) == 1
    assert systemd.heard("STOPPING=1", fleet) == 1
