"""Hostile boxes: whatever a box does to its pipes and its children, it costs its own job at most."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, RetryPolicy, TaskFailed
from celery5.errors import BoxCrashed
from celery5.runners.process_group import ProcessGroup
from celery5.tasks import Box
from tests.redis.boxes import boxing
from tests.redis.commands.staff import is_alive
from tests.redis.worker.workers import Lines, until, working

HOSTILE = str(Path(__file__).with_name("hostile_box.sh"))
LIMIT = 30.0
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel as only Linux can be asked")


@pytest.fixture
def app(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An application with hostile boxes, and others."""
    monkeypatch.setenv("BOXING_APP", app_name)
    one = boxing.make(app_name, url, box_slots=1, retry_policy=RetryPolicy(max_retries=0))

    @one.task(name="hostile", boxed=Box(["sh", HOSTILE]))
    def hostile(what: str, padding: str = "") -> Any:
        raise NotImplementedError

    yield one
    one.close()


async def ask(app: App, what: str, *, task: str = "hostile", padding: str = "", **options: Any) -> Any:
    """Send a job and wait for its result."""
    said = (what, padding) if task == "hostile" else (what,)
    return await (await app.tasks[task].options(**options).adelay(*said)).aget(LIMIT)


def peak() -> int:
    """Bytes of memory that this process has had at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def forget_peak() -> int:
    """Begin again; gives what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def children() -> list[int]:
    """The children of this process, those that have ended and are not reaped among them."""
    return [
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    ]


