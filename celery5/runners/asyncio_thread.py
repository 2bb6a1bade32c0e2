"""The event loop of asyncio in its thread, and the jobs that run in it: loaded with the first of them."""

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import cache
from types import CoroutineType
from typing import Any, cast

import trio
from trio.lowlevel import Abort, RaiseCancelT

from celery5.errors import SoftTimeLimitExceeded
from celery5.protocol.job.verdict import INTERRUPTED, Outcome
from celery5.protocol.process.frozen import name_slot
from celery5.runners.context import isolate_decimal_context
from celery5.runners.jobs_loop import JobsLoop, make_loop, start_task
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import JobCall, RunningJob
from celery5.runners.surrounding import surround_call


class AsyncioSoftLimit:
    """Raises a soft time limit in one coroutine: await it instead of that coroutine, in its own asyncio task."""

    def __init__(self) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._pending_error: SoftTimeLimitExceeded | None = None
        self._stopped = False

    def raise_soon(self, error: SoftTimeLimitExceeded) -> None:
        """Raise `error` in the coroutine, where it awaits now or first. Call it in the loop."""
        if self._stopped or (self._task is not None and self._task.done()):
            return
        self._pending_error = error
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """Treat every later cancellation as a real one. Call it in the loop."""
        self._pending_error, self._stopped = None, True

    def wrap(self, coroutine: Coroutine[Any, Any, Any]) -> "AsyncioSoftLimit":
        """Return itself, to be awaited instead of `coroutine`."""
        self._coroutine = coroutine
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        # `stacks.py` finds the job's coroutine here, by the name of the variable.
        coroutine = self._coroutine
        assert coroutine is not None
        self._task = asyncio.current_task()
        if self._pending_error is not None and self._task is not None:
            self._task.cancel()
        step: Callable[[Any], Any] = coroutine.send
        answer: Any = None
        while True:
            try:
                awaited = step(answer)
            except StopIteration as stop:
                return stop.value
            try:
                answer = yield awaited
                step = coroutine.send
            except GeneratorExit:
                coroutine.close()
                raise
            except asyncio.CancelledError as error:
                answer, step = self._translate(error), coroutine.throw
            except BaseException as error:
                answer, step = error, coroutine.throw
            else:
                self._cancel_again()

    def _translate(self, error: asyncio.CancelledError) -> BaseException:
        """Return the soft time limit that a cancellation stands for, or the cancellation itself."""
        pending, self._pending_error = self._pending_error, None
        if pending is None or self._task is None:
            return error
        self._task.uncancel()
        return SoftLimitCancelled(*pending.args)

    def _cancel_again(self) -> None:
        """Cancel again at the next await: what was awaited has swallowed the cancellation."""
        if self._pending_error is not None and self._task is not None:
            self._task.uncancel()
            self._task.cancel()


class SoftLimitCancelled(SoftTimeLimitExceeded, asyncio.CancelledError):
    """A SoftTimeLimitExceeded that asyncio's own tools (TaskGroup, `wait_for`) treat as a cancellation: they clean up
    and let it through. Its class is shown as SoftTimeLimitExceeded."""


SoftLimitCancelled.__name__ = SoftTimeLimitExceeded.__name__
SoftLimitCancelled.__qualname__ = SoftTimeLimitExceeded.__qualname__
SoftLimitCancelled.__module__ = SoftTimeLimitExceeded.__module__


MAX_TURN = 0.001
"""Seconds of jobs that begin in one turn of the loop: then others go on, and what has ended is reported."""
CANCEL_TIMEOUT = 3.0
"""Seconds that a cancelled asyncio task is waited for, unless `RunningJob.cancel` says otherwise. A task that blocks
its loop or ignores the cancellation is then abandoned, like a thread."""


