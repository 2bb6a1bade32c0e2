"""Odd errors: whatever user code raises, at whatever place it is called, its process goes on.

(test_own_errors.py has the kinds of errors; here their classes have redefined what Python and Trio ask an error for.)
"""

import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel

from celery5 import App, BootStep, RetryPolicy, TaskFailed
from celery5.health import HealthCheck
from celery5.observability import Middleware
from celery5.processes.router import ROUTER
from celery5.protocol.events.documents import DeliveryPacing
from celery5.streams import Keep, StreamEvents
from tests.odd_errors import ERRORS
from tests.redis.worker.workers import Lines, until, working

LIMIT = 60.0


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose jobs are not tried again."""
    one = App(app_name, broker=url, lease=1.0, cpu_slots=4, retry_policy=RetryPolicy(max_retries=0))
    yield one
    one.close()


@asynccontextmanager
async def living(app: App, **options: Any) -> AsyncGenerator[Lines, None]:
    """A process that is alive at the end, and has not started again. It fails by a text: pytest cannot show errors."""
    failure = ""
    try:
        with Lines() as lines:
            async with working(app, **options) as process:
                yield lines
                assert not process.ended.is_set()
        assert lines.of("worker:restarted") == []
    except BaseException as error:
        failure = json.dumps(BaseException.__repr__(error))[:1000]
    if failure:
        pytest.fail(failure)


class Raiser:
    """Raises one odd error after the other, and then nothing more."""

    def __init__(self) -> None:
        self._left = list(ERRORS.values())
        self.calls_in_peace = 0

    def __call__(self, *_words: Any) -> None:
        if self._left:
            raise self._left.pop()()
        self.calls_in_peace += 1


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_task_that_raises_odd_errors_fails_by_them(app: App, kind: str) -> None:
    async def on_loop(name: str) -> None:
        raise ERRORS[name]()

    def in_thread(name: str) -> None:
        raise ERRORS[name]()

    declare: Any = app.task
    task = declare(name="raises", loop="asyncio" if kind == "asyncio" else "trio")(
        in_thread if kind == "thread" else on_loop
    )
    async with living(app):
        for name in ERRORS:
            with pytest.raises(TaskFailed, match="not-retried"):
                await (await task.adelay(name)).aget(LIMIT)


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_processor_that_raises_odd_errors_goes_on_with_the_next_record(app: App, kind: str) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=str, partitions=1, keep=Keep(records=1000))
    raiser, seen = Raiser(), list[int]()

    async def on_loop(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            raiser()
            seen.append(reading["n"])

    def in_thread(events: Any) -> None:
        for reading in events.records():
            raiser()
            seen.append(reading["n"])

    declare: Any = app.processor(
        readings,
        then="ignore",
        on_error=RetryPolicy(max_retries=0),
        name="read",
        loop="asyncio" if kind == "asyncio" else "trio",
    )
    declare(in_thread if kind == "thread" else on_loop)
    for n in range(len(ERRORS) + 1):
        await readings.asend({"n": n})
    async with living(app):
        await until(lambda: seen == [len(ERRORS)], within=LIMIT)


def make_sink(*, is_async: bool) -> Any:
    """Return a sink that raises once for each odd error, and again when it is closed."""
    raiser, closer = Raiser(), Raiser()

    class Sink:
        name = "odd"
        batch = 1
        retry = RetryPolicy(max_retries=2 * len(ERRORS), backoff=0.001, cap=0.001)
        written = raiser

        def close(self) -> None:
            closer()

    class Blocking(Sink):
        def write(self, _documents: Any) -> None:
            raiser()

    class Awaited(Sink):
        async def write(self, _documents: Any) -> None:
            raiser()

    return Awaited() if is_async else Blocking()


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "trio"])
async def test_a_sink_that_raises_odd_errors_gets_the_document_again(
    app: App, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeliveryPacing, "get_delay", lambda *_words: 0.0)
    sink = make_sink(is_async=is_async)

    @app.task(sinks=[sink])
    async def give() -> int:
        return 1

    async with working(app):
        await (await give.adelay()).aget(LIMIT)
    async with living(app, page=ROUTER):
        await until(lambda: sink.written.calls_in_peace == 1, within=LIMIT)


@pytest.mark.parametrize("kind", ["coroutine", "single", "generator", "thread"])
async def test_a_source_that_raises_odd_errors_is_run_again(
    app: App, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.events.source_ingestion.FIRST_DELAY", 0.001)
    monkeypatch.setattr("celery5.services.events.source_ingestion.MAX_DELAY", 0.001)
    raiser = Raiser()

    async def coroutine(emit: Any) -> None:
        raiser()

    async def generator() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raiser()

    def thread() -> list[bytes]:
        raiser()
        return []

    run: Any = {"generator": generator, "thread": thread}.get(kind, coroutine)
    source = app.source(run, name="odd", every=0.01, single=kind == "single")

    @app.task(source=source)
    async def take(document: Any) -> None: ...

    async with living(app, page=ROUTER):
        await until(lambda: raiser.calls_in_peace > 0, within=LIMIT)


async def test_checks_timers_and_limits_that_raise_odd_errors_are_called_again(app: App) -> None:
    blocking, awaited, timer = Raiser(), Raiser(), Raiser()

    @app.health_check(period=0.01, name="blocking")
    def check() -> None:
        blocking()

    @app.health_check(period=0.01, name="awaited")
    async def acheck() -> None:
        awaited()

    @app.timer(interval=0.01)
    async def tick() -> None:
        timer()

    async with living(app):
        await until(lambda: all(job.calls_in_peace for job in (blocking, awaited, timer)), within=LIMIT)


@pytest.mark.parametrize("moment", ["start", "crash", "undo"])
async def test_boot_steps_that_raise_odd_errors_are_tried_again(url: str, app_name: str, moment: str) -> None:
    steps: list[BootStep] = []
    raisers: list[Callable[[], BaseException]] = list(ERRORS.values())
    ended: list[int] = []

    def make_step(number: int, make: Callable[[], BaseException]) -> BootStep:
        tries: list[int] = []

        def fail_once() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise make()
            ended.append(number)

        async def crash_once(*, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            fail_once()

        def come_up() -> None:
            ended.append(number)

        def undo() -> None:
            raise make()

        run: Any = {"start": fail_once, "crash": crash_once, "undo": come_up}[moment]
        retry = {"max_retries": 3, "backoff": 0.01}
        return BootStep(
            f"step-{number}", run, optional=True, retry=retry, undo=undo if moment == "undo" else None
        )

    steps = [make_step(number, make) for number, make in enumerate(raisers)]
    app = App(app_name, broker=url, lease=1.0, bootsteps=steps)
    async with living(app):
        await until(lambda: sorted(ended) == list(range(len(ERRORS))), within=LIMIT)
    app.close()


@pytest.mark.parametrize("hook", ["running", "settling", "received", "unstarted", "sending"])
async def test_middleware_that_raises_odd_errors_changes_nothing(app: App, hook: str) -> None:
    raiser = Raiser()

    class Odd(Middleware): ...

    setattr(Odd, hook, lambda _self, *words: raiser(*words))
    app.add_middleware(Odd())

    @app.task
    async def works(n: int) -> int:
        return n

    async with living(app):
        for n in range(len(ERRORS) + 1):
            if hook == "unstarted":
                late = await works.options(expires=0.0).adelay(n)
                with pytest.raises(Exception, match=r"expired|EXPIRED"):
                    await late.aget(LIMIT)
            assert await (await works.adelay(n)).aget(LIMIT) == n
    assert raiser.calls_in_peace > 0


async def test_a_backoff_that_raises_odd_errors_concerns_its_job_alone(app: App) -> None:
    raiser = Raiser()

    def back_off(_retry: int) -> float:
        raiser()
        return 0.001

    @app.task(retry_policy=RetryPolicy(max_retries=1, backoff=0.001), retry_backoff=back_off)
    async def fails() -> None:
        raise ValueError

    async with living(app):
        for _ in range(len(ERRORS) + 1):
            with pytest.raises(TaskFailed, match="exhausted"):
                await (await fails.adelay()).aget(LIMIT)
    assert raiser.calls_in_peace == 1


# ---- what is no error, but cannot be passed on either


async def test_a_key_of_the_state_without_bytes_concerns_its_record_alone(app: App) -> None:
    declare_stream: Any = app.stream
    readings = declare_stream("readings", dict, by=None, partitions=1)
    keys: list[Any] = ["half of a pair: \udc80", None, object(), True, "a key"]
    seen: list[int] = []

    @app.processor(readings, then="ignore", on_error=RetryPolicy(max_retries=0))
    async def keep(events: StreamEvents[Any]) -> None:
        async for reading in events.records():
            events.state.set(keys[reading["n"]], 1)
            seen.append(reading["n"])

    for n in range(len(keys)):
        await readings.asend({"n": n})
    async with living(app):
        await until(lambda: seen == [len(keys) - 1], within=LIMIT)


class Unshowable:
    """A reason that has no text."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


