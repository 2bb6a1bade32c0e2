"""Trio runner: runs `async def` tasks in the worker's own loop.

Floor: runners. Reads: nothing. Writes: nothing.
"""

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any

import trio
from msgspec.structs import replace

from celery5.protocol.verdict import Outcome, Raised
from celery5.runners.context import isolate_decimal_context
from celery5.runners.ending import get_error_outcome, get_result_outcome
from celery5.runners.hand import RunningJob
from celery5.runners.nudge import TrioSoftLimit

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
