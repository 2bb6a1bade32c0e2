"""In thread: what blocks, done in a thread of the caller's event loop, whichever that is.

Floor: broker. Reads and writes: what it is given to do.
"""

from collections.abc import Callable
from typing import TypeVar

from celery5.broker.colour import current_colour

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T]) -> T:
    """Do `work` in a thread of Trio or asyncio, and give what it gives. Cancelled, it is left to itself."""
    if current_colour() == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)
