"""Getting: what a job returned is waited for as long as it takes, read as often as one likes, or not kept at all."""

import inspect
import time
from functools import partial

import msgspec
import pytest
import redis
import trio
from trio.testing import MockClock

from celery5 import App, AsyncResult, JobState, ResultTimeout, TaskFailed, agather, gather
from celery5.errors import ResultsDisabled
from celery5.protocol.job.messages import Document, encode
from tests.redis.worker.workers import working


async def test_a_result_is_waited_for_as_long_as_it_takes_and_stays_with_its_handle(app: App) -> None:
    @app.task(max_retries=2, backoff=0.4, jitter=False)
    async def third_time(tries: list[int]) -> list[int]:
        job = await app.afind(handle.id)
        assert job is not None
        if job.attempt < 3:
            raise ConnectionError("not yet")
        return [*tries, job.attempt]

    async with working(app):
        handle = await third_time.adelay([])
        with pytest.raises(ResultTimeout, match=r"no result after 0\.2 s; the job is (SENT|EXECUTING|RETRY)"):
            await handle.aget(timeout=0.2)
        with trio.fail_after(30):
            assert await handle.aget(timeout=None) == [3]
        # Whoever asks again, with another handle or the same, gets the same; a handle remembers what it was told.
        again = app.result(handle.id, task=third_time)
        never = app.result(handle.id, task=third_time)
        assert await agather([again, again, handle]) == [[3], [3], [3]]
        assert await again.aget() == [3]
        await handle.aforget()
        assert (await handle.aget(), await again.aget()) == ([3], [3])
        with pytest.raises(ResultTimeout, match="the job is UNKNOWN"):
            await never.aget(timeout=0.05)


def test_a_result_that_was_read_stays_with_its_handle_in_plain_python(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def seven() -> int:
        return 7

    handle = seven.delay()
    document = Document(v=1, id=handle.id, task=handle.task, state="SUCCESS", value=msgspec.Raw(b"7"))
    redis_client.set(handle.key, encode(document))
    assert handle.get() == 7
    redis_client.delete(handle.key)
    assert handle.get() == 7


async def test_a_time_out_says_what_keeps_the_job_from_beginning(app: App) -> None:
    @app.task(queue="images")
    async def shrink() -> None: ...

    async def why() -> str:
        handle = await shrink.adelay()
        with pytest.raises(ResultTimeout) as late:
            await handle.aget(timeout=0.01)
        blocking = await trio.to_thread.run_sync(lambda: why_blocking(handle))
        assert blocking == str(late.value)
        return str(late.value).partition("on queue 'images'")[2]

    def why_blocking(handle: AsyncResult[None]) -> str:
        with pytest.raises(ResultTimeout) as late:
            handle.get(timeout=0.01)
        return str(late.value)

    assert await why() == ": no worker reads it"
    async with working(app):
        await app.control.asend("pause-queue", {"queue": "images"})
        assert await why() == ": the queue is paused"
        await app.control.asend("resume-queue", {"queue": "images"})
    await app.limits.asuspend(shrink, why="the disk is full")
    assert await why() == ": no worker reads it, the task is suspended (the disk is full)"
    await app.limits.aresume(shrink)


async def test_an_application_may_keep_no_results_but_for_those_that_say_otherwise(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, ignore_result=True)

    @app.task(max_retries=0)
    async def half(number: int) -> float:
        if number % 2:
            raise ValueError("odd")
        return number / 2

    @app.task(ignore_result=False)
    async def kept() -> str:
        return "kept"

    async with working(app):
        fine, failed = await half.adelay(4), await half.adelay(5)
        asked = await half.options(ignore_result=False).adelay(6)
        for job in (fine, failed):
            with pytest.raises(ResultsDisabled, match="was sent with ignore_result"):
                await job.aget()
        assert await agather([asked, await kept.adelay()]) == [3.0, "kept"]
        with trio.fail_after(30):
            while {await fine.astatus(), await failed.astatus()} != {JobState.SUCCESS, JobState.DEAD}:
                await trio.sleep(0.01)
        # A failure is told all the same to those who look for it: nobody sends a job in order to lose it.
        with pytest.raises(TaskFailed, match="ValueError: odd"):
            await app.result(failed.id).aget()
    assert 0 < int(redis_client.pttl(fine.key)) <= 60_000  # that it ran is remembered for a minute
    app.close()


async def test_a_result_is_waited_for_ten_seconds_unless_another_limit_is_given(
    app: App, mock_clock: MockClock
) -> None:
    @app.task
    async def nothing() -> None: ...

    handle, ended = await nothing.adelay(), list[float]()
    began = trio.current_time()

    async def wait() -> None:
        with pytest.raises(ResultTimeout, match=r"no result after 10\.0 s"):
            await handle.aget()
        ended.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        while not ended:
            mock_clock.jump(0.1)
            await trio.to_thread.run_sync(
                partial(time.sleep, 0.01)
            )  # what is sent to Redis takes its real time
    assert 10 <= ended[0] < 30
    limits = {
        inspect.signature(way).parameters["timeout"].default
        for way in (handle.get, AsyncResult.aget, gather, agather)
    }
    assert limits == {10.0}
