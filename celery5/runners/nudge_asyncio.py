"""Asyncio nudge: raises a soft time limit in a coroutine on asyncio, at whatever it awaits.

Floor: runners. Reads: nothing. Writes: nothing.

The asyncio task is cancelled, so that all it awaits ends as it does when a task is cancelled; where the cancellation
arrives in the job's own code, it is taken back and arrives as the soft limit.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from celery5.errors import SoftTimeLimitExceeded


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
