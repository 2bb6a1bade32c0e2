"""Colour: whether the caller stands in Trio, in asyncio, or in plain Python.

Neither loop is imported here: a loop that nobody has imported cannot be running, and a Django process pays
nothing for Trio.
"""

import sys
from collections.abc import Callable
from typing import Literal, TypeVar

Colour = Literal["trio", "asyncio"]


def current_colour() -> Colour | None:
    """The event loop that runs the caller; None in plain Python and in the worker threads of both loops."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return "trio"
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return "asyncio"
    return None


T = TypeVar("T")


async def run_in_thread(function: Callable[[], T]) -> T:
    """Do `work` in a thread of Trio or asyncio, and give what it gives. Cancelled, it is left to itself."""
    if current_colour() == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)
