"""Lease: whether this worker still counts as alive, as far as it knows.

Floor: services. Reads: the clock. Writes: nothing.
"""

import time

import trio

from celery5.errors import LeaseLost

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(_CLOCK)


class Lease:
    """This worker's right to settle jobs: how long it lasts unrenewed, in seconds, and whether it was lost.

    `until` is when it ends unless it is renewed, on the clock of `now()`. A worker that was frozen for longer wakes
    with jobs in its hands that others may have finished long ago: it begins none before it is `sure` of its lease (I3).
    """

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self.lost = False
        self.until = 0.0
        self._renewed = trio.Event()

    def renewed(self, asked: float) -> None:
        """Redis has renewed it, and was `asked` to at that time (`now()`). For any thread."""
        self.until = max(self.until, asked + self.seconds)

    def tell(self) -> None:
        """Let those go on who wait to be sure. For the event loop."""
        self._renewed.set()
        self._renewed = trio.Event()

    async def sure(self) -> None:
        """Return once the lease is known to last; for ever in a worker that has lost it."""
        while self.lost or now() >= self.until:
            await self._renewed.wait()

    def lose(self, why: str) -> LeaseLost:
        """The lease is gone. Gives the error to raise."""
        self.lost = True
        return LeaseLost(why)
