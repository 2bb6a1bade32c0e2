"""Sections outside of a worker: errors pass or are ignored, and a decorated function tries again in place."""

import asyncio
import functools
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured, Reject, Retry, optional, poisonous, retry
from celery5.errors import BadArguments, BlockingInEventLoop
from celery5.runners.context import CURRENT_JOB, CurrentJob
from celery5.tasks.sections import CodePosition

UNTYPED_RETRY: Any = retry
UNTYPED_OPTIONAL: Any = optional
"""What a type checker would not let pass."""


def test_retry_and_poisonous_let_the_very_error_pass() -> None:
    error = ValueError("as it is")
    for section in (retry(), poisonous(), optional(KeyError)):
        with pytest.raises(ValueError, match="as it is") as caught, section:
            raise error
        assert caught.value is error
        assert error.__context__ is error.__cause__ is None


def test_optional_ignores_and_says_so_in_pythons_own_log(caplog: pytest.LogCaptureFixture) -> None:
    with optional(), retry(max_retries=0):
        raise OSError("not important")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("celery5", logging.WARNING)
    assert "section:ignored" in record.getMessage()
    assert "OSError: not important" in record.getMessage()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Retry, Reject]
)
def test_optional_never_ignores_what_is_no_failure(error: type[BaseException]) -> None:
    for inner in (optional(), retry(), poisonous()):
        with pytest.raises(error), optional(), inner:
            raise error


def test_what_was_poisonous_stays_so_without_a_worker() -> None:
    with pytest.raises(OSError), optional(), poisonous():  # noqa: PT011
        raise OSError


