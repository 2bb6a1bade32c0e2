"""Decide to which windows of event time a record belongs, and when a window closes.

Times are in ms since 1970, by the records and not by a clock. The *watermark* of a partition is the highest time that
was seen there, less the lateness that is allowed. It never goes back. A window closes when the watermark reaches its
end; a record that comes for it after that is late.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import ceil

import msgspec

from celery5.errors import Misconfigured

MAX_WINDOWS_PER_RECORD = 1_000
"""The most windows that overlap."""

OPEN_WINDOWS = "celery5:open-windows:"
"""The keyed state with the number of open windows of a partition, of those by the key of the stream: these must not
change their partition."""
LATE_RECORDS = "celery5:late-records:"
"""The keyed state with the number of records of a partition that were late."""

WindowKey = str | int


class Tumbling(msgspec.Struct, frozen=True):
    """Windows of one size, one after the other: each record is in one of them.

    They begin at multiples of the size since 1970 in UTC, moved by the offset. All are in seconds.
    """

    size: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        _check_size("Tumbling", self.size)


class Hopping(msgspec.Struct, frozen=True):
    """Windows of one size that begin every so often, and overlap: each record is in several of them. In seconds."""

    size: float
    every: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        _check_size("Hopping", self.size)
        if not 0.001 <= self.every <= self.size:
            raise Misconfigured(f"Hopping(every={self.every!r}): give 0.001 s to the size, {self.size:g} s")
        if ceil(self.size / self.every) > MAX_WINDOWS_PER_RECORD:
            raise Misconfigured(
                f"Hopping({self.size:g}, every={self.every:g}): each record would be in more than "
                f"{MAX_WINDOWS_PER_RECORD:,} windows"
            )


WindowShape = Tumbling | Hopping


def _check_size(name: str, size: float) -> None:
    if not 0.001 <= size < float("inf"):
        raise Misconfigured(f"{name}(size={size!r}): give seconds from 0.001 on")


def find_windows(shape: WindowShape, at: int) -> list[tuple[int, int]]:
    """Return the start and the end of each window that a time is in, the earliest first."""
    size, offset = round(shape.size * 1000), round(shape.offset * 1000)
    every = round(shape.every * 1000) if isinstance(shape, Hopping) else size
    last = (at - offset) // every * every + offset
    first = last - (size - 1 - (at - last)) // every * every
    return [(start, start + size) for start in range(first, last + 1, every)]


class OpenWindow(msgspec.Struct, frozen=True):
    """A window that has records and is not closed."""

    start: int
    end: int
    key: WindowKey


class WindowHead(msgspec.Struct, array_like=True, frozen=True):
    """What is stored of the windows of one partition, beside the open ones."""

    # The highest time that was seen; None for none.
    latest: int | None
    # The open windows have numbers from `first` to `next` - 1; some of these are closed.
    first: int
    next: int
    # How many records were late.
    late: int


class Placement(msgspec.Struct, frozen=True):
    """Where a record belongs."""

    # The open windows with their numbers, and whether the record has opened it.
    windows: tuple[tuple[int, OpenWindow, bool], ...]
    # Whether one of its windows, or all, had been closed before.
    is_late: bool


class TooManyOpen(msgspec.Struct, frozen=True):
    """A record would open more windows than may be open: it is in none."""

    open: int


class WindowTracker:
    """The open windows of one partition. It knows their times and keys, not what is in them.

    Each open window has a number, in the order of opening: under this it is stored.

    Args:
        shape: How windows lie.
        lateness: For how many ms the watermark is behind the highest time.
        max_open: The most open windows.
        head: What was stored of an earlier tracker.
        windows: The open windows of that with their numbers.
    """

    def __init__(
        self,
        shape: WindowShape,
        *,
        lateness: int,
        max_open: int,
        head: WindowHead | None = None,
        windows: Iterable[tuple[int, OpenWindow]] = (),
    ) -> None:
        self._shape = shape
        self._lateness = lateness
        self._max_open = max_open
        self._latest = head.latest if head else None
        self._first, self._next = (head.first, head.next) if head else (0, 0)
        self.late = head.late if head else 0
        self._open: dict[int, OpenWindow] = {}
        self._numbers: dict[OpenWindow, int] = {}
        self._by_end: list[tuple[int, int, int]] = []
        for number, window in windows:
            self._insert(number, window)

    def _insert(self, number: int, window: OpenWindow) -> None:
        self._open[number] = window
        self._numbers[window] = number
        heappush(self._by_end, (window.end, window.start, number))

    @property
    def head(self) -> WindowHead:
        """What is to be stored."""
        while self._first < self._next and self._first not in self._open:
            self._first += 1
        return WindowHead(self._latest, self._first, self._next, self.late)

    @property
    def open_count(self) -> int:
        """How many windows are open."""
        return len(self._open)

    @property
    def watermark(self) -> int | None:
        """The time that is over; None before the first record."""
        return None if self._latest is None else self._latest - self._lateness

    def add(self, at: int, key: WindowKey) -> Placement | TooManyOpen:
        """Place a record of this time and key, and let the watermark follow it."""
        watermark = self.watermark
        found = [OpenWindow(start, end, key) for start, end in find_windows(self._shape, at)]
        current = [window for window in found if watermark is None or window.end > watermark]
        new = [window for window in current if window not in self._numbers]
        if len(self._open) + len(new) > self._max_open:
            return TooManyOpen(len(self._open))
        placed: list[tuple[int, OpenWindow, bool]] = []
        for window in current:
            number = self._numbers.get(window)
            if number is None:
                placed.append((self._next, window, True))
                self._insert(self._next, window)
                self._next += 1
            else:
                placed.append((number, window, False))
        is_late = len(current) < len(found)
        self.late += is_late
        self.advance(at)
        return Placement(tuple(placed), is_late)

    def advance(self, at: int) -> None:
        """Let the watermark follow this time, unless it is further already."""
        self._latest = at if self._latest is None else max(self._latest, at)

    def close_next(self) -> tuple[int, OpenWindow] | None:
        """Close the next window that is over, by its end; return it with its number. None when there is none."""
        watermark = self.watermark
        if watermark is None or not self._by_end or self._by_end[0][0] > watermark:
            return None
        _, _, number = heappop(self._by_end)
        window = self._open.pop(number)
        del self._numbers[window]
        return number, window

    def get_idle_limit(self, idle: float) -> float | None:
        """Return after how many seconds without records the next window closes; None when none is open.

        After `idle` seconds without records, time goes on with the clock.
        """
        if not self._by_end or self._latest is None:
            return None
        return max(idle, (self._by_end[0][0] - self._latest + self._lateness) / 1000)

    def pass_idle_time(self, seconds: float) -> None:
        """Let time go on with the clock, at least until the next window is over."""
        if self._by_end and self._latest is not None:
            self.advance(max(self._latest + int(seconds * 1000), self._by_end[0][0] + self._lateness))
