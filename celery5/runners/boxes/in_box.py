"""In the process of a box: runs the functions of boxed tasks in the main thread, one at a time.

Only in the main thread can a signal raise an error in the middle of a sleep or of a system call. So limits and
revocations end a boxed `def` where they cannot end one in a worker's thread.
"""

import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.boxes.frames import CancelJob, RunJob, SoftLimitReached
from celery5.protocol.job.delivery import assign_in_box
from celery5.protocol.job.verdict import INTERRUPTED, Outcome
from celery5.runners.context import (
    CURRENT_JOB,
    LOG_EVENT,
    PROGRESS_RECEIVER,
    CurrentJob,
    LogEvent,
    ProgressReceiver,
)
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.surrounding import surround_call

if TYPE_CHECKING:
    from celery5.runners.running_job import RunningJob

WAKE_SIGNAL = signal.SIGUSR2
"""The signal that makes the main thread raise a pending error."""

BoxControl = SoftLimitReached | CancelJob


class JobCancelled(BaseException):
    """The job was cancelled. `except Exception` does not catch it."""


class BoxMainThread:
    """The main thread of a Python box. `on_message` may be called from any other thread."""

    def __init__(self, log_event: LogEvent, receive_progress: ProgressReceiver | None = None) -> None:
        self._log_event = log_event
        self._receive_progress = receive_progress
        self._job = ""
        self._pending_errors: list[BaseException] = []
        self._may_raise = self._is_deferred = False
        self._handler: Callable[[BoxControl], None] | None = None
        self._early_messages: list[BoxControl] = []
        self._lock = threading.Lock()
        signal.signal(WAKE_SIGNAL, self._raise_pending)

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return bool(self._job)

    def run_job(
        self,
        run: RunJob,
        loop: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Outcome:
        """Run one job to its end, in its own context."""
        assigned = None if run.resources is None else assign_in_box(run.resources)
        job = CurrentJob(
            run.id, run.task, run.queue, run.attempt, run.worker, run.sections, run.trace, assigned
        )
        return copy_context().run(self._perform, job, run, loop, function, args, kwargs)

    def start_job(self, job: str) -> None:
        """Accept messages for this job from now on."""
        with self._lock:
            self._job, self._handler = job, None
            self._early_messages, self._pending_errors = [], []

    def end_job(self) -> None:
        """Drop messages that come late for the job, which has ended."""
        with self._lock:
            self._job, self._handler = "", None

    def on_message(self, message: BoxControl) -> None:
        """Handle a message of the worker about the job that runs."""
        with self._lock:
            if message.id != self._job:
                return
            if self._handler is None:
                self._early_messages.append(message)
            else:
                self._handler(message)

    def _perform(
        self, job: CurrentJob, run: RunJob, loop: str, function: Any, args: Any, kwargs: Any
    ) -> Outcome:
        CURRENT_JOB.set(job)
        LOG_EVENT.set(self._log_event)
        PROGRESS_RECEIVER.set(self._receive_progress)
        try:
            if loop == "thread":
                return get_result_outcome(self._call(surround_call(function, "thread"), args, kwargs))
            return self._in_loop(run, loop, function, args, kwargs)
        except JobCancelled:
            return INTERRUPTED
        except BaseException as error:
            return get_error_outcome(error)

    # ---- `def` tasks

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        # An error may be raised at any step, those of the assignments too, but two errors cannot skip three of them.
        try:
            try:
                try:
                    self._may_raise = True
                    self._set_handler(self._raise_in_main_thread)
                    return function(*args, **kwargs)
                finally:
                    self._may_raise = False
            finally:
                self._may_raise = False
        finally:
            self._may_raise = False

    def _raise_in_main_thread(self, message: BoxControl) -> None:
        if isinstance(message, SoftLimitReached):
            self._pending_errors.append(SoftTimeLimitExceeded(message.message))
        else:
            self._pending_errors.append(
                TimeLimitExceeded(message.limit) if message.limit else JobCancelled("revoked")
            )
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def _raise_pending(self, _number: int, _frame: object) -> None:
        """Raise a pending error. Python calls this in the main thread, between two steps of whatever it does."""
        if self._may_raise and self._pending_errors and not self._is_deferred:
            raise self._pending_errors.pop(0)

    @contextmanager
    def defer_errors(self) -> Generator[None, None, None]:
        """Raise no error in the job within this block, which must be executed whole: it writes a frame, for example."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
            self._raise_pending(0, None)

    def _set_handler(self, handler: Callable[[BoxControl], None]) -> None:
        with self._lock:
            self._handler, early = handler, self._early_messages
        for message in early:
            handler(message)

    # ---- `async def` tasks

    def _in_loop(self, run: RunJob, loop: str, function: Any, args: Any, kwargs: Any) -> Outcome:
        """Run the job on Trio, or on an asyncio loop beside it, with the runners that a worker has."""
        import trio

        from celery5.runners.on_asyncio import AsyncioRunner
        from celery5.runners.on_trio import TrioRunner
        from celery5.runners.running_job import RunningJob, TimeLimits

        async def job() -> Outcome:
            running_job = RunningJob(limits=TimeLimits(run.time_limit, run.soft_time_limit))
            token = trio.lowlevel.current_trio_token()
            self._set_handler(lambda message: token.run_sync_soon(_apply, running_job, message))
            outcome: Outcome | None = None
            async with trio.open_nursery() as nursery:
                with running_job.scope, _ignore_errors_when_cancelled(running_job):
                    if loop == "asyncio":
                        runner = AsyncioRunner()
                        await nursery.start(runner.run)
                        outcome = await runner.execute(function, args, kwargs, running_job)
                    else:
                        outcome = await TrioRunner().execute(function, args, kwargs, running_job)
                nursery.cancel_scope.cancel()
            return running_job.get_cancel_outcome() if outcome is None else running_job.get_outcome(outcome)

        return trio.run(job)


@contextmanager
def _ignore_errors_when_cancelled(running_job: "RunningJob") -> Generator[None, None, None]:
    """Suppress the errors of a job that was cancelled."""
    try:
        yield
    except Exception:
        if running_job.cancel_outcome is None:
            raise


def _apply(running_job: "RunningJob", message: BoxControl) -> None:
    """Apply a message to the job. Called in the loop."""
    if isinstance(message, CancelJob):
        if message.limit:
            running_job.end_by_time_limit(TimeLimitExceeded(message.limit))
        else:
            running_job.cancel(INTERRUPTED)
    elif running_job.raise_soft_limit is not None:
        running_job.raise_soft_limit(SoftTimeLimitExceeded(message.message))
