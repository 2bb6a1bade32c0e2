"""Tell errors of user code from what must pass through it: the cancellation of its Trio task, and Ctrl-C.

Everything else that user code raises is its own outcome, whatever its class: KeyboardInterrupt, GeneratorExit and
SystemExit, too. Signals never raise an error in a process of celery5 (`processes/lifecycle/signals.py`).
"""

import math
import signal
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import trio

from celery5.protocol.job.verdict import iterate_leaves

MAX_SCOPES = 10_000
"""Cancel scopes that one job may leave open and that are closed for it."""


def reraise_cancellation(error: BaseException) -> None:
    """Raise what must pass through user code, if `error` is that or contains it; else return.

    Call it in an `except BaseException` around user code: `error` is the user's own when this returns.
    """
    if isinstance(error, Exception) and not isinstance(error, BaseExceptionGroup):
        return
    cancellation = find_cancellation(error)
    if cancellation is not None:
        raise cancellation


def find_cancellation(error: BaseException) -> BaseException | None:
    """Return what must pass through user code: the cancellation of this Trio task from outside, or Ctrl-C.

    None for any other error. `trio.Cancelled` that user code has raised by itself is such a one: it is the task's
    cancellation only while a cancel scope around this call is cancelled.
    """
    for leaf in iterate_leaves(error):
        if isinstance(leaf, trio.Cancelled) and _is_cancelled():
            return leaf
        if isinstance(leaf, KeyboardInterrupt) and _is_of_signal(leaf):
            return leaf
    return None


def _is_cancelled() -> bool:
    try:
        return trio.current_effective_deadline() == -math.inf
    except RuntimeError:  # not in a Trio task
        return False


def _is_of_signal(error: BaseException) -> bool:
    """Return whether a handler of SIGINT has raised this: Python's own, or that of Trio, whose frame is the last."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    last: TracebackType | None = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__")).startswith("trio.")


class ScopeGuard:
    """Notices what user code in the current Trio task does to the cancel scopes and nurseries around it.

    An executor runs job after job in one task. A scope that a job leaves open would cancel the jobs after it.
    """

    __slots__ = ("_nurseries", "_sibling_count", "_siblings", "_status", "_task")

    def __init__(self) -> None:
        task: Any = trio.lowlevel.current_task()
        self._task = task
        # Trio has no public name for the innermost cancel scope of a task.
        self._status = task._cancel_status
        self._nurseries = len(task._child_nurseries)
        self._siblings = task._parent_nursery._children
        self._sibling_count = len(self._siblings)

    @property
    def is_intact(self) -> bool:
        """Whether the scopes, nurseries and tasks are those from before the call, and no scope is cancelled."""
        task, status = self._task, self._status
        return (
            task._cancel_status is status
            and not status.effectively_cancelled
            and len(task._child_nurseries) == self._nurseries
            and len(self._siblings) == self._sibling_count
        )

    def restore(self) -> bool:
        """Close the scopes that were left open; return whether all is as before then, cancelled or not."""
        task = self._task
        if task._cancel_status is not self._status and self._status.encloses(task._cancel_status):
            for _ in range(MAX_SCOPES):
                if task._cancel_status is self._status:
                    break
                task._cancel_status._scope.__exit__(None, None, None)
        return task._cancel_status is self._status and len(task._child_nurseries) == self._nurseries


P = ParamSpec("P")
T = TypeVar("T")


async def call_user_code(function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call user code in a Trio task and a nursery of its own, and return what it returns.

    What it does to the nursery and the cancel scopes above it, and what it starts there, ends with the call. Raises
    what it raises, whatever its class, so call `reraise_cancellation` where that is caught; and RuntimeError when it
    has cancelled itself.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    async def call() -> None:
        try:
            values.append(await function(*args, **kwargs))
        except BaseException as error:
            reraise_cancellation(error)
            errors.append(error)
        finally:
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, name=function)
    except BaseException as error:
        reraise_cancellation(error)
        errors.append(error)
    if values:
        return values[0]
    raise errors[0] if errors else make_own_cancellation()


def make_own_cancellation() -> RuntimeError:
    """Return the error of user code that has cancelled what it runs in."""
    return RuntimeError("it has cancelled the cancel scope or the nursery that it runs in")
