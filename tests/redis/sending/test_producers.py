"""Producers: plain Python, asyncio and Trio send and wait by one API and get the same."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, ResultTimeout, TaskFailed, agather, gather, wait, wait_async
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BlockingInEventLoop, UnknownTask
from tests.redis.worker.workers import working

COLOURS = ["plain", "asyncio", "trio"]
in_every_colour = pytest.mark.parametrize("colour", COLOURS)


@dataclass
class Api:
    """What an application's code calls, awaited in every colour."""

    delay: Callable[..., Awaitable[AsyncResult[Any]]]
    send_many: Callable[[App, Sequence[Any]], Awaitable[list[AsyncResult[Any]]]]
    get: Callable[..., Awaitable[Any]]
    status: Callable[[AsyncResult[Any]], Awaitable[JobState]]
    gather: Callable[..., Awaitable[list[Any]]]
    wait: Callable[..., Awaitable[Any]]


def dressed(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """A blocking call in the dress of a coroutine that never waits."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


PLAIN = Api(
    delay=dressed(lambda task, *args: task.delay(*args)),
    send_many=dressed(lambda app, signatures: app.send_many(signatures)),
    get=dressed(lambda result, **kwargs: result.get(**kwargs)),
    status=dressed(lambda result: result.status()),
    gather=dressed(gather),
    wait=dressed(wait),
)
AWAITED = Api(
    delay=lambda task, *args: task.adelay(*args),
    send_many=lambda app, signatures: app.asend_many(signatures),
    get=lambda result, **kwargs: result.aget(**kwargs),
    status=lambda result: result.astatus(),
    gather=agather,
    wait=wait_async,
)


def tell(colour: str, story: Callable[[Api], Awaitable[Any]]) -> Any:
    """Tell a story in that colour; gives what it returns."""
    if colour == "trio":
        return trio.run(story, AWAITED)
    if colour == "asyncio":

        async def awaited() -> Any:
            return await story(AWAITED)

        return asyncio.run(awaited())
    coroutine: Any = story(PLAIN)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a plain story waited for an event loop")


@contextmanager
def worker_elsewhere(app: App) -> Iterator[None]:
    """A worker in another thread, with a Trio run of its own."""
    up, stop = threading.Event(), threading.Event()

    async def live() -> None:
        async with working(app):
            up.set()
            while not stop.is_set():
                await trio.sleep(0.01)

    thread = threading.Thread(target=trio.run, args=(live,))
    thread.start()
    try:
        assert up.wait(30)
        yield
    finally:
        stop.set()
        thread.join(30)


@in_every_colour
def test_a_job_is_sent_waited_for_and_looked_at(app: App, colour: str) -> None:
    @app.task
    async def half(n: int) -> float:
        return n / 2

    @app.task(max_retries=0)
    async def fail() -> None:
        raise ValueError("no")

    async def story(api: Api) -> list[Any]:
        one = await api.delay(half, 3)
        value = await api.get(one, timeout=30)
        other = await api.delay(fail)
        with pytest.raises(TaskFailed, match="no"):
            await api.get(other, timeout=30)
        both = await api.gather([one, other], timeout=30, return_exceptions=True)
        assert isinstance(both[1], TaskFailed)
        done, left = await api.wait([one, other], timeout=30)
        assert (done, left) == ({one, other}, set())
        return [value, both[0], await api.status(one), await api.status(other)]

    with worker_elsewhere(app):
        assert tell(colour, story) == [1.5, 1.5, JobState.SUCCESS, JobState.DEAD]


@in_every_colour
def test_a_thousand_jobs_are_sent_in_few_trips(
    colour: str, own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task
    async def square(n: int) -> int:
        return n * n

    async def story(api: Api) -> list[str]:
        return [job.id for job in await api.send_many(app, [square.s(n) for n in range(1000)])]

    with redis.Redis.from_url(own_server.url) as client:
        ids = tell(colour, story)
        app.close()
        stats: Any = client.info("commandstats")
        calls = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))
        length = client.xlen(app.queue("default").stream)
    assert (len(set(ids)), length) == (1000, 1000)
    assert calls <= 10


@in_every_colour
def test_options_travel_with_the_job(app: App, colour: str) -> None:
    @app.task
    async def nothing() -> None:
        pass

    async def story(api: Api) -> JobState:
        later = await api.delay(nothing.options(countdown=60, queue="slow"))
        assert later.queue == "slow"
        return await api.status(later)

    assert tell(colour, story) is JobState.SCHEDULED


@in_every_colour
def test_a_result_that_does_not_come_in_time(app: App, colour: str) -> None:
    @app.task
    async def nothing() -> None:
        pass

    async def story(api: Api) -> None:
        sent = await api.delay(nothing)
        began = time.monotonic()
        with pytest.raises(ResultTimeout):
            await api.get(sent, timeout=0.1)
        assert 0.1 <= time.monotonic() - began < 10

    tell(colour, story)


def test_a_task_that_is_not_declared_is_unknown_with_the_nearest_name(app: App) -> None:
    @app.task(name="charge")
    async def charge() -> None:
        pass

    with pytest.raises(UnknownTask, match="did you mean 'charge'"):
        app.signature("chagre")


@pytest.mark.parametrize("colour", ["asyncio", "trio"])
def test_blocking_calls_inside_a_loop_are_refused_naming_what_to_await(app: App, colour: str) -> None:
    @app.task
    async def nothing() -> None:
        pass

    async def story(_api: Api) -> None:
        sent = await nothing.adelay()
        for call, instead in (
            (nothing.delay, "adelay"),
            (lambda: app.send_many([nothing.s()]), "asend_many"),
            (sent.get, "aget"),
            (sent.status, "astatus"),
            (sent.forget, "aforget"),
        ):
            with pytest.raises(BlockingInEventLoop, match=rf"{colour}.*{instead}"):
                call()

    tell(colour, story)


def test_delay_takes_few_calls_of_functions(app: App) -> None:
    """Counted, since time on a busy machine says little. A bare socket with hiredis takes 6, each layer 1 to 5."""

    @app.task
    def nothing() -> None: ...

    calls = list[str]()

    def record(_frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    nothing.delay()  # connects, and registers the queue
    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        nothing.delay()
    finally:
        sys.setprofile(previous)
    assert len(calls) <= 140
