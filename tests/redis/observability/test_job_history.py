"""The history of ended jobs: what is kept, what an outage or a killed worker costs, and the story of a job."""

import signal
import time
from typing import Any

import pytest
import redis
import trio

from celery5 import App, current_job
from celery5.broker.calls.job_history import add_history
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.commands.job_details import format_attempts
from celery5.dashboard.pages.jobs import tell_story
from celery5.errors import BrokerUnavailable
from celery5.protocol.job.history import JobRecord, pack_record
from celery5.protocol.observability import ended_jobs
from celery5.protocol.observability.ended_jobs import HistoryBatch
from celery5.services.health.vitals import ProcessStatus
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.observability.test_job_search import FAST, declare, find, until_found
from tests.redis.worker.workers import LEASE, until, until_async, working


async def send_failing(app: App, count: int) -> None:
    """Send jobs that fail once and for all."""
    fail = app.tasks["shop.fail"].options(max_retries=0)
    await app.asend_many([fail.s(number) for number in range(count)])


async def test_all_failures_are_kept_and_those_beyond_the_cap_of_an_interval_are_counted(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_jobs, "MAX_FAILURES", 300)
    app.configure(metrics_interval=300)
    declare(app)
    await send_failing(app, 350)
    status = ProcessStatus(app=app.name)
    async with working(app, process_status=status):
        await until(lambda: status.jobs.count_by_state() == {"DEAD": 350})
    await app.dlq.apurge()
    assert len(await find(app, state="DEAD")) == 300
    page = await app.jobs.asearch(state="DEAD")
    assert "50 failures that were too many for the history" in page.not_looked_at


async def test_attempts_of_a_quiet_worker_are_found_long_before_its_next_report(app: App) -> None:
    app.configure(metrics_interval=300)
    declare(app)
    async with working(app):
        await app.tasks["shop.pay"].adelay({})
        await send_failing(app, 2)
        await until_found(app, 2, state="DEAD")
        await app.dlq.apurge()
        await until_found(app, 2, state="DEAD")
        await until_found(app, 1, state="SUCCESS")
    page = await app.jobs.asearch(state="SUCCESS")
    assert page.behind == 300
    past = await app.jobs.asearch(state="SUCCESS", until=time.time() - 3600)
    assert past.behind == 0


async def test_a_flood_of_failures_displaces_no_success(app: App, redis_client: "redis.Redis") -> None:
    app.configure(**FAST, job_history=100)
    declare(app)
    paid = await app.tasks["shop.pay"].adelay({})
    status = ProcessStatus(app=app.name)
    async with working(app, process_status=status):
        await until_found(app, 1, state="SUCCESS")
        await send_failing(app, 600)
        await until(lambda: status.jobs.count_by_state().get("DEAD") == 600)
    assert [job.id for job in await find(app, state="SUCCESS")] == [paid.id]
    assert 100 <= redis_client.xlen(app.keys.failed_jobs) < 250  # trimmed by whole nodes of the stream
    page = await app.jobs.asearch(state="RETRY")
    assert "failures before 20" in page.not_looked_at
    assert all(redis_client.pttl(key) > 0 for key in (app.keys.failed_jobs, app.keys.other_jobs))


@pytest.mark.parametrize("settings", [{"job_history": 0}, {"metrics_interval": 0}])
async def test_without_a_history_nothing_is_kept_and_a_search_says_so(
    app: App, redis_client: "redis.Redis", settings: dict[str, Any]
) -> None:
    app.configure(**{**FAST, **settings})
    declare(app)
    await send_failing(app, 3)
    async with working(app):
        await until_found(app, 3, state="DEAD")
        await (await app.tasks["shop.pay"].adelay({})).aget(timeout=30)
    assert redis_client.exists(app.keys.failed_jobs, app.keys.other_jobs) == 0
    page = await app.jobs.asearch()
    assert [job.state for job in page.jobs] == ["DEAD"] * 3
    assert page.not_looked_at == f"jobs that have ended while {next(iter(settings))} is 0"


async def test_a_batch_that_comes_twice_counts_once(app: App) -> None:
    packed = pack_record(JobRecord(id="a", queue="till", state="DEAD", ended=1.0))
    batch = HistoryBatch("host:1", 1, [packed], [], 2)
    assert [await app.aperform(add_history(app.keys, batch, limit=10)) for _ in range(3)] == [
        True,
        False,
        False,
    ]
    assert [job.id for job in await find(app)] == ["a"]


