"""Trio runner: runs `async def` tasks in the worker's own loop."""

import gc
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any

import trio
from msgspec.structs import replace
from trio.lowlevel import Abort, RaiseCancelT

from celery5.errors import SoftTimeLimitExceeded
from celery5.protocol.job.verdict import Outcome, Raised
from celery5.runners.context import LOG_EVENT, get_log_fields, isolate_decimal_context
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import RunningJob
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import ScopeGuard, find_cancellation

_CHECKPOINT = trio.lowlevel.checkpoint.__code__


class TrioSoftLimit:
    """Raises a soft time limit in one coroutine that the current Trio task drives.

    The driver passes each wait through `observe_wait`, and throws `pending_error` into the coroutine instead of the
    result of the wait.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.pending_error: SoftTimeLimitExceeded | None = None
        self._coroutine = coroutine
        self._task = trio.lowlevel.current_task()
        self._requested_error: SoftTimeLimitExceeded | None = None
        self._wait: _Wait | None = None

    def raise_soon(self, error: SoftTimeLimitExceeded) -> None:
        """Raise `error` in the coroutine: now if its wait can be aborted, else as soon as one can."""
        self._requested_error = error
        # The wait may be over although the task has not continued yet. Trio itself checks the same attribute.
        current_abort: Any = getattr(self._task, "_abort_func", None)
        if self._wait is not None and current_abort is self._wait and self._abort_wait(self._wait):
            trio.lowlevel.reschedule(self._task)

    def observe_wait(self, request: Any) -> Any:
        """Return what to yield to the loop instead of `request`, unless there is a `pending_error` afterwards."""
        abort = getattr(request, "abort_func", None)
        if abort is None:
            self._wait = None
            if self._requested_error is not None and _at_a_checkpoint(self._coroutine):
                self.pending_error, self._requested_error = self._requested_error, None
            return request
        self._wait = wait = _Wait(abort)
        if self._requested_error is not None:
            self._abort_wait(wait)
        return type(request)(wait)

    def _abort_wait(self, wait: "_Wait") -> bool:
        """Abort the wait if it can be; the error is pending then."""
        error = self._requested_error

        def raise_error() -> None:
            # A nursery calls this at once and keeps the error; a thread calls it as often as it checks; others never.
            if wait.cancelled is not None:
                wait.cancelled()
            if wait.was_raised:
                return
            wait.was_raised, self._requested_error = not wait.abandoned, None
            raise SoftTimeLimitExceeded(*error.args if error else ())

        if wait(raise_error) is not Abort.SUCCEEDED:
            return False
        self.pending_error, self._requested_error, wait.abandoned = error, None, True
        return True


class _Wait:
    """The abort function of one wait. The real one is called once at most, as Trio promises.

    `cancelled` raises a cancellation that came after the soft limit: a thread that checks again after the soft limit
    (`was_raised`) gets it. A thread that was `abandoned` gets the soft limit as often as it checks.
    """

    __slots__ = ("_abort", "abandoned", "cancelled", "was_raised")

    def __init__(self, abort: Any) -> None:
        self._abort = abort
        self.cancelled: RaiseCancelT | None = None
        self.was_raised = self.abandoned = False

    def __call__(self, raise_cancel: Any) -> Abort:
        abort, self._abort = self._abort, None
        if abort is None:
            self.cancelled = raise_cancel
            return Abort.FAILED
        result: Abort = abort(raise_cancel)
        return result


def _at_a_checkpoint(coroutine: Any) -> bool:
    """Return whether a coroutine is in `trio.lowlevel.checkpoint()` (or `sleep(0)`), where an error can do no harm.

    Whatever else yields to the loop may have done something already.
    """
    inner = coroutine
    while inner is not None:
        if getattr(inner, "cr_code", None) is _CHECKPOINT:
            return True
        inner = get_awaited(inner)
    return False


def get_awaited(outer: Any) -> Any:
    """Return what a coroutine, a generator or a step of an asynchronous generator awaits; None at the end."""
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(outer, name):
            return getattr(outer, name)
    # A step of an asynchronous generator has no attribute for its generator, but the garbage collector knows it.
    return next((referent for referent in gc.get_referents(outer) if hasattr(referent, "ag_await")), None)


ASYNCIO_HINT = 'this task runs on Trio: declare it, or the App, with loop="asyncio" if it uses asyncio'
_NO_ASYNCIO = ("no running event loop", "some other framework like asyncio")
"""Error texts of asyncio where only Trio runs, and of Trio about futures of asyncio."""


class TrioRunner:
    """Runs I/O-bound tasks. They must not block; `def` tasks may."""

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run the job in its own context and return its outcome.

        Raises the cancellation of the Trio task. Every other error is the job's outcome, KeyboardInterrupt, SystemExit
        and a Cancelled that it has raised by itself, too. So is what it did to the cancel scopes around it: the
        executor is told when it cannot go on in them (`RunningJob.leave_task`).
        """
        guard = running_job.scope_guard
        if guard is None:
            running_job.set_scope_guard(guard := ScopeGuard())
        context = copy_context()
        context.run(isolate_decimal_context)
        try:
            coroutine = surround_call(function, "trio")(*args, **kwargs)
            try:
                request = context.run(coroutine.send, None)
            except StopIteration as stop:
                value = stop.value
            else:
                if running_job.limits is not None and running_job.limits.soft is not None:
                    value = await _run_with_soft_limit(coroutine, context, request, running_job)
                else:
                    value = await _drive(coroutine, context, request)
            outcome: Outcome = get_result_outcome(value)
        except BaseException as error:
            outcome = _get_outcome_of(error, guard, running_job)
        if not guard.is_intact:
            running_job.leave_task()
            if not guard.restore():
                LOG_EVENT.get()("job:scopes-left-open", "warning", hint=_SCOPES_HINT, **get_log_fields())
        return outcome


