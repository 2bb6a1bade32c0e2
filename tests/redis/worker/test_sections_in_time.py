"""Sections and time: a job whose time is up in a section, and one that is interrupted in it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App, TaskFailed, poisonous, retry
from tests.redis.worker.workers import entries, working

KINDS = ["trio", "asyncio", "thread"]


def quick(retries: int, **more: Any) -> Any:
    """A section that is tried again at once."""
    return retry(max_retries=retries, backoff=0, **more)


def resting(app: App, kind: str, section: Any, runs: list[int], **options: Any) -> Any:
    """A task that rests in a section for longer than its limit."""

    def rest() -> None:
        runs.append(1)
        with section():
            for _ in range(5000):
                time.sleep(0.001)

    async def arest() -> None:
        runs.append(1)
        with section():
            await (asyncio if kind == "asyncio" else trio).sleep(5)

    task: Any = app.task
    if kind == "thread":
        return task(name="rest", **options)(rest)
    return task(name="rest", loop="asyncio" if kind == "asyncio" else "trio", **options)(arest)


@pytest.mark.parametrize("limit", ["time_limit", "soft_time_limit"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_section_has_its_say_when_the_time_of_its_job_is_up_in_it(
    app: App, redis_client: "redis.Redis", kind: str, limit: str
) -> None:
    runs: list[int] = []
    names: Iterator[Any] = iter([poisonous, lambda: quick(1, name="it")])
    section = next(names)
    task = resting(app, kind, lambda: section(), runs, max_retries=9, **{limit: 0.05})
    name = "TimeLimitExceeded" if limit == "time_limit" else "SoftTimeLimitExceeded"
    async with working(app):
        for reason, count in (("poisonous", 1), ("exhausted", 2)):
            with pytest.raises(TaskFailed) as caught:
                await (await task.adelay()).aget(timeout=30)
            assert (caught.value.reason, caught.value.type, len(runs)) == (reason, name, count)
            runs.clear()
            section = next(names, section)
    kept = json.loads(entries(redis_client, app.queue("default").dead)[-1][b"job"])
    assert [(failure.get("attempt", 1), failure["type"]) for failure in kept["failures"]] == [
        (1, name),
        (2, name),
    ]
    assert kept["sections"] == {"it": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_poisonous_section_makes_of_a_time_limit_is_not_tried_again(app: App, kind: str) -> None:
    """Even when its own error hides the limit."""
    runs: list[int] = []

    @contextmanager
    def hiding() -> Iterator[None]:
        with poisonous():
            try:
                yield
            except BaseException as error:
                raise ValueError("half done") from error

    task = resting(app, kind, hiding, runs, max_retries=9, time_limit=0.05)
    async with working(app):
        with pytest.raises(TaskFailed) as caught:
            await (await task.adelay()).aget(timeout=30)
    assert (caught.value.reason, caught.value.type, len(runs)) == ("poisonous", "ValueError", 1)


async def test_a_cancellation_that_is_no_time_limit_says_nothing_of_its_section(app: App) -> None:
    """A worker that stops gives the job back, which so runs again."""
    runs: list[int] = []

    @app.task(max_retries=0)
    async def interrupted() -> str:
        runs.append(1)
        if len(runs) == 1:
            with quick(0), poisonous():
                await trio.sleep_forever()
        return "done"

    app.configure(grace_period=0.0)
    async with working(app):
        sent = await interrupted.adelay()
        with trio.fail_after(30):
            while not runs:
                await trio.sleep(0.005)
    async with working(app):
        assert await sent.aget(timeout=30) == "done"
