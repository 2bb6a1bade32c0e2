"""Boxed tasks: each job in its own process, and all else of it as for any other kind."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured, RetryPolicy, TaskFailed, TaskRevoked, agather
from celery5.errors import BadArguments, TaskRejected
from celery5.tasks import Box
from celery5.testing import replaced
from tests.redis.boxes import boxing
from tests.redis.boxes.boxing import open_file, open_loop
from tests.redis.commands.staff import is_alive
from tests.redis.worker.workers import Lines, until, until_async, working

LIMIT = 60.0
POLICY = RetryPolicy(max_retries=0, backoff=0.01, jitter=False)


@pytest.fixture
def app(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An application that boxes can import."""
    monkeypatch.setenv("BOXING_APP", app_name)
    one = boxing.make(app_name, url, lease=1.0, box_slots=2, retry_policy=POLICY)
    yield one
    one.close()


async def ask(app: App, task: str, *args: Any, **options: Any) -> Any:
    """Send a job and wait for its result."""
    result = await app.tasks[task].options(**options).adelay(*args)
    return await result.aget(LIMIT)


async def test_a_function_runs_in_a_process_of_its_own_that_is_used_again(app: App) -> None:
    async with working(app, name="keeper"):
        assert await ask(app, "add", 2, 3) == 5
        assert await ask(app, "add", 2) == 3
        with pytest.raises(BadArguments, match="takes int, got str"):
            await app.tasks["add"].adelay("two")
        seen = [await ask(app, task) for task in ("seen", "seen_trio", "seen_asyncio")]
        sent = await app.tasks["seen"].adelay()
        last = await sent.aget(LIMIT)
        assert await ask(app, "bound", 7) != await ask(app, "bound", 7)
    pids = {seen_job.pid for seen_job in seen}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert (last.job, last.task, last.queue, last.attempt) == (sent.id, "seen", "default", 1)
    assert last.worker.startswith("keeper")
    await until(lambda: not any(map(is_alive, pids)))


