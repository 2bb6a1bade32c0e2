"""Leaks: the check that watches over all tests finds every kind of key that nobody owns, and no other."""

import ast
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.keys import GROUP, QueueKeys
from tests.leaks import forget, leaks
from tests.redis.worker.workers import working

TESTS = Path(__file__).parents[2]
Plant = Callable[[Any, QueueKeys], Any]

PLANTED: dict[str, Plant] = {
    "a key that nobody made": lambda c, k: c.set(k.result_prefix.replace("result:", "other"), 1),
    "a result that never expires": lambda c, k: c.set(k.result("a"), "{}"),
    "a window that never closes": lambda c, k: c.set(k.unique_window("t k"), "a"),
    "a mark for ever": lambda c, k: c.set(k.replication_mark, ""),
    "a job that is not on the stream": lambda c, k: c.hset(k.jobs, "a", "S1-1"),
    "a revoked job that is not on the stream": lambda c, k: c.hset(k.jobs, "a", "V1-1"),
    "a scheduled job that is never due": lambda c, k: c.hset(k.jobs, "a", "D"),
    "a retry that is never due": lambda c, k: c.hset(k.jobs, "a", "R"),
    "a dead job without a grave": lambda c, k: c.hset(k.jobs, "a", "X1-1"),
    "a place that means nothing": lambda c, k: c.hset(k.jobs, "a", "?"),
    "a due job without a Command": lambda c, k: (c.zadd(k.due, {"a": 1}), c.hset(k.jobs, "a", "D")),
    "a Command that is never due": lambda c, k: c.hset(k.waiting, "a", "{}"),
    "a due job without a place": lambda c, k: (c.zadd(k.due, {"a": 1}), c.hset(k.waiting, "a", "{}")),
    "a second entry of one job": lambda c, k: [
        c.hset(k.jobs, "a", b"S" + c.xadd(k.stream, {"job": '{"id": "a"}'})) for _ in range(2)
    ],
    "a key held by a job that has ended": lambda c, k: c.hset(k.unique, "t k", "a"),
    "a key held by a dead job": lambda c, k: (
        c.hset(k.unique, "t k", "a"),
        c.hset(k.jobs, "a", b"X" + c.xadd(k.dead, {"job": '{"id": "a"}'})),
    ),
    "a lease without end": lambda c, k: c.zadd(k.leases, {"w": (time.time() + 3600) * 1000}),
    "a recovery that is over": lambda c, k: c.zadd(k.leases, {"w": -1}),
}


@pytest.mark.one_server("the check for leaks looks at one server")
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_leak_is_found(redis_client: "redis.Redis", app_name: str, planted: str) -> None:
    PLANTED[planted](redis_client, App(app_name).queue("default"))
    found = leaks(redis_client)
    forget(redis_client)
    assert found
    assert all(app_name in leak for leak in found)
    assert leaks(redis_client) == []


@pytest.mark.one_server("the check for leaks looks at one server")
def test_a_consumer_without_a_worker_is_the_next_workers_to_remove(
    redis_client: "redis.Redis", app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = app.queue("default")
    redis_client.xgroup_create(keys.stream, GROUP, "0", mkstream=True)
    redis_client.xgroup_createconsumer(keys.stream, GROUP, "w")
    monkeypatch.setattr("tests.leaks._visit", lambda _server, _queue: None)
    assert [leak for leak in leaks(redis_client) if "consumer" in leak]
    monkeypatch.undo()
    assert leaks(redis_client) == []
    assert redis_client.xinfo_consumers(keys.stream, GROUP) == []


@pytest.mark.one_server("the check for leaks looks at one server")
async def test_what_lives_is_no_leak(redis_client: "redis.Redis", app: App) -> None:
    @app.task(name="nothing")
    async def nothing() -> None:
        pass

    @app.task(name="fail", max_retries=0)
    async def fail() -> None:
        raise ValueError

    await nothing.options(countdown=60).adelay()
    await nothing.options(queue="elsewhere").adelay()
    async with working(app, queues=("default",)):
        await (await nothing.adelay()).aget(timeout=30)
        with pytest.raises(Exception, match="fail"):
            await (await fail.adelay()).aget(timeout=30)
        assert leaks(redis_client) == []
    assert leaks(redis_client) == []


def test_a_test_that_leaks_fails_and_so_do_several_that_leak_into_what_they_share() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/redis/recovery/leaking.py",
    ]
    run = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "2 passed, 2 errors" in run.stdout
    for key in ("celery5:{leaking:a}:other", "celery5:{leaking:mail}:other"):
        assert f"{key}: nobody's, and it never expires" in run.stdout


def test_every_fixture_that_several_tests_share_on_the_server_is_watched() -> None:
    shared = [
        (path.name, ast.unparse(node))
        for path in TESTS.rglob("test_*.py")
        if "scope=" in (source := path.read_text())
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any("scope=" in ast.unparse(decorator) for decorator in node.decorator_list)
        and {"server", "url"} & {arg.arg for arg in node.args.args}
    ]
    assert len(shared) >= 2
    assert [name for name, text in shared if "with watched(server)" not in text] == []


def test_looking_costs_little(redis_client: "redis.Redis", app: App) -> None:
    @app.task
    async def nothing() -> None:
        pass

    app.send_many([nothing.s() for _ in range(10)])
    laps = []
    for _ in range(20):
        began = time.perf_counter()
        leaks(redis_client)
        laps.append(time.perf_counter() - began)
    assert min(laps) < 0.005
