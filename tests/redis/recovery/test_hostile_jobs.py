"""Hostile jobs: whatever one job does to its worker, it is that job's affair; the others run, and the worker lives."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import trio
import trio.testing

from celery5 import App, RetryPolicy, TaskFailed, current_job
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerUnavailable
from celery5.services.job.outcome_handler import OutcomeHandler
from celery5.services.worker import task_execution
from celery5.testing import recorded
from tests.redis.worker.workers import Lines, held, of_kind, until, working


@dataclass
class Order:
    """An argument whose own code refuses odd numbers, in a worker only."""

    number: int

    def __post_init__(self) -> None:
        if self.number % 2 and threading.current_thread().name == "a worker":
            errors: dict[int, BaseException] = {
                1: KeyError("no such order"),
                3: SystemExit(3),
                5: KeyboardInterrupt(),
            }
            raise errors[self.number]


async def test_an_argument_whose_own_code_raises_anything_at_all_is_refused(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def ship(order: Order) -> int:
        return order.number

    bad = [await ship.adelay(Order(number)) for number in (1, 3, 5)]
    monkeypatch.setattr(threading.current_thread(), "name", "a worker")
    async with working(app) as one:
        for sent, name in zip(bad, ("KeyError", "SystemExit", "KeyboardInterrupt"), strict=True):
            with pytest.raises(TaskFailed, match="bad-arguments") as caught:
                await sent.aget(timeout=30)
            assert caught.value.type == name
            assert "__post_init__" in caught.value.traceback
        assert await (await ship.adelay(Order(4))).aget(timeout=30) == 4
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
        assert await (await compute.adelay(4)).aget(timeout=30) == 8
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

    monkeypatch.setattr(OutcomeHandler, "decide", broken)
    began = time.monotonic()
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with working(app):
            await wait.adelay()
            await started.wait()
            await nothing.adelay()
            await trio.sleep_forever()
    assert time.monotonic() - began < 30
    app.close()


class Sender:
    """A task that waits until it may go, then sends a job of another one; and what became of that."""

    def __init__(self, app: App, kind: str) -> None:
        self.running, self.go = threading.Event(), threading.Event()
        self.raised: list[str] = []
        self.attempts: list[int] = []

        @app.task
        async def other() -> None:
            pass

        async def on_trio() -> int:
            self._begin()
            while not self.go.is_set():
                await trio.sleep(0.01)
            with self._noting():
                await other.adelay()
            return len(self.attempts)

        def in_thread() -> int:
            self._begin()
            self.go.wait(30)
            with self._noting():
                other.delay()
            return len(self.attempts)

        async def on_asyncio() -> int:
            self._begin()
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            with self._noting():
                await other.adelay()
            return len(self.attempts)

        bodies: dict[str, Any] = {"trio": on_trio, "asyncio": on_asyncio, "thread": in_thread}
        loop: Any = "asyncio" if kind == "asyncio" else "trio"
        self.task: Any = app.task(loop=loop)(bodies[kind])

    def _begin(self) -> None:
        job = current_job()
        assert job is not None
        self.attempts.append(job.attempt)
        self.running.set()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BrokerUnavailable as error:
            self.raised.append(type(error).__name__)
            raise


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_job_that_cannot_send_another_while_redis_is_away_loses_no_attempt(
    own_server: EmbeddedServer, app_name: str, kind: str
) -> None:
    app = App(
        app_name, broker=own_server.url, lease=1.0, cpu_slots=2, retry_policy=RetryPolicy(max_retries=0)
    )
    sender = Sender(app, kind)
    with Lines() as lines:
        async with working(app):
            sent = await sender.task.adelay()
            await until(sender.running.is_set)
            await trio.sleep(1.1)  # what the server was told is on its disk now
            own_server.kill()
            sender.go.set()
            await until(lambda: len(lines.of("job")) > 0, within=30)
            await trio.to_thread.run_sync(own_server.revive)
            assert await sent.aget(timeout=30) > 1
        (first, *_more) = [line for line in lines.of("job") if line["job"] == sent.id]
    assert set(sender.attempts) == {1}
    assert first["state"] == "RETRY"
    assert first["error"].startswith(sender.raised[0])
    app.close()


async def test_a_job_that_cannot_reach_another_broker_has_failed(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_execution, "STABLE_CONNECTION", 0.0)
    elsewhere = App("elsewhere", broker="unix:///nonexistent/nobody.sock")

    @elsewhere.task
    def far() -> None:
        pass

    @app.task(max_retries=1)
    def near() -> None:
        far.delay()

    async with working(app):
        with pytest.raises(TaskFailed, match="exhausted") as caught:
            await (await near.adelay()).aget(timeout=30)
    assert caught.value.attempt == 2
    elsewhere.close()


CHANGES: dict[str, Callable[[Any], object]] = {
    "clear": lambda app: app.tasks.clear(),
    "delete": lambda app: app.tasks.pop("other"),
    "replace": lambda app: app.tasks.update(dict.fromkeys(app.tasks)),
    "configure": lambda app: app.configure(broker="unix:///nonexistent/nobody.sock"),
    "broker": lambda app: app.use_broker("unix:///nonexistent/nobody.sock"),
    "configuration": lambda app: app.use_config("nowhere.toml"),
    "record": lambda app: recorded(app).__enter__(),
    "close": lambda app: app.close(),
}
"""What a job may try with its own application."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_job_cannot_change_its_application_for_the_jobs_after_it(
    app: App, kind: str, change: str
) -> None:
    task = of_kind(app, kind, lambda: CHANGES[change](app) and None)

    @app.task(name="other")
    def other() -> int:
        return 1

    @app.task(name="sends")
    def sends() -> int:
        return other.delay().get(timeout=30)

    async with working(app) as one:
        sent = await task.options(max_retries=0).adelay()
        if change == "close":
            await sent.aget(timeout=30)
        else:
            with pytest.raises(TaskFailed, match=r"read-only|for all jobs of its worker"):
                await sent.aget(timeout=30)
        assert await (await sends.adelay()).aget(timeout=30) == 1
        assert not one.ended.is_set()


async def test_a_job_may_change_another_application(app: App) -> None:
    elsewhere = App("elsewhere", broker="unix:///nonexistent/nobody.sock")

    @app.task
    def configure() -> int:
        elsewhere.configure(concurrency=7)
        return elsewhere.settings.concurrency

    async with working(app):
        assert await (await configure.adelay()).aget(timeout=30) == 7


@contextmanager
def set_at_last(event: trio.Event) -> Iterator[None]:
    """Let the job go, however the test ends."""
    try:
        yield
    finally:
        event.set()


async def test_job_that_ignores_cancellation_is_left_to_other_workers(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_execution, "CANCEL_TIMEOUT", 0.1)
    app = App(app_name, broker=url, lease=1.0, grace_period=0.1)
    running, go = trio.Event(), trio.Event()

    @app.task
    async def deaf() -> int:
        running.set()
        with trio.CancelScope(shield=True):
            await go.wait()
        return 1

    with Lines() as lines, set_at_last(go):
        began = time.monotonic()
        async with working(app):
            sent = await deaf.adelay()
            await running.wait()
        assert time.monotonic() - began < 30
        await until(lambda: len(lines.of("job:stuck")) == 1)
        (stuck,) = lines.of("job:stuck")
        assert stuck["jobs"] == [sent.id]
        go.set()
        await trio.testing.wait_all_tasks_blocked()
        async with working(app):
            assert await sent.aget(timeout=30) == 1
    assert [line["state"] for line in lines.of("job")] == ["SUCCESS"]  # of the second run alone
    assert held(redis_client, app) == {}
    app.close()
