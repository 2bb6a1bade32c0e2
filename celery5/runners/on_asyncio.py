"""Asyncio runner: runs `async def` tasks that need asyncio, in an event loop of its own in a thread."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import trio
from trio.lowlevel import Abort, RaiseCancelT

from celery5.errors import SoftTimeLimitExceeded
from celery5.protocol.job.verdict import INTERRUPTED, Outcome
from celery5.runners.context import isolate_decimal_context
from celery5.runners.outcome import get_error_outcome, get_result_outcome
from celery5.runners.running_job import RunningJob


class AsyncioSoftLimit:
    """For one job: await it instead of the coroutine that it is `around`, in an asyncio task of its own."""

    def __init__(self) -> None:
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._owed: SoftTimeLimitExceeded | None = None
        self._stopped = False

    def raise_soon(self, error: SoftTimeLimitExceeded) -> None:
        """In the loop: raise `error` in the coroutine, at what it awaits now; or first, if it has not begun."""
        if self._stopped or (self._task is not None and self._task.done()):
            return
        self._owed = error
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """In the loop: the task is cancelled in earnest. What arrives from now on is a cancellation."""
        self._owed, self._stopped = None, True

    def wrap(self, coroutine: Coroutine[Any, Any, Any]) -> "AsyncioSoftLimit":
        """Itself, to be awaited instead of `coroutine`."""
        self._coroutine = coroutine
        return self

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        assert coroutine is not None
        self._task = asyncio.current_task()
        if self._owed is not None and self._task is not None:
            self._task.cancel()
        step: Callable[[Any], Any] = coroutine.send
        answer: Any = None
        while True:
            try:
                asked = step(answer)
            except StopIteration as stop:
                return stop.value
            try:
                answer = yield asked
                step = coroutine.send
            except GeneratorExit:
                coroutine.close()
                raise
            except asyncio.CancelledError as error:
                answer, step = self._meant(error), coroutine.throw
            except BaseException as error:
                answer, step = error, coroutine.throw
            else:
                self._insist()

    def _meant(self, error: asyncio.CancelledError) -> BaseException:
        """What a cancellation stands for."""
        owed, self._owed = self._owed, None
        if owed is None or self._task is None:
            return error
        self._task.uncancel()
        return SoftLimitCancelled(*owed.args)

    def _insist(self) -> None:
        """What was awaited has swallowed the cancellation: it comes again at the next await."""
        if self._owed is not None and self._task is not None:
            self._task.uncancel()
            self._task.cancel()


class SoftLimitCancelled(SoftTimeLimitExceeded, asyncio.CancelledError):
    """A SoftTimeLimitExceeded that asyncio's own tools, a TaskGroup or `wait_for`, treat as the cancellation it came
    with: they end what they have begun and let it through. For all else it is what its name says."""


SoftLimitCancelled.__name__ = SoftTimeLimitExceeded.__name__
SoftLimitCancelled.__qualname__ = SoftTimeLimitExceeded.__qualname__
SoftLimitCancelled.__module__ = SoftTimeLimitExceeded.__module__


STOP_TIMEOUT = 2.0
"""Seconds that the loop's thread gets to end."""
CANCEL_TIMEOUT = 3.0
"""Seconds that a cancelled asyncio task is waited for, unless its hand has more patience. One that blocks its loop, or
takes no notice, is then left behind, like a thread."""


