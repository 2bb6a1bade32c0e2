"""Idle workers, one of many: they send Redis little, begin a job at once, and one that is dead keeps none for long."""

import time
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.keys import GROUP
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.tasks import Task
from tests.redis.worker.workers import until, working

LEASE = 0.3
WORKERS = 60
"""So the interval between two heartbeats of an idle worker is two leases."""


def make_app(name: str, server: EmbeddedServer) -> tuple[App, Task[Any, int]]:
    app = App(name, broker=server.url, lease=LEASE, metrics_interval=0)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    return app, add


@pytest.mark.plants
async def test_an_idle_worker_of_many_sends_little_and_begins_a_job_at_once(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app, add = make_app(app_name, own_server)
    keys = app.queue("default")
    with redis.Redis.from_url(own_server.url) as client:
        client.zadd(keys.leases, {f"other-{n}": time.time() * 1000 + 60_000 for n in range(WORKERS)})
        async with working(app):
            await until(lambda: client.zcard(keys.idle_leases) == 1)
            (name,) = client.zrange(keys.idle_leases, 0, -1)
            assert (client.zscore(keys.leases, name) or 0) / 1000 > time.time() + 2 * LEASE
            result = await add.adelay(1, 2)
            assert await result.aget(timeout=5) == 3
            assert client.zscore(keys.idle_leases, name) is None
            assert (client.zscore(keys.leases, name) or 0) / 1000 <= time.time() + LEASE


@pytest.mark.plants
async def test_a_job_that_a_dead_idle_worker_was_given_runs_elsewhere_as_soon_as_ever(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app, add = make_app(app_name, own_server)
    keys = app.queue("default")
    with redis.Redis.from_url(own_server.url) as client:
        # Its host was lost while it waited for a job; Redis does not know, and gives it one.
        client.xgroup_create(keys.stream, GROUP, id="0", mkstream=True)
        end = time.time() * 1000 + 60_000
        client.zadd(keys.leases, {"dead": end})
        client.zadd(keys.idle_leases, {"dead": end})
        result = await add.adelay(1, 2)
        client.xreadgroup(GROUP, "dead", {keys.stream: ">"}, count=1)
        async with working(app):
            assert await result.aget(timeout=10) == 3
