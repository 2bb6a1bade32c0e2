"""Thread runner: runs `def` tasks in worker threads."""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import trio

from celery5.protocol.job.verdict import Outcome
from celery5.protocol.process.frozen import name_slot
from celery5.runners.context import isolate_decimal_context
from celery5.runners.cpu_meters import CpuMeter, CpuMeters
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import JobCall, JobSlot, RunningJob
from celery5.runners.surrounding import surround_call
from celery5.runners.thread_pool import ThreadCall, ThreadPool
from celery5.runners.user_errors import find_cancellation

T = TypeVar("T")

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING: Any = ctypes.py_object()


class CallInterrupter:
    """One call in a thread, in which at most two errors may be raised from another thread.

    The thread of the call never takes the lock. From CPython 3.14 on, an error may be raised in it after it has
    taken a lock and before the block that gives it back has begun: the lock would stay locked.
    """

    def __init__(self) -> None:
        # Held while an error is raised.
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._early_error: type[BaseException] | None = None
        self._is_over = False

    def interrupt(self, error: Exception) -> None:
        """Raise an error like this one in the call: at once if it runs, else when it begins.

        To be called from another thread.
        """
        error_class = _as_class(error)
        with self._lock:
            if self._is_over:
                return
            if self._thread is None:
                self._early_error = error_class
            else:
                _raise_in(self._thread, error_class)

    def call(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """Call the function in this thread. Raises the errors of `interrupt` too."""
        # An error may be raised at any step, those of `_end` too, but two errors cannot interrupt three calls of it.
        # After the first complete call no error can be raised any more.
        try:
            try:
                try:
                    self._begin()
                    return function(*args, **kwargs)
                finally:
                    self._end()
            finally:
                self._end()
        finally:
            self._end()

    def _begin(self) -> None:
        self._thread = threading.get_ident()
        self._wait_for_interrupt()
        if self._early_error is not None:
            raise self._early_error

    def _end(self) -> None:
        self._is_over = True
        self._wait_for_interrupt()
        if self._thread is not None:
            _raise_in(self._thread, _NOTHING)  # clears an error that has not been raised yet

    def _wait_for_interrupt(self) -> None:
        """Wait until no `interrupt` is at work that may not have seen what this thread has set before."""
        while self._lock.locked():
            time.sleep(0)


def _as_class(error: Exception) -> type[BaseException]:
    """Return a class whose instances are like this error: only a class can be raised in another thread."""
    kind, text = type(error), str(error)

    def init(self: Exception) -> None:
        Exception.__init__(self, text)

    names = {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


class ThreadRunner:
    """Runs `def` tasks, at most `get_slots()` at once, and measures what they compute, if there are `meters`.

    A thread cannot be killed. A cancelled job can notice that by `trio.from_thread.check_cancelled()`. How long its end
    is awaited is an argument of `RunningJob.cancel` (by default not at all). After that the thread is abandoned: it
    keeps its slot until it ends, which sets `RunningJob.thread_ended`.
    """

    def __init__(self, *, get_slots: Callable[[], int], meters: CpuMeters | None = None) -> None:
        self._get_slots = get_slots
        self._meters = meters
        self._pool = ThreadPool(get_slots())

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run the job and return its outcome.

        Those that `running_job.go_on` names when a job has ended are run, too: then it is the outcome of the last one.

        Raises:
            Cancelled: The thread has not ended with an outcome.
            NotBegun: The job may wait behind others, and those take long.
        """
        series = _Series(self._pool, self._get_slots, self._meters, running_job)
        call = series.begin(function, args, kwargs)
        try:
            outcome = await self._pool.make(call, series.go_on if running_job.go_on is not None else None)
            return series.outcome or outcome
        except trio.Cancelled as error:
            if find_cancellation(error) is None:  # the task has raised it by itself
                return get_error_outcome(error)
            call = series.call
            if (
                call.result is None
                and call.end is not None
                and not await running_job.wait_ended(call.end, 0.0)
            ):
                running_job.record_abandoned_thread(call.end)
            elif call.result is not None:
                return call.result
            raise
        finally:
            series.finish()


class _Series:
    """A job, and those that follow in its place while the Trio task of their executor sleeps."""

    call: ThreadCall[Outcome]

    def __init__(
        self,
        pool: ThreadPool,
        get_slots: Callable[[], int],
        meters: CpuMeters | None,
        running_job: RunningJob,
    ) -> None:
        self._pool = pool
        self._get_slots = get_slots
        self._meters = meters
        self._running_job = running_job
        self._job: _JobInThread | None = None
        self.outcome: Outcome | None = None
        """What the executor is to go on with, in place of what the last call has returned."""

    def begin(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ThreadCall[Outcome]:
        """Return the call of a job. Call it in the context of the executor."""
        running_job = self._running_job
        self._pool.resize(self._get_slots())
        job = self._job = _JobInThread(surround_call(function, "thread"), args, kwargs, running_job.slot)
        if running_job.limits is not None:
            interrupter = job.interrupter = CallInterrupter()
            running_job.allow_interrupts(interrupter.interrupt, interrupter.interrupt)
        running_job.set_thread(job)
        if self._meters is not None and running_job.delivery is not None and running_job.delivery.command:
            task = running_job.delivery.command.task
            job.meter = self._meters.add(task, is_handed_over=not running_job.is_ahead)
        on_begin = running_job.begin_late if running_job.on_begin is not None else None
        self.call = ThreadCall(job.get_run(), on_begin, may_be_given_back=running_job.is_ahead)
        return self.call

    def go_on(self, call: ThreadCall[Outcome]) -> ThreadCall[Outcome] | None:
        """Return the call of the job that follows on this one; None if the executor must go on."""
        outcome, choose_next = call.result, self._running_job.go_on
        assert outcome is not None
        assert choose_next is not None
        self._note_end()
        following = choose_next(outcome)
        if isinstance(following, JobCall):
            return self.begin(*following)
        self.outcome = following
        return None

    def _note_end(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._running_job.set_ended(job.ended_at)
            if self._meters is not None and job.meter is not None:
                self._meters.remove(job.meter)

    def finish(self) -> None:
        """Note that the last job has ended, or was abandoned."""
        self._note_end()
        self._running_job.forbid_interrupts()
        self._running_job.set_thread(None)


class _JobInThread:
    """One job in a thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        memory_slot: JobSlot | None,
    ) -> None:
        self._memory_slot = memory_slot
        self._call = (function, args, kwargs)
        self.interrupter: CallInterrupter | None = None
        self.meter: CpuMeter | None = None
        self.ended_at = 0.0
        # The identity of the thread; None before the call and after it.
        self.thread_id: int | None = None
        self.coroutine = None

    def get_run(self) -> Callable[[], Outcome]:
        """Return `run`, whose frame tells which executor's job it runs."""
        if self._memory_slot is None:
            return self.run
        return MethodType(_name_run(self._memory_slot.number), self)

    def run(self) -> Outcome:
        """Run in the thread, and encode the result there too, to keep that off the event loop."""
        function, args, kwargs = self._call
        self.thread_id = threading.get_ident()
        if self._memory_slot is not None:
            self._memory_slot.set_thread(threading.get_native_id())
        isolate_decimal_context()
        if self.meter is not None:
            self.meter.start()
        try:
            value = (
                function(*args, **kwargs)
                if self.interrupter is None
                else self.interrupter.call(function, args, kwargs)
            )
            outcome: Outcome = get_result_outcome(value)
        except trio.Cancelled:
            raise  # the task called check_cancelled()
        except BaseException as error:
            outcome = get_error_outcome(error)
        finally:
            self.thread_id = None
            self.ended_at = time.perf_counter()
            if self.meter is not None:
                self.meter.stop()
        return outcome


@cache
def _name_run(slot: int) -> Callable[[_JobInThread], Outcome]:
    return name_slot(_JobInThread.run, slot)