async def test_the_reason_of_a_reported_state_may_be_anything(app: App) -> None:
    check = app.health_check.add(HealthCheck("shared", states=("bad", "good"), scope="global"))
    reasons: list[Any] = ["half of a pair: \udc80", object(), 10**400, Unshowable(), "x" * 3_000_000]

    @app.task
    async def report() -> None:
        for why in reasons:
            check.report("bad", why)
            check.report("good")

    async with living(app) as lines:
        await (await report.adelay()).aget(LIMIT)
        await until(lambda: len(lines.of("health:changed")) >= 2 * len(reasons), within=LIMIT)
    assert max(len(line["why"]) for line in lines.of("health:changed")) <= 500


# ---- cancel scopes


def get_scope() -> Any:
    """Return the innermost cancel scope of this task."""
    task: Any = trio.lowlevel.current_task()
    return task._cancel_status._scope


@contextmanager
def bound_time() -> Iterator[None]:
    """Cancel what is surrounded at once: as `trio.move_on_after(seconds)` would a little later."""
    with trio.move_on_after(0):
        yield


def open_scope() -> None:
    trio.CancelScope().__enter__()


def close_scope() -> None:
    get_scope().__exit__(None, None, None)


HARM: dict[str, Callable[[], Any]] = {
    "block that cancels": bound_time,
    "open scope": open_scope,
    "cancelled scope": lambda: get_scope().cancel(),
    "deadline": lambda: setattr(get_scope(), "deadline", -1),
    "closed scope": close_scope,
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("hook", ["settling", "received", "unstarted"])
async def test_middleware_that_changes_cancel_scopes_stops_no_service(app: App, hook: str, harm: str) -> None:
    class Scoped(Middleware): ...

    setattr(Scoped, hook, lambda _self, *_words: HARM[harm]())
    app.add_middleware(Scoped())

    @app.task
    async def works(n: int) -> int:
        return n

    async with living(app):
        for n in range(5):
            await works.options(expires=0.0).adelay(n)
            assert await (await works.adelay(n)).aget(LIMIT) == n


async def test_a_backoff_that_opens_a_cancel_scope_concerns_its_job_alone(app: App) -> None:
    def back_off(_retry: int) -> float:
        trio.move_on_after(0).__enter__()
        return 0.001

    @app.task(retry_policy=RetryPolicy(max_retries=2, backoff=0.001), retry_backoff=back_off)
    async def fails() -> None:
        raise ValueError

    async with living(app):
        for _ in range(3):
            with pytest.raises(TaskFailed, match="exhausted"):
                await (await fails.adelay()).aget(LIMIT)