class AsyncioRunner:
    """Runs tasks declared with `loop="asyncio"` (C60), all in one loop, which starts with the first of them.

    A job may stop the loop, or raise SystemExit in it: it goes on with the others. Should a loop really be lost, its
    jobs have failed and the next one gets a new loop.
    """

    def __init__(self) -> None:
        self._loop: _Loop | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the loop until cancelled, then end it."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run to the end. Cancellation cancels the asyncio task, waits for its end, and goes through, unless the task
        ended with an outcome all the same."""
        loop = self._running()
        crossing = _Crossing(loop, function, args, kwargs, running_job)
        loop.crossings.add(crossing)
        try:
            return await crossing.wait()
        except trio.Cancelled:
            running_job.thread_ended = await crossing.left_behind()
            if crossing.outcome is None:
                raise
            return crossing.outcome
        finally:
            running_job.raise_soft_limit = None
            if running_job.thread_ended is None:
                loop.crossings.discard(crossing)

    def _running(self) -> "_Loop":
        if self._loop is None or not self._loop.alive:
            self._loop = _Loop()
        return self._loop

    async def _end(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.end()
            await trio.to_thread.run_sync(loop.thread.join, STOP_TIMEOUT)


class _Loop:
    """The loop in its thread, and those who wait for what runs in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.crossings: set[_Crossing] = set()
        self.thread = threading.Thread(target=self._serve, name="celery5-asyncio", daemon=True)
        self._ending = False
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes jobs."""
        return self.thread.is_alive() and not self.loop.is_closed()

    def end(self) -> None:
        """Cancel what is left and end the thread."""
        with contextlib.suppress(RuntimeError):  # it is closed already
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._ending = True
        self.loop.stop()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        why = ""
        try:
            while not self._ending:
                # Whatever a job does to it, loop.stop() or SystemExit in a task of its own, the loop goes on.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self._sweep()
        except BaseException as error:  # it cannot go on: its selector is broken, say
            why = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(Exception):
                self.loop.close()
            for each in list(self.crossings):
                each.lost(why)

    def _sweep(self) -> None:
        """Cancel what jobs have left behind."""
        self.loop.set_task_factory(None)
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())


class _Crossing:
    """One job on its way through the asyncio loop and back."""

    def __init__(
        self,
        loop: "_Loop",
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hand: RunningJob,
    ) -> None:
        self._loop = loop.loop
        self._crossings = loop.crossings
        self._call = (function, args, kwargs)
        self._hand = hand
        self._token = trio.lowlevel.current_trio_token()
        self._waiter = trio.lowlevel.current_task()
        self._task: asyncio.Task[None] | None = None
        self._nudge = AsyncioSoftLimit() if hand.has_soft_limit else None
        self.outcome: Outcome | None = None
        self._cancelled = False
        self._parked = False
        self._over = False
        self._end: trio.Event | None = None

    async def wait(self) -> Outcome:
        """The outcome. Cancelling cancels the asyncio task, and does not wait for it: `end` does."""
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(self._begin, context=context)
        if self._nudge is not None:
            self._hand.raise_soft_limit = self._soften
        self._parked = True
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        return self.outcome or INTERRUPTED

    def _abort(self, _raise: RaiseCancelT) -> Abort:
        self._cancelled, self._parked = True, False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is lost, and is told so
            self._loop.call_soon_threadsafe(self._cancel)
        return Abort.SUCCEEDED

    async def left_behind(self) -> trio.Event | None:
        """Once cancelled, wait for the end, as long as the hand has patience. Gives what tells of it when it has not
        come by then."""
        if self._over:
            return None
        end = self._end = trio.Event()
        return None if await self._hand.wait_ended(end, CANCEL_TIMEOUT) else end

    def _soften(self, error: SoftTimeLimitExceeded) -> None:
        """From the Trio loop: raise `error` in the job."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, error)

    def lost(self, why: str) -> None:
        """From any thread: the loop has ended under the job; in order, unless it says `why`."""
        if why and self.outcome is None:
            self.outcome = get_error_outcome(
                RuntimeError(f"the asyncio event loop ended under the job: {why}")
            )
        self._go_on()

    def _go_on(self) -> None:
        """From any thread: let the waiting job go on."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        self._over = True
        self._crossings.discard(self)
        if self._parked:
            self._parked = False
            trio.lowlevel.reschedule(self._waiter)
        if self._end is not None:
            self._end.set()

    def _begin(self) -> None:
        run = self._run()
        try:
            self._task = self._loop.create_task(run)
        except BaseException as error:  # a job may have set a task factory
            run.close()
            self.outcome = get_error_outcome(error)
            self._go_on()
            return
        self._task.add_done_callback(self._done)
        if self._cancelled:
            self._cancel()

    def _cancel(self) -> None:
        if self._nudge is not None:
            self._nudge.stop()
        if self._task is not None:
            self._task.cancel()

    def _tell(self, error: SoftTimeLimitExceeded) -> None:
        if self._nudge is not None:
            self._nudge.raise_soon(error)

    async def _run(self) -> None:
        isolate_decimal_context()
        try:
            self.outcome = get_result_outcome(await self._begun())
        except asyncio.CancelledError as error:
            if self._cancelled:
                self._hand.record_traceback(error)
            else:  # the task cancelled itself: that is its failure
                self.outcome = get_error_outcome(error)
        except BaseException as error:
            self.outcome = get_error_outcome(error)

    def _begun(self) -> Awaitable[Any]:
        function, args, kwargs = self._call
        coroutine: Coroutine[Any, Any, Any] = function(*args, **kwargs)
        return coroutine if self._nudge is None else self._nudge.wrap(coroutine)

    def _done(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
        self._go_on()
