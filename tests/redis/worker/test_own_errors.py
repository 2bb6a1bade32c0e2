"""Own errors: whatever user code raises, or does to the Trio tasks above it, is its own outcome; the worker lives."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar

import msgspec
import pytest
import trio
import trio.lowlevel

from celery5 import App, JobState, RetryPolicy, TaskFailed, TaskRevoked
from celery5.observability import Middleware
from celery5.streams import Keep, StreamEvents
from tests.redis.boxes import boxing
from tests.redis.worker.workers import Lines, until, working

KINDS = ("trio", "asyncio", "thread")
LIMIT = 60.0


class Own(BaseException):
    """A class of the application's own that is no Exception."""


def make_cancelled() -> BaseException:
    """Return a cancellation of Trio that nobody has asked for."""
    make: Any = trio.Cancelled
    error: BaseException = make._create(source="unknown")
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "Own": Own,
    "Cancelled": make_cancelled,
    "CancelledError": asyncio.CancelledError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup(
        "two", [KeyboardInterrupt(), ValueError(), make_cancelled()]
    ),
}


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose jobs are not tried again."""
    one = App(app_name, broker=url, lease=1.0, cpu_slots=4, retry_policy=RetryPolicy(max_retries=0))
    yield one
    one.close()


@asynccontextmanager
async def living(app: App) -> AsyncGenerator[None, None]:
    """A worker that is alive at the end, and has not started again."""
    with Lines() as lines:
        async with working(app) as worker:
            yield
            assert not worker.ended.is_set()
    assert lines.of("worker:restarted") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_task_raises_is_its_own_failure(app: App, kind: str) -> None:
    async def on_loop(name: str, late: bool) -> None:
        if late:
            sleep = asyncio.sleep if kind == "asyncio" else trio.sleep
            await sleep(0.01)
        raise ERRORS[name]()

    def in_thread(name: str, late: bool) -> None:
        raise ERRORS[name]()

    loop: Any = "asyncio" if kind == "asyncio" else "trio"
    function: Any = in_thread if kind == "thread" else on_loop
    declare: Any = app.task
    task = declare(name="raises", loop=loop)(function)
    async with living(app):
        for name in ERRORS:
            for late in (False, True):
                with pytest.raises(TaskFailed, match="not-retried") as caught:
                    await (await task.adelay(name, late)).aget(LIMIT)
                assert caught.value.type == name


@pytest.mark.parametrize("task", ["act", "act_trio", "act_asyncio"])
async def test_whatever_a_boxed_task_raises_is_its_own_failure(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setenv("BOXING_APP", app_name)
    app = boxing.make(app_name, url, lease=1.0, box_slots=2, retry_policy=RetryPolicy(max_retries=0))
    async with living(app):
        acts = ["escape KeyboardInterrupt", "escape GeneratorExit", "escape Cancelled"]
        for what in [*acts, "cancel itself"] if task == "act_trio" else acts:
            with pytest.raises(TaskFailed, match="not-retried"):
                await (await app.tasks[task].adelay(what)).aget(LIMIT)
    app.close()


def leak_nothing() -> None:
    """Do nothing: the others must fail for a reason."""


def get_task() -> Any:
    return trio.lowlevel.current_task()


def cancel_nursery() -> None:
    get_task().parent_nursery.cancel_scope.cancel()


def cancel_scope() -> None:
    get_task()._cancel_status._scope.cancel()


def close_scope() -> None:
    get_task()._cancel_status._scope.__exit__(None, None, None)


def leak_scopes() -> None:
    trio.CancelScope().__enter__()
    trio.move_on_after(0.02).__enter__()


def misnest_scopes() -> None:
    outer, inner = trio.CancelScope(), trio.CancelScope()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)


def start_sibling() -> None:
    async def fail() -> None:
        await trio.sleep(0.02)
        raise KeyboardInterrupt

    get_task().parent_nursery.start_soon(fail)


async def leak_nursery() -> None:
    nursery = await trio.open_nursery().__aenter__()
    nursery.start_soon(trio.sleep_forever)


DISORDER: list[Callable[[], Any]] = [
    leak_nothing,
    cancel_nursery,
    cancel_scope,
    close_scope,
    leak_scopes,
    misnest_scopes,
    start_sibling,
    leak_nursery,
]


@pytest.mark.parametrize("waits", [False, True], ids=["ends", "waits"])
@pytest.mark.parametrize("harm", DISORDER, ids=lambda harm: harm.__name__)
async def test_what_a_task_does_to_the_tasks_above_it_harms_no_other(
    app: App, harm: Callable[[], Any], waits: bool
) -> None:
    @app.task
    async def hostile() -> None:
        made = harm()
        if made is not None:
            await made
        if waits:
            await trio.sleep(0.1)

    @app.task
    async def innocent(n: int) -> int:
        await trio.sleep(0.02)
        return n

    async with living(app):
        sent: list[Any] = []
        bad: list[Any] = []
        for n in range(3):
            sent += [await innocent.adelay(10 * n + m) for m in range(10)]
            bad.append(await hostile.adelay())
        assert [await result.aget(LIMIT) for result in sent] == list(range(30))
        for job in bad:
            await until_ended(job)


async def until_ended(sent: Any) -> None:
    """Wait until a job is settled, in whatever state."""
    with trio.fail_after(LIMIT):
        while await sent.astatus() not in (JobState.SUCCESS, JobState.DEAD):
            await trio.sleep(0.02)


async def test_a_revoked_task_is_revoked_whatever_it_raises_then(app: App) -> None:
    started = trio.Event()

    @app.task
    async def stubborn() -> None:
        async def fail() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyboardInterrupt

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            started.set()
            await trio.sleep_forever()

    async with living(app):
        sent = await stubborn.adelay()
        await started.wait()
        await sent.arevoke()
        with pytest.raises(TaskRevoked):
            await sent.aget(LIMIT)


@pytest.mark.parametrize("name", ERRORS)
async def test_whatever_middleware_raises_changes_nothing_for_the_job(app: App, name: str) -> None:
    class Hostile(Middleware):
        def received(self, jobs: Any) -> None:
            raise ERRORS[name]()

        @contextmanager
        def running(self, job: Any) -> Any:
            if job.task == "enters":
                raise ERRORS[name]()
            yield
            raise ERRORS[name]()

        @contextmanager
        def settling(self, batch: Any) -> Any:
            yield
            raise ERRORS[name]()

    class HostileOnTrio(Middleware):
        def running(self, job: Any) -> Any:
            return self._fail_late()

        @asynccontextmanager
        async def _fail_late(self) -> AsyncGenerator[None, None]:
            await trio.lowlevel.checkpoint()
            yield
            raise ERRORS[name]()

    hostile = App(app.name, broker=app.settings.broker, lease=1.0, middleware=[Hostile(), HostileOnTrio()])

    @hostile.task(name="leaves")
    async def leaves() -> int:
        return 1

    @hostile.task(name="enters")
    def enters() -> int:
        return 2

    async with living(hostile):
        assert await (await leaves.adelay()).aget(LIMIT) == 1
        assert await (await enters.adelay()).aget(LIMIT) == 2
    hostile.close()


@pytest.mark.parametrize("name", ERRORS)
async def test_what_the_code_around_a_task_raises_concerns_its_job_alone(app: App, name: str) -> None:
    """Its backoff, and its policy for duplicates. (test_hostile_jobs.py has the code of arguments.)"""

    def back_off(retry: int) -> float:
        raise ERRORS[name]()

    async def refuse() -> str:
        raise ERRORS[name]()

    @app.task(retry_policy=RetryPolicy(max_retries=1, backoff=0.01), retry_backoff=back_off)
    async def fails() -> None:
        raise ValueError

    @app.task(deduplicate=refuse)
    async def compared() -> None: ...

    async with living(app):
        for task in (fails, compared):
            with pytest.raises(TaskFailed):
                await (await task.adelay()).aget(LIMIT)


class HostileReading(msgspec.Struct):
    """A record whose own code raises what it names, in a worker only."""

    is_hostile: ClassVar[bool] = False
    error: str = ""

    def __post_init__(self) -> None:
        if self.is_hostile and self.error:
            raise ERRORS[self.error]()


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_processor_raises_concerns_its_record_alone(app: App, kind: str) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=str, partitions=1, keep=Keep(records=1000))
    names = list(ERRORS)
    seen: list[int] = []

    def handle(reading: dict[str, int]) -> None:
        seen.append(reading["n"])
        if reading["n"] < len(names):
            raise ERRORS[names[reading["n"]]]()

    async def on_loop(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            handle(reading)

    def in_thread(events: Any) -> None:
        for reading in events.records():
            handle(reading)

    declare: Any = app.processor(
        readings, then="ignore", name="read", loop="asyncio" if kind == "asyncio" else "trio"
    )
    declare(in_thread if kind == "thread" else on_loop)
    for n in range(len(names) + 1):
        await readings.asend({"n": n})
    async with living(app):
        await until(lambda: len(names) in seen)


class HostileKind(type):
    """The class of a class that says nothing of itself."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__", "__mro__"):
            raise KeyboardInterrupt(name)
        return super().__getattribute__(name)


