"""Thread runner: runs `def` tasks in worker threads."""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import trio

from celery5.protocol.job.verdict import Outcome
from celery5.runners.context import isolate_decimal_context
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import RunningJob

T = TypeVar("T")

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING: Any = ctypes.py_object()


class CallInterrupter:
    """One call, at which at most two errors may be shot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._early: type[BaseException] | None = None
        self._over = False

    def interrupt(self, error: Exception) -> None:
        """Raise an error like this one in the call: at once if it runs, when it begins if it has not begun. From any
        other thread."""
        kind = _as_class(error)
        with self._lock:
            if self._over:
                return
            if self._thread is None:
                self._early = kind
            else:
                _raise_in(self._thread, kind)

    def call(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """Call, here and now. Raises what was shot, too."""
        # An error may hit any step, those of `_done` too: but two errors cannot hit three of it. Whichever of them
        # goes through to its end is the last that can be hit.
        try:
            try:
                try:
                    self._begin()
                    return function(*args, **kwargs)
                finally:
                    self._done()
            finally:
                self._done()
        finally:
            self._done()

    def _begin(self) -> None:
        with self._lock:
            self._thread = threading.get_ident()
        if self._early is not None:
            raise self._early

    def _done(self) -> None:
        with self._lock:
            self._over = True
            if self._thread is not None:
                _raise_in(self._thread, _NOTHING)  # what has not come yet will not come


def _as_class(error: Exception) -> type[BaseException]:
    """A class that makes errors like this one: a thread can only be told to raise a class."""
    kind, text = type(error), str(error)

    def init(self: Exception) -> None:
        Exception.__init__(self, text)

    names = {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


class ThreadRunner:
    """Runs CPU-bound tasks (C61), at most `slots` at once.

    A thread cannot be killed. When it is cancelled it can see so through `trio.from_thread.check_cancelled()`, and is
    waited for as long as its hand has patience (not at all, unless somebody says so). After that it is left to itself:
    its slot stays taken until it ends, and the hand's `behind` tells when that is.
    """

    def __init__(self, *, slots: int) -> None:
        self._limiter = trio.CapacityLimiter(slots)

    def resize(self, slots: int) -> None:
        """At most `slots` at once from now on; what runs already goes on."""
        self._limiter.total_tokens = slots

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run to the end. Cancellation goes through, unless the thread ended with an outcome all the same."""
        call = _Call(self._limiter, function, args, kwargs)
        if running_job.limits is not None:
            call.aim = aim = CallInterrupter()
            running_job.raise_soft_limit = running_job.interrupt = aim.interrupt
        try:
            # Trio takes whatever acquires and releases for a limiter.
            limiter = cast("trio.CapacityLimiter", call)
            return await trio.to_thread.run_sync(call.run, abandon_on_cancel=True, limiter=limiter)
        except trio.Cancelled:
            if call.begun and not call.over:
                call.end = trio.Event()
                if not await running_job.wait_ended(call.end, 0.0):
                    running_job.thread_ended = call.end
            if call.over and call.outcome is not None:
                return call.outcome
            raise
        finally:
            running_job.raise_soft_limit = running_job.interrupt = None


class _Call:
    """One call in a thread, and the slot that it takes."""

    def __init__(
        self,
        slots: trio.CapacityLimiter,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._slots = slots
        self._call = (function, args, kwargs)
        self.aim: CallInterrupter | None = None
        self.outcome: Outcome | None = None
        self.end: trio.Event | None = None
        self.begun = self.over = False

    def run(self) -> Outcome:
        """In the thread: the result is encoded here too, off the loop."""
        function, args, kwargs = self._call
        isolate_decimal_context()
        try:
            value = function(*args, **kwargs) if self.aim is None else self.aim.call(function, args, kwargs)
            outcome: Outcome = get_result_outcome(value)
        except trio.Cancelled:
            raise  # the task asked check_cancelled()
        except BaseException as error:
            outcome = get_error_outcome(error)
        self.outcome = outcome
        return outcome

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """In the loop, and the last thing before the thread begins."""
        await self._slots.acquire_on_behalf_of(borrower)
        self.begun = True

    def release_on_behalf_of(self, borrower: object) -> None:
        """In the loop: the thread has really ended."""
        self._slots.release_on_behalf_of(borrower)
        self.over = True
        if self.end is not None:
            self.end.set()
