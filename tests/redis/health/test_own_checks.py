"""Own checks: the health checks that celery5 brings along, each of them in the trouble that it is for."""

import inspect
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, Misconfigured
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.health import BreakerPolicy, HealthCheck
from celery5.health.checks import (
    BrokerPing,
    Disk,
    EventLoopLag,
    HttpEndpoint,
    Memory,
    QueueLength,
    UnpublishedMessages,
)
from celery5.health.machine import available_memory, used_memory
from tests.redis.worker.workers import Lines, until, until_async, working


def only(app: App, check: HealthCheck) -> HealthCheck:
    """Have the application's workers look at it."""
    return app.health_check.add(check)


async def test_the_broker_is_unhealthy_while_it_does_not_answer(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    check = only(app, BrokerPing(limit=0.2, period=0.1))
    async with working(app):
        await until(lambda: check.state == "healthy")
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await until(lambda: check.state == "unhealthy")
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await until(lambda: check.state == "healthy")
    app.close()


async def test_the_broker_is_unhealthy_while_it_is_gone(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)
    check = only(app, BrokerPing(period=0.05))
    async with working(app):
        await until(lambda: check.state == "healthy")
        own_server.kill()
        await until(lambda: check.state == "unhealthy")
        own_server.revive()
        await until(lambda: check.state == "healthy", within=30)
    app.close()


async def test_the_broker_is_unhealthy_for_as_long_as_its_memory_is_full(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    check = only(app, BrokerPing(period=0.05))
    with redis.Redis.from_url(own_server.url) as client, Lines() as lines:
        async with working(app):
            await until(lambda: check.state == "healthy")
            client.config_set("maxmemory", 1)
            await until(lambda: check.state == "unhealthy")
            await until(lambda: bool(lines.of("broker:full")), within=60)
            assert check.state == "unhealthy"
            client.config_set("maxmemory", 0)
            await until(lambda: check.state == "healthy")
    changed = [line for line in lines.of("health:changed") if line["check"] == "broker"]
    assert [line["state"] for line in changed] == ["unhealthy", "healthy"]
    assert changed[0]["why"].startswith("memory is full, nothing more is stored: noeviction, ")
    app.close()


async def test_a_job_that_blocks_the_loop_shows_in_its_lag(app: App) -> None:
    check = only(app, EventLoopLag(limit=0.2, period=0.02))

    @app.task
    async def block() -> None:
        time.sleep(0.5)  # noqa: ASYNC251  that is what it must not do

    with Lines() as lines:
        async with working(app):
            await until(lambda: check.state == "healthy")
            await (await block.adelay()).aget(timeout=30)
            await until(lambda: bool(lines.of("health:changed")) and check.state == "healthy")
    changed = [line["state"] for line in lines.of("health:changed")]
    assert "unhealthy" in changed
    assert changed[-1] == "healthy"


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda: Memory(needed=2**20), "healthy"),
        (lambda: Memory(needed=2**60), "unhealthy"),
        (lambda: Memory(needed=0.9 * available_memory()), "degraded"),
        (lambda: Memory(needed=2**20, limit=2**20), "unhealthy"),
        (lambda: Memory(needed=2**20, limit=100 * used_memory()), "healthy"),
        (lambda: Disk(needed=2**10), "healthy"),
        (lambda: Disk(needed=2**60), "unhealthy"),
    ],
    ids=["memory", "too little memory", "hardly memory", "too much memory", "memory enough", "disk", "full"],
)
async def test_memory_and_disk(app: App, make: Callable[[], HealthCheck], state: str) -> None:
    check = make()  # here: how much memory is free may change until a test begins
    only(app, check)
    async with working(app):
        await until(lambda: check.state == state)


async def test_a_disk_that_is_not_there_is_an_error_of_the_check(app: App, tmp_path: Path) -> None:
    check = only(app, Disk(path=tmp_path / "gone"))
    with Lines() as lines:
        async with working(app):
            await until(lambda: bool(lines.of("health:check-failed")))
    assert check.state == "unknown"
    assert "FileNotFoundError" in lines.of("health:check-failed")[0]["why"]