async def test_the_story_of_a_job_is_told_when_its_result_has_expired(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(**FAST)
    declare(app)

    @app.task(name="shop.flaky", queue="till", max_retries=3, backoff=0.0)
    async def flaky(number: int) -> int:
        job = current_job()
        assert job is not None
        if job.attempt < 3:
            raise LookupError(f"try {job.attempt}")
        return number

    async with working(app, name="one"):
        sent = await flaky.adelay(5)
        assert await sent.aget(timeout=30) == 5
        await until_found(app, 3, id=sent.id)
    known = await app.jobs.astory(sent.id)
    assert known is not None
    assert (known.state, known.value, known.is_from_history) == ("SUCCESS", 5, False)
    redis_client.delete(app.queue("till").result(sent.id))
    assert await app.afind(sent.id) is None
    story = await app.jobs.astory(sent.id)
    assert story is not None
    assert (story.state, story.task, story.attempt, story.is_from_history) == (
        "SUCCESS",
        "shop.flaky",
        3,
        True,
    )
    assert [(record.attempt, record.state, record.error) for record in story.attempts] == [
        (1, "RETRY", "LookupError: try 1"),
        (2, "RETRY", "LookupError: try 2"),
        (3, "SUCCESS", ""),
    ]
    *failed, succeeded = [record.kept for record in story.attempts]
    assert failed == ["failure", "failure"]
    assert succeeded in ("slow", "sample")  # which of them depends on when ended within the interval
    for attempt in story.attempts:
        assert attempt.worker.startswith("one:")
        assert attempt.sent <= attempt.ended
        assert attempt.waited is not None
        assert attempt.ran is not None
        assert attempt.arguments == {"number": 5}
    assert await app.jobs.astory("nobody") is None


async def test_a_job_that_no_worker_can_run_and_one_that_expires_are_in_the_history(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    stranger = App(app.name, broker=app.settings.broker)

    @stranger.task(name="shop.unknown", queue="till")
    async def unknown(number: int) -> None: ...

    lost = await unknown.adelay(1)
    expired = await app.tasks["shop.pay"].options(expires=0.01).adelay({})
    over = time.time() + 0.01
    await until(lambda: time.time() > over)
    async with working(app):
        await until_found(app, 1, state="EXPIRED")
        await until_found(app, 1, state="DEAD")
    await app.dlq.apurge()
    (job,) = await find(app, state="DEAD")
    assert (job.id, job.reason, job.error_type, job.ran) == (lost.id, "unknown-task", "UnknownTask", None)
    assert job.arguments == {"0": 1}
    assert [job.id for job in await find(app, state="EXPIRED")] == [expired.id]
    stranger.close()


async def test_a_foreign_job_is_shown_as_never_run_with_its_wait_for_other_code(app: App) -> None:
    app.configure(**{**FAST, "unknown_task_grace": 0.2})
    declare(app)
    stranger = App(app.name, broker=app.settings.broker)
    unknown = await stranger.task(name="shop.unknown", queue="till")(lambda _number: None).adelay(1)
    wrong = await stranger.task(name="shop.fail", queue="till")(lambda _a, _b: None).adelay(1, 2)
    async with working(app):
        await until_found(app, 2, state="DEAD")
    for job in (unknown, wrong):
        story = await app.jobs.astory(job.id)
        assert story is not None
        assert story.started == 0.0
        (attempt,) = story.attempts
        assert attempt.ran is None
        assert attempt.waited is not None
        assert 0.2 <= attempt.waited < 10
        (row,) = [line.split() for line in format_attempts(story.attempts)][1:]
        assert "never" in row
        (line,) = [line.text for line in tell_story(story, time.time()) if "without having run" in line.text]
        assert "for other code: " in line
    blank = JobRecord(id="a", queue="q", state="RETRY", attempt=1, error_type="E")
    (row,) = [line.split() for line in format_attempts([blank])][1:]
    assert row == ["1", "RETRY", "-", "-", "E"]
    stranger.close()


def test_a_killed_worker_takes_no_more_with_it_than_an_interval(staff: Staff) -> None:
    worker = staff.start(metrics_interval=0.2)
    jobs = staff.app.send_many([staff.app.tasks["fail"].options(max_retries=0).s() for _ in range(20)])
    wait_until(lambda: {job.id for job in jobs} == read_kept(staff))
    worker.signal(signal.SIGKILL)
    worker.wait()
    assert {job.id for job in jobs} == read_kept(staff)


def read_kept(staff: Staff) -> set[str]:
    """The ids of the failures in the history."""
    staff.app.dlq.purge()
    return {job.id for job in staff.app.jobs.search(state="DEAD").jobs}


async def test_what_has_ended_while_redis_was_unreachable_is_sent_afterwards(
    app_name: str, own_server: EmbeddedServer
) -> None:
    own_app = App(app_name, broker=own_server.url, lease=LEASE, **FAST)
    declare(own_app)
    end = trio.Event()

    @own_app.task(name="shop.last", queue="till", max_retries=0)
    async def last() -> None:
        await end.wait()
        raise ValueError("the last one")

    async def is_found() -> bool:
        try:
            return len(await find(own_app, task="shop.last", error="ValueError")) == 1
        except BrokerUnavailable:  # it is not back yet
            return False

    status = ProcessStatus(app=own_app.name)
    async with working(own_app, process_status=status):
        await last.adelay()
        await until_found(own_app, 1, state="EXECUTING")
        await trio.to_thread.run_sync(own_server.kill)
        end.set()
        await until(lambda: status.ended_jobs.has_pending)
        await trio.to_thread.run_sync(own_server.revive)
        await until_async(is_found)
    own_app.close()