def test_a_section_is_called_after_its_place_in_the_code_in_each_run() -> None:
    seen: list[str] = []

    class Watched:
        """A section that tells what it would be called."""

        def __init__(self) -> None:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            self.place = CodePosition(frame.f_back)

        def __enter__(self) -> None: ...

        def __exit__(self, *_exc: object) -> None:
            frame = inspect.currentframe()
            assert frame is not None
            assert frame.f_back is not None
            seen.append(self.place.get_name_in(frame.f_back))

    made_elsewhere = Watched()

    def make() -> Watched:
        return Watched()

    def body() -> None:
        with Watched(), Watched():
            pass
        with make():
            pass
        with made_elsewhere:
            pass
        with ExitStack() as stack:
            stack.enter_context(Watched())

    body()
    once = list(seen)
    body()
    assert seen == once * 2
    prefix = f"{__name__}.{body.__qualname__}"
    assert once == [f"{prefix}:1:25", f"{prefix}:1:14", f"{prefix}:3", f"{prefix}:5", f"{prefix}:8:33"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: UNTYPED_RETRY(max_retries=-1), "max_retries is -1"),
        (lambda: UNTYPED_RETRY(max_retries=[1]), r"max_retries is \[1\]"),
        (lambda: UNTYPED_RETRY(backoff=float("nan")), "backoff is nan"),
        (lambda: UNTYPED_RETRY(interval_start=-1), "interval_start is -1"),
        (
            lambda: UNTYPED_RETRY(interval_start=1, cap=5),
            "retry_policy has 'cap' and 'interval_start': use one spelling",
        ),
        (lambda: UNTYPED_RETRY(on=5), r"retry\(on=...\) has 5: give classes of errors"),
        (
            lambda: UNTYPED_RETRY(on=[ValueError]),
            r"retry\(on=...\) has \[<class 'ValueError'>\]: give classes",
        ),
        (
            lambda: UNTYPED_RETRY(on=BaseException),
            "retry.+ has <class 'BaseException'>: .+ derived from Exception",
        ),
        (lambda: UNTYPED_RETRY(name=""), r"retry\(name=''\): give a text of 1 to 200 characters"),
        (lambda: UNTYPED_RETRY(name="a" * 201), r"retry\(name='a+'\): give"),
        (lambda: UNTYPED_OPTIONAL(SystemExit), r"optional\(...\) has <class 'SystemExit'>"),
        (lambda: UNTYPED_OPTIONAL("ValueError"), r"optional\(...\) has 'ValueError'"),
    ],
    ids=range(12),
)
def test_a_section_that_makes_no_sense_is_refused_where_it_stands(make: Any, says: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{says}"):
        make()


class Flaky:
    """A function that fails so many times."""

    def __init__(self, fails: int, error: Exception) -> None:
        self.left = fails
        self.calls = 0
        self.error = error

    def __call__(self, value: int) -> int:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return value


def test_a_decorated_function_is_called_again_until_its_retries_are_used_up() -> None:
    for fails, wanted in ((0, 1), (2, 3), (3, 3)):
        flaky = Flaky(fails, OSError("no"))
        decorated = retry(max_retries=2, backoff=0)(flaky.__call__)
        if fails == 3:
            with pytest.raises(OSError, match="no") as caught:
                decorated(5)
            assert caught.value is flaky.error
        else:
            assert decorated(5) == 5
        assert flaky.calls == wanted


@pytest.mark.parametrize("error", [Retry(), Reject(), KeyError()], ids=repr)
def test_a_decorated_function_is_not_called_again_for_what_it_is_not_for(error: Exception) -> None:
    flaky = Flaky(1, error)
    with pytest.raises(type(error)):
        retry(backoff=0, on=(OSError, Retry, Reject))(flaky.__call__)(1)
    assert flaky.calls == 1


def test_what_was_poisonous_is_not_tried_again_in_place() -> None:
    calls: list[int] = []

    @retry(backoff=0)
    def function() -> None:
        calls.append(1)
        with poisonous():
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        function()
    assert len(calls) == 1


def test_a_decorated_function_looks_like_itself() -> None:
    @retry()
    def function(a: int, *, b: str = "") -> float:
        """Its own words."""
        return 1.0

    @retry()
    async def coroutine() -> None: ...

    assert (function.__name__, function.__doc__) == ("function", "Its own words.")
    assert str(inspect.signature(function)) == "(a: int, *, b: str = '') -> float"
    assert inspect.iscoroutinefunction(coroutine)


class Calling:
    """An object that is awaited when it is called."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.calls == 1:
            raise OSError
        return self.calls


async def test_decorator_takes_callable_objects_and_partials_but_no_task() -> None:
    app = App("shop")
    assert await retry(backoff=0)(Calling())() == 2
    assert await retry(backoff=0)(functools.partial(Calling().__call__))() == 2

    @app.task
    @retry(backoff=0)
    async def above(n: int) -> int:
        return n

    @app.task
    @retry(backoff=0)
    def above_too(n: int) -> int:
        return n

    assert (await above(1), above_too(2)) == (1, 2)
    assert (above.kind, above_too.kind) == ("trio", "thread")
    with pytest.raises(BadArguments):
        above.job("x")  # type: ignore[arg-type]
    for task in (above, above_too):
        with pytest.raises(Misconfigured, match=r"is a task: put @app.task above"):
            retry()(task)


def test_a_generator_cannot_be_tried_again() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def generator_too() -> AsyncIterator[int]:
        yield 1

    for broken in (generator, generator_too):
        with pytest.raises(Misconfigured, match="is a generator function: retry cannot run it again"):
            retry()(broken)


async def test_a_decorated_coroutine_function_waits_in_the_colour_of_its_caller(autojump_clock: Any) -> None:
    calls: list[float] = []

    @retry(max_retries=3, backoff=100, jitter=False)
    async def on_trio() -> str:
        calls.append(trio.current_time())
        if len(calls) < 4:
            raise OSError
        return "done"

    assert await on_trio() == "done"
    assert [round(call - calls[0]) for call in calls] == [0, 100, 300, 700]
    calls.clear()
    with trio.move_on_after(250) as scope:
        await on_trio()
    assert scope.cancelled_caught
    assert len(calls) == 2


def test_and_on_asyncio_with_others_going_on_meanwhile() -> None:
    calls: list[int] = []

    @retry(max_retries=1, backoff=0.05, jitter=False)
    async def on_asyncio() -> None:
        calls.append(1)
        raise OSError

    async def main() -> int:
        task = asyncio.create_task(on_asyncio())
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.005)
        with pytest.raises(OSError):  # noqa: PT011
            await task
        return turns

    assert asyncio.run(main()) > 3
    assert len(calls) == 2


async def test_a_function_that_would_block_the_loop_is_refused_before_it_is_called() -> None:
    flaky = Flaky(1, OSError())
    with pytest.raises(BlockingInEventLoop, match=r"Flaky.__call__ waits before it tries again"):
        retry()(flaky.__call__)(1)
    assert flaky.calls == 0
    assert retry(backoff=0)(flaky.__call__)(1) == 1
    assert flaky.calls == 2


async def test_a_thread_that_waits_ends_soon_when_its_job_is_cancelled() -> None:
    ended = threading.Event()
    began = time.monotonic()

    @retry(backoff=600, jitter=False)
    def function() -> None:
        raise OSError

    def work() -> None:
        try:
            function()
        finally:
            ended.set()

    with trio.move_on_after(0.05):
        await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    assert await trio.to_thread.run_sync(ended.wait, 5)
    assert time.monotonic() - began < 3


def test_a_section_with_retries_left_is_not_passed_over_by_one_that_tries_in_place() -> None:
    job = CurrentJob("id", "task", "queue", 1, "worker", {"it": 1})
    calls: dict[int, int] = {}

    @retry(max_retries=2, backoff=0)
    def function(most: int) -> None:
        calls[most] = calls.get(most, 0) + 1
        with retry(max_retries=most, name="it"):
            raise OSError

    token = CURRENT_JOB.set(job)
    try:
        for most in (1, 2):
            with pytest.raises(OSError):  # noqa: PT011
                function(most)
    finally:
        CURRENT_JOB.reset(token)
    assert calls == {1: 3, 2: 1}, "with its retries used up the error is for whoever is around it"
