"""Loop watch: a job that blocks the event loop is named while it does, in the log, on the status port and by health."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.cli.standalone.health import send_probe
from celery5.health import checks
from celery5.health.checks import EventLoopLag
from celery5.logs.log import Log
from celery5.processes.watch import event_loop
from celery5.processes.watch.event_loop import LoopWatchdog, find_job
from celery5.services.health import vitals as vitals_module
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from tests.redis.commands.staff import Staff, logged, wait_until
from tests.redis.worker.workers import Lines, until, working
from tests.trio.health.test_status_port import free_port

THRESHOLD = 0.1


@asynccontextmanager
async def watched(
    app: App, port: int, *, threshold: float = THRESHOLD
) -> AsyncGenerator[ProcessStatus, None]:
    """A worker in this Trio run with what watches the loop, and a status port."""
    vitals = ProcessStatus(app=app.name)
    log = Log(worker="w", app=app.name)
    status = StatusPort(process_status=vitals, log=log, port=port, host="127.0.0.1")
    watch = LoopWatchdog(threshold=threshold, process_status=vitals, port=status, address=None, log=log)
    async with trio.open_nursery() as nursery:
        await nursery.start(status.run)
        await nursery.start(watch.run)
        async with working(app, process_status=vitals):
            yield vitals
        nursery.cancel_scope.cancel()


class Blocker:
    """A task that blocks the loop until it is let go, or for 30 s."""

    def __init__(self, app: App) -> None:
        self.blocks = threading.Event()
        self.go = threading.Event()

        @app.task(name="shop.block")
        async def block() -> None:
            block_here(self)

        @app.task(name="shop.block_in_a_child")
        async def block_in_a_child() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._child)

        self.task, self.in_a_child = block, block_in_a_child

    async def _child(self) -> None:
        block_here(self)

    def meanwhile(self, look: Callable[[], Any]) -> list[Any]:
        """Have a thread look while the loop is blocked, then let it go; the list gets what it saw."""
        seen: list[Any] = []

        def watch() -> None:
            try:
                if self.blocks.wait(30):
                    seen.append(look())
            finally:
                self.go.set()

        threading.Thread(target=watch, daemon=True).start()
        return seen


def block_here(blocker: Blocker) -> None:
    """Block, in a function that can be found on a stack."""
    blocker.blocks.set()
    blocker.go.wait(30)


@pytest.mark.parametrize("where", ["task", "in_a_child"])
async def test_a_job_that_blocks_the_loop_is_named_while_it_does_and_when_it_has_ended(
    app: App, where: str
) -> None:
    blocker = Blocker(app)
    task = getattr(blocker, where)
    with Lines() as lines:
        seen = blocker.meanwhile(lambda: wait_until(lambda: len(lines.of("loop:blocked")) >= 2))
        async with watched(app, free_port()) as vitals:
            job = await task.adelay()
            await job.aget(timeout=30)
            await until(lambda: bool(lines.of("loop:resumed")))
            assert seen
            first, second, *_ = lines.of("loop:blocked")
            (resumed,) = lines.of("loop:resumed")
            for line in (first, second, resumed):
                assert (line["task"], line["job"], line["level"]) == (task.name, job.id, "warning")
            assert THRESHOLD <= first["seconds"] < second["seconds"] <= resumed["seconds"]
            assert second["seconds"] >= 2 * first["seconds"] - 0.001  # at growing intervals
            assert "block_here" in first["stack"]
            assert "blocker.go.wait(30)" in first["stack"]
            assert "task_execution" not in first["stack"]
            assert vitals.loop.totals[task.name][0] == 1


async def test_the_status_port_tells_of_a_block_while_it_lasts(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals_module, "MAX_BLOCKED_SECONDS", 0.4)
    blocker, port = Blocker(app), free_port()

    def look() -> dict[str, Any]:
        wait_until(lambda: not send_probe("127.0.0.1", port, "/livez", timeout=30).ok)
        answers = {
            path: send_probe("127.0.0.1", port, path, timeout=30)
            for path in ("/livez", "/readyz", "/metrics")
        }
        return {path: (answer.status, answer.body.decode()) for path, answer in answers.items()}

    seen = blocker.meanwhile(look)
    async with watched(app, port):
        job = await blocker.task.adelay()
        await job.aget(timeout=30)
        (found,) = seen
        for path in ("/livez", "/readyz"):
            status, body = found[path]
            assert status == 503
            assert f"by job {job.id} of task shop.block" in json.loads(body)["conditions"]["loop"]
        status, body = found["/metrics"]
        assert status == 200
        numbers = dict(line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
        assert float(numbers["celery5_loop_blocked_seconds"]) >= 0.4
        assert float(numbers["celery5_process_ready"]) == 0

        def after() -> tuple[bool, str]:
            ready = send_probe("127.0.0.1", port, "/readyz", timeout=30).ok
            return ready, send_probe("127.0.0.1", port, "/metrics", timeout=30).body.decode()

        ready, body = await trio.to_thread.run_sync(after)
        assert ready
        assert "celery5_loop_blocked_seconds 0" in body
        assert 'celery5_loop_blocked_total{task="shop.block"} 1' in body


async def test_loop_check_is_unhealthy_after_a_block_and_names_the_task(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SLEEPS", 0)  # its first look sees nothing, however busy the machine is
    check = EventLoopLag(limit=0.4, period=3600)  # its next look would come too late
    app.health_check.add(check)
    blocker = Blocker(app)
    blocker.meanwhile(lambda: time.sleep(0.5))
    with Lines() as lines:
        async with watched(app, free_port()):
            await until(lambda: check.state == "healthy")
            job = await blocker.task.adelay()
            await job.aget(timeout=30)
            await until(lambda: check.state == "unhealthy")
    (changed,) = [line for line in lines.of("health:changed") if line["state"] == "unhealthy"]
    assert f"by job {job.id} of task shop.block" in changed["why"]


async def test_a_job_that_holds_the_interpreters_lock_is_named_as_soon_as_it_lets_go(app: App) -> None:
    @app.task(name="shop.holds")
    async def holds() -> int:
        return sum(range(4 * 10**7))  # one step of the interpreter: no thread can run meanwhile

    with Lines() as lines:
        async with watched(app, free_port()) as vitals:
            for count in range(1, 6):
                await (await holds.adelay()).aget(timeout=30)
                await until(lambda count=count: len(lines.of("loop:resumed")) >= count)  # type: ignore[misc]
                if "shop.holds" in vitals.loop.totals:  # another thread may get the lock first
                    break
    assert vitals.loop.totals["shop.holds"][1] >= 0.2
    assert "return sum(" in [line for line in lines.of("loop:blocked") if line["task"]][-1]["stack"]


async def test_short_blocks_and_a_setting_of_0_are_told_of_by_nobody(app: App) -> None:
    blocker = Blocker(app)
    blocker.go.set()
    with Lines() as lines:
        async with watched(app, free_port(), threshold=0):
            time.sleep(0.3)  # noqa: ASYNC251  the loop is to be blocked
        async with watched(app, free_port(), threshold=20):
            await (await blocker.task.adelay()).aget(timeout=30)
            time.sleep(0.3)  # noqa: ASYNC251
    assert lines.of("loop:blocked") == []


async def test_loop_watch_reports_what_blocks_and_when_it_has_ended(
    short_path: Path,
) -> None:
    vitals, log = ProcessStatus(), Log(worker="w", app="shop")
    vitals.mark_up([])
    status = StatusPort(process_status=vitals, log=log, port=None, host="127.0.0.1")
    address = short_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(address))
        ear.settimeout(30)
        with LoopWatchdog(threshold=0.05, process_status=vitals, port=status, address=str(address), log=log):
            assert ear.recv(1000).startswith(b"STATUS=the event loop was blocked for 0.")  # this blocks it
            message = b""
            while b"ready" not in message:
                message = await trio.to_thread.run_sync(ear.recv, 1000)
    assert message == b"STATUS=ready; attempts: 0, succeeded: 0, failed: 0, dead: 0"


async def test_a_process_that_starts_is_not_blocked(app: App) -> None:
    vitals, log = ProcessStatus(), Log(worker="w", app=app.name)
    status = StatusPort(process_status=vitals, log=log, port=None, host="127.0.0.1")
    with (
        Lines() as lines,
        LoopWatchdog(threshold=0.05, process_status=vitals, port=status, address=None, log=log),
    ):
        time.sleep(0.5)  # noqa: ASYNC251  modules are imported, say
        assert vitals.loop.current is None
    assert lines.of("loop:blocked") == []


async def test_blocking_code_of_no_job_is_told_of_with_its_stack(app: App) -> None:
    vitals, log = ProcessStatus(), Log(worker="w", app=app.name)
    vitals.mark_up([])
    status = StatusPort(process_status=vitals, log=log, port=None, host="127.0.0.1")
    with (
        Lines() as lines,
        LoopWatchdog(threshold=0.05, process_status=vitals, port=status, address=None, log=log),
    ):
        await trio.sleep(0.1)
        limit = time.monotonic() + 30
        while vitals.loop.current is None and time.monotonic() < limit:
            time.sleep(0.01)  # noqa: ASYNC251
        await until(lambda: vitals.loop.current is None)
    log_lines = lines.of("loop:blocked")
    assert (log_lines[0]["task"], log_lines[0]["job"]) == ("", "")
    assert "test_blocking_code_of_no_job" in log_lines[0]["stack"]


def test_a_process_that_was_stopped_blames_no_job(staff: Staff) -> None:
    worker = staff.start(loop_block_warning=0.3)
    staff.app.tasks["nap"].delay(60)
    wait_until(lambda: bool(logged(worker.output, "worker:started")))
    os.kill(worker.process.pid, signal.SIGSTOP)
    time.sleep(1.5)  # nothing can be awaited of a process that is stopped
    os.kill(worker.process.pid, signal.SIGCONT)
    wait_until(lambda: bool(logged(worker.output, "process:paused")))
    assert logged(worker.output, "loop:blocked") == []


def test_what_runs_nowhere_near_the_loop_has_no_job() -> None:
    assert find_job(None) == ("", "")
    assert event_loop.is_idle(None)


class Spoken:
    """A log that keeps its events, and can do something during one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.during: Callable[[str], None] = lambda _what: None

    def event(self, what: str, _level: str = "info", /, **fields: Any) -> None:
        self.during(what)
        self.events.append((what, fields))

    def of(self, what: str) -> list[dict[str, Any]]:
        """Return the fields of each such event."""
        return [fields for name, fields in self.events if name == what]


