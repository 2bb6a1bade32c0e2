"""Windows of event time: `events.windows(...)`.

The open windows of a partition are keyed state of its processor: a head with the watermark, and one value for each
open window. They change with the records that are added to them, in the same commit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Self, TypedDict, TypeVar, cast

import msgspec

from celery5.broker.calls.streams import RawEntry
from celery5.errors import CeleryError, Misconfigured
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.json_values import from_json
from celery5.protocol.streams.groups import split_id
from celery5.protocol.streams.windows import (
    LATE_RECORDS,
    OPEN_WINDOWS,
    Hopping,
    OpenWindow,
    TooManyOpen,
    Tumbling,
    WindowHead,
    WindowKey,
    WindowShape,
    WindowTracker,
)
from celery5.streams.codec import RecordCodec
from celery5.streams.feed import RecordFeed

A = TypeVar("A")
K = TypeVar("K", bound=WindowKey)
R = TypeVar("R")

WINDOWS_PREFIX = "celery5:windows:"
"""The keyed state of a group in which windows are stored."""
OWN_STATE = (WINDOWS_PREFIX, OPEN_WINDOWS, LATE_RECORDS)
"""What the names of the keyed state of windows begin with."""
CLOSINGS_PER_COMMIT = 500
"""The most windows that are closed in one commit: Redis does nothing else in that time."""


class TooManyWindows(CeleryError):
    """A record would open more windows of a partition than `max_open` allows."""


class WindowSettings(TypedDict, Generic[R], total=False):
    """The options of `events.windows(...)`: `WindowOptions` explains them."""

    time: Callable[[R], float | datetime] | None
    lateness: float
    idle: float | None
    on_late: Callable[[R], object] | None
    max_open: int
    name: str


@dataclass(frozen=True)
class WindowOptions(Generic[R]):
    """How records are gathered in windows.

    Raises:
        Misconfigured: A value makes no sense.
    """

    shape: WindowShape
    initial: Any
    add: Callable[[Any, R], Any]
    by: Callable[[R], Any] | None = None
    time: Callable[[R], float | datetime] | None = None
    """Returns when a record happened, in seconds since 1970 or as an aware datetime; by default when it was sent."""
    lateness: float = 0.0
    """For how many seconds of event time a window stays open beyond its end."""
    idle: float | None = None
    """Seconds without records after which event time goes on with the clock. None: windows wait for a record."""
    on_late: Callable[[R], object] | None = None
    """Is called with each record that came after a window of it had closed; by default it is only counted."""
    max_open: int = 10_000
    """The most open windows of a partition. A record beyond that fails."""
    name: str = "windows"
    """Under which the windows are stored: several windows of one processor need a name each."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not isinstance(cast("object", self.shape), Tumbling | Hopping):
            raise Misconfigured(f"windows({self.shape!r}): give Tumbling(...) or Hopping(...)")
        if not 0 <= self.lateness < float("inf"):
            raise Misconfigured(f"windows(lateness={self.lateness!r}): give seconds from 0 on")
        if self.idle is not None and not 0 < self.idle < float("inf"):
            raise Misconfigured(f"windows(idle={self.idle!r}): give seconds above 0")
        if isinstance(self.max_open, bool) or not 1 <= self.max_open <= 1_000_000:
            raise Misconfigured(f"windows(max_open={self.max_open!r}): give 1 to 1,000,000")


class Window(msgspec.Struct, Generic[K, A], frozen=True):
    """A window that is closed."""

    key: K
    start: float
    """When it began, in seconds since 1970."""
    end: float
    """When it was over; records of this time are in the next one."""
    value: A
    """What `add` has made of its records."""


