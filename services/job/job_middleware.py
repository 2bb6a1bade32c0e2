"""Call an application's middleware for the jobs of one worker."""

from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import trio

from celery5.app import App
from celery5.broker.keys import EVENTS
from celery5.logs.log import Log
from celery5.middleware.jobs import IncomingJob, SettlingBatch
from celery5.middleware.middleware import Middleware
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import Verdict
from celery5.runners.context import LOG_EVENT
from celery5.runners.user_errors import reraise_cancellation

RUNNING_TIMEOUT = 10.0
"""Seconds that an `async with` block of a middleware may take to begin, and to end."""
CANCELLED_TIMEOUT = 5.0
"""Seconds that the blocks around a cancelled job may take to end, all together."""

EnteredBlock = tuple[Middleware, Any, bool]
"""A middleware, its block, and whether that is asynchronous."""


class JobMiddleware:
    """The middleware of one worker. Which methods it has is looked up when the worker starts."""

    def __init__(self, *, app: App, worker: str, log: Log) -> None:
        self._stack = app.middleware
        self._running = self._stack.running
        self._worker = worker
        self._log = log
        # Whether there is middleware of a kind: all that is looked at where there is none.
        self.runs: bool = self._stack.runs
        self.settles: bool = self._stack.settles
        self.receives: bool = self._stack.receives
        self.notes_unstarted: bool = self._stack.notes_unstarted

    def enter(self, job: IncomingJob, entered: list[EnteredBlock]) -> Awaitable[None] | None:
        """Enter the blocks around a job, and add each to `entered` when it has begun.

        Returns:
            What enters the rest, beginning with the first one that is asynchronous; None when all have begun.
        """
        for number, (middleware, hook) in enumerate(self._running):
            try:
                block: Any = hook(job)
                if block is None:
                    continue
                if not hasattr(block, "__enter__"):
                    return self._enter_rest(job, entered, block, number)
                block.__enter__()
                entered.append((middleware, block, False))
            except BaseException as error:
                reraise_cancellation(error)
                self._stack.report(middleware, "running", error)
        return None

    async def _enter_rest(
        self, job: IncomingJob, entered: list[EnteredBlock], block: Any, number: int
    ) -> None:
        for index in range(number, len(self._running)):
            middleware, hook = self._running[index]
            try:
                block = block if index == number else hook(job)
                if block is None:
                    continue
                if hasattr(block, "__enter__"):
                    block.__enter__()
                    entered.append((middleware, block, False))
                    continue
                with trio.move_on_after(RUNNING_TIMEOUT) as scope:
                    await block.__aenter__()
                    entered.append((middleware, block, True))
                if scope.cancelled_caught:
                    raise TimeoutError(f"its block has not begun within {RUNNING_TIMEOUT:g} s")
            except BaseException as error:
                reraise_cancellation(error)
                self._stack.report(middleware, "running", error)

    def exit(self, entered: list[EnteredBlock]) -> Awaitable[None] | None:
        """Leave the blocks around a job, the innermost first.

        Returns:
            What leaves the rest, beginning with the first one that is asynchronous; None when all have ended.
        """
        while entered:
            middleware, block, is_async = entered[-1]
            if is_async:
                return self._exit_rest(entered)
            entered.pop()
            try:
                block.__exit__(None, None, None)
            except BaseException as error:
                reraise_cancellation(error)
                self._stack.report(middleware, "running", error)
        return None

    async def _exit_rest(self, entered: list[EnteredBlock]) -> None:
        while entered:
            middleware, block, is_async = entered.pop()
            try:
                if not is_async:
                    block.__exit__(None, None, None)
                    continue
                with trio.move_on_after(RUNNING_TIMEOUT) as scope:
                    await block.__aexit__(None, None, None)
                if scope.cancelled_caught:
                    raise TimeoutError(f"its block has not ended within {RUNNING_TIMEOUT:g} s")
            except BaseException as error:
                reraise_cancellation(error)
                self._stack.report(middleware, "running", error)

    async def exit_cancelled(self, entered: list[EnteredBlock]) -> None:
        """Leave the blocks around a job that was cancelled: they get some time all the same."""
        with trio.move_on_after(CANCELLED_TIMEOUT, shield=True):
            await self._exit_rest(entered)

    def settling(self, queue: str, deliveries: Sequence[Delivery]) -> AbstractContextManager[None]:
        """Surround one settlement."""
        LOG_EVENT.set(self._log.event)
        return self._stack.settling(
            SettlingBatch(queue, [IncomingJob(delivery, self._worker) for delivery in deliveries])
        )

    def note_received(self, deliveries: Sequence[Delivery]) -> None:
        """Tell middleware of jobs that were read."""
        if deliveries:
            LOG_EVENT.set(self._log.event)
            self._stack.notify("received", [IncomingJob(delivery, self._worker) for delivery in deliveries])

    def note_unstarted(self, delivery: Delivery, verdict: Verdict) -> None:
        """Tell middleware of a job that ends here without being run."""
        if self.notes_unstarted:
            job = IncomingJob(delivery, self._worker)
            job.finish(verdict)
            LOG_EVENT.set(self._log.event)
            self._stack.notify("unstarted", job)

    def note_recovered(self, worker: str, queue: str, count: int) -> None:
        """Tell middleware of the death of another worker."""
        LOG_EVENT.set(self._log.event)
        self._stack.notify("recovered", worker, "events" if queue == EVENTS else queue, count)
