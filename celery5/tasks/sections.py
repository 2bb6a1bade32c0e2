"""Sections: parts of a task that say for themselves what happens when they fail.

A section never replaces or wraps an error, and never runs its body again, which no context manager can: it keeps its
word on the error (`protocol/job/section_rulings.py`), which the worker finds when the error has left the task. The
innermost
section that has something to say decides. Code that catches the error further out has handled it.
"""

import functools
import inspect
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from celery5.broker.colour import current_colour
from celery5.errors import BlockingInEventLoop, Misconfigured, TimeLimitExceeded
from celery5.protocol.job.names import get_module_name
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.job.section_rulings import ErrorLeaf, get_leaf_errors, set_ruling
from celery5.protocol.job.verdict import Reason, Ruling, make_ruling
from celery5.runners.context import CURRENT_JOB, LOG_EVENT
from celery5.runners.outcome import make_failure

P = ParamSpec("P")
R = TypeVar("R")
Errors = type[Exception] | tuple[type[Exception], ...]

CANCEL_CHECK_INTERVAL = 0.05
"""Seconds: how often a thread that waits looks whether its job was cancelled."""


class CodePosition:
    """Where in the code a section was made: what it is called when it has no name. The same in each run of a job."""

    __slots__ = ("_at", "_code", "_module")

    def __init__(self, frame: FrameType) -> None:
        self._code: CodeType = frame.f_code
        self._at = frame.f_lasti
        self._module: str = frame.f_globals.get("__name__", "")

    def get_name_in(self, frame: FrameType) -> str:
        """Its name where the `with` is in `frame`. One that was made elsewhere, by a function of the user's or once for
        a module, is called after the line of the `with`; an ExitStack's `with` says nothing."""
        if self._code is frame.f_code or frame.f_globals.get("__name__") == "contextlib":
            return str(self)
        name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"
        return f"{name}:{(frame.f_lineno or 0) - frame.f_code.co_firstlineno}"

    def __str__(self) -> str:
        """`shop.sync:3:10`: a function, the line after its first, the column. Found only when asked for."""
        code = self._code
        line, _, column, _ = next(islice(code.co_positions(), self._at // 2, None), (None,) * 4)
        name = f"{self._module}.{code.co_qualname}"
        if line is None:
            return f"{name}:{self._at}"
        at = f"{name}:{line - code.co_firstlineno}"
        return at if column is None else f"{at}:{column + 1}"


class RetrySection:
    """What `retry(...)` gives: a section for `with`, or a decorator."""

    def __init__(
        self, policy: RetryPolicy, on: tuple[type[Exception], ...], name: str | CodePosition
    ) -> None:
        self._policy = policy
        self._on = on
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> None:
        job = CURRENT_JOB.get()
        if error is None or job is None:
            return
        name = self._name if isinstance(self._name, str) else self._name.get_name_in(_caller())[-200:]
        for leaf in get_leaf_errors(error, job):
            if not leaf.is_final and (
                _is_of((error, leaf.error), self._on) or _may_be_a_limit(leaf.error, self._on)
            ):
                set_ruling(leaf.error, job, make_ruling(name, self._policy, job.sections))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, which is called again in place when it fails, with waits of its caller's colour in between."""
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise Misconfigured(f"{_called(function)} is a generator function: retry cannot run it again")
        if hasattr(function, "delay"):
            raise Misconfigured(f"{_called(function)} is a task: put @app.task above @retry(...), not below")
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return cast("Callable[P, R]", self._awaiting(function))
        return cast("Callable[P, R]", self._calling(function))

    def _awaiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def again(*args: Any, **kwargs: Any) -> Any:
            attempt = 1
            while True:
                try:
                    return await function(*args, **kwargs)
                except Exception as error:
                    if not self._may_follow(attempt, error):
                        raise
                    wait = self._told(function, attempt, error)
                await _sleep(wait)
                attempt += 1

        return again

    def _calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        waits = self._policy.backoff > 0 or bool(self._policy.step)

        @functools.wraps(function)
        def again(*args: Any, **kwargs: Any) -> Any:
            if waits and current_colour() is not None:
                raise BlockingInEventLoop(
                    f"{_called(function)} waits before it tries again, which would block the event loop: "
                    "make it async def, or call it in a thread"
                )
            attempt = 1
            while True:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    if not self._may_follow(attempt, error):
                        raise
                    wait = self._told(function, attempt, error)
                _sleep_in_thread(wait)
                attempt += 1

        return again

    def _may_follow(self, attempt: int, error: Exception) -> bool:
        """Whether the function is called again after that error."""
        found = get_leaf_errors(error, CURRENT_JOB.get())
        if any(leaf.is_final for leaf in found) or _is_a_limit(found, self._on):
            return False
        wanted = all(_is_of((error, leaf.error), self._on) for leaf in found)
        return wanted and self._policy.allows(attempt)

    def _told(self, function: Callable[..., Any], attempt: int, error: Exception) -> float:
        """How many seconds to wait, when the log has been told so."""
        wait = self._policy.delay(attempt, random.random)
        _tell("section:retried", "info", _called(function), error, failed=attempt, delay=round(wait, 3))
        return wait


class OptionalSection:
    """What `optional(...)` gives: a section for `with`."""

    def __init__(self, errors: tuple[type[Exception], ...], place: CodePosition) -> None:
        self._errors = errors
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False  # nothing, a cancellation, an interruption
        found = get_leaf_errors(error, CURRENT_JOB.get())
        if any(leaf.is_final for leaf in found) or _is_a_limit(found, self._errors):
            return False
        if not all(_is_of((error, leaf.error), self._errors) for leaf in found):
            return False
        _tell("section:ignored", "warning", self._place.get_name_in(_caller()), error)
        return True


class PoisonousSection:
    """What `poisonous()` gives: a section for `with`."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> None:
        if error is None:
            return
        job = CURRENT_JOB.get()
        for leaf in get_leaf_errors(error, job):
            if not leaf.is_final:
                set_ruling(leaf.error, job, _POISONOUS)


def retry(
    *,
    max_retries: int = 3,
    backoff: float | None = None,
    cap: float | None = None,
    jitter: bool | None = None,
    step: float | None = None,
    interval_start: float | None = None,
    interval_step: float | None = None,
    interval_max: float | None = None,
    on: Errors = Exception,
    name: str | None = None,
) -> RetrySection:
    """A section with a retry policy of its own.

    `with retry(max_retries=10):` in a task: when the body fails the whole job is tried again, under this policy
    and counted for this section alone; the task's own retries stay as they are. What stands before the section runs
    again, too. When the retries are used up the error goes to the section around this one; with none around it the job
    is buried as exhausted. Outside of a worker the error just passes.

    `@retry(max_retries=3)` on a function or a coroutine function calls it again in place, in a worker or anywhere.

    `backoff`, `cap`, `jitter` and `step` are those of `RetryPolicy`; `interval_start`, `interval_step` and
    `interval_max` are the CEP's names for waits that grow evenly; all in seconds. `on` are the errors that it is
    for. `name` is what its retries are counted under: the section's place in the code, unless given; give one to
    sections in a loop. Raises Misconfigured.
    """
    said = (max_retries, backoff, cap, jitter, step, interval_start, interval_step, interval_max)
    if name is not None and not (isinstance(cast("object", name), str) and 0 < len(name) <= 200):
        raise Misconfigured(f"retry(name={name!r}): give a text of 1 to 200 characters")
    try:
        policy = _policy(*said)
    except TypeError:  # it cannot even be hashed
        policy = _policy.__wrapped__(*said)
    return RetrySection(policy, _classes("retry(on=...)", on), name or CodePosition(_caller()))


def optional(*errors: type[Exception]) -> OptionalSection:
    """A section that may fail: its failure is logged as a warning, and the task goes on after it.

    `errors` are those that it may fail with: all (`Exception`) unless given. Cancellation always passes, and so do
    `Retry`, `Reject`, what an inner `poisonous` section said no to, what an inner `retry` section will try again,
    and, unless it is named, the time limit. Of a group of errors all must be among them. Raises Misconfigured.
    """
    return OptionalSection(_classes("optional(...)", errors or Exception), CodePosition(_caller()))


def poisonous() -> PoisonousSection:
    """A section that must not fail twice: when it fails the job is dead-lettered at once, with the reason `poisonous`,
    whatever `autoretry_for` and the retry policy say. `Retry` and `Reject` pass, and so does cancellation."""
    return PoisonousSection()


def _caller() -> FrameType:
    """Where the caller of the function that asks stands."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


@functools.lru_cache(256, typed=True)
def _policy(max_retries: int, *said: Any) -> RetryPolicy:
    given = {name: value for name, value in zip(_SAID, said, strict=True) if value is not None}
    return RetryPolicy.parse({"max_retries": max_retries, **given})


def _classes(what: str, errors: object) -> tuple[type[Exception], ...]:
    each = cast("tuple[object, ...]", errors if isinstance(errors, tuple) else (errors,))
    for one in each:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise Misconfigured(f"{what} has {one!r}: give classes of errors, derived from Exception")
    return cast("tuple[type[Exception], ...]", each)


def _is_of(either: tuple[BaseException, ...], classes: tuple[type[Exception], ...]) -> bool:
    """Whether an error, or the group that it came in, is of these classes."""
    return any(isinstance(each, classes) for each in either)


def _is_a_limit(found: list[ErrorLeaf], classes: tuple[type[Exception], ...]) -> bool:
    """Whether the job's time is up. That is meant for the task, not for a section that takes any error."""
    if any(issubclass(each, TimeLimitExceeded) for each in classes):
        return False
    return any(isinstance(leaf.error, TimeLimitExceeded) for leaf in found)


def _may_be_a_limit(error: BaseException, classes: tuple[type[Exception], ...]) -> bool:
    """Whether it is the cancellation of a job that may have run for too long: what is said of a cancellation counts
    then, and only then."""
    cancelled = type(error).__name__ in ("Cancelled", "CancelledError") and not isinstance(error, Exception)
    return cancelled and any(issubclass(TimeLimitExceeded, each) for each in classes)


def _called(function: Callable[..., Any]) -> str:
    return f"{get_module_name(function)}.{getattr(function, '__qualname__', repr(function))}"


def _tell(what: str, level: str, section: str, error: Exception, **fields: Any) -> None:
    job, failure = CURRENT_JOB.get(), make_failure(error)
    about: dict[str, Any] = {"job": job.id, "task": job.task, "attempt": job.attempt} if job else {}
    about |= {"trace": job.trace} if job and job.trace else {}
    text = f"{failure.type}: {failure.message}"
    LOG_EVENT.get()(what, level, **about, section=section, error=text, **fields)


async def _sleep(seconds: float) -> None:
    if current_colour() == "trio":
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


def _sleep_in_thread(seconds: float) -> None:
    """Sleep. In a thread of Trio's, such as a job's, raises Cancelled soon when the job is cancelled."""
    until, trio = time.monotonic() + seconds, sys.modules.get("trio")
    while (left := until - time.monotonic()) > 0:
        if trio is not None:
            with suppress(RuntimeError):  # this is no thread of Trio's
                trio.from_thread.check_cancelled()
        time.sleep(min(left, CANCEL_CHECK_INTERVAL))


_SAID = ("backoff", "cap", "jitter", "step", "interval_start", "interval_step", "interval_max")
_POISONOUS = Ruling(reason=Reason.POISONOUS)
