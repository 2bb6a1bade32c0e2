"""Systemd Notify: heard by a real datagram socket in systemd's place."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import trio
import trio.testing

from celery5.services.process import systemd_notify
from celery5.services.process.fenced import run_fenced
from celery5.services.process.systemd_notify import (
    NotifySettings,
    SystemdNotify,
    notify_watchdog,
    notify_with_retry,
    read_notify_settings,
    take_notify_settings,
)

NOTHING = {"address": None, "interval": None}


def addresses() -> list[str]:
    """The kinds of address that systemd uses on this system: abstract ones are Linux's."""
    return ["path", "abstract"] if sys.platform == "linux" else ["path"]


@pytest.fixture(params=addresses())
def address(request: pytest.FixtureRequest, short_path: Path) -> str:
    """An address as NOTIFY_SOCKET spells it."""
    if request.param == "abstract":
        return f"@celery5-test/{uuid4().hex}"
    return str(short_path / "notify")


@pytest.fixture
def heard(address: str) -> Iterator[Callable[[], list[str]]]:
    """systemd's end: gives the messages that have come since it was last asked."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ear:
        ear.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        ear.setblocking(False)

        def listen() -> list[str]:
            messages: list[str] = []
            while True:
                try:
                    messages.append(ear.recv(4096).decode())
                except BlockingIOError:
                    return messages

        yield listen


async def test_it_says_ready_then_feeds_the_watchdog_then_says_stopping(
    address: str, heard: Callable[[], list[str]], autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=address, interval=5, status=lambda: "7 jobs\nrunning").run)
        assert heard() == ["READY=1\nSTATUS=7 jobs running"]
        await trio.sleep(12)
        assert heard() == ["WATCHDOG=1\nSTATUS=7 jobs running"] * 2
        nursery.cancel_scope.cancel()
    assert heard() == ["STOPPING=1\nSTATUS=7 jobs running"]


async def test_watchdog_is_notified_from_ready_on_also_between_incarnations(
    address: str, heard: Callable[[], list[str]], autojump_clock: trio.testing.MockClock
) -> None:
    ready = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notify_watchdog, NotifySettings(address=address, interval=5.0), ready)
        await trio.sleep(12)
        assert heard() == []
        ready.set()
        await trio.sleep(12)
        assert heard() == ["WATCHDOG=1"] * 3
        nursery.cancel_scope.cancel()


async def test_the_notification_names_the_loaded_file_in_one_line(
    address: str, heard: Callable[[], list[str]], autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(
            SystemdNotify(address=address, code="/v2\nREADY=0/shop.py", incarnation="w:1").run
        )
        assert heard() == ["READY=1\nX_CELERY5_CODE=/v2 READY=0/shop.py\nX_CELERY5_INCARNATION=w:1"]
        nursery.cancel_scope.cancel()


async def test_without_a_watchdog_it_says_only_ready_and_stopping(
    address: str, heard: Callable[[], list[str]], autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=address).run)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert heard() == ["READY=1", "STOPPING=1"]


async def test_a_worker_that_only_begins_again_does_not_say_that_it_stops(
    address: str, heard: Callable[[], list[str]]
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=address, is_exiting=lambda: False).run)
        nursery.cancel_scope.cancel()
    assert heard() == ["READY=1"]


async def test_a_process_that_systemd_did_not_start_says_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=None, interval=None).run)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()


async def test_a_socket_that_is_gone_stops_nothing(
    short_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=str(short_path / "gone"), interval=1).run)
        await trio.sleep(5)
        nursery.cancel_scope.cancel()


async def test_a_systemd_that_reads_nothing_holds_nobody_up(
    address: str, heard: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_notify, "SEND_TIMEOUT", 0.1)
    full = SystemdNotify(address=address, interval=0.001, is_exiting=lambda: False)
    with trio.move_on_after(0.2):  # many more messages than a datagram socket holds
        await full.run()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(SystemdNotify(address=address).run)
            nursery.cancel_scope.cancel()
    assert heard()


async def test_ready_is_said_as_soon_as_a_busy_systemd_reads_again(
    address: str, heard: Callable[[], list[str]]
) -> None:
    with trio.move_on_after(0.2):
        await SystemdNotify(address=address, interval=0.001, is_exiting=lambda: False).run()
    assert "READY=1" in heard()
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(address=address).run)
        assert heard() == ["READY=1"]
        nursery.cancel_scope.cancel()


async def test_the_watchdog_is_fed_although_the_status_cannot_be_told(
    address: str, heard: Callable[[], list[str]], autojump_clock: trio.testing.MockClock
) -> None:
    def fail() -> str:
        raise OverflowError("too big")

    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(run_fenced, "systemd", SystemdNotify(address=address, interval=5, status=fail))
        )
        await trio.sleep(11)
        assert heard() == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]
        nursery.cancel_scope.cancel()
    assert heard() == ["STOPPING=1"]


async def test_failed_notification_is_repeated_without_stopping(
    address: str,
    heard: Callable[[], list[str]],
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, errors = systemd_notify.notify, [RuntimeError("no socket can be made")]

    def fail_once(to: str | None, *lines: str) -> bool:
        if "WATCHDOG=1" in lines and errors:
            raise errors.pop()
        return send(to, *lines)

    monkeypatch.setattr(systemd_notify, "notify", fail_once)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(run_fenced, "systemd", SystemdNotify(address=address, interval=5)))
        await trio.sleep(12)
        assert heard() == ["READY=1", "READY=1", "WATCHDOG=1"]
        nursery.cancel_scope.cancel()
    assert heard() == ["STOPPING=1"]


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, NOTHING),
        ({"NOTIFY_SOCKET": ""}, NOTHING),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, NOTHING),
        ({"WATCHDOG_USEC": "30000000"}, NOTHING),
        ({"NOTIFY_SOCKET": "/run/n"}, {"address": "/run/n", "interval": None}),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000"}, {"address": "@n", "interval": 2.0}),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"},
            {"address": "@n", "interval": 2.0},
        ),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"},
            {"address": "@n", "interval": None},
        ),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "soon"}, {"address": "@n", "interval": None}),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "0"}, {"address": "@n", "interval": None}),
    ],
)
def test_the_environment_says_what_systemd_wants(environ: dict[str, str], asked: dict[str, object]) -> None:
    assert read_notify_settings(environ, 7) == asked


async def test_what_the_environment_says_is_what_the_service_takes(
    address: str, heard: Callable[[], list[str]]
) -> None:
    wanted = read_notify_settings({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"}, os.getpid())
    async with trio.open_nursery() as nursery:
        await nursery.start(SystemdNotify(**wanted).run)
        nursery.cancel_scope.cancel()
    assert heard()[0] == "READY=1"


def test_a_parent_takes_out_of_the_environment_what_its_children_must_not_use(
    address: str, heard: Callable[[], list[str]]
) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "6000000", "WATCHDOG_PID": "7", "HOME": "/"}
    wanted = take_notify_settings(environ, 7)
    assert wanted == {"address": address, "interval": 0.5}
    assert environ == {"HOME": "/"}
    notify_with_retry(wanted["address"], "READY=1", "STATUS=up")
    assert heard() == ["READY=1\nSTATUS=up"]


def test_blocking_code_insists_for_a_while_only(
    address: str, heard: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_notify, "SEND_TIMEOUT", 0.05)
    while systemd_notify.notify(address, "WATCHDOG=1"):
        pass  # until its socket is full
    notify_with_retry(address, "READY=1")
    assert "READY=1" not in heard()
