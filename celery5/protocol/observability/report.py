"""Make and read the reports that processes send of their metrics: what has changed since the report before."""

import zlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from math import isfinite
from typing import Any, NamedTuple, cast

import msgspec

from celery5.protocol.bounded_decoding import decode_msgpack, inflate
from celery5.protocol.observability.families import Labels, MetricFamily
from celery5.protocol.observability.sketch import Sketch

VERSION = 1
"""The version of a packed report."""
MAX_SERIES = 5000
"""Series in one report: more labels are a mistake, and the rest is left out."""
HAS_BZ2 = find_spec("_bz2") is not None
MAX_PACKED = 4 * 1024 * 1024
"""Bytes of a report, unpacked: what has more is not read."""
MAX_VALUES = 400_000
"""Values in one: 5,000 series with their labels, and distributions of some of them."""
MAX_NAME = 300
"""Characters of a label that are read from others."""

Series = tuple[str, ...]
"""What is measured: the name of a metric, then the names and values of its labels, sorted."""


class Measurements(msgspec.Struct):
    """Numbers by series."""

    # How much was added.
    counters: dict[Series, float] = {}
    # How it stands.
    gauges: dict[Series, float] = {}
    # How durations are distributed.
    sketches: dict[Series, Sketch] = {}

    def add(self, other: "Measurements") -> None:
        """Add the counters and sketches of `other`, and take over its gauges."""
        for series, value in other.counters.items():
            self.counters[series] = self.counters.get(series, 0.0) + value
        self.gauges.update(other.gauges)
        for series, sketch in other.sketches.items():
            self.sketches.setdefault(series, Sketch()).add_all(sketch)

    def pack(self, *, in_short: bool = False) -> list[Any]:
        """Return plain values for the wire.

        Args:
            in_short: Counts of distributions are within 6 %, and their sums are left out.
        """
        return [
            [[*series, _round(value)] for series, value in self.counters.items()],
            [[*series, _shorten(value)] for series, value in self.gauges.items()],
            [
                [*series, sketch.to_bytes() if in_short else sketch.to_wire()]
                for series, sketch in self.sketches.items()
            ],
        ]

    @classmethod
    def unpack(cls, packed: Any) -> "Measurements":
        """Return the measurements of what `pack` has returned; what cannot be any is left out."""
        measurements = cls()
        counters, gauges, sketches = (*_as_list(packed), None, None, None)[:3]
        for series, value in _read_series(counters):
            if _is_number(value) and value >= 0:
                measurements.counters[series] = float(value)
        for series, value in _read_series(gauges):
            if _is_number(value):
                measurements.gauges[series] = float(value)
        for series, value in _read_series(sketches):
            sketch = Sketch.from_wire(value)
            if sketch.counts:
                measurements.sketches[series] = sketch
        return measurements


class ReportOrigin(NamedTuple):
    """What a report says of the process that it comes from."""

    # The full name of a worker or another process.
    name: str = ""
    # When the process started, in seconds since 1970; 0: not known.
    started: float = 0.0
    # Attempts that have ended in it.
    ended: int = 0
    # The version of its code: the same for workers whose tasks are the same; '': not known.
    code: str = ""


UNKNOWN_ORIGIN = ReportOrigin()
"""That of a report that says nothing of its process."""


class MetricsReport(msgspec.Struct, frozen=True):
    """What one process has measured since its report before."""

    # A name of its own for each process.
    process: str
    # worker, router, scheduler, controller or publisher.
    kind: str
    # Counts the reports of the process.
    number: int
    measurements: Measurements
    # The gauges of which the largest counts in a cluster; all others are added up.
    largest: frozenset[str] = frozenset()
    origin: ReportOrigin = UNKNOWN_ORIGIN

    def pack(self) -> bytes:
        """Return the report as bytes: msgpack, compressed by zlib."""
        words = [
            VERSION,
            self.process,
            self.kind,
            self.number,
            *self.measurements.pack(),
            sorted(self.largest),
            self.origin,
        ]
        return zlib.compress(msgspec.msgpack.encode(words), 1)


def unpack_gauges(packed: bytes) -> MetricsReport | None:
    """Return a report without its counters and sketches, in a quarter of the time; None when it cannot be read."""
    return _unpack(packed, gauges_only=True)


def unpack_report(packed: bytes) -> MetricsReport | None:
    """Return a report; None when it cannot be read, or is of another version."""
    return _unpack(packed, gauges_only=False)


def _unpack(packed: bytes, *, gauges_only: bool) -> MetricsReport | None:
    words = _as_list(decompress(packed))
    if len(words) < 8 or words[0] != VERSION:
        return None
    _, process, kind, number, counters, gauges, sketches, largest = words[:8]
    if not isinstance(process, str) or not isinstance(kind, str) or type(number) is not int:
        return None
    measurements = Measurements.unpack([None, gauges, None] if gauges_only else [counters, gauges, sketches])
    names = frozenset(name for name in _as_list(largest) if isinstance(name, str))
    origin = _read_origin(words[8] if len(words) > 8 else None)
    return MetricsReport(process[:MAX_NAME], kind[:MAX_NAME], number, measurements, names, origin)


