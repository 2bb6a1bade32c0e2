"""Calling: middleware that surrounds the code of a job where that runs, in its thread, task or box."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import trio

from celery5 import App, TaskFailed, current_job
from celery5.observability import FunctionCall, Middleware
from celery5.streams import BlockingEvents
from tests.redis.boxes import boxing
from tests.redis.worker.workers import until, working

PLACE: ContextVar[str] = ContextVar("place", default="")


class Places(Middleware):
    """Notes where functions are called, and how they end."""

    def __init__(self, *, is_async: bool = False) -> None:
        self.is_async = is_async
        self.calls: list[tuple[FunctionCall, int]] = []
        self.ends: list[str] = []

    def calling(self, call: FunctionCall) -> Any:
        self.calls.append((call, threading.get_ident()))
        return self.surround_async() if self.is_async and call.kind != "thread" else self.surround()

    @contextmanager
    def surround(self) -> Iterator[None]:
        PLACE.set("here")
        try:
            yield
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        self.ends.append("returned")

    @asynccontextmanager
    async def surround_async(self) -> AsyncIterator[None]:
        with self.surround():
            await pause()
            yield
            await pause()


async def pause() -> None:
    """Let the loop turn, whichever it is."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        await trio.lowlevel.checkpoint()
    else:
        await asyncio.sleep(0)


def declare(app: App, kind: str) -> Any:
    """A task of that kind, which returns its thread and what its middleware has set, or fails."""
    if kind == "thread":

        @app.task(name=kind, max_retries=0)
        def work(fails: bool) -> tuple[int, str]:
            if fails:
                raise ValueError("no")
            return threading.get_ident(), PLACE.get()

        return work

    @app.task(name=kind, loop="asyncio" if kind == "asyncio" else "trio", max_retries=0)
    async def awork(fails: bool) -> tuple[int, str]:
        await pause()
        if fails:
            raise ValueError("no")
        return threading.get_ident(), PLACE.get()

    return awork


@pytest.mark.parametrize("kind", ["thread", "asyncio", "trio"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_a_block_is_where_the_job_is_and_gets_its_error(app: App, kind: str, is_async: bool) -> None:
    places = Places(is_async=is_async)
    app.add_middleware(places)
    task = declare(app, kind)
    async with working(app):
        result = await task.adelay(False)
        thread, place = await result.aget()
        with pytest.raises(TaskFailed, match="no") as failed:
            await (await task.adelay(True)).aget()
    assert place == "here"
    (first, where), (second, _) = places.calls
    assert where == thread
    assert (first.kind, first.is_boxed, first.job and first.job.id) == (kind, False, result.id)
    assert second.job is not None
    assert places.ends == ["returned", "ValueError"]
    assert "surrounding" not in failed.value.traceback


class Faulty(Middleware):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    @contextmanager
    def calling(self, call: FunctionCall) -> Iterator[None]:
        if self.where == "before":
            raise ConnectionError("before")
        try:
            yield
        except ValueError:
            if self.where != "hides":
                raise
        if self.where == "after":
            raise ConnectionError("after")


@pytest.mark.parametrize("kind", ["thread", "asyncio", "trio"])
@pytest.mark.parametrize(
    ("where", "fails", "says"),
    [("before", False, "before"), ("after", False, "after"), ("hides", True, "no")],
)
async def test_the_error_of_a_block_is_the_jobs_and_no_block_hides_one(
    app: App, kind: str, where: str, fails: bool, says: str
) -> None:
    places = Places()
    app.add_middleware(places)
    app.add_middleware(Faulty(where))
    task = declare(app, kind)
    async with working(app):
        with pytest.raises(TaskFailed, match=says):
            await (await task.adelay(fails)).aget()
    assert places.ends == ["ConnectionError" if where != "hides" else "ValueError"]


class Wrong(Middleware):
    """Gives an `async with` block to plain functions."""

    @asynccontextmanager
    async def calling(self, call: FunctionCall) -> AsyncIterator[None]:
        yield


async def test_a_plain_function_gets_no_async_block(app: App) -> None:
    app.add_middleware(Wrong())
    task = declare(app, "thread")
    async with working(app):
        with pytest.raises(TaskFailed, match="write `with` blocks"):
            await (await task.adelay(False)).aget()


class Pids(Middleware):
    """Writes the process id of each call in a box to a file."""

    @contextmanager
    def calling(self, call: FunctionCall) -> Iterator[None]:
        assert call.is_boxed == (os.getpid() != int(os.environ["WORKER_PID"]))
        yield
        job = current_job()
        assert job is not None
        with open(os.environ["BOX_CALLS"], "a") as file:
            file.write(f"{os.getpid()} {call.kind} {job.id}\n")


async def test_the_code_of_a_boxed_task_is_surrounded_in_its_box(
    url: str, app_name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXING_APP", app_name)
    monkeypatch.setenv("BOXING_MIDDLEWARE", "tests.redis.observability.test_calling:Pids")
    monkeypatch.setenv("BOX_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("WORKER_PID", str(os.getpid()))
    app = boxing.make(app_name, url, lease=60.0, box_slots=1)
    app.add_middleware(Pids())
    seen: list[tuple[str, Any]] = []
    async with working(app):
        for name, kind in (("seen", "thread"), ("seen_trio", "trio"), ("seen_asyncio", "asyncio")):
            seen.append((kind, await (await app.tasks[name].adelay()).aget(60.0)))
    app.close()
    lines = (tmp_path / "calls").read_text().splitlines()
    assert lines == [f"{note.pid} {kind} {note.job}" for kind, note in seen]


async def test_other_functions_of_the_application_are_surrounded_too(app: App) -> None:
    places = Places()
    app.add_middleware(places)
    clicks = app.stream("clicks", partitions=1)
    done: list[tuple[str, str]] = []

    @app.processor(clicks)
    def read(events: BlockingEvents[Any]) -> None:
        for _ in events:
            done.append(("processor", PLACE.get()))
            raise ValueError("no")

    @app.timer(0.05)
    def tick() -> None:
        done.append(("timer", PLACE.get()))

    @app.health_check(period=0.05)
    def look() -> str:
        done.append(("check", PLACE.get()))
        return "ok"

    async with working(app):
        await clicks.asend({"n": 1})
        await until(lambda: {name for name, _ in done} >= {"processor", "timer", "check"})
        await until(lambda: "ValueError" in places.ends)
    assert {place for _, place in done} == {"here"}
    assert {call.job for call, _ in places.calls} == {None}
