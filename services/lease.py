"""Lease: whether this worker still counts as alive, as far as it knows.

Floor: services. Reads: the clock, the black box. Writes: nothing.
"""

import time
from functools import partial

import trio

from celery5.errors import LeaseLost
from celery5.services.black_box import SidecarMemory

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


MARGIN_FRACTION = 1 / 20
"""The last part of a lease, in which a worker acts as if the lease had ended: it cancels the jobs that must not outlast
the lease, and they have this time to end."""
CHECK_INTERVAL = 1.0
"""Seconds between looks at the clock, at least: a timer fires late on a machine that was suspended."""

now = partial(time.clock_gettime, _CLOCK)
"""Seconds on a clock that goes on while the machine is suspended, where there is one."""


class Lease:
    """This worker's right to settle jobs: how long it lasts unrenewed, in seconds, and whether it was lost.

    `until` is when it ends unless it is renewed, on the clock of `now()`. A worker that was frozen for longer wakes
    with jobs in its hands that others may have finished long ago: it begins none before it is `sure` of its lease (I3).
    """

    def __init__(self, *, seconds: float, sidecar_memory: SidecarMemory | None = None) -> None:
        self.seconds = seconds
        self.is_lost = False
        self.expires_at = 0.0
        self._black_box = sidecar_memory
        self._renewed = trio.Event()

    def mark_renewed(self, requested_at: float) -> None:
        """Redis has renewed it, and was `asked` to at that time (`now()`)."""
        self.expires_at = max(self.expires_at, requested_at + self.seconds)
        self._renewed.set()
        self._renewed = trio.Event()

    async def wait_until_valid(self) -> None:
        """Return once the lease is known to last; for ever in a worker that has lost it."""
        while self.is_lost or not self.is_valid():
            await self._renewed.wait()

    def is_valid(self) -> bool:
        """Whether it is known to last. While a job blocked the loop, the understudy may have renewed it."""
        if self._black_box is not None:
            self.expires_at = max(self.expires_at, self._black_box.lease_until)
        return now() < self.expires_at

    async def wait_for_expiry(self) -> None:
        """Return when the lease is about to end, or has ended, as far as this worker's clock says."""
        margin = self.seconds * MARGIN_FRACTION
        while self.is_valid() and (left := self.expires_at - margin - now()) > 0:  # noqa: ASYNC110  the clock changes
            await trio.sleep(min(left, max(margin, CHECK_INTERVAL)))

    def mark_lost(self, why: str) -> LeaseLost:
        """The lease is gone. Gives the error to raise."""
        self.is_lost = True
        return LeaseLost(why)