async def test_a_box_opens_a_resource_once_and_what_belongs_to_a_loop_for_each_job(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXING_CLOSED", str(tmp_path / "closed"))
    app.configure(box_slots=1)
    with Lines() as lines:
        async with working(app):
            first = await ask(app, "opened")
            assert first[0] != os.getpid()
            assert await ask(app, "opened") == [first[0], 1, 2]
            assert await ask(app, "opened_async") == [[first[0], 1, 2, 3], [first[0], 1]]
            assert await ask(app, "opened_async") == [[first[0], 1, 2, 3, 4], [first[0], 1]]
    assert lines.of("resource:opened") == []  # the worker itself needs none
    await until(lambda: (tmp_path / "closed").exists() and (tmp_path / "closed").read_text() == "5")


async def test_a_resource_that_a_job_has_broken_is_opened_again_in_its_box(app: App) -> None:
    app.configure(box_slots=1)
    with Lines() as lines:
        async with working(app):
            assert [await ask(app, "break_fragile") for _ in range(3)] == [[], [], []]
            await until(lambda: len(lines.of("resource:failed")) == 2)
            failed = lines.of("resource:failed")[0]
    assert (failed["resource"], failed["why"]) == ("open_fragile", "ResourceBroken: its check returned False")


async def test_boxed_tasks_get_replaced_resources_in_the_process_of_the_test(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXING_CLOSED", str(tmp_path / "closed"))
    app.configure(box_slots=1)
    async with working(app):
        for task in ("opened", "opened_async"):
            stand_in, loop_stand_in = [-1], [-2]
            with replaced(open_file, stand_in), replaced(open_loop, loop_stand_in):
                # One after another in one slot: a job that needs a box is between them, and follows none of them.
                names = [task, "seen", task, task, "seen"]
                results = await app.asend_many([app.tasks[name].s() for name in names])
                values: list[Any] = [await result.aget(LIMIT) for result in results]
            assert stand_in == [-1, 1, 2, 3]
            assert loop_stand_in == ([-2] if task == "opened" else [-2, 1, 2, 3])
            assert [values[n].pid == os.getpid() for n in (1, 4)] == [False, False]
    assert not (tmp_path / "closed").exists(), "nothing was opened"


async def test_no_box_is_started_before_a_job_needs_one_and_no_more_than_there_are_slots(app: App) -> None:
    # On a busy machine a worker may lose a short lease: then it would end its boxes and start others.
    app.configure(lease=60.0)
    with Lines() as lines:
        async with working(app):
            assert lines.of("box:started") == []
            await ask(app, "add", 1)
            await until(lambda: len(lines.of("box:started")) == 1)

            async def are_two_started() -> bool:  # one box may be quick enough for the first forty jobs
                results = await app.asend_many([app.tasks["add"].s(n) for n in range(40)])
                assert [await result.aget(LIMIT) for result in results] == [n + 1 for n in range(40)]
                return len(lines.of("box:started")) == 2

            await until_async(are_two_started)
            # Boxes of another kind make room for each other.
            assert await ask(app, "shell", "double", 21) == 42
            await until(lambda: len(lines.of("box:ended")) == 1)
        await until(lambda: len(lines.of("box:ended")) == 3)
        pids = [line["pid"] for line in lines.of("box:started")]
    assert not any(map(is_alive, pids))


async def test_a_box_is_made_anew_after_so_many_jobs_and_ended_when_it_is_idle(app: App) -> None:
    app.configure(box_jobs=2, box_idle=0.2)
    with Lines() as lines:
        async with working(app):
            pids = [(await ask(app, "seen")).pid for _ in range(5)]
            assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
            await until(lambda: not is_alive(pids[4]))
            await until(lambda: len(lines.of("box:ended")) == 3)
            assert [line["level"] for line in lines.of("box:ended")] == ["debug"] * 3


@pytest.mark.parametrize("task", ["act", "act_trio", "act_asyncio"])
async def test_errors_sections_and_words_to_the_worker_travel_as_they_are_meant(app: App, task: str) -> None:
    async with working(app):
        with pytest.raises(TaskFailed) as caught:
            await ask(app, task, "fail")
        assert (caught.value.type, caught.value.message) == ("KeyError", "'nothing there'")
        assert caught.value.traceback.splitlines()[1].endswith(f"in {task}")
        assert await ask(app, task, "section") == 3
        with pytest.raises(TaskFailed) as caught:
            await ask(app, task, "poison", max_retries=3)
        assert caught.value.reason == "poisonous"
        assert await ask(app, task, "again", max_retries=1) == 2
        with pytest.raises(TaskRejected, match="not today"):
            await ask(app, task, "reject")
        with pytest.raises(TaskFailed) as caught:
            await ask(app, task, "fail", max_retries=5, dont_autoretry_for=(LookupError,))
        assert caught.value.attempt == 1


async def test_a_policy_that_rejects_jobs_is_asked_in_the_box(app: App) -> None:
    async with working(app):
        assert await ask(app, "deduplicated", 2) == 2
        with pytest.raises(TaskRejected, match="it is odd"):
            await ask(app, "deduplicated", 3)


async def test_what_user_code_prints_is_never_taken_for_an_answer(app: App) -> None:
    with Lines() as lines:
        async with working(app):
            assert await ask(app, "act", "print 300") == 0, "and its stdin is empty"
            await until(lambda: len(lines.of("box:output-truncated")) == 1)
            log_lines = lines.of("box:printed")
            assert [line["line"] for line in log_lines[:2]] == [
                '{"type":"result","value":0}',
                '{"type":"result","value":1}',
            ]
            assert {line["task"] for line in log_lines} == {"act"}
            assert len(log_lines) == 100
            assert lines.of("box:output-truncated")[0]["lines"] == 201


async def test_what_a_box_logs_is_in_the_workers_log(app: App) -> None:
    with Lines() as lines:
        async with working(app):
            result = await app.tasks["act"].adelay("log")
            await result.aget(LIMIT)
            await until(lambda: bool(lines.of("log") and lines.of("section:ignored")))
            said = next(line for line in lines.of("log") if line["logger"] == "boxing")
            assert (said["message"], said["level"], said["shelf"]) == ("careful with that", "warning", 3)
            assert (said["job"], said["task"]) == (result.id, "act")
            assert lines.of("section:ignored")[0]["job"] == result.id


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("exit 3", "the box exited with code 3 while it ran the job: last words"),
        (f"kill {signal.SIGSEGV:d}", "the box was killed by SIGSEGV while it ran the job: last words"),
    ],
)
async def test_a_crash_is_a_failed_attempt_and_says_how_it_ended(app: App, what: str, says: str) -> None:
    async with working(app):
        before = (await ask(app, "seen")).pid
        with pytest.raises(TaskFailed) as caught:
            await ask(app, "act", what, max_retries=1)
        assert (caught.value.type, caught.value.message, caught.value.attempt) == ("BoxCrashed", says, 2)
        assert "last words" in caught.value.traceback
        assert (await ask(app, "seen")).pid != before


