"""Received twice: the very same message, which comes again, is discarded; a job that comes again for a reason is
run."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, Retry, current_job
from celery5.errors import BrokerUnavailable
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command, encode, read_command
from celery5.services.job.in_flight import RecentJobs
from tests.redis.worker.workers import LEASE, Lines, until, until_async, working


@pytest.fixture
def lines() -> Iterator[Lines]:
    with Lines() as one:
        yield one


async def settled(client: "redis.Redis", app: App) -> None:
    """Wait until the stream is empty."""
    await until(lambda: not client.xlen(app.queue("default").stream))


@pytest.mark.parametrize("kind", ["trio", "thread"])
async def test_a_message_that_was_added_twice_is_run_once(
    app: App, redis_client: "redis.Redis", lines: Lines, kind: str
) -> None:
    runs: list[int] = []

    async def note(n: int) -> int:
        runs.append(n)
        await trio.sleep(0.02)
        return n

    def note_in_thread(n: int) -> int:
        runs.append(n)
        return n

    task = app.task(name="note")(note if kind == "trio" else note_in_thread)
    job, stream = task.job(7), app.queue("default").stream
    for _ in range(3):
        redis_client.xadd(stream, {"job": job.message})
    result = app.result(job.id, task=task)
    async with working(app):
        assert await result.aget() == 7
        await settled(redis_client, app)
        redis_client.xadd(stream, {"job": job.message})  # when the first has ended, too
        await settled(redis_client, app)
        await until(lambda: len(lines.of("consumer:duplicate-dropped")) == 3)
        assert await result.astatus() is JobState.SUCCESS
    assert runs == [7]
    (told, *_) = lines.of("consumer:duplicate-dropped")
    assert (told["job"], told["task"], told["attempt"], told["level"]) == (job.id, "note", 1, "warning")


async def test_the_copy_of_a_job_that_was_published_changes_nothing_for_it(
    app: App, redis_client: "redis.Redis"
) -> None:
    go = trio.Event()

    @app.task
    async def work() -> str:
        await go.wait()
        return "done"

    job, keys = work.job(), app.queue("default")
    async with working(app):
        (sent,) = await app.asend_jobs([job])
        await until_async(lambda: _is(sent, JobState.EXECUTING))
        redis_client.xadd(keys.stream, {"job": job.message})
        await until(lambda: redis_client.xlen(keys.stream) == 1)
        assert await sent.astatus() is JobState.EXECUTING
        go.set()
        assert await sent.aget() == "done"
        assert not redis_client.exists(keys.jobs)


async def _is(result: Any, state: JobState) -> bool:
    found: JobState = await result.astatus()
    return found is state


async def test_each_attempt_is_run_and_the_copy_of_an_earlier_one_is_not(
    app: App, redis_client: "redis.Redis", lines: Lines
) -> None:
    runs: list[int] = []

    @app.task
    async def work() -> int:
        job = current_job()
        assert job is not None
        runs.append(job.attempt)
        if job.attempt < 3:
            raise Retry(countdown=0.05)
        return job.attempt

    job = work.job()
    async with working(app):
        (sent,) = await app.asend_jobs([job])
        await until(lambda: runs == [1])
        redis_client.xadd(app.queue("default").stream, {"job": job.message})
        assert await sent.aget() == 3
        await settled(redis_client, app)
    assert runs == [1, 2, 3]
    assert len(lines.of("consumer:duplicate-dropped")) == 1


async def test_a_job_that_was_given_back_is_run_when_it_comes_again(
    app_name: str, url: str, lines: Lines
) -> None:
    app = App(app_name, broker=url, lease=LEASE, cpu_slots=1)
    runs: list[int] = []

    @app.task
    def work(n: int, seconds: float) -> int:
        trio.from_thread.run(trio.sleep, seconds)
        runs.append(n)
        return n

    async with working(app):
        sent = await app.asend_many([work.s(n, 0.9 if n == 20 else 0.0) for n in range(40)])
        assert [await job.aget() for job in sent] == list(range(40))
    assert lines.of("consumer:jobs-returned"), "or this shows nothing"
    assert sorted(runs) == list(range(40))
    assert lines.of("consumer:duplicate-dropped") == []


async def test_an_attempt_that_was_postponed_is_run_when_it_comes_again(
    app: App, redis_client: "redis.Redis", lines: Lines
) -> None:
    runs: list[int] = []

    @app.task(max_retries=1)
    async def away() -> int:
        job = current_job()
        runs.append(job.attempt if job else 0)
        if len(runs) == 1:
            raise BrokerUnavailable("no answer")
        return 7

    job = away.job()
    async with working(app):
        (sent,) = await app.asend_jobs([job])
        assert await sent.aget() == 7
        assert runs == [1, 1], "or it was not postponed"
        redis_client.xadd(app.queue("default").stream, {"job": job.message})
        await until(lambda: bool(lines.of("consumer:duplicate-dropped")))
    assert len(lines.of("consumer:duplicate-dropped")) == 1, "but for the copy"


async def test_an_id_that_is_published_anew_long_after_is_run_again(
    app: App, redis_client: "redis.Redis", lines: Lines
) -> None:
    runs: list[int] = []

    @app.task
    async def work(n: int) -> int:
        runs.append(n)
        return n

    mine, keys = work.options(id="mine"), app.queue("default")
    async with working(app):
        assert await (await mine.adelay(1)).aget() == 1
        redis_client.delete(keys.result("mine"))  # as if its time were over
        assert await (await mine.adelay(2)).aget() == 2
        await settled(redis_client, app)
        assert not redis_client.exists(keys.jobs)
    assert runs == [1, 2]


async def test_a_worker_that_remembers_nothing_runs_what_it_gets(
    app_name: str, url: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, lease=LEASE, recent_jobs=0)
    runs: list[int] = []

    @app.task
    async def work() -> None:
        runs.append(1)

    job = work.job()
    for _ in range(2):
        redis_client.xadd(app.queue("default").stream, {"job": job.message})
    async with working(app):
        await until(lambda: len(runs) == 2)


def delivery(
    job_id: str, *, queue: str = "mail", deliveries: int = 0, **fields: Any
) -> tuple[Delivery, Command]:
    """A message as it was read."""
    command = Command(v=1, id=job_id, task="t", **fields)
    return Delivery(queue, b"1-1", encode(command), deliveries, command), read_command(encode(command))


def test_what_is_the_same_message() -> None:
    recent = RecentJobs(recent_jobs=10)
    assert not recent.check_and_add(*delivery("a"))
    assert recent.check_and_add(*delivery("a"))
    assert not recent.check_and_add(*delivery("a", attempt=2))
    assert not recent.check_and_add(*delivery("a", replays=1))
    assert not recent.check_and_add(*delivery("a", queue="other"))
    assert not recent.check_and_add(*delivery("a", deliveries=1)), "its worker died"
    recent.forget(delivery("a")[0])
    assert not recent.check_and_add(*delivery("a"))
    recent.forget(Delivery("mail", b"1-1", b"no Command"))


@pytest.mark.parametrize("limit", [0, 1, 7, 100])
def test_memory_has_its_limits_and_keeps_its_promise(limit: int) -> None:
    recent = RecentJobs(recent_jobs=limit)
    for number in range(1000):
        assert not recent.check_and_add(*delivery(f"j{number}"))
        assert len(recent) <= 2 * limit
    last = [f"j{number}" for number in range(1000 - limit, 1000)]
    for job_id in last:
        recent.forget(delivery("none")[0])
        assert recent.check_and_add(*delivery(job_id))
