"""Hostile jobs: whatever one job does to its worker, it is that job's affair; the others run, and the worker lives.

Floor: tests. Reads and writes: the keys of the test's application.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import trio

from celery5 import App, TaskFailed
from celery5.services import task_execution
from tests.redis.workers import held, working


@dataclass
class Order:
    """An argument whose own code refuses odd numbers, in a worker only."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2 and threading.current_thread().name == "a worker":
            errors: dict[int, BaseException] = {1: KeyError("no such order"), 3: SystemExit(3)}
            raise errors[self.number]


async def test_an_argument_whose_own_code_raises_anything_at_all_is_refused(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def ship(order: Order) -> int:
        return order.number

    bad = [await ship.adelay(Order(1)), await ship.adelay(Order(3))]
    monkeypatch.setattr(threading.current_thread(), "name", "a worker")
    async with working(app) as one:
        for sent, name in zip(bad, ("KeyError", "SystemExit"), strict=True):
            with pytest.raises(TaskFailed, match="bad-arguments") as caught:
                await sent.aget(timeout=5)
            assert caught.value.type == name
            assert "__post_init__" in caught.value.traceback
        assert await (await ship.adelay(Order(4))).aget(timeout=5) == 4
        assert not one.ended.is_set()
    assert held(redis_client, app) == {}


async def test_a_job_that_no_thread_can_be_started_for_is_tried_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []

    @app.task
    def compute(n: int) -> int:
        return 2 * n

    real = trio.to_thread.run_sync

    async def run_sync(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("limiter") is not None and not failed:  # one of a worker's own
            failed.append("as the system says it")
            raise RuntimeError("can't start new thread")
        return await real(*args, **kwargs)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    async with working(app) as one:
        assert await (await compute.adelay(4)).aget(timeout=5) == 8
        assert failed
        assert not one.ended.is_set()


async def test_executors_that_break_down_are_not_waited_for(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(app_name, broker=url, lease=1.0, grace_period=30)
    started = trio.Event()

    @app.task
    async def wait() -> None:
        started.set()
        await trio.sleep_forever()

    @app.task
    async def nothing() -> None:
        pass

    def broken(*_args: object, **_more: object) -> None:
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(task_execution, "judge", broken)
    began = time.monotonic()
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with working(app):
            await wait.adelay()
            await started.wait()
            await nothing.adelay()
            await trio.sleep_forever()
    assert time.monotonic() - began < 5
    app.close()