async def test_a_job_over_its_memory_or_processor_time_fails(app: App) -> None:
    async with working(app):
        with pytest.raises(TaskFailed) as caught:
            await ask(app, "limited", "grab")
        assert caught.value.type == "MemoryError"
        with pytest.raises(TaskFailed, match="over its limit of 1 s of processor time"):
            await ask(app, "limited", "burn")


@pytest.mark.parametrize("task", ["act", "act_trio", "act_asyncio"])
async def test_a_soft_limit_is_raised_inside_and_a_hard_one_ends_it(
    app: App, task: str, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    async with working(app):
        await ask(app, "seen")  # so that a box is there
        assert await ask(app, task, f"sleep {told}", soft_time_limit=0.3) == "SoftTimeLimitExceeded caught"
        began = time.monotonic()
        with pytest.raises(TaskFailed) as caught:
            await ask(app, task, f"sleep {tmp_path / 'hard'}", time_limit=0.3)
        assert caught.value.type == "TimeLimitExceeded"
        assert caught.value.message == "ran for longer than its time_limit of 0.3 s"
        where = "in _sleep" if task == "act" else "in _rest"
        assert where in caught.value.traceback, "it says where it was"
        assert 0.3 <= time.monotonic() - began < 20
        assert (tmp_path / "hard.ended").exists(), "it could clean up"


async def test_a_revoked_job_is_stopped_and_cleans_up(app: App, tmp_path: Path) -> None:
    told = tmp_path / "told"
    async with working(app):
        for task in ("act", "act_trio"):
            result = await app.tasks[task].adelay(f"sleep {told}")
            await until(told.exists, within=LIMIT)
            await result.arevoke()
            with pytest.raises(TaskRevoked):
                await result.aget(LIMIT)
            (tmp_path / "told.ended").unlink()  # it is there
            pid = int(told.read_text())
            told.unlink()
        assert is_alive(pid), "the box is used again"
        assert (await ask(app, "seen")).pid == pid


@pytest.mark.parametrize("how", ["time limit", "revoke"])
async def test_what_takes_no_notice_is_killed_with_all_that_it_has_started(
    app: App, tmp_path: Path, how: str
) -> None:
    told = tmp_path / "told"
    limit: dict[str, Any] = {"time_limit": 2.0} if how == "time limit" else {}
    async with working(app):
        await ask(app, "seen")  # so that a box is there, which takes longer than the limit on a busy machine
        result = await app.tasks["act"].options(**limit).adelay(f"deaf {told}")
        await until(told.exists, within=LIMIT)
        pids = [int(word) for word in told.read_text().split()]
        if how == "revoke":
            await result.arevoke()
        with pytest.raises(TaskRevoked if how == "revoke" else TaskFailed):
            await result.aget(LIMIT)
        assert not any(map(is_alive, pids))
        assert await ask(app, "add", 1) == 2


async def test_a_result_over_the_limit_is_told_of_and_the_box_lives(app: App) -> None:
    app.configure(message_limit=4096)
    async with working(app):
        pid = (await ask(app, "seen")).pid
        for count in (5_000, 5_000_000):
            with pytest.raises(TaskFailed) as caught:
                await ask(app, "act", f"large {count}", max_retries=3)
            assert (caught.value.type, caught.value.reason) == ("MessageTooLarge", "result-too-large")
        assert (await ask(app, "seen")).pid == pid


async def test_a_box_in_another_language_answers_as_well(app: App) -> None:
    with Lines() as lines:
        async with working(app):
            assert await ask(app, "shell", "double", 21) == 42
            assert await ask(app, "shell", "noise") == "done"
            await until(lambda: len(lines.of("box:printed")) == 4)
            said = [line["line"] for line in lines.of("box:printed")]
            assert said[0] == "a word in between"
            assert said[1].startswith('{"type":"greeting"')
            assert said[2].startswith("xxxx")
            assert len(said[2]) == 2_000
            gap = next(line for line in lines.of("log") if line.get("gap"))
            assert (gap["message"], gap["level"], gap["logger"]) == ("mind the gap", "warning", "box")
            assert gap["worker"] != "me"


async def test_what_goes_wrong_in_another_language_is_a_failed_attempt(app: App) -> None:
    async def failure(what: str, n: int = 1, **options: Any) -> TaskFailed:
        with pytest.raises(TaskFailed) as caught:
            await ask(app, "shell", what, n, **options)
        return caught.value

    async with working(app):
        failed = await failure("fail", max_retries=3, dont_autoretry_for=("shell.NotThere",))
        assert (failed.type, failed.message, failed.attempt) == ("shell.NotThere", "no such thing", 1)
        assert (await failure("large")).reason == "result-too-large"
        assert "cannot be read" in (await failure("malformed")).message
        crashed = await failure("crash", 7)
        assert crashed.message == "the box exited with code 7 while it ran the job: last words"
        assert crashed.traceback == "some words\nlast words"
        assert "killed by" in (await failure("close")).message
        with pytest.raises(TaskRejected, match="closed on Sundays"):
            await ask(app, "shell", "reject")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["no-such-program"], "cannot start 'no-such-program': No such file or directory"),
        (["sh", "-c", "echo oh no >&2; exit 4"], "exited with code 4 before it was ready: oh no"),
        (["sh", "-c", """echo '{"type":"ready","version":9}'; sleep 60"""], "speaks version 9"),
    ],
)
async def test_a_box_that_does_not_come_up_is_a_failed_attempt(
    app: App, command: list[str], says: str
) -> None:
    @app.task(name="broken", boxed=Box(command))
    def broken() -> None:
        raise NotImplementedError

    async with working(app):
        with pytest.raises(TaskFailed) as caught:
            await ask(app, "broken")
        assert caught.value.type == "BoxCrashed"
        assert says in caught.value.message


