"""Sections of a task that decide what happens when they fail: `retry`, `optional` and `poisonous`.

A context manager cannot run its body again, so a section does not, and it never replaces or wraps an error. It stores
its ruling on the error (`protocol/job/verdict.py`), and the worker reads that when the error has left the task.
The innermost section with a ruling decides. Code that catches the error further out has handled it.
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
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.job.verdict import ErrorLeaf, Reason, Ruling, get_leaf_errors, make_ruling, set_ruling
from celery5.protocol.masking import get_type_name
from celery5.protocol.names import get_module_name
from celery5.runners.context import CURRENT_JOB, LOG_EVENT
from celery5.runners.outcome import make_failure

P = ParamSpec("P")
R = TypeVar("R")
Errors = type[Exception] | tuple[type[Exception], ...]

CANCEL_CHECK_INTERVAL = 0.05
"""Seconds between two checks of a waiting thread whether its job was cancelled."""


class CodePosition:
    """Where in the code a section was made: its name if it has no other. The same in each run of a job."""

    __slots__ = ("_at", "_code", "_module")

    def __init__(self, frame: FrameType) -> None:
        self._code: CodeType = frame.f_code
        self._at = frame.f_lasti
        self._module: str = frame.f_globals.get("__name__", "")

    def get_name_in(self, frame: FrameType) -> str:
        """Return the name of a section whose `with` is in `frame`.

        A section that was made in another place, by a function of the user's or once for a module, is named after the
        line of the `with`. The `with` of an ExitStack has no meaningful line.
        """
        if self._code is frame.f_code or frame.f_globals.get("__name__") == "contextlib":
            return str(self)
        name = f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}"
        return f"{name}:{(frame.f_lineno or 0) - frame.f_code.co_firstlineno}"

    def __str__(self) -> str:
        """Return `shop.sync:3:10`: a function, the line after its first, the column. Computed on use only."""
        code = self._code
        line, _, column, _ = next(islice(code.co_positions(), self._at // 2, None), (None,) * 4)
        name = f"{self._module}.{code.co_qualname}"
        if line is None:
            return f"{name}:{self._at}"
        place = f"{name}:{line - code.co_firstlineno}"
        return place if column is None else f"{place}:{column + 1}"


class RetrySection:
    """The result of `retry(...)`: a section for `with`, or a decorator."""

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
                _is_of((error, leaf.error), self._on) or _may_be_time_limit(leaf.error, self._on)
            ):
                set_ruling(leaf.error, job, make_ruling(name, self._policy, job.sections))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that calls `function` again when it fails. It waits as its caller's event loop requires."""
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise Misconfigured(f"{_called(function)} is a generator function: retry cannot run it again")
        if hasattr(function, "delay"):
            raise Misconfigured(f"{_called(function)} is a task: put @app.task above @retry(...), not below")
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return cast("Callable[P, R]", self._awaiting(function))
        return cast("Callable[P, R]", self._calling(function))

    def _awaiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def call_with_retries(*args: Any, **kwargs: Any) -> Any:
            attempt = 1
            while True:
                try:
                    return await function(*args, **kwargs)
                except Exception as error:
                    if not self._may_retry(attempt, error):
                        raise
                    wait = self._log_retry(function, attempt, error)
                await _sleep(wait)
                attempt += 1

        return call_with_retries

    def _calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        waits = self._policy.backoff > 0 or bool(self._policy.step)

        @functools.wraps(function)
        def call_with_retries(*args: Any, **kwargs: Any) -> Any:
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
                    if not self._may_retry(attempt, error):
                        raise
                    wait = self._log_retry(function, attempt, error)
                _sleep_in_thread(wait)
                attempt += 1

        return call_with_retries

    def _may_retry(self, attempt: int, error: Exception) -> bool:
        """Return whether the function is called again after this error."""
        leaves = get_leaf_errors(error, CURRENT_JOB.get())
        if any(leaf.is_final for leaf in leaves) or _has_time_limit(leaves, self._on):
            return False
        wanted = all(_is_of((error, leaf.error), self._on) for leaf in leaves)
        return wanted and self._policy.allows(attempt)

    def _log_retry(self, function: Callable[..., Any], attempt: int, error: Exception) -> float:
        """Log the retry, and return how many seconds to wait."""
        wait = self._policy.delay(attempt, random.random)
        _tell("section:retried", "info", _called(function), error, failed=attempt, delay=round(wait, 3))
        return wait


class OptionalSection:
    """The result of `optional(...)`: a section for `with`."""

    def __init__(self, errors: tuple[type[Exception], ...], place: CodePosition) -> None:
        self._errors = errors
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False  # no error, a cancellation or an interruption
        leaves = get_leaf_errors(error, CURRENT_JOB.get())
        if any(leaf.is_final for leaf in leaves) or _has_time_limit(leaves, self._errors):
            return False
        if not all(_is_of((error, leaf.error), self._errors) for leaf in leaves):
            return False
        _tell("section:ignored", "warning", self._place.get_name_in(_caller()), error)
        return True


