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
from celery5.runners.context import isolate_decimal_context
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import RunningJob

_CHECKPOINT = trio.lowlevel.checkpoint.__code__


class TrioSoftLimit:
    """For one coroutine that the current Trio task drives: whoever drives it shows each wait to `watch`, and throws
    into it what is `given`, instead of the wait's answer."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.pending_error: SoftTimeLimitExceeded | None = None
        self._coroutine = coroutine
        self._task = trio.lowlevel.current_task()
        self._owed: SoftTimeLimitExceeded | None = None
        self._wait: _Wait | None = None

    def raise_soon(self, error: SoftTimeLimitExceeded) -> None:
        """Raise `error` in the coroutine: now, if what it waits for can be given up, else as soon as that is so."""
        self._owed = error
        # The wait may be over, though the task has not gone on yet; Trio itself asks the same attribute.
        waits: Any = getattr(self._task, "_abort_func", None)
        if self._wait is not None and waits is self._wait and self._given_up(self._wait):
            trio.lowlevel.reschedule(self._task)

    def observe_wait(self, asked: Any) -> Any:
        """The coroutine `asked` the loop for this: gives what is to be asked instead, unless something is `given`."""
        abort = getattr(asked, "abort_func", None)
        if abort is None:
            self._wait = None
            if self._owed is not None and _at_a_checkpoint(self._coroutine):
                self.pending_error, self._owed = self._owed, None
            return asked
        self._wait = wait = _Wait(abort)
        if self._owed is not None:
            self._given_up(wait)
        return type(asked)(wait)

    def _given_up(self, wait: "_Wait") -> bool:
        """Try to abort the wait; when that succeeds, the error is given."""
        error = self._owed

        def tell() -> None:
            # Called at once by a nursery, which keeps the error; by a thread, as often as it asks; or never.
            if wait.cancelled is not None:
                wait.cancelled()
            if wait.told:
                return
            wait.told, self._owed = not wait.abandoned, None
            raise SoftTimeLimitExceeded(*error.args if error else ())

        if wait(tell) is not Abort.SUCCEEDED:
            return False
        self.pending_error, self._owed, wait.abandoned = error, None, True
        return True


class _Wait:
    """The abort function of one wait. It is called once at most, by whoever is first, as Trio promises it.

    `cancelled` raises the cancellation that came after the soft limit: whoever was `told` of that and asks again hears
    of this. Who was `abandoned` has nothing to go on with, and hears of its limit as often as it asks.
    """

    __slots__ = ("_abort", "abandoned", "cancelled", "told")

    def __init__(self, abort: Any) -> None:
        self._abort = abort
        self.cancelled: RaiseCancelT | None = None
        self.told = self.abandoned = False

    def __call__(self, raise_cancel: Any) -> Abort:
        abort, self._abort = self._abort, None
        if abort is None:
            self.cancelled = raise_cancel
            return Abort.FAILED
        done: Abort = abort(raise_cancel)
        return done


def _at_a_checkpoint(coroutine: Any) -> bool:
    """Whether a coroutine stands in `trio.lowlevel.checkpoint()` (or `sleep(0)`), which has done nothing yet that an
    error could spoil. Whatever else asks for a turn of the loop has."""
    inner = coroutine
    while inner is not None:
        if getattr(inner, "cr_code", None) is _CHECKPOINT:
            return True
        inner = _awaited(inner)
    return False


def _awaited(outer: Any) -> Any:
    """What a coroutine, a generator or a step of an asynchronous generator waits for; None at the end."""
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(outer, name):
            return getattr(outer, name)
    # A step of an asynchronous generator does not say whose it is, but the collector knows.
    return next((each for each in gc.get_referents(outer) if hasattr(each, "ag_await")), None)


ASYNCIO_HINT = 'this task runs on Trio: declare it with @app.task(loop="asyncio") if it uses asyncio'
_NO_ASYNCIO = ("no running event loop", "some other framework like asyncio")
"""What asyncio says where there is only Trio, and Trio of what it does not know."""


class TrioRunner:
    """Runs I/O-bound tasks (C60). They must not block; `def` tasks are for that."""

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run to the end, in a context of the job's own. Cancellation goes through: the executor knows what it means.

        So does KeyboardInterrupt, which Trio raises in whatever code runs; all else is the job's own affair, a
        SystemExit too, alone or in the group that a nursery makes of it.
        """
        context = copy_context()
        context.run(isolate_decimal_context)
        try:
            coroutine = function(*args, **kwargs)
            try:
                asked = context.run(coroutine.send, None)
            except StopIteration as stop:
                return get_result_outcome(stop.value)
            if running_job.limits is not None and running_job.limits.soft is not None:
                return get_result_outcome(await _softly(coroutine, context, asked, running_job))
            return get_result_outcome(await _the_rest(coroutine, context, asked))
        except _NOT_ITS_OWN as error:
            running_job.record_traceback(error)
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(_NOT_ITS_OWN) is not None:
                running_job.record_traceback(group)
                raise
            return get_error_outcome(group)
        except BaseException as error:
            return _hinted(get_error_outcome(error))