class Windows(Generic[R, K, A]):
    """The windows of one partition. Iterate over them: each comes once, when it closes.

    A window is closed by the record that moves the watermark to its end. What the processor sends for it is committed
    together with that.
    """

    def __init__(self, feed: RecordFeed, codec: RecordCodec[R], options: WindowOptions[R]) -> None:
        if feed.concurrency > 1:
            raise Misconfigured(
                f"processor {feed.group}: windows need the order of a partition: declare it with concurrency=1"
            )
        self._feed = feed
        self._codec = codec
        self._options = options
        self._prefix = f"{WINDOWS_PREFIX}{options.name}:{feed.partition}"
        self._initial = encode_value(options.initial, "a window's value")
        # A value is read back after each record, so that nothing changes when it is read back after a crash.
        kind = cast("type[Any]", type(options.initial))
        self._values: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            Any if kind in _JSON_TYPES else kind, dec_hook=from_json
        )
        self._tracker: WindowTracker | None = None
        self._closings = 0
        # How many windows and late records of these are in the numbers of the partition.
        self._counted_open = self._counted_late = 0
        self._last_record = feed.now()

    @property
    def late(self) -> int:
        """How many records of the partition came after a window of them had closed."""
        return self._tracker.late if self._tracker else 0

    @property
    def open(self) -> int:
        """How many windows of the partition are open."""
        return self._tracker.open_count if self._tracker else 0

    @property
    def watermark(self) -> float | None:
        """The event time up to which windows are closed, in seconds since 1970; None before the first record."""
        watermark = self._tracker.watermark if self._tracker else None
        return None if watermark is None else watermark / 1000

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window[K, A]:
        tracker = self._tracker
        if tracker is None:
            tracker = self._tracker = await self._load()
            self._counted_open, self._counted_late = tracker.open_count, tracker.late
        while True:
            window = await self._close_next(tracker)
            if window is not None:
                return window
            if not await self._take_next(tracker):
                raise StopAsyncIteration

    async def _load(self) -> WindowTracker:
        """Return the windows as they are stored."""
        options, lateness = self._options, round(self._options.lateness * 1000)
        raw = await self._feed.get_state(self._prefix)
        if raw is None:
            return WindowTracker(options.shape, lateness=lateness, max_open=options.max_open)
        head = msgspec.json.decode(raw, type=WindowHead)
        numbers = range(head.first, head.next)
        contents = await self._feed.get_states([self._name(number) for number in numbers])
        windows: list[tuple[int, OpenWindow]] = []
        for number, content in zip(numbers, contents, strict=True):
            if content is not None:
                start, end, key, _ = _STORED.decode(content)
                windows.append((number, OpenWindow(start, end, key)))
        return WindowTracker(
            options.shape, lateness=lateness, max_open=options.max_open, head=head, windows=windows
        )

    def _name(self, number: int) -> str:
        return f"{self._prefix}:{number}"

    async def _save(self, tracker: WindowTracker) -> None:
        self._feed.set_state(self._prefix, msgspec.json.encode(tracker.head))
        if self._options.by is None and self._counted_open != tracker.open_count:
            await self._add_to(OPEN_WINDOWS, tracker.open_count - self._counted_open)
            self._counted_open = tracker.open_count
        if self._counted_late != tracker.late:
            await self._add_to(LATE_RECORDS, tracker.late - self._counted_late)
            self._counted_late = tracker.late

    async def _add_to(self, prefix: str, count: int) -> None:
        """Change a number of the partition, which other windows of the processor may have a part in."""
        name = f"{prefix}{self._feed.partition}"
        total = int(await self._feed.get_state(name) or 0) + count
        self._feed.set_state(name, str(total).encode() if total > 0 else None)

    async def _close_next(self, tracker: WindowTracker) -> Window[K, A] | None:
        """Close the next window that is over; None when there is none, or the processor is to end."""
        if self._feed.is_stopping:
            return None  # the next owner closes the rest
        if self._closings >= CLOSINGS_PER_COMMIT:
            self._closings = 0
            await self._feed.flush()
        closed = tracker.close_next()
        if closed is None:
            return None
        number, window = closed
        value = await self._get_value(number, is_new=False)
        self._feed.set_state(self._name(number), None)
        await self._save(tracker)
        self._closings += 1
        return Window(cast("K", window.key), window.start / 1000, window.end / 1000, value)

    async def _get_value(self, number: int, *, is_new: bool) -> Any:
        raw = None if is_new else await self._feed.get_state(self._name(number))
        return self._values.decode(self._initial if raw is None else _STORED.decode(raw)[3])

    async def _take_next(self, tracker: WindowTracker) -> bool:
        """Acknowledge what was taken, and add the next record to its windows, or let time go on.

        Return False when the processor is to end.
        """
        feed, self._closings = self._feed, 0
        feed.settle()
        raw = feed.take_next()
        if raw is None:
            idle = self._options.idle
            limit = None if idle is None else tracker.get_idle_limit(idle)
            if limit is None:
                raw = await feed.wait_next()
            else:
                raw = await feed.wait_next(max(0.0, self._last_record + limit - feed.now()))
        if raw is not None:
            await self._add(tracker, raw)
        elif feed.is_stopping:
            return False
        else:
            tracker.pass_idle_time(feed.now() - self._last_record)
        self._last_record = feed.now()
        return True

    async def _add(self, tracker: WindowTracker, raw: RawEntry) -> None:
        options, record = self._options, self._codec.decode(raw[1])
        placement = tracker.add(self._find_time(raw, record), self._find_key(record))
        if isinstance(placement, TooManyOpen):
            windows = f"{format_count(placement.open, 'window')} of partition {self._feed.partition}"
            raise TooManyWindows(
                f"processor {self._feed.group}: {windows} {choose_form(placement.open, 'is', 'are')} open, "
                f"and max_open is {options.max_open:,}: allow more, or use fewer keys or a smaller lateness"
            )
        for number, window, is_new in placement.windows:
            value = options.add(await self._get_value(number, is_new=is_new), record)
            content = (window.start, window.end, window.key, value)
            self._feed.set_state(self._name(number), encode_value(content, "a window's value"))
        await self._save(tracker)
        if placement.is_late and options.on_late is not None:
            options.on_late(record)

    def _find_time(self, raw: RawEntry, record: R) -> int:
        if self._options.time is None:
            return split_id(raw[0].decode())[0]
        time = self._options.time(record)
        if isinstance(time, datetime):
            if time.tzinfo is None:
                raise ValueError(f"the time of a record is {time!r}: give a datetime with a time zone")
            time = time.timestamp()
        return round(time * 1000)

    def _find_key(self, record: R) -> WindowKey:
        if self._options.by is None:
            key = self._codec.key(record)
            if key is None:
                raise Misconfigured(
                    f"processor {self._feed.group}: records without keys: give windows(by=...)"
                )
            return key.decode(errors="backslashreplace")
        key = self._options.by(record)
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(f"windows(by=...) has returned {key!r}: give a text or an int")
        return key


_STORED = msgspec.json.Decoder(tuple[int, int, WindowKey, msgspec.Raw])
"""What is stored of an open window: start, end, key, value."""
_JSON_TYPES = (int, float, str, bool, list, dict, type(None))
"""Types of values that JSON gives back as they are."""
