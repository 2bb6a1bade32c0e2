"""Pace: how often a test looks whether a condition holds."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

SHORTEST = 0.005
LONGEST = 0.2
"""Seconds from the end of one look to the next."""


class Pace:
    """Looks at conditions, and measures how long that takes.

    A test shares its processors with the processes that it waits for. So it pauses for six times as long as the last
    look took: a condition that reads ten thousand jobs or a long log must not keep a processor busy.
    """

    def __init__(self) -> None:
        self.pause = SHORTEST
        """Seconds until the next look."""

    def look(self, condition: Callable[[], T]) -> T:
        """Return what `condition()` returns."""
        began = time.perf_counter()
        value = condition()
        self._pause_after(began)
        return value

    async def look_async(self, condition: Callable[[], Awaitable[T]]) -> T:
        """Return what `condition()` returns, which is awaited."""
        began = time.perf_counter()
        value = await condition()
        self._pause_after(began)
        return value

    def _pause_after(self, began: float) -> None:
        self.pause = min(max(6 * (time.perf_counter() - began), SHORTEST), LONGEST)
