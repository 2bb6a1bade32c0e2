"""Call functions of the application inside of blocks where they run: in a thread, a task of a loop, or a box."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from celery5.runners.context import CURRENT_JOB, CurrentJob

CallKind = Literal["trio", "asyncio", "thread"]
CallBlock: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function of the application that is about to be called, where that is done."""

    # In the Trio or asyncio task that calls it, or in its thread: one of a worker, or the main one of a box.
    kind: CallKind
    is_boxed: bool
    # None for what is no task: processors, timers, health checks, sinks and the like.
    job: CurrentJob | None
    # What it is called with.
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


CallHook = Callable[[FunctionCall], CallBlock]
"""Returns what surrounds a call."""
CallSurround = Callable[[Callable[..., Any], CallKind], Callable[..., Any]]
"""Returns a function that calls another one inside of blocks."""

CALL_SURROUND: ContextVar[CallSurround | None] = ContextVar("celery5_call_surround", default=None)
"""What surrounds the functions that this process calls; None where there is nothing."""


def surround_call(function: Callable[..., Any], kind: CallKind) -> Callable[..., Any]:
    """Return the function, or one that calls it inside of the blocks of this process's middleware."""
    surround = CALL_SURROUND.get()
    return function if surround is None else surround(function, kind)


def make_surround(hooks: Sequence[CallHook], *, is_boxed: bool = False) -> CallSurround:
    """Return what surrounds functions with the blocks that `hooks` return, the outermost first.

    A block gets the error of the function, and its own error is one of the function: it is as if the function were
    called in `with` statements, but that no block can hide an error.
    """

    def surround(function: Callable[..., Any], kind: CallKind) -> Callable[..., Any]:
        call = _call if kind == "thread" else _call_async
        return partial(call, hooks, is_boxed, kind, function)

    return surround


def _call(
    hooks: Sequence[CallHook],
    is_boxed: bool,
    kind: CallKind,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = FunctionCall(kind, is_boxed, CURRENT_JOB.get(), args, kwargs)
    entered = list[AbstractContextManager[Any]]()
    try:
        for hook in hooks:
            block = hook(call)
            if block is None:
                continue
            if not isinstance(block, AbstractContextManager):
                raise TypeError(
                    f"{block!r} surrounds a call in a thread, where nothing can be awaited: write `with` blocks"
                )
            block.__enter__()
            entered.append(block)
        result = function(*args, **kwargs)
    except BaseException as error:
        _leave(entered, error)
        raise
    _leave(entered, None)
    return result


def _leave(entered: list[AbstractContextManager[Any]], error: BaseException | None) -> None:
    """Leave all blocks, the innermost first. Raises the last error of one."""
    original = error
    while entered:
        try:
            entered.pop().__exit__(
                type(error) if error else None, error, error.__traceback__ if error else None
            )
        except BaseException as own:
            error = own
    if error is not None and error is not original:
        raise error


async def _call_async(
    hooks: Sequence[CallHook],
    is_boxed: bool,
    kind: CallKind,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    call, entered = FunctionCall(kind, is_boxed, CURRENT_JOB.get(), args, kwargs), list[Any]()
    try:
        for hook in hooks:
            block: Any = hook(call)
            if block is None:
                continue
            if hasattr(block, "__aenter__"):
                await block.__aenter__()
            else:
                block.__enter__()
            entered.append(block)
        result = await function(*args, **kwargs)
    except BaseException as error:
        await _leave_async(entered, error)
        raise
    await _leave_async(entered, None)
    return result


async def _leave_async(entered: list[Any], error: BaseException | None) -> None:
    original = error
    while entered:
        block = entered.pop()
        words = (type(error) if error else None, error, error.__traceback__ if error else None)
        try:
            if hasattr(block, "__aexit__"):
                await block.__aexit__(*words)
            else:
                block.__exit__(*words)
        except BaseException as own:
            error = own
    if error is not None and error is not original:
        raise error