async def test_a_queue_that_grows_too_long_is_degraded_then_unhealthy(app: App) -> None:
    check = only(app, QueueLength("slow", limit=10, period=0.05))

    @app.task
    async def other() -> None: ...

    @app.task(queue="slow")
    async def slow() -> None: ...

    async with working(app, queues=["default"]):
        await until(lambda: check.state == "healthy")
        await app.asend_many([slow.s() for _ in range(8)])
        await until(lambda: check.state == "degraded")
        await app.asend_many([slow.s() for _ in range(2)])
        await until(lambda: check.state == "unhealthy")
        async with working(app, queues=["slow"], name="b"):
            await until(lambda: check.state == "healthy")


async def test_messages_that_redis_has_not_got_are_degraded_then_unhealthy(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, backlog=100)
    check = only(app, UnpublishedMessages(app.backlog, limit=5, period=0.05))

    @app.task(queue="elsewhere")
    async def other() -> None: ...

    async with working(app, queues=["default"]):
        await until(lambda: check.state == "healthy")
        own_server.kill()
        await app.asend_many([other.s() for _ in range(4)])
        await until(lambda: check.state == "degraded")
        await other.adelay()
        await until(lambda: check.state == "unhealthy")
        own_server.revive()
        await until(lambda: check.state == "healthy", within=30)
    app.close()


async def test_jobs_that_a_worker_has_do_not_wait(app: App) -> None:
    check = only(app, QueueLength("default", limit=2, period=0.05))
    go = trio.Event()

    @app.task
    async def wait() -> None:
        await go.wait()

    async with working(app):
        sent = await app.asend_many([wait.s() for _ in range(5)])
        await until_async(lambda: all_run(sent))
        await trio.sleep(0.12)
        assert check.state == "healthy"
        go.set()


async def all_run(sent: Sequence[AsyncResult[Any]]) -> bool:
    return all([(await job.astatus()) == "EXECUTING" for job in sent])


async def test_a_task_that_needs_more_memory_than_there_is_is_held(app: App) -> None:
    huge = Memory("8-exabytes", needed=8 * 2**60, allowed={"unhealthy": 0})
    app.task(name="big", checks=[huge], breaker=BreakerPolicy(threshold=None, reset=5))(_big)
    async with working(app):
        await until(lambda: huge.state == "unhealthy")
        held = await app.tasks["big"].adelay()
        await until_async(lambda: has_state(held, "HELD"))
        await held.arevoke()


async def _big() -> None: ...


async def has_state(job: AsyncResult[Any], state: str) -> bool:
    return (await job.astatus()) == state


async def test_a_worker_looks_after_itself_unless_told_otherwise(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    from celery5.health.checks import get_all_checks

    app, bare = App(app_name, broker=url), App(app_name, broker=url, own_checks=False)
    assert set(get_all_checks(app)) == {"broker", "event-loop", "memory", "disk"}
    assert get_all_checks(bare) == {}
    mine = only(app, BrokerPing(limit=3))
    assert get_all_checks(app)["broker"] is mine
    for opened in (app, bare):
        opened.close()


@pytest.mark.parametrize("make", [BrokerPing, EventLoopLag])
def test_limits_without_sense_are_refused(make: type[BrokerPing] | type[EventLoopLag]) -> None:
    with pytest.raises(Misconfigured, match="limit is 0: give more than 0"):
        make(limit=0)


BUILT_IN: dict[str, Callable[..., HealthCheck]] = {
    "broker": BrokerPing,
    "loop": EventLoopLag,
    "memory": Memory,
    "disk": Disk,
    "queue": partial(QueueLength, "default", limit=5),
    "backlog": partial(UnpublishedMessages, App("unused").backlog, limit=5),
    "endpoint": partial(HttpEndpoint, "http://127.0.0.1:1/"),
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", "mine"),
        ("period", 7.0),
        ("timeout", 3.0),
        ("allowed", {"unhealthy": 1}),
        ("window", 70.0),
        ("scope", "global"),
        ("stale_after", 5),
    ],
)
def test_every_built_in_check_takes_what_any_health_check_takes(
    name: str, option: str, value: object
) -> None:
    assert getattr(BUILT_IN[name](**{option: value}), option) == value


def test_the_options_tried_are_all_that_a_health_check_has() -> None:
    options = {"name", "period", "timeout", "allowed", "window", "scope", "stale_after"}
    assert options == set(inspect.signature(HealthCheck).parameters) - {"function", "states", "loop"}


def test_the_states_of_an_endpoint_are_its_own() -> None:
    with pytest.raises(Misconfigured, match="an HttpEndpoint sets its states itself"):
        HttpEndpoint("http://127.0.0.1/", states=("bad", "good"))
