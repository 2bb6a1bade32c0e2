"""Any value: whatever arguments, results, errors and progress hold, a job ends as it should, and the worker lives."""

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from celery5 import App, Reject, Retry, RetryPolicy, TaskFailed, chain, progress
from celery5.errors import CeleryError, ResultTimeout, TaskExpired, TaskRejected, TaskRevoked
from celery5.events.event import Event
from celery5.logs.fence import FENCE
from celery5.streams import Keep, StreamEvents
from celery5.testing import running_worker
from tests.redis.boxes import boxing

KINDS = ("trio", "asyncio", "thread")
REFUSALS = (TypeError, ValueError, CeleryError)
"""What sending a value raises that has no JSON form."""


def nest(depth: int) -> Any:
    """Return lists inside of each other."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**400]),
    st.just(5000).map(lambda digits: 10**digits),
    st.floats(),
    st.text(st.characters(), max_size=20),
    st.sampled_from(["\udc80", "x\ud800", "\x00\x1b[31m", "é" * 50_000]),
)
VALUES = st.one_of(
    SCALARS,
    st.builds(nest, st.sampled_from([3, 200, 600, 950, sys.getrecursionlimit() + 500])),
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)


class Unshowable(Exception):
    """An error whose text is the worst of code."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


def make_error(value: Any, number: int) -> BaseException:
    """Return an error with a value in it."""
    errors: list[Callable[[], BaseException]] = [
        lambda: ValueError(value),
        lambda: Unshowable(value),
        lambda: ExceptionGroup("é" * 10_000, [ValueError(value), Unshowable(value)]),
        lambda: BaseExceptionGroup("both", [KeyboardInterrupt(value), GeneratorExit(value)]),
        lambda: SystemExit(value),
        lambda: _group_deeply(ValueError(value)),
    ]
    error = errors[number % len(errors)]()
    error.add_note(str(value)[:100] if isinstance(value, str) else "note \udc80")
    return error


def _group_deeply(error: Exception) -> Exception:
    for _ in range(2000):
        error = ExceptionGroup("one in another", [error])
    return error


class Shop:
    """The tasks of each kind. What they return and raise is what was put into `values`: nothing encodes it before."""

    def __init__(self, app: App) -> None:
        self.values: list[Any] = []
        self.tasks: dict[tuple[str, str], Any] = {}
        self.app = app
        for kind in KINDS:
            for body in (self.echo, self.give, self.fail, self.reject, self.again):
                self.tasks[kind, body.__name__] = self._declare(kind, body)
        self.seen: list[int] = []

    def _declare(self, kind: str, body: Callable[..., Any]) -> Any:
        async def on_loop(value: Any) -> Any:
            return body(value)

        def in_thread(value: Any) -> Any:
            return body(value)

        name = f"{body.__name__}-{kind}"
        loop: Any = "asyncio" if kind == "asyncio" else "trio"
        function: Any = in_thread if kind == "thread" else on_loop
        return self.app.task(name=name, loop=loop)(function)

    def echo(self, value: Any) -> Any:
        progress(1, 2, str(value)[:500] if isinstance(value, str) else "\udc80")
        return value

    def give(self, number: int) -> object:
        return self.values[number]

    def fail(self, number: int) -> Any:
        raise make_error(self.values[number], number)

    def reject(self, number: int) -> Any:
        raise Reject(self.values[number])

    def again(self, number: int) -> Any:
        raise Retry(countdown=0.0, max_retries=1) from make_error(self.values[number], number)


@contextmanager
def serving(url: str, app_name: str) -> Generator[Shop]:
    app = App(
        app_name, broker=url, metrics_interval=0.2, retry_policy=RetryPolicy(max_retries=1, backoff=0.0)
    )
    shop = Shop(app)
    FENCE.take_counts()
    with running_worker(app, broker=url):
        yield shop
    assert not FENCE.take_counts()  # nothing had to be caught: all could be shown


def draw_values(count: int) -> list[Any]:
    """Return values that Hypothesis has drawn. Not while the worker runs, which draws random numbers, too."""
    drawn: list[Any] = []

    @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate])
    @given(VALUES)
    def keep(value: Any) -> None:
        drawn.append(value)

    keep()
    return drawn