def _get_outcome_of(error: BaseException, guard: ScopeGuard, running_job: RunningJob) -> Outcome:
    """Return the outcome of a task that has raised `error`; raise the cancellation of the Trio task."""
    is_whole = (
        guard.is_intact or guard.restore()
    )  # what the job has left open is no cancellation from outside
    cancellation = find_cancellation(error)
    if cancellation is None:
        return _add_hint(get_error_outcome(error))
    if not is_whole:
        running_job.leave_task()
    running_job.record_traceback(error)
    raise cancellation


def _add_hint(outcome: Outcome) -> Outcome:
    """Add what to do to the failure of a job that has called asyncio."""
    if type(outcome) is not Raised or not any(text in outcome.failure.message for text in _NO_ASYNCIO):
        return outcome
    failure = replace(outcome.failure, message=f"{outcome.failure.message} ({ASYNCIO_HINT})")
    return replace(outcome, failure=failure)


@types.coroutine
def _drive(coroutine: Coroutine[Any, Any, Any], context: Context, request: Any) -> Generator[Any, Any, Any]:
    """Drive a coroutine to its end, in a context that is not the task's, after its first `request` to the loop.

    An executor runs job after job in one Trio task, and a task has one context. So each step of a job is made in the
    job's own context, and the tasks that the job spawns copy that one.
    """
    while True:
        try:
            answer = yield request
            step = coroutine.send
        except GeneratorExit:
            context.run(coroutine.close)
            raise
        except BaseException as error:
            answer, step = error, coroutine.throw
        try:
            request = context.run(step, answer)
        except StopIteration as stop:
            return stop.value


async def run_in_context(coroutine: Coroutine[Any, Any, Any], context: Context) -> Any:
    """Run a coroutine to its end in a context that is not the task's, and return its result."""
    try:
        request = context.run(coroutine.send, None)
    except StopIteration as stop:
        return stop.value
    return await _drive(coroutine, context, request)


async def _run_with_soft_limit(
    coroutine: Coroutine[Any, Any, Any], context: Context, request: Any, running_job: RunningJob
) -> Any:
    """Drive a coroutine to its end; its soft limit can be raised in it."""
    soft_limit = TrioSoftLimit(coroutine)
    running_job.allow_interrupts(soft_limit.raise_soon)
    try:
        return await _drive_with_soft_limit(coroutine, context, request, soft_limit)
    finally:
        running_job.forbid_interrupts()


@types.coroutine
def _drive_with_soft_limit(
    coroutine: Coroutine[Any, Any, Any], context: Context, request: Any, soft_limit: TrioSoftLimit
) -> Generator[Any, Any, Any]:
    while True:
        request = soft_limit.observe_wait(request)
        answer: Any = None
        step: Callable[[Any], Any] = coroutine.send
        if soft_limit.pending_error is None:
            try:
                answer = yield request
            except GeneratorExit:
                context.run(coroutine.close)
                raise
            except BaseException as error:
                answer, step = error, coroutine.throw
        if soft_limit.pending_error is not None:
            answer, step = soft_limit.pending_error, coroutine.throw
            soft_limit.pending_error = None
        try:
            request = context.run(step, answer)
        except StopIteration as stop:
            return stop.value


DRIVER_CODES = (_drive.__code__, _drive_with_soft_limit.__code__)
"""The code that drives a job's coroutine, its local variable `coroutine`, which is not among what the task awaits."""
_SCOPES_HINT = (
    "the task has left a nursery or a cancel scope open, or closed one that is not its own: use `with`"
)
