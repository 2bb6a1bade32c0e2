"""Nudge: raises a soft time limit in a coroutine on Trio, at whatever it waits for.

Floor: runners. Reads: nothing. Writes: nothing.

It is done as Trio delivers a KeyboardInterrupt: what the coroutine waits for is aborted, through no cancel scope, so
that no shield keeps it away and nothing stays cancelled. A nursery that is waited for collects the error and cancels
its children. What cannot be aborted is told, and may raise the error by itself, as a thread does that asks
`check_cancelled`, once; when it does not, the error is raised at the next wait.
"""

import gc
from collections.abc import Coroutine
from typing import Any

import trio
from trio.lowlevel import Abort, RaiseCancelT

from celery5.errors import SoftTimeLimitExceeded

_CHECKPOINT = trio.lowlevel.checkpoint.__code__


class TrioSoftLimit:
    """For one coroutine that the current Trio task drives: whoever drives it shows each wait to `watch`, and throws
    into it what is `given`, instead of the wait's answer."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.pending_error: SoftTimeLimitExceeded | None = None
        self._coroutine = coroutine
        self._task = trio.lowlevel.current_task()
        self._owed: SoftTimeLimitExceeded | None = None
        self._wait: _Wait | None = None

    def raise_soon(self, error: SoftTimeLimitExceeded) -> None:
        """Raise `error` in the coroutine: now, if what it waits for can be given up, else as soon as that is so."""
        self._owed = error
        # The wait may be over, though the task has not gone on yet; Trio itself asks the same attribute.
        waits: Any = getattr(self._task, "_abort_func", None)
        if self._wait is not None and waits is self._wait and self._given_up(self._wait):
            trio.lowlevel.reschedule(self._task)

    def observe_wait(self, asked: Any) -> Any:
        """The coroutine `asked` the loop for this: gives what is to be asked instead, unless something is `given`."""
        abort = getattr(asked, "abort_func", None)
        if abort is None:
            self._wait = None
            if self._owed is not None and _at_a_checkpoint(self._coroutine):
                self.pending_error, self._owed = self._owed, None
            return asked
        self._wait = wait = _Wait(abort)
        if self._owed is not None:
            self._given_up(wait)
        return type(asked)(wait)

    def _given_up(self, wait: "_Wait") -> bool:
        """Try to abort the wait; when that succeeds, the error is given."""
        error = self._owed

        def tell() -> None:
            # Called at once by a nursery, which keeps the error; by a thread, as often as it asks; or never.
            if wait.cancelled is not None:
                wait.cancelled()
            if wait.told:
                return
            wait.told, self._owed = not wait.abandoned, None
            raise SoftTimeLimitExceeded(*error.args if error else ())

        if wait(tell) is not Abort.SUCCEEDED:
            return False
        self.pending_error, self._owed, wait.abandoned = error, None, True
        return True


class _Wait:
    """The abort function of one wait. It is called once at most, by whoever is first, as Trio promises it.

    `cancelled` raises the cancellation that came after the soft limit: whoever was `told` of that and asks again hears
    of this. Who was `abandoned` has nothing to go on with, and hears of its limit as often as it asks.
    """

    __slots__ = ("_abort", "abandoned", "cancelled", "told")

    def __init__(self, abort: Any) -> None:
        self._abort = abort
        self.cancelled: RaiseCancelT | None = None
        self.told = self.abandoned = False

    def __call__(self, raise_cancel: Any) -> Abort:
        abort, self._abort = self._abort, None
        if abort is None:
            self.cancelled = raise_cancel
            return Abort.FAILED
        done: Abort = abort(raise_cancel)
        return done


def _at_a_checkpoint(coroutine: Any) -> bool:
    """Whether a coroutine stands in `trio.lowlevel.checkpoint()` (or `sleep(0)`), which has done nothing yet that an
    error could spoil. Whatever else asks for a turn of the loop has."""
    inner = coroutine
    while inner is not None:
        if getattr(inner, "cr_code", None) is _CHECKPOINT:
            return True
        inner = _awaited(inner)
    return False


def _awaited(outer: Any) -> Any:
    """What a coroutine, a generator or a step of an asynchronous generator waits for; None at the end."""
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(outer, name):
            return getattr(outer, name)
    # A step of an asynchronous generator does not say whose it is, but the collector knows.
    return next((each for each in gc.get_referents(outer) if hasattr(each, "ag_await")), None)
