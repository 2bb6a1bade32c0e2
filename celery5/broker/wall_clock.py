"""The time of day by which jobs go: that of this machine and of the server, or one that a test sets.

Leases and timeouts of connections always use real time: when a test lets a day pass, its worker must not count as
dead. The starts of rates are stored in real time; when virtual time passes, they are moved back by as much.
"""

import time


class WallClock:
    """The clock of this process. Read it as `wall_time()`."""

    def __init__(self) -> None:
        self._virtual_time: float | None = None

    @property
    def is_virtual(self) -> bool:
        """Whether a test sets the time. Then the scripts that keep jobs and runs until their time go by it, too."""
        return self._virtual_time is not None

    def now(self) -> float:
        """Return the seconds since 1970."""
        return time.time() if self._virtual_time is None else self._virtual_time

    def set_virtual_time(self, seconds: float | None) -> None:
        """Let time stand still at a number of seconds since 1970; None: go by real time again."""
        self._virtual_time = seconds


WALL_CLOCK = WallClock()
wall_time = WALL_CLOCK.now
