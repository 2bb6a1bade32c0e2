"""Canary limit: a canary takes a limited number of jobs until its Controller has judged it."""

import pytest
import redis

from celery5 import App
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
