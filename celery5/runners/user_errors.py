"""Tell errors of user code from what must pass through it: the cancellation of its Trio task, and Ctrl-C.

Everything else that user code raises is its own outcome, whatever its class: KeyboardInterrupt, GeneratorExit and
SystemExit, too. Signals never raise an error in a process of celery5 (`processes/lifecycle/signals.py`).
"""

import math
import signal
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import trio

from celery5.protocol.job.tracebacks import get_traceback
from celery5.protocol.job.verdict import iterate_leaves
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error

MAX_SCOPES = 10_000
"""Cancel scopes that one job may leave open and that are closed for it."""


def reraise_cancellation(error: BaseException) -> None:
    """Raise what must pass through user code, if `error` is that or contains it; else return.

    Call it in an `except BaseException` around user code: `error` is the user's own when this returns.
    """
    kind = type(error)  # a class may lie about `__class__`, or raise when it is asked
    if issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup):
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
        if issubclass(type(leaf), trio.Cancelled) and _is_cancelled():
            return leaf
        if issubclass(type(leaf), KeyboardInterrupt) and _is_of_signal(leaf):
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
    last = get_traceback(error)
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


@contextmanager
def guard_scopes() -> Generator[None, None, None]:
    """Surround a plain call of user code in a Trio task of ours: the cancel scopes around it stay as they are.

    What it does to the current scope, it does to one that ends with this block; scopes that it leaves open are closed.
    """
    guard = ScopeGuard()
    trio.CancelScope().__enter__()
    try:
        yield
    finally:
        guard.restore()


P = ParamSpec("P")
T = TypeVar("T")


async def call_user_code(function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call user code in a Trio task and a nursery of its own, and return what it returns.

    What it does to the nursery and the cancel scopes above it, and what it starts there, ends with the call. Raises
    what it raises, whatever its class, so call `reraise_cancellation` where that is caught; an UnmanageableError for
    what even Trio cannot pass on; and RuntimeError when it has cancelled itself.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    async def call() -> None:
        try:
            values.append(await function(*args, **kwargs))
        except BaseException as error:
            reraise_cancellation(error)
            errors.append(make_manageable(error))
        finally:
            nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, name=function)
    except BaseException as error:
        reraise_cancellation(error)
        errors.append(make_manageable(error))
    if values:
        return values[0]
    raise errors[0] if errors else make_own_cancellation()


async def call_in_thread(function: Callable[[], T], *, limiter: trio.CapacityLimiter | None = None) -> T:
    """Call blocking user code in a thread, which is abandoned when this is cancelled, and return what it returns.

    Raises what it raises, whatever its class, or an UnmanageableError for what Trio cannot bring out of a thread.
    """

    def call() -> T:
        try:
            return function()
        except BaseException as error:
            manageable = make_manageable(error)
            if manageable is error:
                raise
        raise manageable

    return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)


class UnmanageableError(Exception):
    """Stands for an error of user code that cannot be passed on, and has its text."""


def make_manageable(error: BaseException) -> BaseException:
    """Return the error; or another one in its place, if what passes it on would fail.

    Python and Trio ask an error for its class, its traceback and its text, and a group for its members: a class may
    have redefined all of that. And they go into a group recursively.
    """
    try:
        if _is_plain(type(error)) and _is_flat(error) and type(repr(error)) is str:
            return error
    except BaseException:  # the user's code
        pass
    other = UnmanageableError(f"{describe_error(error, MAX_ERROR_LENGTH)} (an error that cannot be examined)")
    return other.with_traceback(get_traceback(error))


def _is_plain(kind: type) -> bool:
    """Return whether Python has what it asks an error of this class for from the built-in classes."""
    defined: list[Any] = [_NAMESPACE.__get__(base) for base in _BASES.__get__(kind)]
    return all(
        next(names[name] for names in defined if name in names) is builtin
        for builtin_class, names_of_class in _ASKED_FOR.items()
        if issubclass(kind, builtin_class)
        for name, builtin in names_of_class.items()
    )


def _is_flat(error: BaseException) -> bool:
    """Return whether a group is not nested so deeply that going into it would exhaust the stack."""
    level: list[BaseException] = [error]
    visited = set[int]()
    for _ in range(MAX_DEPTH):
        groups = [
            member
            for member in level
            if issubclass(type(member), BaseExceptionGroup) and id(member) not in visited
        ]
        if not groups:
            return True
        visited.update(map(id, groups))
        level = [member for group in groups for member in _MEMBERS.__get__(group)]
    return False


MAX_DEPTH = 50
"""Levels of groups in groups that an error of user code may have."""
_OF_CLASSES: Mapping[str, Any] = vars(type)
_NAMESPACE, _BASES = _OF_CLASSES["__dict__"], _OF_CLASSES["__mro__"]
_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]
_ASKED_FOR: dict[type, dict[str, Any]] = {
    BaseException: {
        "__class__": vars(object)["__class__"],
        **{
            name: getattr(BaseException, name)  # 3.14 has __getattribute__ from object
            for name in ("__getattribute__", "__traceback__", "__context__", "__cause__", "with_traceback")
        },
    },
    BaseExceptionGroup: {"exceptions": _MEMBERS},
}
"""What Python asks errors and groups for, and where that is defined."""


def make_own_cancellation() -> RuntimeError:
    """Return the error of user code that has cancelled what it runs in."""
    return RuntimeError("it has cancelled the cancel scope or the nursery that it runs in")
