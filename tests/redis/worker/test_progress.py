"""Progress: what running jobs report is stored by their worker, shown everywhere, and gone when they have ended."""

import asyncio
import threading
import time
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, RetryPolicy, progress
from celery5.broker.calls import jobs as jobs_calls
from celery5.protocol.job.progress import ProgressReport
from celery5.results import Progress
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import Lines, until, until_async, working


def stored(client: "redis.Redis", app: App) -> list[str]:
    """The keys of the progress of jobs."""
    return [key.decode() for key in client.scan_iter(f"celery5:[{{]{app.name}:*:progress:*")]


async def read(sent: Any, done: float) -> Progress:
    """Wait until that is stored."""
    found: list[Progress] = []

    async def is_there() -> bool:
        now = await sent.aprogress()
        if now is not None and now.done == done:
            found.append(now)
        return bool(found)

    await until_async(is_there)
    return found[0]


def declare(app: App, kind: str, step: threading.Event) -> Any:
    """A task of that kind which reports, and goes on with `step`."""
    if kind == "thread":

        def work() -> None:
            progress(1, 4, "in a thread")
            assert step.wait(30)

        return app.task(work)

    nap: Any = trio.sleep if kind == "trio" else asyncio.sleep

    async def work_on() -> None:
        progress(1, 4, "in a loop")
        while not step.is_set():
            await nap(0.01)

    declared: Any = app.task
    return declared(loop=kind)(work_on)


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_job_of_each_kind_reports_and_it_is_gone_when_the_job_has_ended(
    app: App, kind: str, redis_client: "redis.Redis"
) -> None:
    step = threading.Event()
    task = declare(app, kind, step)
    async with working(app, name="keeper"):
        before = time.time()
        sent = await task.adelay()
        found = await read(sent, 1)
        assert (found.total, found.fraction, found.attempt) == (4, 0.25, 1)
        assert found.note.startswith("in a ")
        assert found.worker.startswith("keeper")
        assert abs(found.at - before) < 30
        details = await app.afind(sent.id)
        assert details is not None
        assert details.progress == found
        (key,) = stored(redis_client, app)
        assert 0 < redis_client.ttl(key) <= 300
        step.set()
        await sent.aget(30)
        ended = await app.afind(sent.id)
        assert ended is not None
        assert ended.progress is None
        await until(lambda: not stored(redis_client, app))
        assert await sent.aprogress() is None


def test_plain_python_reads_it_of_a_handle_that_was_made_from_an_id(app: App) -> None:
    assert app.result("nobody").progress() is None


def note_writes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int, ProgressReport]]]:
    """The reports of each write from now on."""
    written: list[list[tuple[str, int, ProgressReport]]] = []
    make = jobs_calls.record_progress

    def note(*args: Any, **options: Any) -> Any:
        written.append(list(options["reports"]))
        return make(*args, **options)

    monkeypatch.setattr(jobs_calls, "record_progress", note)
    return written


async def test_a_worker_whose_jobs_report_nothing_sends_nothing_for_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = note_writes(monkeypatch)

    @app.task
    async def quiet() -> None:
        pass

    @app.task
    async def late() -> None:
        progress(1)

    async with working(app):
        for job in await app.asend_many([quiet.s() for _ in range(500)]):
            await job.aget(30)
        assert not written
        await (await late.adelay()).aget(30)


async def test_a_tight_loop_costs_one_write_a_second_and_the_last_report_counts(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = note_writes(monkeypatch)
    step = threading.Event()

    @app.task
    def busy(number: int) -> None:
        for done in range(20_000):
            progress(done, 20_000)
        progress(20_000 + number, note="over")
        assert step.wait(30)

    async with working(app):
        began = time.monotonic()
        sent = await app.asend_many([busy.s(number) for number in range(3)])
        for number, job in enumerate(sent):
            assert (await read(job, 20_000 + number)).note == "over"
        took = time.monotonic() - began
        writes = sum(1 for reports in written if reports)
        assert writes <= took + 2
        assert max(map(len, written)) > 1  # those of several jobs in one call
        step.set()
        for job in sent:
            await job.aget(30)


async def test_the_report_of_an_earlier_attempt_does_not_outlast_it(
    app: App, redis_client: "redis.Redis"
) -> None:
    step = threading.Event()

    @app.task(retry_policy=RetryPolicy(max_retries=1, backoff=0.01, jitter=False))
    async def flaky() -> str:
        from celery5 import current_job

        job = current_job()
        assert job is not None
        if job.attempt == 1:
            progress(9, 10, "first")
            await trio.sleep(0.2)
            raise ValueError("once")
        progress(1, 10, "second")
        while not step.is_set():
            await trio.sleep(0.01)
        return "done"

    async with working(app):
        sent = await flaky.adelay()
        found = await read(sent, 1)
        assert (found.attempt, found.note) == (2, "second")
        step.set()
        assert await sent.aget(30) == "done"
        await until(lambda: not stored(redis_client, app))


def test_a_worker_that_has_lost_its_lease_stores_and_deletes_nothing(queue: Queue) -> None:
    report = ProgressReport(1, 2, "mine")

    def record(worker: str, *, reports: Any = (), kept: Any = (), ended: Any = ()) -> bool:
        call = jobs_calls.record_progress(queue.keys, worker, ttl=60, reports=reports, kept=kept, ended=ended)
        return bool(queue(call))

    queue.join("a")
    queue.join("b")
    assert record("a", reports=[("j", 1, report)])
    assert record("b", reports=[("j", 2, ProgressReport(5, None, "theirs"))])
    queue.client.zrem(queue.keys.leases, "a")
    assert not record("a", reports=[("j", 1, report)])
    assert not record("a", ended=["j"])
    found = queue(jobs_calls.get_progress(queue.keys, "j"))
    assert (found.done, found.total, found.worker, found.attempt) == (5, None, "b", 2)
    queue.join("a")  # back, with a late end of its attempt: another worker has the job now
    assert record("a", ended=["j"])
    assert queue(jobs_calls.get_progress(queue.keys, "j")) == found
    queue.client.pexpire(queue.keys.progress("j"), 1000)
    assert record("b", kept=["j"])
    assert queue.client.pttl(queue.keys.progress("j")) > 30_000
    assert record("b", ended=["j"])
    assert queue(jobs_calls.get_progress(queue.keys, "j")) is None


async def test_a_key_that_cannot_be_written_is_one_warning_and_the_job_succeeds(
    app: App, redis_client: "redis.Redis"
) -> None:
    step = threading.Event()

    @app.task
    async def report() -> str:
        number = 0
        while not step.is_set():
            progress(number := number + 1)
            await trio.sleep(0.01)
        return "done"

    with Lines() as lines:
        async with working(app):
            job = report.job()
            redis_client.set(app.queue("default").progress(job.id), "another program's", ex=60)
            (sent,) = await app.asend_jobs([job])
            await until(lambda: bool(lines.of("progress:write-failed")))
            assert await sent.astatus() == JobState.EXECUTING
            redis_client.delete(app.queue("default").progress(job.id))
            await until(lambda: bool(lines.of("progress:resumed")))
            assert await sent.aprogress() is not None
            step.set()
            assert await sent.aget(30) == "done"
        assert len(lines.of("progress:write-failed")) == 1