class Unknowable(Exception, metaclass=HostileKind):
    """An error whose class cannot be asked for its name."""


class Surrogate(Exception):
    """An error whose text has no bytes."""

    def __repr__(self) -> str:
        return "half of a pair: \udc80"


@pytest.mark.parametrize("error", [Unknowable, Surrogate], ids=["no name", "no bytes"])
async def test_an_error_that_cannot_be_told_of_concerns_its_record_alone(
    app: App, error: type[Exception]
) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=str, partitions=1, keep=Keep(records=1000))
    seen: list[int] = []

    @app.processor(readings, then="ignore")
    async def read(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            seen.append(reading["n"])
            if reading["n"] == 0:
                raise error

    for n in range(2):
        await readings.asend({"n": n})
    async with living(app):
        await until(lambda: 1 in seen)


class HostileSerializer:
    """A serializer that raises what a record names, in a worker only."""

    name = "hostile"

    def __init__(self) -> None:
        self.is_hostile = False

    def dumps(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def loads(self, raw: bytes) -> Any:
        value = json.loads(raw)
        if self.is_hostile and value["error"]:
            raise ERRORS[value["error"]]()
        return value


async def test_whatever_reads_a_record_raises_concerns_that_record_alone(app: App) -> None:
    app.configure(unknown_record_grace=0.0)
    declare_stream: Any = app.stream
    serializer, seen = HostileSerializer(), list[str]()
    streams: list[Any] = [
        declare_stream("own", dict, by=None, partitions=1, codec=serializer),
        declare_stream("typed", HostileReading, by=None, partitions=1),
    ]

    async def read(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            seen.append(reading["error"] if isinstance(reading, dict) else reading.error)

    for stream in streams:
        app.processor(stream, then="ignore", name=f"read-{stream.name}")(read)
        for name in (*ERRORS, ""):
            await stream.asend({"error": name} if stream.name == "own" else HostileReading(name))
    serializer.is_hostile = HostileReading.is_hostile = True
    try:
        async with living(app):
            await until(lambda: seen == ["", ""])
    finally:
        HostileReading.is_hostile = False


async def test_a_processor_that_cancels_the_tasks_above_it_is_called_again(app: App) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=str, partitions=1, keep=Keep(records=1000))
    seen: list[int] = []

    @app.processor(readings, then="ignore")
    async def read(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            seen.append(reading["n"])
            if reading["n"] == 0:
                cancel_nursery()
                await trio.sleep(1)

    for n in range(2):
        await readings.asend({"n": n})
    async with living(app):
        await until(lambda: 1 in seen)