class LoopThread(trio.abc.Instrument):
    """The event loop in its thread, and the jobs that run in it."""

    def __init__(self) -> None:
        self.loop = make_loop()
        self.jobs: set[_AsyncioJob] = set()
        self.thread = threading.Thread(target=self._serve, name="celery5-asyncio", daemon=True)
        self._ending = False
        self._failure = ""  # why it has ended; '' if that was in order
        self._token = trio.lowlevel.current_trio_token()
        # Jobs go to the loop in lists, and come back in lists: for each list one thread wakes the other.
        self._begun: deque[tuple[_AsyncioJob, contextvars.Context]] = deque()
        self._ended: deque[_AsyncioJob] = deque()
        self._wakes_loop = self._wakes_trio = False
        trio.lowlevel.add_instrument(self)
        self.thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether it can run jobs."""
        return self.thread.is_alive() and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more jobs."""
        return self.loop.is_closed()

    def begin(self, job: "_AsyncioJob") -> None:
        """Begin a job in a copy of this context. Call it in the Trio loop.

        The only one begins now; others when this turn of the Trio loop ends. Woken for the first of them the loop would
        take that one alone, and most lists would have one job.
        """
        self._begun.append((job, contextvars.copy_context()))
        self.jobs.add(job)
        if len(self.jobs) == 1:
            self._wake_loop()

    def before_io_wait(self, timeout: float) -> None:
        """Wake the loop for the jobs of this turn of the Trio loop: called by Trio."""
        if self._begun:
            self._wake_loop()

    def _wake_loop(self) -> None:
        if self._wakes_loop:
            return
        self._wakes_loop = True
        try:
            self.loop.call_soon_threadsafe(self._begin_jobs)
        except RuntimeError:  # the loop is closed
            self._fail_jobs([job for job, _ in self._begun])

    def _begin_jobs(self) -> None:
        self._wakes_loop = False  # what is appended from now on wakes the loop again
        pause_at = time.perf_counter() + MAX_TURN
        self._wakes_trio = True  # below, and not for each that ends here
        while self._begun:
            job, context = self._begun.popleft()
            try:
                job.start(context)
            except BaseException as error:  # no task could be made: the next job may have more luck
                job.fail(error)
            if time.perf_counter() > pause_at:
                if self._begun and not self._wakes_loop:
                    self._wakes_loop = True
                    self.loop.call_soon(self._begin_jobs)
                break
        if self._ended:
            self._wake_trio()
        self._wakes_trio = False

    def report_end(self, job: "_AsyncioJob") -> None:
        """Wake the Trio task of a job that has ended. Call it in this loop."""
        self._ended.append(job)
        if not self._wakes_trio:
            self._wakes_trio = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and `_serve` wakes Trio
                self.loop.call_soon(self._wake_trio)  # after all that end in this turn of the loop

    def _wake_trio(self) -> None:
        self._wakes_trio = False
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._collect)

    def _collect(self) -> None:
        while self._ended:
            self._ended.popleft().wake()

    def release(self) -> None:
        """Begin no more jobs in it. Call it in the Trio loop."""
        trio.lowlevel.remove_instrument(self)

    def end(self) -> None:
        """Cancel what is left and end the thread. Call it in the Trio loop."""
        self.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._ending = True
        self.loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._ending:
                # The loop continues even if a job calls loop.stop(), or a task of the job raises SystemExit.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self._cancel_leftovers()
        except BaseException as error:  # it cannot continue: its selector is broken, for example
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(Exception):
                self.loop.close()
            self._fail_jobs(list(self.jobs))

    def _fail_jobs(self, jobs: Sequence["_AsyncioJob"]) -> None:
        """End jobs because the loop has ended. Call it in any thread."""
        for job in jobs:
            job.fail_by_loop_end(self._failure)
            self._ended.append(job)
        self._wake_trio()

    def _cancel_leftovers(self) -> None:
        """Cancel the tasks that jobs have left behind."""
        self.loop.set_task_factory(None)
        leftovers = asyncio.all_tasks(self.loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            self.loop.run_until_complete(asyncio.wait(leftovers, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())


class LoopJobWaiter:
    """The Trio task that waits for a job in the loop, and then for those that it goes on with.

    To wake the task for each of them would take as long as to run a short one.
    """

    job: "_AsyncioJob"

    def __init__(self, loop: LoopThread, running_job: RunningJob) -> None:
        self._loop = loop
        self._running_job = running_job
        self._task = trio.lowlevel.current_task()
        self._outcome: Outcome = INTERRUPTED
        self._is_parked = False

    def begin(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begin a job. Call it in the Trio loop, in the context of the task."""
        loop, running_job = self._loop, self._running_job
        self.job = job = _AsyncioJob(
            loop, self, surround_call(function, "asyncio"), args, kwargs, running_job
        )
        if running_job.slot is not None and loop.thread.native_id is not None:
            running_job.slot.set_thread(loop.thread.native_id)
        running_job.set_thread(job)
        loop.begin(job)

    async def wait(self) -> Outcome:
        """Return the outcome. Cancelled, it cancels the job; `_AsyncioJob.wait_cancelled` waits for the end of that."""
        if self._running_job.has_soft_limit:
            self._running_job.allow_interrupts(self.job.raise_soft_limit)
        self._is_parked = True
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        return self._outcome

    def end(self) -> None:
        """Let go of the last job: no cycle is left to the garbage collector."""
        self._running_job.forbid_interrupts()
        self._running_job.set_thread(None)
        if self._running_job.thread_ended is None:
            self.job.forget()
        del self.job

    def _abort(self, _raise: RaiseCancelT) -> Abort:
        self._is_parked = False
        self.job.cancel()
        return Abort.SUCCEEDED

    def wake(self, outcome: Outcome) -> None:
        """Go on with the next job, or wake the task. Call it in the Trio loop."""
        if self._is_parked:
            self._task.context.run(self._go_on, outcome)

    def _go_on(self, outcome: Outcome) -> None:
        choose_next = None if self._loop.has_ended else self._running_job.go_on
        following = outcome if choose_next is None else choose_next(outcome)
        if isinstance(following, JobCall):
            self.begin(*following)
            return
        self._outcome, self._is_parked = following, False
        trio.lowlevel.reschedule(self._task)


class _AsyncioJob:
    """One job in the asyncio loop."""

    # What the loop runs for the job; None before that and afterwards.
    coroutine: "CoroutineType[Any, Any, Any] | None" = None
    outcome: Outcome | None = None
    is_running = True
    _task: asyncio.Task[None] | None = None
    _soft_limit: AsyncioSoftLimit | None = None
    _has_begun = _is_cancelled = _is_over = False
    _ended: trio.Event | None = None

    def __init__(
        self,
        loop: "LoopThread",
        waiter: LoopJobWaiter,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> None:
        self._owner = loop
        self._loop = loop.loop
        self._waiter = waiter
        self._call = (function, args, kwargs)
        self._running_job = running_job
        if running_job.has_soft_limit:
            self._soft_limit = AsyncioSoftLimit()

    @property
    def thread_id(self) -> int | None:
        """The identity of the loop's thread; None before the job has begun, and when it has ended."""
        return None if self.coroutine is None else self._owner.thread.ident

    def cancel(self) -> None:
        """Cancel the job. Call it in the Trio loop."""
        self._is_cancelled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: `fail_by_loop_end` is called
            self._loop.call_soon_threadsafe(self._cancel)

    async def wait_cancelled(self) -> trio.Event | None:
        """Wait for the end of a cancelled job. Return None, or the event of its end if that has not come in time."""
        if self._is_over:
            return None
        ended = self._ended = trio.Event()
        return None if await self._running_job.wait_ended(ended, CANCEL_TIMEOUT) else ended

    def raise_soft_limit(self, error: SoftTimeLimitExceeded) -> None:
        """Raise `error` in the job. Call it in the Trio loop."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._soft_limit_in_loop, error)

    def fail_by_loop_end(self, reason: str) -> None:
        """End the job because its loop has ended; `reason` is empty if that was in order. Call it in any thread."""
        if reason and self.outcome is None:
            self.outcome = get_error_outcome(
                RuntimeError(f"the asyncio event loop ended under the job: {reason}")
            )

    def fail(self, error: BaseException) -> None:
        """End the job, which could not begin. Call it in its loop."""
        self.outcome = get_error_outcome(error)
        self._end()

    def wake(self) -> None:
        """Wake the Trio task that waits. Call it in the Trio loop."""
        if self._is_over:
            return
        self._is_over = True
        self.forget()
        self._waiter.wake(self.outcome or INTERRUPTED)
        if self._ended is not None:
            self._ended.set()

    def forget(self) -> None:
        """Forget the job, which has ended."""
        self._owner.jobs.discard(self)

    def start(self, context: contextvars.Context) -> None:
        """Run the job, in a context, up to where it waits first. Call it in the loop."""
        if self._is_cancelled:
            self._end()
            return
        slot = self._running_job.slot
        coroutine = self.run() if slot is None else _name_run(slot.number)(self)
        self.coroutine = cast("CoroutineType[Any, Any, None]", coroutine)
        task = start_task(self._loop, coroutine, context, self)
        if self.is_running:
            self._task = task
            if not self._has_begun:  # cancelled before its first step, it does not run at all
                task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._soft_limit is not None:
            self._soft_limit.stop()
        if self._task is not None:
            self._task.cancel()

    def _soft_limit_in_loop(self, error: SoftTimeLimitExceeded) -> None:
        if self._soft_limit is not None:
            self._soft_limit.raise_soon(error)

    async def run(self) -> None:
        """Run the job in the loop."""
        self._has_begun = True
        isolate_decimal_context()
        try:
            self.outcome = get_result_outcome(await self._start_coroutine())
        except asyncio.CancelledError as error:
            if self._is_cancelled:
                self._running_job.record_traceback(error)
            else:  # the task has cancelled itself: that is its failure
                self.outcome = get_error_outcome(error)
        except BaseException as error:
            self.outcome = get_error_outcome(error)
        finally:
            self._end()

    def _start_coroutine(self) -> Awaitable[Any]:
        function, args, kwargs = self._call
        coroutine: Coroutine[Any, Any, Any] = function(*args, **kwargs)
        return coroutine if self._soft_limit is None else self._soft_limit.wrap(coroutine)

    def _end(self, _task: object = None) -> None:
        """Report, once, that the job has ended. Its task ends with this step."""
        if not self.is_running:
            return
        self.is_running = False
        self.coroutine = self._task = (
            None  # they refer to this job: no cycle is left to the garbage collector
        )
        if isinstance(self._loop, JobsLoop):
            self._loop.end_job(self)
        self._owner.report_end(self)


@cache
def _name_run(slot: int) -> Callable[[_AsyncioJob], Coroutine[Any, Any, None]]:
    return name_slot(_AsyncioJob.run, slot)
