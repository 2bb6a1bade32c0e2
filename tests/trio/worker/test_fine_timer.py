"""Fine timer: it rings when the loop wants to wake, and leaves nothing behind."""

import ctypes
import os
import select
import sys

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from celery5.services.worker import time_limits
from celery5.services.worker.time_limits import FineTimer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timerfd is Linux's")


def timers() -> set[str]:
    """The timers that this process has open."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if "timerfd" in target:
            found.add(name)
    return found


async def test_it_rings_after_what_the_loop_is_about_to_wait_for() -> None:
    before, timer = timers(), FineTimer()
    async with trio.open_nursery() as nursery:
        await nursery.start(timer.run)
        (ours,) = timers() - before
        timer.before_io_wait(0.0205)
        assert not select.select([int(ours)], [], [], 0)[0]  # not at once
        assert select.select([int(ours)], [], [], 20)[0]
        nursery.cancel_scope.cancel()
    assert timers() == before


async def test_the_loop_has_it_set_by_itself_and_goes_on_when_it_rings() -> None:
    asked: list[float] = []

    class Listening(FineTimer):
        def before_io_wait(self, timeout: float) -> None:
            asked.append(timeout)
            super().before_io_wait(timeout)

    async with trio.open_nursery() as nursery:
        await nursery.start(Listening().run)
        for _ in range(20):
            await trio.sleep(0.0031)
        nursery.cancel_scope.cancel()
    assert any(0 < timeout <= 0.0031 for timeout in asked)


async def test_what_is_far_away_and_what_is_at_once_leave_it_alone() -> None:
    before, timer = timers(), FineTimer()
    async with trio.open_nursery() as nursery:
        await nursery.start(timer.run)
        (ours,) = timers() - before
        timer.before_io_wait(0)
        timer.before_io_wait(0.001)  # epoll counts whole milliseconds as well as anybody
        timer.before_io_wait(time_limits.MAX_TIMEOUT - 0.0005)
        timer.before_io_wait(time_limits.MAX_TIMEOUT + 0.0005)
        assert not select.select([int(ours)], [], [], 0.05)[0]  # the one of a second, all but, has not rung
        nursery.cancel_scope.cancel()


async def test_who_waits_for_the_loop_to_be_idle_is_not_kept_waiting() -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(FineTimer().run)
        with trio.fail_after(20):
            await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()


async def test_where_no_timer_can_be_had_the_loop_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __init__(self, _name: None) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", Nothing)
    before, timer = timers(), FineTimer()
    async with trio.open_nursery() as nursery:
        await nursery.start(timer.run)
        timer.before_io_wait(0.0105)
        await trio.sleep(0.01)
        assert timers() == before
        nursery.cancel_scope.cancel()