async def test_a_task_that_its_box_does_not_find_is_told_of(app: App) -> None:
    app.configure(unknown_task_grace=0.0)

    @app.task(name="inner", boxed=True)
    def inner() -> None: ...

    async with working(app):
        with pytest.raises(TaskFailed, match="no task 'inner' in its box") as caught:
            await ask(app, "inner", max_retries=3)
        assert caught.value.reason == "unknown-task"


async def test_a_stop_of_the_worker_gives_the_job_back_and_ends_its_box(app: App, tmp_path: Path) -> None:
    app.configure(grace_period=0.1)
    told = tmp_path / "told"
    with Lines() as lines:
        async with working(app) as worker:
            result = await app.tasks["act"].adelay(f"sleep {told}")
            await until(told.exists, within=LIMIT)
            with trio.fail_after(30):
                await worker.stop()
        assert not is_alive(int(told.read_text()))
        assert [line["state"] for line in lines.of("job")] == ["SENT"]
    await result.arevoke()


def test_what_makes_no_sense_is_said_when_it_is_declared(app_name: str) -> None:
    app = App(app_name)

    def declare(**said: Any) -> None:
        app.task(**said)(lambda job: None)

    for wrong in ({"boxed": "yes"}, {"boxed": True, "abandon_on_cancel": True}):
        with pytest.raises(Misconfigured, match="boxed"):
            declare(**wrong)
    with pytest.raises(Misconfigured, match="bind and deduplicate are for functions"):
        declare(boxed=Box(["sh"]), bind=True)
    for said in ({"command": "node resize.js"}, {"command": [1]}, {"memory": 5}, {"cpu": 0}, {"cpu": True}):
        with pytest.raises(Misconfigured, match="Box"):
            Box(**said)
    with pytest.raises(Misconfigured, match=r"Box\(\['node', 'resize.js'\]\)"):
        Box("node resize.js")


