"""Sub-processes: what a child says is heard, that it ends, too, and one that cannot be begun leaves nothing."""

import os
import socket
import subprocess
from typing import Any

import pytest
import trio

from celery5.errors import PlatformError
from celery5.platform import Beat, Ended, Member, MemberEvent, Ready, Stopping
from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.cluster.members import format_failure_status
from celery5.services.controller.sub_processes import (
    SubProcesses,
    describe_exit,
    parse_error,
    parse_notification,
)

CLUSTER = parse_cluster({"workers": {"default": {}}})


def test_what_a_child_says_is_the_protocol_of_systemd() -> None:
    said = b"READY=1\nSTATUS=2 jobs\nWATCHDOG=1\nSTOPPING=1\nMAINPID=3\nREADY=2\nnonsense\n\xff"
    assert list(parse_notification("w", said)) == [Ready("w"), Beat("w", "2 jobs"), Beat("w"), Stopping("w")]
    assert list(
        parse_notification("w", b"READY=1\nX_CELERY5_CODE=/v2/shop.py\nX_CELERY5_INCARNATION=w:1")
    ) == [Ready("w", "/v2/shop.py", "w:1")]
    assert describe_exit(3) == "ended with 3"
    assert describe_exit(-9) == "ended by SIGKILL"
    assert describe_exit(-99) == "ended by signal 99"


def test_a_status_that_says_why_a_child_ends_is_no_sign_of_life() -> None:
    said = format_failure_status("boot step 'db':\n\x1b[2J" + "x" * 1000)
    assert list(parse_notification("w", f"STATUS={said}".encode())) == []
    assert parse_error(f"WATCHDOG=1\nSTATUS={said}".encode()).startswith("boot step 'db': [2Jxxx")
    assert len(parse_error(f"STATUS={said}".encode())) == 300
    assert parse_error(b"STATUS=failed: \x1b[31mred\x07") == "[31mred"  # who says so need not be ours
    assert parse_error(b"STATUS=2 jobs failed: they were") == ""


async def test_a_sub_process_that_ends_is_told_of() -> None:
    platform, heard = SubProcesses(cluster=CLUSTER), list[MemberEvent]()
    async with trio.open_nursery() as nursery:
        await nursery.start(platform.live, heard.append)
        await platform.start(Member(name="w", kind="worker", arguments=("--version",)))
        with pytest.raises(PlatformError):
            await platform.start(Member(name="w", kind="worker", arguments=("--version",)))
        with pytest.raises(PlatformError, match="here only"):
            await platform.start(Member(name="v", kind="worker", host="web2", arguments=()))
        with trio.fail_after(60):
            while not heard:
                await trio.sleep(0.01)
        assert heard == [Ended("w", "ended with 0", 0)]
        await platform.stop("w")
        await platform.kill("w")
        assert await platform.living() == {}
        nursery.cancel_scope.cancel()


async def test_a_flood_of_notifications_leaves_the_controller_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs have the address of the socket in their environment: it is read in parts, however fast they send."""
    read = 0

    class FloodedSocket(socket.socket):
        def recvmsg(self, *_: Any) -> Any:
            nonlocal read
            read += 1
            assert read < 10_000, "it is read without end"
            return b"WATCHDOG=1", [], 0, None  # of nobody

    monkeypatch.setattr(socket, "socket", FloodedSocket)
    platform, heard = SubProcesses(cluster=CLUSTER), list[MemberEvent]()
    async with trio.open_nursery() as nursery:
        await nursery.start(platform.live, heard.append)
        await platform.start(Member(name="w", kind="worker", arguments=("health", "--help")))
        platform._read_notifications(platform._children["w"], platform._children["w"].notify_socket)
        nursery.cancel_scope.cancel()
    assert 0 < read < 10_000
    assert [type(event) for event in heard] == [Ended]


async def test_a_platform_that_is_cancelled_ends_its_children() -> None:
    platform, heard = SubProcesses(cluster=CLUSTER), list[MemberEvent]()
    async with trio.open_nursery() as nursery:
        await nursery.start(platform.live, heard.append)
        await platform.start(Member(name="w", kind="worker", arguments=("health", "--help")))
        nursery.cancel_scope.cancel()
    (ended,) = heard
    assert isinstance(ended, Ended)
    assert platform.pid_of("w") is None


async def test_one_that_cannot_be_begun_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_said: Any, **_more: Any) -> None:
        raise BlockingIOError("no room for another process")

    platform = SubProcesses(cluster=CLUSTER)
    async with trio.open_nursery() as nursery:
        await nursery.start(platform.live, list[MemberEvent]().append)
        monkeypatch.setattr(subprocess, "Popen", no_room)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(PlatformError, match="w cannot be started: no room"):
                await platform.start(Member(name="w", kind="worker", arguments=()))
        assert len(os.listdir("/proc/self/fd")) == before
        nursery.cancel_scope.cancel()


def test_a_status_alone_is_no_sign_that_the_event_loop_turns() -> None:
    assert list(parse_notification("w", b"STATUS=blocked by job j")) == [
        Beat("w", "blocked by job j", loop_alive=False)
    ]
    assert list(parse_notification("w", b"WATCHDOG=1\nSTATUS=ready")) == [Beat("w"), Beat("w", "ready")]
