"""Suspects: jobs that have taken workers down run one at a time, and those that wait are given back uncounted."""

from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.protocol.job.messages import read_job_id
from celery5.streams import StreamEvents
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
            behind = [jobs[number].id for number in (0, 3, 1, 2)]
            await until(
                lambda: [read_job_id(fields[b"job"]) for fields in entries(redis_client, stream)] == behind
            )
            go_on.set()
            await until(lambda: entries(redis_client, stream) == [])
            assert sorted(running) == [0, 1, 2, 3]
        await worker.stop()
    if not stale:
        left = {
            read_job_id(entry[b"job"]): int(entry[b"deliveries"]) for entry in entries(redis_client, stream)
        }
        assert left == {job.id: deaths for job, deaths in zip(jobs, DEATHS, strict=True)}
        assert sorted(running) == [0, 3]


async def test_a_suspect_does_not_run_while_a_record_is_on_trial_for_the_deaths_of_workers(
    app: App, redis_client: "redis.Redis"
) -> None:
    """Else a job that kills its workers would dead-letter the record that each of them was at."""
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=None, partitions=1)
    seen: list[str] = []

    async def note(what: str) -> None:
        seen.append(f"{what} begins")
        await trio.sleep(0.5)
        seen.append(f"{what} ends")

    @app.processor(readings, name="read")
    async def read(events: StreamEvents[Any]) -> None:
        async for _ in events.records():
            await note("record")

    @app.task
    async def suspicious() -> None:
        await note("job")

    await readings.asend({"n": 0})
    async with working(app):
        await until(lambda: len(seen) == 2)
    seen.clear()
    await readings.asend({"n": 1})
    redis_client.hset(f"{readings.keys.partition_prefix}read:0", "deaths", 2)
    redis_client.xadd(app.queue("default").stream, {"job": suspicious.job().message, "deliveries": 2})
    async with working(app):
        await until(lambda: len(seen) == 4)
    assert seen[0].removesuffix("begins") == seen[1].removesuffix("ends")
    assert len(set(seen)) == 4
