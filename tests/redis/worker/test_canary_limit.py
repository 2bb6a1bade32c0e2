"""Canary limit: a canary takes a limited number of jobs until its Controller has judged it."""

import pytest
import redis
import trio

from celery5 import App, RetryPolicy
from celery5.protocol.cluster import canary_limit
from celery5.protocol.cluster.canary_limit import CanaryBounds
from tests.redis.worker.workers import Lines, entries, until, working

ATTEMPTS, JOBS = 3, 40


@pytest.mark.parametrize("limit", [None, 100], ids=["unlimited", "admitted"])
async def test_canary_whose_jobs_all_fail_reads_no_more_than_its_attempts(
    app: App, redis_client: "redis.Redis", limit: int | None
) -> None:
    lines = Lines()

    @app.task(max_retries=0, limit=limit)
    async def fail() -> None:
        raise ValueError("always")

    await app.asend_many([fail.s() for _ in range(JOBS)])
    with lines:
        async with working(app, canary=CanaryBounds(ATTEMPTS, 600.0)):
            await until(lambda: bool(lines.of("canary:paused")))
            assert len(entries(redis_client, app.queue("default").dead)) == ATTEMPTS


async def test_canary_without_a_controller_reads_jobs_again_after_each_pause(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_limit, "VERDICT_PAUSE", 0.2)
    lines = Lines()

    @app.task(max_retries=0)
    async def fail() -> None:
        raise ValueError("always")

    await app.asend_many([fail.s() for _ in range(4 * ATTEMPTS)])
    with lines:
        async with working(app, canary=CanaryBounds(ATTEMPTS, 600.0)):
            await until(lambda: len(entries(redis_client, app.queue("default").dead)) == 4 * ATTEMPTS)
            await until(lambda: len(lines.of("canary:paused")) == 4)


async def test_canary_whose_jobs_succeed_is_never_paused(app: App) -> None:
    lines, ended = Lines(), list[int]()

    @app.task
    async def work(number: int) -> None:
        ended.append(number)

    await app.asend_many([work.s(number) for number in range(JOBS)])
    with lines:
        async with working(app, canary=CanaryBounds(ATTEMPTS, 600.0)):
            await until(lambda: len(ended) == JOBS)
    assert not lines.of("canary:paused")


@pytest.mark.parametrize(
    ("limit", "queues"), [(None, 1), (100, 1), (None, 3)], ids=["unlimited", "admitted", "several queues"]
)
async def test_canary_runs_no_more_jobs_at_once_than_it_has_attempts(
    app: App, limit: int | None, queues: int
) -> None:
    running = most = ended = 0

    async def work() -> None:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await trio.sleep(0.02)
        running -= 1
        ended += 1

    names = [f"queue-{number}" for number in range(queues)]
    tasks = [app.task(name=name, queue=name, limit=limit)(work) for name in names]
    await app.asend_many([task.s() for task in tasks for _ in range(JOBS)])
    async with working(app, queues=names, canary=CanaryBounds(ATTEMPTS, 600.0)):
        await until(lambda: ended == queues * JOBS)
    assert 1 < most < ATTEMPTS + queues  # the last free one may be taken by each queue at once


async def test_retries_of_a_canary_count_as_failed_attempts(app: App) -> None:
    lines, begun = Lines(), list[int]()

    @app.task(retry_policy=RetryPolicy(max_retries=9, backoff=600.0))
    async def fail(number: int) -> None:
        begun.append(number)
        raise ValueError("always")

    await app.asend_many([fail.s(number) for number in range(JOBS)])
    with lines:
        async with working(app, canary=CanaryBounds(ATTEMPTS, 600.0)):
            await until(lambda: bool(lines.of("canary:paused")))
            assert len(begun) == ATTEMPTS


async def test_canary_whose_jobs_run_on_takes_more_when_its_limit_ends(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_limit, "VERDICT_PAUSE", 0.2)
    begun, go_on = list[int](), trio.Event()

    @app.task
    async def work(number: int) -> None:
        begun.append(number)
        await go_on.wait()

    await app.asend_many([work.s(number) for number in range(3 * ATTEMPTS)])
    async with working(app, canary=CanaryBounds(ATTEMPTS, 0.2)):
        await until(lambda: len(begun) == 3 * ATTEMPTS)
        go_on.set()
