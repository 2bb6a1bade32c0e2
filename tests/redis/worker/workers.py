"""Workers: a worker in the test's own Trio run, and what can be seen of it in Redis."""

import io
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import redis
import trio

from celery5 import App
from celery5.broker.keys import GROUP
from celery5.logs.log import Log, LogWriter
from celery5.processes.foreground import WORKER
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.worker import WorkerOptions
from tests.pace import Pace

LEASE = 3.0
"""Seconds. Short, so that a dead worker is noticed soon."""


@dataclass(frozen=True)
class Working:
    """A worker that runs: how to stop it, and the event that a burst sets."""

    scope: trio.CancelScope
    done: trio.Event
    ended: trio.Event

    async def stop(self) -> None:
        """Stop it in order, and wait until it has."""
        self.scope.cancel()
        with trio.fail_after(30):
            await self.ended.wait()


async def start(nursery: trio.Nursery, app: App, *, page: ProcessKind = WORKER, **options: Any) -> Working:
    """Start a worker, or what `page` says, in `nursery`; gives it when it consumes."""
    log = Log(worker=options.get("name", "tested"), app=app.name)
    done, ended = trio.Event(), trio.Event()

    async def live(*, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        try:
            with trio.CancelScope() as scope:
                told = WorkerOptions(**options)
                async with trio.open_nursery() as inner:
                    await inner.start(partial(page.run, app, told, log=log, done=done))
                    task_status.started(scope)
        finally:
            log.finish()
            ended.set()

    with trio.fail_after(30):
        scope = await nursery.start(live)
    return Working(scope, done, ended)


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncGenerator[Working, None]:
    """A worker for `app` while the block lasts."""
    async with trio.open_nursery() as nursery:
        one = await start(nursery, app, **options)
        yield one
        await one.stop()


async def until(condition: Callable[[], bool], *, within: float = 30.0) -> None:
    """Wait until `condition()` holds, for `within` seconds at most."""
    pace = Pace()
    with trio.fail_after(within):
        while not pace.look(condition):
            await trio.sleep(pace.pause)


async def until_async(condition: Callable[[], Awaitable[bool]], *, within: float = 30.0) -> None:
    """The same, for a condition that is awaited."""
    pace = Pace()
    with trio.fail_after(within):
        while not await pace.look_async(condition):
            await trio.sleep(pace.pause)


def held(client: "redis.Redis", app: App, queue: str = "default") -> dict[str, int]:
    """How many jobs each consumer of a queue holds."""
    stream = app.queue(queue).stream
    found: list[dict[str, Any]] = client.xinfo_consumers(stream, GROUP)
    return {consumer["name"].decode(): consumer["pending"] for consumer in found}


def leftovers(client: "redis.Redis", app: App) -> dict[str, str]:
    """The keys of the application that are left, with their types."""
    looked: Any = client
    found = looked.scan_iter(f"celery5:{{{app.name}*", count=1000)
    return {key.decode(): looked.type(key).decode() for key in found}


def entries(client: "redis.Redis", stream: str) -> list[dict[bytes, bytes]]:
    """What is on a stream, from the oldest on."""
    found: Any = client.xrange(stream)
    return [fields for _, fields in found]


class Lines:
    """What a worker logs, as values."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._journal = LogWriter(self._stream, level="debug")

    def __enter__(self) -> Self:
        self._journal.__enter__()
        self._journal._buffer.clear()  # what eliot had kept for the first who would listen
        return self

    def __exit__(self, *_exc: object) -> None:
        self._journal.__exit__()

    def count(self, text: str) -> int:
        """How many lines have this text so far."""
        return sum(text in line for line in self._stream.getvalue().splitlines())

    def of(self, name: str) -> list[dict[str, Any]]:
        """All messages `celery5:<name>` so far."""
        message_type = f"celery5:{name}"
        # Most lines need no parsing.
        lines = [json.loads(line) for line in self._stream.getvalue().splitlines() if message_type in line]
        return [line for line in lines if line.get("message_type") == message_type]


def of_kind(app: App, kind: str, body: Any) -> Any:
    """A task named `flaky` that does `body` where the kind says."""
    if kind == "thread":

        def flaky() -> Any:
            return body()

        return app.task(name="flaky")(flaky)

    async def coroutine() -> Any:
        return body()

    return app.task(name="flaky", loop="asyncio" if kind == "asyncio" else "trio")(coroutine)
