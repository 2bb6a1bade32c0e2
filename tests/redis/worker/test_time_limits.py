"""Limits in time: they fire for every kind of task, and what becomes of the job is what the retry policy says."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import pytest
import redis
import trio
import trio.lowlevel

from celery5 import App, SoftTimeLimitExceeded, TaskFailed, TimeLimitExceeded, current_job
from celery5.protocol.job.messages import Command, encode, read_command
from tests.redis.worker.workers import Lines, until, working

KINDS = ("trio", "asyncio", "thread")
Body = Generator[float, None, Any]


def declare(app: App, kind: str, body: Callable[[], Body], **options: Any) -> Any:
    """A task named `limited` that does what `body` says: it yields for how many seconds it rests, and may catch what is
    raised in it meanwhile."""

    def limited() -> Any:
        return _drive(body())

    async def alimited() -> Any:
        return await _adrive(body(), asyncio.sleep if kind == "asyncio" else trio.sleep)

    task: Any = app.task
    if kind == "thread":
        return task(name="limited", **options)(limited)
    return task(name="limited", loop="asyncio" if kind == "asyncio" else "trio", **options)(alimited)


def _drive(steps: Body) -> Any:
    error: BaseException | None = None
    try:
        while True:
            seconds = next(steps) if error is None else steps.throw(error)
            error = None
            try:
                for _ in range(int(seconds / 0.001)):
                    time.sleep(0.001)
            except BaseException as raised:
                error = raised
    except StopIteration as stop:
        return stop.value


async def _adrive(steps: Body, rest: Any) -> Any:
    error: BaseException | None = None
    try:
        while True:
            seconds = next(steps) if error is None else steps.throw(error)
            error = None
            try:
                await rest(seconds)
            except BaseException as raised:
                error = raised
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("kind", KINDS)
async def test_an_attempt_that_runs_for_too_long_is_ended_and_tried_again_by_the_policy(
    app: App, kind: str
) -> None:
    attempts = list[int]()

    def body() -> Body:
        job = current_job()
        assert job is not None
        attempts.append(job.attempt)
        yield 60 if job.attempt == 1 else 0.001
        return job.attempt

    limited = declare(app, kind, body, time_limit=0.1)
    with Lines() as lines:
        async with working(app):
            began = time.monotonic()
            assert await (await limited.adelay()).aget(30) == 2
            assert 0.1 <= time.monotonic() - began < 30
            failing = await limited.options(dont_autoretry_for=(TimeLimitExceeded,)).adelay()
            with pytest.raises(TaskFailed) as caught:
                await failing.aget(30)
    assert attempts == [1, 2, 1]
    assert (caught.value.type, caught.value.reason) == ("TimeLimitExceeded", "not-retried")
    assert caught.value.message == "ran for longer than its time_limit of 0.1 s"
    assert "limited" in caught.value.traceback, "it says where it was"
    states = [(line["state"], line.get("error", "")[:17]) for line in lines.of("job")]
    over = "TimeLimitExceeded"
    assert states == [("RETRY", over), ("SUCCESS", ""), ("DEAD", over)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_is_told_first_and_may_clean_up_until_its_hard_limit(app: App, kind: str) -> None:
    heard = list[str]()

    def body() -> Body:
        try:
            yield 60
        except SoftTimeLimitExceeded as error:
            heard.append(str(error))
        yield 0.01
        job = current_job()
        assert job is not None
        if job.attempt == 1:
            yield 60
        return "cleaned up"

    limited = declare(app, kind, body, soft_time_limit=0.05, time_limit=0.2)
    with Lines() as lines:
        async with working(app):
            assert await (await limited.adelay()).aget(30) == "cleaned up"
    assert heard == ["ran for longer than its soft_time_limit of 0.05 s"] * 2
    first, second = lines.of("job")
    assert (first["state"], second["state"]) == ("RETRY", "SUCCESS")
    assert first["error"] == "TimeLimitExceeded: ran for longer than its time_limit of 0.2 s"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_soft_limit_that_is_not_caught_is_a_failed_attempt(app: App, kind: str) -> None:
    def body() -> Body:
        yield 60

    limited = declare(app, kind, body, soft_time_limit=timedelta(milliseconds=50), max_retries=0)
    async with working(app):
        result = await limited.adelay()
        with pytest.raises(
            TaskFailed, match="SoftTimeLimitExceeded: ran for longer than its soft_time_limit of"
        ):
            await result.aget(30)


async def test_time_limit_of_a_call_beats_the_task_and_the_task_the_settings(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, time_limit=0.3, soft_time_limit=30, lease=1)
    client: Any = redis_client

    @app.task(name="usual", max_retries=0)
    async def usual() -> None:
        await trio.sleep(60)

    @app.task(name="own", max_retries=0, time_limit=0.2)
    async def own() -> None:
        await trio.sleep(60)

    async def said(result: Any) -> str:
        with pytest.raises(TaskFailed) as caught:
            await result.aget(30)
        return str(caught.value.message).rsplit("its ", maxsplit=1)[1]

    async with working(app):
        assert await said(await usual.adelay()) == "time_limit of 0.3 s"
        assert await said(await own.adelay()) == "time_limit of 0.2 s"
        assert await said(await own.options(time_limit=0.1).adelay()) == "time_limit of 0.1 s"
        assert await said(await own.options(soft_time_limit=0.05).adelay()) == "soft_time_limit of 0.05 s"
        # Whoever writes to the stream need not know the task's options.
        for job, hard, soft in (("raw", None, None), ("limited", 0.1, None), ("told", None, 30)):
            command = Command(v=1, id=job, task="own", time_limit=hard, soft_time_limit=soft)
            client.xadd(app.queue("default").stream, {"job": encode(command)})
        assert await said(app.result("told")) == "time_limit of 0.2 s"
        assert await said(app.result("raw")) == "time_limit of 0.2 s"
        assert await said(app.result("limited")) == "time_limit of 0.1 s"
    app.close()


async def test_a_job_with_limits_that_is_quick_is_not_disturbed_nor_is_the_next_one(app: App) -> None:
    @app.task(name="quick", time_limit=0.4, soft_time_limit=0.3)
    def quick(n: int) -> int:
        return n

    @app.task(name="aquick", time_limit=0.4)
    async def aquick(n: int) -> int:
        await trio.sleep(0.001)
        return n

    @app.task(name="long", max_retries=0)
    async def long() -> str:
        await trio.sleep(0.6)
        return "long"

    async with working(app):
        jobs = await app.asend_many([task.s(n) for n in range(60) for task in (quick, aquick)])
        after = await app.asend_many([long.s() for _ in range(20)])
        assert [await job.aget(30) for job in jobs] == [n for n in range(60) for _ in (quick, aquick)]
        assert [await job.aget(30) for job in after] == ["long"] * 20


async def test_what_returns_in_spite_of_its_limit_has_returned(app: App) -> None:
    @app.task(name="stubborn", time_limit=0.05, max_retries=0)
    async def stubborn(returns: bool) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.1)
        if returns:
            return "done"
        await trio.lowlevel.checkpoint()
        return "never"

    async with working(app):
        assert await (await stubborn.adelay(True)).aget(30) == "done"
        with pytest.raises(TaskFailed, match="longer than its time_limit"):
            await (await stubborn.adelay(False)).aget(30)


async def test_a_thread_that_cannot_be_reached_is_settled_and_keeps_its_slot(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, cpu_slots=1)
    lock, began = threading.Lock(), list[int]()
    lock.acquire()

    @app.task(name="stuck", time_limit=0.05, max_retries=0)
    def stuck(n: int) -> int:
        began.append(n)
        lock.acquire()
        return n

    with Lines() as lines:
        async with working(app):
            first, second = await stuck.adelay(1), await stuck.options(time_limit=30).adelay(2)
            with pytest.raises(TaskFailed, match="longer than its time_limit"):
                await first.aget(30)
            await until(lambda: bool(lines.of("job:abandoned")))
            assert began == [1], "the thread has the slot"
            lock.release()
            await until(lambda: began == [1, 2])
            (line,) = lines.of("job:abandoned")
            assert (line["job"], line["task"]) == (first.id, "stuck")
            assert "keeps its slot until it ends" in line["hint"]
            assert "boxed=True" in line["hint"]
            lock.release()
            assert await second.aget(30) == 2
    app.close()


async def test_a_job_that_a_stop_interrupts_has_not_failed_by_its_limit(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, grace_period=0)
    client: Any = redis_client

    @app.task(name="long", time_limit=30, soft_time_limit=20)
    async def long() -> None:
        began.append(1)
        await trio.sleep(60)

    began = list[int]()
    async with working(app):
        await long.adelay()
        await until(lambda: bool(began))
    [(_entry, fields)] = client.xrange(app.queue("default").stream)
    command = read_command(fields[b"job"])
    assert (command.attempt, command.failures, command.time_limit) == (1, (), 30)
    app.close()


async def test_a_hard_limit_that_is_not_beyond_the_soft_one_is_the_only_one(app: App) -> None:
    """As when the one is the task's and the other the settings'; one task with both is told that it makes no sense."""
    heard = list[str]()
    app.configure(soft_time_limit=0.05)

    @app.task(name="both", time_limit=0.05, max_retries=0)
    async def both() -> None:
        try:
            await trio.sleep(60)
        except SoftTimeLimitExceeded:
            heard.append("told")

    async with working(app):
        with pytest.raises(TaskFailed, match="its time_limit of"):
            await (await both.adelay()).aget(30)
    assert heard == []
