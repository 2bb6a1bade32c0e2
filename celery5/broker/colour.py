"""Colour: whether the caller stands in Trio, in asyncio, or in plain Python.

Floor: broker. Reads: nothing. Writes: nothing.

Neither loop is imported here: a loop that nobody has imported cannot be running, and a Django process pays
nothing for Trio.
"""

import sys
from typing import Literal

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