def _watch_of(
    process_status: ProcessStatus, log: Any, *, port: int | None = None, threshold: float = THRESHOLD
) -> LoopWatchdog:
    status = StatusPort(process_status=process_status, log=log, port=port, host="127.0.0.1")
    return LoopWatchdog(
        threshold=threshold, process_status=process_status, port=status, address=None, log=log
    )


async def test_connections_that_say_nothing_hide_no_block_and_no_time_of_it() -> None:
    vitals, log, port = ProcessStatus(), Spoken(), free_port()
    vitals.mark_up([])
    status = StatusPort(process_status=vitals, log=log, port=port, host="127.0.0.1")  # type: ignore[arg-type]
    watch = LoopWatchdog(threshold=THRESHOLD, process_status=vitals, port=status, address=None, log=log)  # type: ignore[arg-type]
    silent = list[socket.socket]()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(status.run)
            await nursery.start(watch.run)
            began = time.monotonic()
            while time.monotonic() < began + 2:  # nothing awaits: the loop is blocked
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=30))
                time.sleep(0.2)  # noqa: ASYNC251
            blocked = time.monotonic() - began
            await until(lambda: bool(log.of("loop:resumed")))
            nursery.cancel_scope.cancel()
    finally:
        for connection in silent:
            connection.close()
    assert log.of("process:paused") == []
    assert len(log.of("loop:blocked")) >= 2
    assert log.of("loop:resumed")[0]["seconds"] >= blocked - THRESHOLD


