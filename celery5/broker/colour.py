"""Colour: whether the caller is in Trio, in asyncio, or in plain Python.

Neither loop is imported here: a loop that nobody has imported cannot be running, and a Django process pays
nothing for Trio.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Literal, TypeVar

from celery5.errors import BlockingInEventLoop

Colour = Literal["trio", "asyncio"]
T = TypeVar("T")


def current_colour() -> Colour | None:
    """Return the event loop that runs the caller; None in plain Python and in the worker threads of both loops."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return "trio"
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return "asyncio"
    return None


def check_may_block() -> None:
    """Raise BlockingInEventLoop inside an event loop. The error names the coroutine to await instead."""
    colour = current_colour()
    if colour is not None:
        name = _find_coroutine_name(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        raise BlockingInEventLoop(f"this would block the {colour} event loop: await {name}(...) instead")


def _find_coroutine_name(frame: FrameType | None) -> str:
    """Return the name of the coroutine for the call of the public API that led to `frame`.

    It is read off the stack, since the alternative is to hand it down through every function between the API and the
    driver. The outermost function of this package that has a counterpart is the one that the user called.
    """
    name, package = "get_async_driver", __name__.partition(".")[0]
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        name = _get_counterpart(frame) or name
        frame = frame.f_back
    return name


def _get_counterpart(frame: FrameType) -> str:
    """Return how the coroutine beside a function is reached: `delay` has `adelay`, `wait` has `wait_async`.

    A class that is reached through an attribute of the application names that as `REACHED_AS`. '' for none.
    """
    function, owner = frame.f_code.co_name, frame.f_locals.get("self", frame.f_locals.get("cls"))
    for counterpart in (f"a{function}", f"{function}_async"):
        if owner is None and counterpart in frame.f_globals:
            return counterpart
        kind = owner if isinstance(owner, type) else type(owner)
        if owner is not None and hasattr(kind, counterpart):
            return f"{getattr(kind, 'REACHED_AS', '')}{counterpart}"
    return ""


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread of Trio or asyncio and return its result. A cancelled call is abandoned there.

    In plain Python it is called here.
    """
    colour = current_colour()
    if colour is None:
        return function()
    if colour == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)
