"""Fine Timer: has the event loop wake when something is due, and not up to a millisecond later.

Floor: services. Reads: nothing. Writes: nothing.

epoll waits for whole milliseconds, rounded up, and so does every loop built on it: a hundred jobs that sleep 50 ms, one
after another on each slot, take 51 ms and more. A timerfd counts nanoseconds. One is set to what the loop is about to
wait for, and wakes it first.
"""

import ctypes
import os
from collections.abc import Callable
from math import ceil

import trio

MAX_TIMEOUT = 1.0
"""Seconds: for what is further away a millisecond is nothing."""
MIN_LATENESS = 0.0001
"""Seconds that epoll must be late to be anticipated. Told to wait for whole milliseconds it is not late at all."""
_NANOSECONDS = 1_000_000_000


class _Span(ctypes.Structure):
    """struct itimerspec: how often after the first time, which is never, and when first, counted from now."""

    _fields_ = (
        ("again_seconds", ctypes.c_long),
        ("again_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class FineTimer(trio.abc.Instrument):
    """Sets the timer each time that the loop is about to wait. Where there is no timerfd (outside Linux) it does
    nothing, and the loop wakes as it always does."""

    def __init__(self) -> None:
        self._span = _Span()
        self._set: Callable[..., int] | None = None
        self._timer = -1

    def before_io_wait(self, timeout: float) -> None:
        """The loop is about to wait for so many seconds (Trio's instrument)."""
        if (
            0 < timeout < MAX_TIMEOUT
            and ceil(timeout * 1000) / 1000 - timeout > MIN_LATENESS
            and self._set is not None
        ):
            # Never 0, which would stop the timer; a timer that rings a little early would have the loop wait once more.
            self._span.nanoseconds = min(ceil(timeout * _NANOSECONDS), _NANOSECONDS - 1)
            self._set(self._timer, 0, ctypes.byref(self._span), None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled."""
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "timerfd_create"):
            task_status.started()
            await trio.sleep_forever()
        self._timer = libc.timerfd_create(
            ctypes.c_int(_MONOTONIC), ctypes.c_int(os.O_NONBLOCK | os.O_CLOEXEC)
        )
        if self._timer < 0:  # no file descriptor is left, or a sandbox forbids it
            task_status.started()
            await trio.sleep_forever()
        self._set = libc.timerfd_settime
        trio.lowlevel.add_instrument(self)
        try:
            task_status.started()
            while True:
                await trio.lowlevel.wait_readable(self._timer)
                os.read(self._timer, 8)
        finally:
            trio.lowlevel.remove_instrument(self)
            trio.lowlevel.notify_closing(self._timer)
            os.close(self._timer)
            self._set = None


_MONOTONIC = 1
