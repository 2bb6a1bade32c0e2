"""Asyncio runner: runs `async def` tasks that need asyncio, in an event loop of its own in a thread.

Floor: runners. Reads: nothing. Writes: nothing.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from trio.lowlevel import Abort, RaiseCancelT

from celery5.protocol.verdict import Outcome
from celery5.runners.ending import INTERRUPTED, raised, returned

STOP_LIMIT = 2.0
"""Seconds that the loop's thread gets to end."""
CANCEL_LIMIT = 3.0
"""Seconds that a cancelled asyncio task is waited for. One that blocks its loop is left behind, like a thread."""


class AsyncioRunner:
    """Runs tasks declared with `loop="asyncio"` (C60), all in one loop, which starts with the first of them."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the loop until cancelled, then end it."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def execute(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome:
        """Run to the end. Cancellation cancels the asyncio task, waits for its end, and goes through, unless the task
        ended with an outcome all the same."""
        return await _Crossing(self._running(), function, args, kwargs).wait()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="celery5-asyncio", daemon=True
            )
            self._thread.start()
        return self._loop

    async def _end(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        await trio.to_thread.run_sync(thread.join, STOP_LIMIT)


class _Crossing:
    """One job on its way through the asyncio loop and back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._loop = loop
        self._call = (function, args, kwargs)
        self._token = trio.lowlevel.current_trio_token()
        self._waiter = trio.lowlevel.current_task()
        self._task: asyncio.Task[None] | None = None
        self._outcome: Outcome | None = None
        self._cancelled = False
        self._awaited = True
        self._patience: threading.Timer | None = None

    async def wait(self) -> Outcome:
        """The outcome. Cancelling waits until the asyncio task has really ended, for CANCEL_LIMIT seconds."""
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(self._begin, context=context)
        await trio.lowlevel.wait_task_rescheduled(self._abort)
        if self._outcome is None:
            await trio.lowlevel.checkpoint_if_cancelled()
        return self._outcome or INTERRUPTED

    def _abort(self, _raise: RaiseCancelT) -> Abort:
        self._cancelled = True
        self._loop.call_soon_threadsafe(self._cancel)
        self._patience = threading.Timer(CANCEL_LIMIT, self._go_on)
        self._patience.daemon = True
        self._patience.start()
        return Abort.FAILED

    def _go_on(self) -> None:
        """From any thread: let the waiting job go on."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._wake)

    def _wake(self) -> None:
        if self._awaited:
            self._awaited = False
            if self._patience is not None:
                self._patience.cancel()
            trio.lowlevel.reschedule(self._waiter)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._done)
        if self._cancelled:
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        function, args, kwargs = self._call
        try:
            self._outcome = returned(await function(*args, **kwargs))
        except asyncio.CancelledError as error:
            if not self._cancelled:  # the task cancelled itself: that is its failure
                self._outcome = raised(error)
        except BaseException as error:
            self._outcome = raised(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
        self._go_on()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
