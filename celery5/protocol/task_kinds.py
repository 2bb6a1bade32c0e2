"""The kinds of tasks: where their code runs."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected

EventLoop = Literal["trio", "asyncio"]
"""The event loop of an `async def`."""
FunctionKind = Literal["trio", "asyncio", "thread"]
"""Where a function runs that has no process of its own: in one of the loops, or in a thread."""
TaskKind = Literal["trio", "asyncio", "thread", "boxed"]
"""In the worker's Trio loop, in its asyncio loop, in a thread, or in its own process."""
TASK_KINDS = ("trio", "asyncio", "thread", "boxed")
IO_KINDS = ("trio", "asyncio")
"""The kinds that are I/O-bound: more of their jobs may wait at once on the same processor."""


def check_loop(loop: object, where: str) -> None:
    """Raise Misconfigured unless `loop` is the name of an event loop. `where` begins the message."""
    if loop not in ("trio", "asyncio"):
        raise Misconfigured(f"{where}: loop is {loop!r}: give 'trio' or 'asyncio'")


def choose_kind(
    function: Callable[..., Any],
    loop: EventLoop | None,
    default: EventLoop,
    where: str,
    *,
    is_task: bool = False,
) -> FunctionKind:
    """Return where a function runs: an `async def` in a loop, a `def` in a thread.

    Args:
        function: The function.
        loop: The event loop that its declaration names, if it names one.
        default: The event loop of the application.
        where: The beginning of an error message.
        is_task: Whether it may take resources.

    Raises:
        Misconfigured: The loop is unknown or does not run `def` functions, or a function that is no
            task takes a resource.
    """
    if not is_task:
        refuse_injected(function, where)
    if loop is not None:
        check_loop(loop, where)
    if inspect.iscoroutinefunction(function):
        return loop or default
    if loop == "asyncio":
        raise Misconfigured(f"{where} is not async: loop='asyncio' is for async def")
    return "thread"
