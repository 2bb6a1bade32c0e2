"""Asyncio runner: runs `async def` tasks that need asyncio, in its own event loop in a thread."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import trio

from celery5.protocol.job.verdict import Outcome
from celery5.runners import asyncio_thread, jobs_loop
from celery5.runners.running_job import RunningJob

T = TypeVar("T")

STOP_TIMEOUT = 2.0
"""Seconds that the loop's thread has to end."""


class AsyncioRunner:
    """Runs tasks declared with `loop="asyncio"`, all in one loop, which starts with the first of them.

    A job may stop the loop or raise SystemExit in it: the loop continues with the others. If a loop does break, its
    jobs have failed and the next job gets a new loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio_thread.LoopThread | None = None

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
        """Run the job and return its outcome.

        Those that `running_job.go_on` names when a job has ended are run, too: then it is the outcome of the last one.

        Cancellation cancels the asyncio task and waits for its end. Cancelled is raised unless the task has ended with
        an outcome.
        """
        waiter = asyncio_thread.LoopJobWaiter(self._get_loop(), running_job)
        waiter.begin(function, args, kwargs)
        try:
            return await waiter.wait()
        except trio.Cancelled:
            running_job.record_abandoned_thread(await waiter.job.wait_cancelled())
            if waiter.job.outcome is None:
                raise
            return waiter.job.outcome
        finally:
            waiter.end()

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call code that is no job in the loop, and return its result. What it makes there belongs to no job.

        Raises:
            RuntimeError: It was stopped before it returned.
            Exception: What the code raises.
        """
        results, errors = list[T](), list[Exception]()

        async def run() -> None:
            jobs_loop.OWNER.set(None)
            try:
                results.append(await function())
            except Exception as error:
                errors.append(error)

        outcome = await self.execute(run, (), {}, RunningJob())
        if errors:
            raise errors[0]
        if not results:
            why = f"it was stopped before it returned ({outcome!r})"[:1000]
            raise RuntimeError(f"{why}: look in the log before this for what cancelled it or ended its loop")
        return results[0]

    def _get_loop(self) -> "asyncio_thread.LoopThread":
        if self._loop is None or not self._loop.is_usable:
            if self._loop is not None:
                self._loop.release()
            self._loop = asyncio_thread.LoopThread()
        return self._loop

    async def _end(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.end()
            await trio.to_thread.run_sync(loop.thread.join, STOP_TIMEOUT)