def send_on_each_path(shop: Shop, number: int) -> Iterator[tuple[str, Any, tuple[type[BaseException], ...]]]:
    """Send a job with a value on each path; yield what it is, the job, and what `get` may raise."""
    value = shop.values[number]
    for kind in KINDS:
        for name in ("give", "fail", "reject", "again"):
            errors: tuple[type[BaseException], ...] = (TaskRejected,) if name == "reject" else (TaskFailed,)
            yield f"{name} {kind} {number}", shop.tasks[kind, name].delay(number), errors
        echo = shop.tasks[kind, "echo"]
        with suppress(*REFUSALS):  # in one clear line, where it was sent
            yield f"echo {kind} {number}", echo.delay(value), (TaskFailed,)
        with suppress(*REFUSALS):
            compose: Any = chain
            yield f"run {kind} {number}", compose(echo.s(value), echo.s()).start(), (TaskFailed, CeleryError)


def test_a_job_ends_as_it_should_whatever_values_it_has(url: str, app_name: str) -> None:
    values = draw_values(40)
    with serving(url, app_name) as shop:
        shop.values += values
        sent = [job for number in range(len(values)) for job in send_on_each_path(shop, number)]
        for what, job, errors in sent:
            try:
                job.get(timeout=60)
            except ResultTimeout as error:
                pytest.fail(f"{what}: {error}")
            except errors:
                continue
        assert shop.tasks["trio", "echo"].delay("alive").get(timeout=60) == "alive"


def test_a_boxed_job_ends_as_it_should_whatever_values_it_has(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = draw_values(25)
    monkeypatch.setenv("BOXING_APP", app_name)
    app = boxing.make(
        app_name, url, box_slots=2, metrics_interval=0.2, retry_policy=RetryPolicy(max_retries=0)
    )
    FENCE.take_counts()
    with running_worker(app, broker=url):
        sent: list[Any] = []
        for value in values:
            for fails in (False, True):
                with suppress(*REFUSALS):
                    sent.append(app.tasks["echo"].delay(value, fails))
        for job in sent:
            with suppress(TaskFailed):
                job.get(timeout=60)
        assert app.tasks["echo"].delay("alive").get(timeout=60) == "alive"
    assert not FENCE.take_counts()


def test_a_job_is_expired_revoked_or_told_of_an_event_whatever_values_it_has(url: str, app_name: str) -> None:
    values = draw_values(25)
    app = App(app_name, broker=url, metrics_interval=0.2, retry_policy=RetryPolicy(max_retries=0))
    heard: list[int] = []

    @app.event(name="Told")
    class Told(Event):
        number: int
        value: Any

    @Told.subscribe
    @app.task(name="hear")
    async def hear(number: int, value: Any) -> None:
        heard.append(number)

    @app.task(name="keep")
    async def keep(value: Any) -> None: ...

    FENCE.take_counts()
    told: list[int] = []
    expired: list[Any] = []
    revoked: list[Any] = []
    with running_worker(app, broker=url):
        for number, value in enumerate(values):
            with suppress(*REFUSALS):
                Told.delay(number=number, value=value)
                told.append(number)
            with suppress(*REFUSALS):
                expired.append(keep.options(expires=0.0001).delay(value))
                revoked.append(keep.options(countdown=600).delay(value))
        assert told
        assert all(job.revoke() for job in revoked)
        for job in revoked:
            with pytest.raises(TaskRevoked):
                job.get(timeout=60)
        for job in expired:
            with suppress(TaskExpired):
                job.get(timeout=60)
        deadline = time.monotonic() + 60
        while len(heard) < len(told) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sorted(heard) == told
        keep.delay("alive").get(timeout=60)
    assert not FENCE.take_counts()


class Reading(msgspec.Struct):
    key: str
    value: Any


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_is_passed_whatever_its_processor_raises(url: str, app_name: str, kind: str) -> None:
    """The records after it are processed by the same worker."""
    from tests.redis.worker.workers import until, working

    values = [2**70, float("nan"), "\udc80", nest(3000), "é" * 100_000, {"a": [10**5000]}]
    app = App(app_name, broker=url, lease=1.0, grace_period=1.0)
    readings = app.stream("readings", Reading, by="key", partitions=1, keep=Keep(records=1000))
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if number < 2 * len(values):
            raise make_error(values[number % len(values)], number)

    async def on_loop(events: StreamEvents[Reading]) -> None:
        async for reading in events.records():
            handle(int(reading.key))

    def in_thread(events: Any) -> None:
        for reading in events.records():
            handle(int(reading.key))

    loop: Any = "asyncio" if kind == "asyncio" else "trio"
    declare: Any = app.processor(readings, then="ignore", loop=loop, name="read")
    declare(in_thread if kind == "thread" else on_loop)
    for number in range(2 * len(values) + 2):
        await readings.asend(Reading(str(number), 0))
    async with working(app) as worker:
        await until(lambda: (2 * len(values) + 1) in seen)
        assert not worker.ended.is_set()
    app.close()