def test_a_command_can_only_be_sent(app_name: str) -> None:
    app = App(app_name)
    with pytest.raises(TypeError, match="runs in its box only"):
        app.task(boxed=Box(["sh", boxing.SHELL]))(boxing.shell)("double")
    assert app.task(boxed=True)(boxing.add)(2) == 3, "a function can be called as ever"


async def test_a_boxed_job_reports_its_progress_and_its_box_sends_the_last_report(
    app: App, tmp_path: Path
) -> None:
    async with working(app, name="keeper"):
        sent = await app.tasks["count"].adelay(str(tmp_path / "enough"))

        async def is_near() -> bool:
            found = await sent.aprogress()
            return found is not None and (found.done, found.total, found.note) == (3, 4, "nearly there")

        await until_async(is_near)
        (tmp_path / "enough").touch()
        assert await sent.aget(LIMIT) == "counted"


async def test_a_box_in_another_language_reports_with_a_frame_and_nonsense_is_logged(app: App) -> None:
    with Lines() as lines:
        async with working(app, name="keeper"):
            sent = await app.tasks["shell"].adelay("progress")

            async def is_half() -> bool:
                found = await sent.aprogress()
                return found is not None and found.fraction == 0.5

            await until_async(is_half)
            await sent.aget(LIMIT)
    assert [line["line"] for line in lines.of("box:printed")] == ['{"type":"progress","done":-1}']


async def test_each_job_in_a_box_sees_the_gpu_that_it_has_and_no_other(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    app.configure(capacity={"gpu": 2})
    task = app.tasks["on_gpu"]
    async with working(app):
        sent = list(await app.asend_many([task.s() for _ in range(6)]))
        seen: list[Any] = await agather(sent, timeout=LIMIT)
        assert await ask(app, "seen"), "another box runs what takes no GPU"
    assert {visible for visible, *_ in seen} == {"5", "7"}
    assert all(devices == (0,) and resources == {"gpu": 1} for _, devices, resources, *_ in seen)
    assert len({(visible, pid) for visible, _, _, pid, *_ in seen}) == 2, "a box for each, which is kept"
    for visible in ("5", "7"):
        times = sorted((began, ended) for shown, *_, began, ended in seen if shown == visible)
        assert all(ended <= later for (_, ended), (later, _) in itertools.pairwise(times))


async def test_a_box_that_crashes_returns_what_its_job_had(app: App) -> None:
    app.configure(capacity={"gpu": 1})
    async with working(app):
        with pytest.raises(TaskFailed):
            await ask(app, "crash_on_gpu")
        assert (await ask(app, "on_gpu"))[2] == {"gpu": 1}