def of_group(group: int) -> list[str]:
    """The processes of a group that live."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            stat = (process / "stat").read_text()
            state, _, its, *_ = stat.rpartition(")")[2].split()
            if int(its) == group and state != "Z":  # orphans are for another process to reap
                found.append(stat)
    return found


@linux
async def test_floods_on_both_pipes_cost_no_memory_and_hold_up_no_other_job(app: App) -> None:
    waits: list[float] = []

    async def beat() -> None:
        while True:
            began = trio.current_time()
            await trio.sleep(0.01)
            waits.append(trio.current_time() - began)

    with Lines() as lines:
        async with working(app), trio.open_nursery() as nursery:
            await ask(app, "warm")
            nursery.start_soon(beat)
            before = forget_peak()
            assert await ask(app, "flood") == "flooded"
            assert await ask(app, "endless") == "after a long line"
            with pytest.raises(TaskFailed) as caught:
                await ask(app, "huge")
            assert caught.value.reason == "result-too-large"
            assert await ask(app, "warm") == "fine", "in the same box"
            nursery.cancel_scope.cancel()
        assert peak() - before < 32 * 2**20
        assert sorted(waits)[int(0.95 * len(waits))] < 0.5
        await until(lambda: len(lines.of("box:ended")) == 1)
        assert len(lines.of("box:started")) == 1
        # A hundred for each job; what is still in stderr's pipe at its end is the next one's.
        assert len(lines.of("box:printed")) <= 500
        assert sum(line["lines"] for line in lines.of("box:output-truncated")) > 100_000


@linux
async def test_nothing_is_left_of_boxes_that_crash_one_after_another(app: App) -> None:
    before = children()
    files = len(os.listdir("/proc/self/fd"))
    async with working(app):
        for _ in range(4):
            with pytest.raises(TaskFailed, match="exited with code 3"):
                await ask(app, "exit 3", task="act")
        await until(lambda: children() == before)
    assert len(os.listdir("/proc/self/fd")) <= files + 2


async def test_who_leaves_the_group_with_the_pipes_holds_up_nobody(app: App) -> None:
    async with working(app) as worker:
        stray = int(await ask(app, "leave"))
        assert await ask(app, "next") == "fine"
        with trio.fail_after(30), pytest.raises(TaskFailed, match="exited with code 5"):
            await ask(app, "strand")
        with trio.fail_after(30):
            await worker.stop()
    assert is_alive(stray), "it is nobody's any more"
    os.kill(stray, signal.SIGKILL)


@pytest.mark.parametrize("what", ["stop", "still"])
async def test_who_does_not_read_is_stopped_in_time_with_its_children(app: App, what: str) -> None:
    with Lines() as lines:
        await stopped_in_time(app, what)
        await until(lambda: len(lines.of("box:ended")) == 2)
        assert [of_group(line["pid"]) for line in lines.of("box:started")] == [[], []]


async def stopped_in_time(app: App, what: str) -> None:
    """A job that takes no notice of its limit, and then another one."""
    async with working(app):
        assert await ask(app, "warm") == "fine"
        began = time.monotonic()
        with pytest.raises(TaskFailed) as caught:
            await ask(app, what, time_limit=0.5)
        assert caught.value.type == "TimeLimitExceeded"
        assert time.monotonic() - began < 30
        assert await ask(app, "next") == "fine"


async def test_arguments_that_nobody_reads_hold_up_nobody(app: App) -> None:
    @app.task(
        name="unread", boxed=Box(["sh", "-c", """echo '{"type":"ready","version":1}'; exec sleep 60"""])
    )
    def unread(padding: str) -> None:
        raise NotImplementedError

    async with working(app):
        began = time.monotonic()
        result = await unread.options(time_limit=0.5).adelay("x" * 500_000)  # more than a pipe holds
        with pytest.raises(TaskFailed) as caught:
            await result.aget(LIMIT)
        assert caught.value.type == "TimeLimitExceeded"
        assert time.monotonic() - began < 30
        assert await ask(app, "next") == "fine"


async def test_box_that_answers_without_a_job_is_used_no_more(
    app: App,
) -> None:
    with Lines() as lines:
        async with working(app):
            assert await ask(app, "again") == 1
            await until(lambda: bool(lines.of("box:ended")), within=30)
            assert await ask(app, "next") == "fine"
    assert len(lines.of("box:started")) == 2


async def test_answers_that_are_none_cost_their_own_job_at_most(app: App) -> None:
    async with working(app):
        assert await ask(app, "twice") == 1
        assert await ask(app, "next") == "fine", "a second answer is not the next job's"
        assert await ask(app, "binary") == "text"
        for what in ("nan", "late", "cut", "deep"):
            with pytest.raises(TaskFailed, match="wrote a frame that cannot be read: "):
                await ask(app, what)
        assert await ask(app, "next") == "fine"


@pytest.mark.parametrize("what", ["longlog", "oddlog"])
async def test_a_line_for_the_log_that_cannot_be_read_is_no_reply_to_the_job(app: App, what: str) -> None:
    with Lines() as lines:
        async with working(app):
            assert await ask(app, what) == "logged"
            assert await ask(app, "next") == "fine"
            await until(lambda: bool(lines.of("box:printed")))
            assert '"type":"log"' in lines.of("box:printed")[0]["line"]
    assert len(lines.of("box:started")) == 1


async def test_a_reply_that_follows_a_long_printed_line_is_not_taken_for_the_next_jobs(app: App) -> None:
    async with working(app):
        with pytest.raises(TaskFailed, match="wrote a frame of more than"):
            await ask(app, "json")
        for _ in range(3):
            assert await ask(app, "next") == "fine"


async def test_long_texts_that_a_function_logs_are_cut_and_its_box_goes_on(app: App) -> None:
    with Lines() as lines:
        async with working(app):
            await ask(app, "log_much 3000000", task="act")
            await ask(app, "log", task="act")
            await until(lambda: len(lines.of("log")) == 3)
        texts = [line["message"] for line in lines.of("log")]
    assert [len(text) < 60_000 for text in texts] == [True] * 3
    assert texts[0].endswith("x... (3000000 characters)")
    assert len(lines.of("box:started")) == 1


async def test_a_function_that_forks_has_one_answer_and_its_box_goes_on(app: App) -> None:
    async with working(app):
        assert await ask(app, "fork", task="act") in ("parent", "child")
        assert await ask(app, "fork", task="act") in ("parent", "child")
        seen = await (await app.tasks["seen"].adelay()).aget(LIMIT)
    await until(lambda: not is_alive(seen.pid))


@linux
async def test_reaped_process_is_never_mistaken_for_another(app: App) -> None:
    group = ProcessGroup(["true"])
    await trio.to_thread.run_sync(
        os.waitpid, group.pid, 0
    )  # as a job may that waits for all children of its worker
    await group.wait_ended()
    group.start_ticks -= 1000  # somebody has its id now, who came later
    other = ProcessGroup(["sleep", "60"])
    real, group._popen.pid = group.pid, other.pid
    group.signal(signal.SIGKILL)
    assert not other._has_ended()
    group._popen.pid = real
    await group.reap()
    await other.reap()
    with pytest.raises(BoxCrashed, match="cannot start"):
        ProcessGroup(["/nowhere/at/all"])
