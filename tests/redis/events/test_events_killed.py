"""Events, killed: whatever happens to Routers, each subscriber has exactly one job for each event (I7).

Routers are real processes, and they die by SIGKILL: at each point of their work, or at any time.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.broker.keys import EVENTS
from celery5.events.event import Event
from tests.forking import Process, start_process
from tests.redis.process.router_process import POINTS
from tests.redis.worker.workers import start, until


def begun(app: App, url: str, *where: object) -> Process:
    """A Router that is up."""
    words = [sys.executable, "-m", "tests.redis.process.router_process", app.name, url, *map(str, where)]
    process = start_process(
        words, cwd=Path.cwd(), env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) != b"up\n":
        assert line, "it came up"
    return process


@contextmanager
def ended(routers: list[Process]) -> Generator[None, None, None]:
    """All of them are gone in the end."""
    try:
        yield
    finally:
        for router in routers:
            router.kill()
            router.wait()
            assert router.stdout is not None
            router.stdout.close()


def left(client: Any, app: App) -> int:
    """Events that no Router has ended."""
    count: int = client.xlen(app.queue(EVENTS).stream)
    return count


def forget(client: Any, app: App) -> None:
    """Killed Routers leave their leases, which live ones would have seen to."""
    client.delete(app.queue(EVENTS).leases, app.queue(EVENTS).stream)


def declared(app_name: str, url: str) -> tuple[App, Any, Counter[tuple[str, int]]]:
    """An application with an event that has three subscribers on two queues, and what they had. Its worker has a long
    lease: only Routers are to be taken for dead."""
    app, had = App(app_name, broker=url), Counter[tuple[str, int]]()

    @app.event(name="Placed")
    class Placed(Event):
        order: int

    @Placed.subscribe
    @app.task
    async def one(order: int) -> None:
        had["one", order] += 1

    @Placed.subscribe(queue="other")
    @app.task
    async def two(order: int) -> None:
        had["two", order] += 1

    @Placed.subscribe(ignore_result=True)
    @app.task
    async def three(order: int) -> None:
        had["three", order] += 1

    return app, Placed, had


@pytest.mark.parametrize("point", POINTS)
async def test_a_router_that_is_killed_at_any_point_loses_and_doubles_nothing(
    url: str, app_name: str, redis_client: Any, point: str
) -> None:
    app, placed, had = declared(app_name, url)
    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routers = [begun(app, url, point, 2)]
        with ended(routers):
            await app.events.asend([placed(order=n) for n in range(300)])
            await until(lambda: routers[0].poll() is not None, within=60)
            assert routers[0].returncode == -signal.SIGKILL
            routers.append(begun(app, url))
            await until(lambda: left(redis_client, app) == 0, within=60)
            await until(lambda: len(had) == 900, within=60)
        await working.stop()
    assert set(had.values()) == {1}
    forget(redis_client, app)


async def test_three_routers_of_which_one_after_another_is_killed_lose_and_double_nothing(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, placed, had = declared(app_name, url)
    chance = random.Random(5)
    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routers = [begun(app, url) for _ in range(3)]
        with ended(routers):
            for portion in range(6):
                await app.events.asend([placed(order=portion * 500 + n) for n in range(500)])
                await trio.sleep(chance.random() * 0.1)
                victim = routers[-1 - chance.randrange(3)]
                victim.send_signal(signal.SIGKILL)
                routers.append(begun(app, url))
            await until(lambda: left(redis_client, app) == 0, within=60)
            await until(lambda: len(had) == 9000, within=60)
        await working.stop()
    assert set(had.values()) == {1}
    forget(redis_client, app)


async def test_late_redelivery_of_an_event_doubles_no_job(url: str, app_name: str, redis_client: Any) -> None:
    app, placed, had = declared(app_name, url)
    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routers = [begun(app, url, "published", 1)]
        with ended(routers):
            await placed.adelay(order=1)
            await until(lambda: len(had) == 3 and routers[0].poll() is not None, within=60)
            results = [
                key for name in ("default", "other") for key in redis_client.keys(app.queue(name).result("*"))
            ]
            redis_client.delete(*results)  # as if their time were over
            routers.append(begun(app, url))
            await until(lambda: left(redis_client, app) == 0, within=60)
            windows = [
                key
                for name in ("default", "other")
                for key in redis_client.keys(app.queue(name).unique_window("*"))
            ]
            assert len(windows) == 3
            # They are forgotten sooner now.
            await until(lambda: all(redis_client.pttl(key) <= 600_000 for key in windows))
        await working.stop()
    assert set(had.values()) == {1}
    forget(redis_client, app)


async def test_a_router_that_is_frozen_beyond_its_lease_wakes_and_doubles_nothing(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, placed, had = declared(app_name, url)
    async with trio.open_nursery() as nursery:
        working = await start(nursery, app)
        routers = [begun(app, url)]
        with ended(routers):
            await app.events.asend([placed(order=n) for n in range(2000)])
            await until(lambda: len(had) > 300, within=60)
            routers[0].send_signal(signal.SIGSTOP)
            routers.append(begun(app, url))
            await until(lambda: left(redis_client, app) == 0, within=60)
            routers[0].send_signal(signal.SIGCONT)
            await app.events.asend([placed(order=n) for n in range(2000, 2100)])
            await until(lambda: left(redis_client, app) == 0, within=60)
            await until(lambda: len(had) == 6300, within=60)
        await working.stop()
    assert set(had.values()) == {1}
    forget(redis_client, app)