async def test_a_loop_that_waits_for_events_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    vitals, log = ProcessStatus(), Spoken()
    vitals.mark_up([])
    watch = _watch_of(vitals, log, threshold=0.04)
    monkeypatch.setattr(watch, "_ask", lambda: asked.append(1))
    looks = list[int]()
    look = watch._look  # pyright: ignore[reportPrivateUsage]

    def counting(now: float, *, locked: bool) -> None:
        looks.append(1)
        look(now, locked=locked)

    monkeypatch.setattr(watch, "_look", counting)
    with watch:
        await trio.sleep(0.1)
        looks.clear()
        asked.clear()
        with trio.fail_after(30):
            while len(looks) < 20:  # a loop that wakes now and then
                await trio.sleep(0.2)
    assert len(asked) <= len(looks) / 4  # a look may meet a moment in which it works
    assert log.of("loop:blocked") == []


async def test_an_idle_process_spends_next_to_nothing_on_the_watch() -> None:
    vitals, log = ProcessStatus(), Spoken()
    vitals.mark_up([])
    with _watch_of(vitals, log, threshold=0.5):
        await trio.sleep(0.2)
        began, spent = time.monotonic(), time.process_time()
        await trio.sleep(2)
        share = (time.process_time() - spent) / (time.monotonic() - began)
    assert share < 0.005  # it is 0.001


async def test_a_block_that_ends_while_it_is_logged_is_logged_as_ended_last() -> None:
    vitals, log = ProcessStatus(), Spoken()
    vitals.mark_up([])
    ends = threading.Event()

    def during(what: str) -> None:
        if what == "loop:blocked" and not ends.is_set():
            ends.set()  # the loop turns now
            time.sleep(0.3)  # and would have the time to log that first

    log.during = during
    with _watch_of(vitals, log) as watch:
        await trio.sleep(0.05)
        ends.wait(30)  # blocks the loop
        await until(lambda: bool(log.of("loop:resumed")) and vitals.loop.current is None)
        assert [what for what, _ in log.events] == ["loop:blocked", "loop:resumed"]
        assert watch._log_from == 0.0  # pyright: ignore[reportPrivateUsage]