def _read_origin(packed: Any) -> ReportOrigin:
    """Return what a report says of its process: nothing when an earlier version has made it."""
    words: list[Any] = [*_as_list(packed), None, None, None, None]
    name, started, ended, code = words[:4]
    return ReportOrigin(
        name[:MAX_NAME] if isinstance(name, str) else "",
        float(started) if _is_number(started) else 0.0,
        ended if type(ended) is int else 0,
        code[:MAX_NAME] if isinstance(code, str) else "",
    )


def compress(value: Any) -> bytes:
    """Return a plain value as msgpack, compressed by zlib."""
    return zlib.compress(msgspec.msgpack.encode(value), 6)


def compress_for_long(value: Any) -> bytes:
    """Return a plain value as msgpack, in fewer bytes than `compress`: for what is written once and kept.

    A day of a busy queue has 7.0 kB instead of 9.2 kB. A Python may have been built without bzip2; then it is zlib's.
    """
    if not HAS_BZ2:
        return compress(value)
    import bz2

    encoded = msgspec.msgpack.encode(value)
    return min(zlib.compress(encoded, 6), bz2.compress(encoded), key=len)


def decompress(packed: bytes) -> Any:
    """Return what these two have packed; None for what cannot be read, or is too large."""
    if packed[:3] == b"BZh" and not HAS_BZ2:
        return None
    try:
        return decode_msgpack(inflate(packed, limit=MAX_PACKED), most=MAX_VALUES)
    except (ValueError, TypeError):
        return None


class ReportMaker:
    """Makes the reports of one process.

    A report says what has changed since the last one that has arrived. One whose fate is not known is sent again as it
    was, with its number, so that Redis can tell that it has come before.

    Args:
        process: A name that no other process has.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._number = 0
        self._counters: dict[Series, float] = {}
        self._sketches: dict[Series, Sketch] = {}
        # The gauges of the last report that were not 0: one that is 0 now is reported once more.
        self._gauges: set[Series] = set()
        self._pending: MetricsReport | None = None

    @property
    def has_pending(self) -> bool:
        """Whether a report was made that has not been acknowledged."""
        return self._pending is not None

    def make(
        self, families: Iterable[MetricFamily], *, kind: str, origin: ReportOrigin = UNKNOWN_ORIGIN
    ) -> MetricsReport:
        """Return the next report; the last one again, when it has not been acknowledged.

        Args:
            families: The metrics of the process as they stand.
            kind: The kind of process.
            origin: What the report says of it.
        """
        if self._pending is not None:
            return self._pending
        measurements, largest = Measurements(), set[str]()
        for family in families:
            self._add_family(measurements, family)
            if family.kind == "gauge" and family.merge == "max":
                largest.add(family.name)
        self._gauges = {series for series, value in measurements.gauges.items() if value}
        self._number += 1
        self._pending = MetricsReport(
            self._process, kind, self._number, measurements, frozenset(largest), origin
        )
        return self._pending

    def acknowledge(self) -> None:
        """Note that the last report has arrived."""
        self._pending = None

    def _add_family(self, measurements: Measurements, family: MetricFamily) -> None:
        for sample in family.samples:
            series, value = make_series(family.name, sample.labels), sample.value
            if not isfinite(value):
                continue
            if family.kind == "gauge":
                is_wanted = family.merge and (value or series in self._gauges)
                if is_wanted and len(measurements.gauges) < MAX_SERIES:
                    measurements.gauges[series] = measurements.gauges.get(series, 0.0) + value
            elif self._is_room_for(series, self._counters):
                before = self._counters.get(series, 0.0)
                # A part of the process that was built again counts from 0 again.
                if added := value - before if value >= before else value:
                    measurements.counters[series] = measurements.counters.get(series, 0.0) + added
                self._counters[series] = value
        for sketch in family.sketches:
            series = make_series(family.name, sketch.labels)
            if self._is_room_for(series, self._sketches):
                new = sketch.sketch.since(self._sketches.get(series))
                if new.counts:
                    measurements.sketches[series] = new
                    self._sketches[series] = sketch.sketch.copy()

    @staticmethod
    def _is_room_for(series: Series, seen: dict[Series, Any]) -> bool:
        return series in seen or len(seen) < MAX_SERIES


def make_series(name: str, labels: Labels) -> Series:
    """Return the series of a metric with these labels."""
    return (name, *(word for pair in sorted(labels.items()) for word in pair))


def get_labels(series: Series) -> dict[str, str]:
    """Return the labels of a series."""
    return dict(zip(series[1::2], series[2::2], strict=True))


def _read_series(packed: Any) -> Iterator[tuple[Series, Any]]:
    for words in _as_list(packed)[:MAX_SERIES]:
        *names, value = _as_list(words) or [None]
        if len(names) % 2 and all(isinstance(name, str) and len(name) <= MAX_NAME for name in names):
            yield cast("Series", tuple(names)), value


def _round(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 6)


def _shorten(value: float) -> float | int:
    """Return a number in as few bytes as it needs: a large one as a whole number, which is shorter than a float."""
    return int(value) if value == int(value) or value >= 100 else round(value, 6)


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)