def _hinted(outcome: Outcome) -> Outcome:
    """What failed because it called asyncio says what to do."""
    if type(outcome) is not Raised or not any(each in outcome.failure.message for each in _NO_ASYNCIO):
        return outcome
    failure = replace(outcome.failure, message=f"{outcome.failure.message} ({ASYNCIO_HINT})")
    return replace(outcome, failure=failure)


@types.coroutine
def _the_rest(coroutine: Coroutine[Any, Any, Any], context: Context, asked: Any) -> Generator[Any, Any, Any]:
    """What a coroutine does after it `asked` the loop for the first time, in a `context` that is not the task's.

    An executor takes job after job in one Trio task, and a task has one context: so each step of a job is made in the
    job's own. What it spawns copies that one.
    """
    while True:
        try:
            answer = yield asked
            step = coroutine.send
        except GeneratorExit:
            context.run(coroutine.close)
            raise
        except BaseException as error:
            answer, step = error, coroutine.throw
        try:
            asked = context.run(step, answer)
        except StopIteration as stop:
            return stop.value


async def _softly(coroutine: Coroutine[Any, Any, Any], context: Context, asked: Any, hand: RunningJob) -> Any:
    """The same for a job that may be told that its time is nearly up."""
    nudge = TrioSoftLimit(coroutine)
    hand.raise_soft_limit = nudge.raise_soon
    try:
        return await _nudged(coroutine, context, asked, nudge)
    finally:
        hand.raise_soft_limit = None


@types.coroutine
def _nudged(
    coroutine: Coroutine[Any, Any, Any], context: Context, asked: Any, nudge: TrioSoftLimit
) -> Generator[Any, Any, Any]:
    while True:
        asked = nudge.observe_wait(asked)
        answer: Any = None
        step: Callable[[Any], Any] = coroutine.send
        if nudge.pending_error is None:
            try:
                answer = yield asked
            except GeneratorExit:
                context.run(coroutine.close)
                raise
            except BaseException as error:
                answer, step = error, coroutine.throw
        if nudge.pending_error is not None:
            answer, step = nudge.pending_error, coroutine.throw
            nudge.pending_error = None
        try:
            asked = context.run(step, answer)
        except StopIteration as stop:
            return stop.value


def find_driven_coroutine(frame: types.FrameType) -> Coroutine[Any, Any, Any] | None:
    """The job's coroutine, if a frame is one that drives it by hand: who follows what a task awaits does not see it."""
    return frame.f_locals.get("coroutine") if frame.f_code in _DRIVERS else None


_DRIVERS = (_the_rest.__code__, _nudged.__code__)
_NOT_ITS_OWN = (trio.Cancelled, KeyboardInterrupt, GeneratorExit)
