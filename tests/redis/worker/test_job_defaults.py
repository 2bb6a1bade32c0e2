"""What happens to jobs when nothing is said: each default is one that somebody's code relies on."""

import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import trio

from celery5 import App, TaskFailed
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.worker.workers import until, working


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application without any setting."""
    one = App(app_name, broker=url)
    yield one
    one.close()


async def test_a_job_is_tried_four_times_after_waits_that_double_and_are_drawn(app: App) -> None:
    attempts = defaultdict[int, list[float]](list)

    @app.task
    async def fails(number: int) -> None:
        attempts[number].append(time.monotonic())
        raise ValueError("it fails")

    async with working(app):
        handles = await app.asend_many([fails.s(number) for number in range(40)])
        for handle in handles:
            with pytest.raises(TaskFailed):
                await handle.aget(timeout=60)
    waits = [[b - a for a, b in pairwise(times)] for times in attempts.values()]
    assert {len(wait) for wait in waits} == {3}
    # Drawn from 0 to 1, 2 and 4 s, and late at most: forty draws do not all lie in one end.
    first, second, third = (sorted(times) for times in zip(*waits, strict=True))
    assert first[-1] - first[0] > 0.3
    assert second[-1] > 1.0
    assert third[-1] > 2.0


async def test_what_is_sent_while_redis_is_away_is_kept(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task
    async def number(n: int) -> int:
        return n

    await (await number.adelay(0)).astatus()
    await trio.to_thread.run_sync(own_server.kill)
    handles = [await number.adelay(n) for n in range(3)]
    await trio.to_thread.run_sync(own_server.revive)
    async with working(app):
        assert [await handle.aget(timeout=60) for handle in handles] == [0, 1, 2]
    app.close()


async def test_a_job_that_runs_for_seconds_ends_when_its_worker_stops(app: App) -> None:
    began, ended = trio.Event(), list[int]()

    @app.task
    async def long() -> None:
        began.set()
        await trio.sleep(3)
        ended.append(1)

    async with working(app):
        await long.adelay()
        with trio.fail_after(30):
            await began.wait()
    assert ended == [1]


async def test_a_task_without_a_breaker_is_never_held(app: App) -> None:
    runs = list[int]()

    @app.task(max_retries=0)
    async def fails() -> None:
        runs.append(1)
        raise ValueError("it fails")

    async with working(app):
        handles: list[Any] = await app.asend_many([fails.s() for _ in range(10)])
        await until(lambda: len(runs) == 10)
        for handle in handles:
            with pytest.raises(TaskFailed):
                await handle.aget(timeout=30)
