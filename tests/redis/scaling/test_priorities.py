"""Priorities: a job says how urgent it is, and keeps that wherever it goes."""

import json
from functools import partial
from typing import Any

import pytest
import redis

from celery5 import App, JobState, Misconfigured
from celery5.health import BreakerPolicy
from celery5.protocol.job.job import Job
from tests.redis.worker.workers import until, until_async, working


def places(app: App, client: "redis.Redis", queue: str = "default") -> list[str]:
    """Where the jobs of a queue are, but for the digits."""
    found: Any = client.hvals(app.queue(queue).jobs)
    return sorted(
        "".join(character for character in place.decode() if character.isalpha()) for place in found
    )


async def test_urgent_jobs_run_first_whatever_was_sent_before_them(app: App) -> None:
    ran: list[int] = []

    @app.task(priority="low")
    async def note(number: int) -> None:
        ran.append(number)

    signatures = [note.s(3), note.options(priority="normal").s(2), note.options(priority="high").s(1)]
    await app.asend_many([signature for _ in range(5) for signature in signatures])
    async with working(app, burst=True) as worker:
        await worker.done.wait()
    assert ran == [1] * 5 + [2] * 5 + [3] * 5


async def test_a_priority_outlives_retries_holding_and_the_wait_for_a_time(
    app: App, redis_client: "redis.Redis"
) -> None:
    seen: list[str] = []

    @app.task(priority="low", max_retries=1, backoff=0.02)
    async def fails() -> None:
        seen.extend(places(app, redis_client))
        if len(seen) == 1:
            raise ValueError("once")

    handle = await fails.options(countdown=0.05).adelay()
    assert places(app, redis_client) == ["Dl"]
    async with working(app):
        await handle.aget(timeout=30)
    assert seen == ["Sl", "Sl"]


async def test_a_held_job_keeps_its_priority(app: App, redis_client: "redis.Redis") -> None:
    broken = True
    breaker = BreakerPolicy(threshold=1, reset=0.3)

    @app.task(priority="high", max_retries=0, breaker=breaker)
    async def works() -> str:
        if broken:
            raise OSError("away")
        return places(app, redis_client)[0]

    async with working(app):
        with pytest.raises(Exception, match="away"):
            await (await works.adelay()).aget(timeout=30)
        broken = False
        held = await works.adelay()
        await until(lambda: places(app, redis_client) == ["Hh", "X"])
        assert await held.aget(timeout=30) == "Sh"


async def test_a_replayed_job_goes_to_the_lane_of_its_priority(app: App, redis_client: "redis.Redis") -> None:
    @app.task(priority="high", max_retries=0)
    async def fails() -> None:
        raise ValueError("no")

    @app.task(max_retries=0)
    async def usual() -> None:
        raise ValueError("no")

    sent = [await fails.adelay(), await usual.adelay()]
    async with working(app):
        for job in sent:
            await until_async(partial(_is, job, JobState.DEAD))
    assert (await app.dlq.areplay()).done == 2
    assert places(app, redis_client) == ["S", "Sh"]


async def test_one_live_job_for_a_key_holds_whatever_the_priorities_are(app: App) -> None:
    @app.task
    async def count() -> None: ...

    first = await count.options(key="k", priority="low").adelay()
    other = await count.options(key="k", priority="high").adelay()
    assert other.id == first.id


async def test_a_job_tells_its_priority_where_one_looks_at_it(app: App) -> None:
    @app.task
    async def count(number: int) -> None: ...

    await app.asend_many(
        [count.options(priority=priority).s(1) for priority in ("high", "normal", "low", "low")]
    )
    (state,) = (await app.ainfo()).queues.values()
    assert (state.waiting, state.high, state.low) == (4, 1, 2)
    job = await count.options(priority="low").adelay(1)
    story = await app.afind(job.id)
    assert story is not None
    assert story.priority == "low"


def test_what_is_no_priority_is_refused_where_it_is_said(app: App) -> None:
    @app.task
    async def count() -> None: ...

    wrong: Any
    for wrong in ("urgent", "", 1, ["high"]):
        with pytest.raises(Misconfigured, match="give high, normal or low"):
            count.options(priority=wrong)
    said: Any = {"priority": "highest"}
    with pytest.raises(Misconfigured, match="give high, normal or low"):
        app.task(**said)(count.function)
    assert count.options(priority="high").options(priority="normal").job().lane == ""


async def test_unknown_priority_of_a_raw_message_is_normal(app: App, redis_client: "redis.Redis") -> None:
    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    for job_id, priority in (("a", "highest"), ("b", 5)):
        message = {"v": 1, "id": job_id, "task": "double", "args": [4], "priority": priority}
        redis_client.xadd(app.queue("default").stream, {"job": json.dumps(message)})
    async with working(app):
        assert await app.result("a", task=double).aget(timeout=30) == 8
        dead = app.result("b", task=double)
        await until_async(lambda: _is(dead, JobState.DEAD))


async def _is(handle: Any, state: JobState) -> bool:
    return bool(await handle.astatus() is state)


def test_a_job_that_was_kept_keeps_its_priority_and_takes_no_other_lane() -> None:
    kept = Job("a", "t", "q", b"{}", lane="h")
    assert Job.from_bytes(kept.to_bytes()) == kept
    with pytest.raises(Exception, match="not a job"):
        Job.from_bytes(kept.to_bytes().replace(b'"lane":"h"', b'"lane":"g"'))
