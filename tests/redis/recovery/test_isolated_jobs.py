"""Suspects: jobs that have taken workers down run one at a time, and those that wait are given back uncounted."""

import pytest
import redis
import trio

from celery5 import App
from tests.redis.worker.workers import entries, held, until, working

DEATHS = (2, 3, 2, 1)


@pytest.mark.parametrize("stale", [True, False], ids=["after a while", "when the worker stops"])
async def test_a_suspect_that_waits_for_another_is_given_back(
    app: App, redis_client: "redis.Redis", stale: bool
) -> None:
    app.configure(grace_period=0.1)
    running: list[int] = []
    go_on = trio.Event()

    @app.task
    async def suspicious(number: int) -> int:
        running.append(number)
        await go_on.wait()
        return number

    stream = app.queue("default").stream
    jobs = [suspicious.job(number) for number in range(4)]
    for job, deaths in zip(jobs, DEATHS, strict=True):
        redis_client.xadd(stream, {"job": job.message, "deliveries": deaths})
    async with working(app) as worker:
        await until(lambda: len(running) == 2)
        assert running == [0, 3]  # one suspect, and one that is none yet
        assert list(held(redis_client, app).values()) == [4]
        if stale:
            behind = [jobs[number].message for number in (0, 3, 1, 2)]
            await until(lambda: [each[b"job"] for each in entries(redis_client, stream)] == behind)
            go_on.set()
            await until(lambda: entries(redis_client, stream) == [])
            assert sorted(running) == [0, 1, 2, 3]
        await worker.stop()
    if not stale:
        left = {each[b"job"]: int(each[b"deliveries"]) for each in entries(redis_client, stream)}
        assert left == {job.message: deaths for job, deaths in zip(jobs, DEATHS, strict=True)}
        assert sorted(running) == [0, 3]