class PoisonousSection:
    """The result of `poisonous()`: a section for `with`."""

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
    """Return a section with its own retry policy.

    `with retry(max_retries=10):` in a task: when the body fails the whole job is tried again, under this policy
    and counted for this section alone; the task's own retries do not change. Code before the section runs again, too.
    When the retries are used up the section around this one decides; without one the job becomes a dead letter with the
    reason `exhausted`. Outside of a worker the error just passes.

    `@retry(max_retries=3)` on a function or a coroutine function calls it again in place, in a worker or anywhere.

    `backoff`, `cap`, `jitter` and `step` are those of `RetryPolicy`; `interval_start`, `interval_step` and
    `interval_max` are the CEP's names for delays that grow linearly; all in seconds. `on` are the errors to retry.
    `name` is the name under which retries are counted, by default the section's place in the code; name sections in a
    loop. Raises Misconfigured.
    """
    policy_values = (max_retries, backoff, cap, jitter, step, interval_start, interval_step, interval_max)
    if name is not None and not (isinstance(cast("object", name), str) and 0 < len(name) <= 200):
        raise Misconfigured(f"retry(name={name!r}): give a text of 1 to 200 characters")
    try:
        policy = _policy(*policy_values)
    except TypeError:  # a value that cannot be hashed
        policy = _policy.__wrapped__(*policy_values)
    return RetrySection(policy, _classes("retry(on=...)", on), name or CodePosition(_caller()))


def optional(*errors: type[Exception]) -> OptionalSection:
    """Return a section that may fail: its failure is logged as a warning, and the task continues after it.

    `errors` are the errors with which it may fail; by default all (`Exception`). Cancellation always passes. So do
    `Retry`, `Reject`, an error of an inner `poisonous` section, an error that an inner `retry` section will retry,
    and, unless it is named, the time limit. Of a group of errors all must be among them. Raises Misconfigured.
    """
    return OptionalSection(_classes("optional(...)", errors or Exception), CodePosition(_caller()))


def poisonous() -> PoisonousSection:
    """Return a section that must not fail twice.

    When it fails the job becomes a dead letter at once, with the reason `poisonous`, whatever `autoretry_for` and the
    retry policy are. `Retry`, `Reject` and cancellation pass.
    """
    return PoisonousSection()


def _caller() -> FrameType:
    """Return the frame that called the caller of this function."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


@functools.lru_cache(256, typed=True)
def _policy(max_retries: int, *values: Any) -> RetryPolicy:
    options = {name: value for name, value in zip(_POLICY_OPTIONS, values, strict=True) if value is not None}
    return RetryPolicy.parse({"max_retries": max_retries, **options})


def _classes(what: str, errors: object) -> tuple[type[Exception], ...]:
    classes = cast("tuple[object, ...]", errors if isinstance(errors, tuple) else (errors,))
    for error_class in classes:
        if not (isinstance(error_class, type) and issubclass(error_class, Exception)):
            raise Misconfigured(f"{what} has {error_class!r}: give classes of errors, derived from Exception")
    return cast("tuple[type[Exception], ...]", classes)


def _is_of(errors: tuple[BaseException, ...], classes: tuple[type[Exception], ...]) -> bool:
    """Return whether an error, or the group that contains it, is of these classes."""
    return any(isinstance(error, classes) for error in errors)


def _has_time_limit(leaves: list[ErrorLeaf], classes: tuple[type[Exception], ...]) -> bool:
    """Return whether a time limit was exceeded, which is for the task to handle unless `classes` name it."""
    if any(issubclass(error_class, TimeLimitExceeded) for error_class in classes):
        return False
    return any(isinstance(leaf.error, TimeLimitExceeded) for leaf in leaves)


def _may_be_time_limit(error: BaseException, classes: tuple[type[Exception], ...]) -> bool:
    """Return whether an error is a cancellation that a time limit may have caused.

    The ruling on a cancellation counts only if a time limit did cause it.
    """
    cancelled = get_type_name(error) in ("Cancelled", "CancelledError") and not isinstance(error, Exception)
    return cancelled and any(issubclass(TimeLimitExceeded, error_class) for error_class in classes)


def _called(function: Callable[..., Any]) -> str:
    return f"{get_module_name(function)}.{getattr(function, '__qualname__', repr(function))}"


def _tell(event: str, level: str, section: str, error: Exception, **fields: Any) -> None:
    job, failure = CURRENT_JOB.get(), make_failure(error)
    job_fields: dict[str, Any] = {"job": job.id, "task": job.task, "attempt": job.attempt} if job else {}
    job_fields |= {"trace": job.trace} if job and job.trace else {}
    text = f"{failure.type}: {failure.message}"
    LOG_EVENT.get()(event, level, **job_fields, section=section, error=text, **fields)


async def _sleep(seconds: float) -> None:
    if current_colour() == "trio":
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


def _sleep_in_thread(seconds: float) -> None:
    """Sleep. In a thread of Trio's, such as a job's, raises Cancelled soon when the job is cancelled."""
    deadline, trio = time.monotonic() + seconds, sys.modules.get("trio")
    while (left := deadline - time.monotonic()) > 0:
        if trio is not None:
            with suppress(RuntimeError):  # this is no thread of Trio's
                trio.from_thread.check_cancelled()
        time.sleep(min(left, CANCEL_CHECK_INTERVAL))


_POLICY_OPTIONS = ("backoff", "cap", "jitter", "step", "interval_start", "interval_step", "interval_max")
_POISONOUS = Ruling(reason=Reason.POISONOUS)
