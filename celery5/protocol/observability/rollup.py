"""Roll the reports of all processes up into points of a minute and of an hour, and keep the totals.

One process at a time does this, and what it holds stands in Redis as well, so that another one can go on. Points belong
to a *group*: the queue that a series names in its label `queue`, or the cluster as a whole (CLUSTER).

Source: RRDtool's archives of different steps; the reports are deltas, so a point can be added to at any time.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from sys import intern
from typing import Any, NamedTuple, cast

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.observability.report import (
    Measurements,
    MetricsReport,
    Series,
    compress,
    compress_for_long,
    decompress,
    get_labels,
    make_series,
)
from celery5.protocol.observability.sketch import Sketch

MINUTE = 60
"""Seconds of the finer points."""
HOUR = 3600
"""Seconds of the coarser points."""
DAY = 86400
"""Seconds of which the hours are packed together."""
MINUTES_KEPT = 7 * 86400
"""Seconds for which minutes are kept."""
HOURS_KEPT = 90 * 86400
"""Seconds for which hours are kept."""
CLUSTER = ""
"""The group of what belongs to no queue."""
MAX_GROUPS = 2000
"""Groups that are kept; what belongs to further queues counts for the cluster."""
MAX_GROUP_SERIES = 2000
"""Series of one group; further ones are left out."""
STALE_AFTER = 45
"""Seconds after which the gauges of a process that does not report any more are forgotten."""
MAX_KNOWN_SERIES = 20_000
"""Series whose group is remembered, so that it is not derived for each report again."""

ReportId = tuple[int, int]
"""The id of a report on its stream: ms, then its number of those in that ms."""


class Tier(NamedTuple):
    """Points of one length. A point waits in Redis until its chunk is over; then the chunk is packed as a whole."""

    name: str
    # Seconds of a point, and of the chunk of points that are packed together.
    step: int
    chunk: int
    # Only three buckets of each distribution are packed: the percentiles of each point, but not of several together.
    is_reduced: bool


MINUTES = Tier("minutes", MINUTE, HOUR, is_reduced=True)
HOURS = Tier("hours", HOUR, DAY, is_reduced=False)


def read_report_id(text: str) -> ReportId:
    """Return an id of the stream as numbers, which are in the order of the stream; (0, 0) for what is none."""
    ms, _, number = text.partition("-")
    whole = read_whole(ms, -1), read_whole(number, -1)
    return whole if min(whole) >= 0 else (0, 0)


class MetricsGroup(msgspec.Struct):
    """The numbers of one queue, or of the cluster.

    A group is saved as a whole, with the id of the last report that counts in it. So groups can be saved one after
    another: when that is interrupted, the next one skips in each group the reports that count there already.
    """

    # All that was counted before the minute that is under way, and its gauges as they stand. So a report is added
    # once, to that minute, which takes a third off the work of a rollup.
    before: Measurements = msgspec.field(default_factory=Measurements)
    # The minute that is under way, in seconds since 1970; 0: nothing has been measured in any.
    minute: int = 0
    current: Measurements = msgspec.field(default_factory=Measurements)
    # When the points that are not packed yet began, in seconds since 1970, by tier.
    waiting: dict[str, list[int]] = msgspec.field(default_factory=lambda: {MINUTES.name: [], HOURS.name: []})
    # The last report that counts here.
    counted_to: ReportId = (0, 0)
    # How the group is marked in Redis: the last report that counted when it was saved, and how often it was; '' before.
    mark: str = ""

    @property
    def totals(self) -> Measurements:
        """All that was ever counted, and the gauges as they stand."""
        totals = Measurements(gauges=dict(self.before.gauges))
        for part in (self.before, self.current):
            totals.add(Measurements(counters=part.counters, sketches=part.sketches))
        return totals

    def count_all(self) -> dict[Series, float]:
        """Return the counters of `totals`."""
        counters = dict(self.before.counters)
        for series, value in self.current.counters.items():
            counters[series] = counters.get(series, 0.0) + value
        return counters

    def advance_mark(self) -> str:
        """Mark the group as saved once more. Return the mark before."""
        before, saves = self.mark, int(self.mark.partition("/")[2] or 0)
        self.mark = f"{self.counted_to[0]}-{self.counted_to[1]}/{saves + 1}"
        return before

    def pack(self) -> bytes:
        """Return the group as it stands in Redis, except for its mark."""
        waiting = [self.waiting[MINUTES.name], self.waiting[HOURS.name]]
        return compress([self.before.pack(), self.minute, self.current.pack(), waiting])

    @classmethod
    def unpack(cls, packed: bytes | None, mark: bytes | None = None) -> "MetricsGroup":
        """Return the group of what stands in Redis; an empty one when that is nothing."""
        words = _as_list(decompress(packed) if packed else None)
        group = cls()
        if len(words) == 4 and type(words[1]) is int:
            group.before, group.minute = Measurements.unpack(words[0]), words[1]
            group.current = Measurements.unpack(words[2])
            for tier, times in zip((MINUTES, HOURS), _as_list(words[3]), strict=False):
                group.waiting[tier.name] = [at for at in _as_list(times) if type(at) is int]
        text = (mark or b"").decode("ascii", "replace")
        counted_to, _, saves = text.partition("/")
        if saves.isdecimal():
            group.counted_to, group.mark = read_report_id(counted_to), text
        return group


class ClosedMinute(msgspec.Struct, frozen=True):
    """A minute that is over."""

    group: str
    # When it began, in seconds since 1970.
    at: int
    measurements: Measurements


class _ProcessGauges(NamedTuple):
    """The gauges of one process, in a tenth of the memory of its report."""

    # When its report came, in seconds since 1970.
    at: float
    series: tuple[Series, ...]
    values: "array[float]"
    largest: frozenset[str]


class Rollup:
    """Adds reports to groups, and closes the minutes that are over."""

    def __init__(self) -> None:
        self.groups: dict[str, MetricsGroup] = {}
        self._changed: set[str] = set()
        self._closed: deque[ClosedMinute] = deque()
        # The last gauges of each process. Their series are the same for most processes, and stand here once.
        self._gauges: dict[str, _ProcessGauges] = {}
        self._columns: dict[tuple[Series, ...], tuple[Series, ...]] = {}
        self._assigned: dict[Series, tuple[str, Series]] = {}

    def split(self, report: MetricsReport) -> dict[str, Measurements]:
        """Return the counters and sketches of a report by group; its gauges are the cluster's."""
        parts: dict[str, Measurements] = {}
        for series, value in report.measurements.counters.items():
            group, rest = self._assign(series)
            parts.setdefault(group, Measurements()).counters[rest] = value
        for series, sketch in report.measurements.sketches.items():
            group, rest = self._assign(series)
            parts.setdefault(group, Measurements()).sketches[rest] = sketch
        return parts

    def _assign(self, series: Series) -> tuple[str, Series]:
        """Return the group of a series, and the series without it."""
        found = self._assigned.get(series)
        if found is None:
            labels = get_labels(series)
            queue = labels.pop("queue", CLUSTER)
            found = (queue, make_series(series[0], labels)) if queue else (CLUSTER, series)
            if len(self._assigned) >= MAX_KNOWN_SERIES:
                self._assigned.clear()
            self._assigned[series] = found
        return found

    def add_report(
        self, at: float, report: MetricsReport, parts: dict[str, Measurements], report_id: ReportId
    ) -> None:
        """Add a report to the groups in which it does not count yet. They are known.

        Args:
            at: When it came, in seconds since 1970.
            parts: What `split` has returned of it.
            report_id: Its id on the stream.
        """
        by_group: dict[str, list[Measurements]] = {}
        for name, part in parts.items():
            by_group.setdefault(name if name in self.groups else CLUSTER, []).append(part)
        for name, several in by_group.items():
            group = self.groups.setdefault(name, MetricsGroup())
            if report_id > group.counted_to:
                for part in several:
                    self._add(at, name, part)
                group.counted_to = report_id
        gauges = report.measurements.gauges
        columns = tuple(gauges)
        columns = self._columns.setdefault(columns, columns)
        self._gauges[report.process] = _ProcessGauges(
            at, columns, array("d", gauges.values()), report.largest
        )

    def add_gauges(self, at: float, group: str, gauges: dict[Series, float]) -> None:
        """Add what was measured of a queue."""
        self._add(at, group, Measurements(gauges=gauges))

    def _add(self, at: float, name: str, part: Measurements) -> None:
        group, minute = self.groups.setdefault(name, MetricsGroup()), int(at // MINUTE) * MINUTE
        if 0 < group.minute < minute:
            self._close(name, group)
        if group.minute == 0:
            group.minute = minute
        part = _limit(part, group.before)
        for series in part.counters:  # `before` knows all series, so that they can be limited
            group.before.counters.setdefault(series, 0.0)
        for series in part.sketches:
            group.before.sketches.setdefault(series, Sketch())
        if part.gauges:  # all of the group, so that none stays that is not measured any more
            group.before.gauges = dict(part.gauges)
        group.current.add(part)
        self._changed.add(name)

    def merge_gauges(self, at: float, merged: dict[Series, float]) -> Iterator[None]:
        """Enter the gauges of the cluster in `merged`, one process that has reported lately at each step."""
        columns: dict[tuple[Series, ...], tuple[Series, ...]] = {}
        for process, gauges in list(self._gauges.items()):
            if gauges.at < at - STALE_AFTER:
                del self._gauges[process]
                continue
            columns[gauges.series] = gauges.series
            for series, value in zip(gauges.series, gauges.values, strict=True):
                if series[0] in gauges.largest:
                    merged[series] = max(merged.get(series, value), value)
                else:
                    merged[series] = merged.get(series, 0.0) + value
            yield
        self._columns = columns

    def close_minutes(self, at: float) -> Iterator[ClosedMinute]:
        """Yield the minutes that are over at a time, by Redis' clock, and have not been yielded before.

        A minute is closed when it is reached, so that the caller can let others run on the way.
        """
        now = int(at // MINUTE) * MINUTE
        for name, group in list(self.groups.items()):
            if 0 < group.minute < now:
                self._close(name, group)
            while self._closed:
                yield self._closed.popleft()

    def _close(self, name: str, group: MetricsGroup) -> None:
        current = group.current
        group.before.add(Measurements(counters=current.counters, sketches=current.sketches))
        self._closed.append(ClosedMinute(name, group.minute, current))
        group.minute, group.current = 0, Measurements()
        self._changed.add(name)

    def change(self, name: str) -> None:
        """Note that a group has to be saved."""
        self._changed.add(name)

    def take_changed(self) -> dict[str, MetricsGroup]:
        """Return the groups that have changed since the last call."""
        changed = {name: self.groups[name] for name in self._changed}
        self._changed.clear()
        return changed


def _limit(part: Measurements, totals: Measurements) -> Measurements:
    """Return the part without the new series that a group has no room for."""
    left = MAX_GROUP_SERIES - len(totals.counters) - len(totals.sketches)
    new = [
        *(series for series in part.counters if series not in totals.counters),
        *(series for series in part.sketches if series not in totals.sketches),
    ]
    if len(new) <= left:
        return part
    refused = set(new[max(left, 0) :])
    return Measurements(
        {series: value for series, value in part.counters.items() if series not in refused},
        part.gauges,
        {series: sketch for series, sketch in part.sketches.items() if series not in refused},
    )


def name_point(tier: Tier, at: int, group: str) -> str:
    """Return the field under which a point waits in Redis until its chunk is packed."""
    return f"{tier.name}:{at}:{group}"


def read_index(packed: bytes) -> list[str]:
    """Return the names of all groups: what cannot be read is left out."""
    return [name for name in _as_list(decompress(packed) if packed else None) if isinstance(name, str)]


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def pack_point(measurements: Measurements) -> bytes:
    """Return one point as bytes."""
    return compress(measurements.pack())


def unpack_point(packed: bytes) -> Measurements:
    """Return the point of what `pack_point` has returned."""
    return Measurements.unpack(decompress(packed))


def pack_chunk(tier: Tier, points: Iterable[tuple[int, Measurements]]) -> bytes:
    """Return the points of a chunk as bytes: by series, so that its name stands there once.

    The times first, then for counters, gauges and sketches: each series, with its values at those times.
    """
    points = sorted(points, key=lambda point: point[0])
    packed = [(_reduce(point) if tier.is_reduced else point) for _, point in points]
    columns: list[list[Any]] = []
    for kind in range(3):
        by_series: dict[Series, list[Any]] = {}
        for number, point in enumerate(packed):
            for *series, value in point.pack(in_short=not tier.is_reduced)[kind]:
                by_series.setdefault(tuple(series), [None] * len(packed))[number] = value
        columns.append([[*series, values] for series, values in by_series.items()])
    return compress_for_long([[at for at, _ in points], *columns])


def unpack_chunk(packed: bytes, *, only: str = "") -> list[tuple[int, Measurements]]:
    """Return the points of what `pack_chunk` has returned; what cannot be read is left out.

    Args:
        packed: The chunk.
        only: The name of the one metric that is wanted; '' for all.
    """
    words = _as_list(decompress(packed))
    times = [at for at in _as_list(words[0] if words else None) if type(at) is int]
    rows: list[list[list[Any]]] = [[[], [], []] for _ in times]
    for kind, column in enumerate(words[1:4]):
        for series in _as_list(column):
            *names, values = _as_list(series) or [None]
            if only and names[:1] != [only]:
                continue
            for row, value in zip(rows, _as_list(values), strict=False):
                if value is not None:
                    row[kind].append([*names, value])
    return [(at, Measurements.unpack(row)) for at, row in zip(times, rows, strict=True)]


FAILED_STATES = ("RETRY", "DEAD")
"""The states in which attempts end that have failed. One that asks for the next one is counted as another state."""
FINISHED_STATES = (*FAILED_STATES, "SUCCESS")
"""The states in which attempts end that have run to their end."""


class AttemptCounts(NamedTuple):
    """How many attempts have ended, how many of these have run to their end, and how many of those failed."""

    ended: int
    finished: int
    failed: int

    @property
    def failed_share(self) -> float | None:
        """The share of those that failed of those that have run to their end; None when none has."""
        return self.failed / self.finished if self.finished else None


def count_attempts(by_state: Mapping[str, int]) -> AttemptCounts:
    """Return how many attempts have ended and failed, of how many have ended in each state."""
    failed = sum([by_state.get(state, 0) for state in FAILED_STATES])
    return AttemptCounts(sum(by_state.values()), failed + by_state.get("SUCCESS", 0), failed)


def count_by_task(counters: Mapping[Series, float]) -> dict[tuple[str, str], int]:
    """Return how many attempts have ended, by task and state."""
    counts: dict[tuple[str, str], int] = {}
    for series, value in counters.items():
        if series[0] == "celery5_jobs_total":
            labels = get_labels(series)
            counts[intern(labels.get("task", "")), intern(labels.get("state", ""))] = int(value)
    return counts


def count_jobs(packed: bytes) -> dict[tuple[str, str], int]:
    """Return how many attempts have ended in a point, by task and state, of what `pack_point` has returned."""
    return count_by_task(unpack_point(packed).counters)


def unpack_job_counts(packed: bytes) -> list[tuple[int, dict[tuple[str, str], int]]]:
    """Return when each point of a chunk began and how many attempts ended in it, without what else was measured."""
    points = unpack_chunk(packed, only="celery5_jobs_total")
    return [(at, count_by_task(point.counters)) for at, point in points]


def _reduce(point: Measurements) -> Measurements:
    sketches = {series: sketch.reduce() for series, sketch in point.sketches.items()}
    return Measurements(point.counters, point.gauges, sketches)


def sum_points(points: Iterable[Measurements]) -> Measurements:
    """Return one point for all: counters and sketches added up, and of each gauge the largest."""
    total = Measurements()
    for point in points:
        gauges = {
            series: max(value, total.gauges.get(series, value)) for series, value in point.gauges.items()
        }
        total.add(Measurements(point.counters, gauges, point.sketches))
    return total


OLDEST = "celery5_queue_oldest_seconds"
"""The gauge whose largest value is that of all queues; the others count something, and are added up."""


def add_queue(total: Measurements, queue: Measurements) -> None:
    """Add a queue's point to that of all queues."""
    gauges = {
        series: max(value, total.gauges.get(series, value))
        if series[0] == OLDEST
        else value + total.gauges.get(series, 0.0)
        for series, value in queue.gauges.items()
    }
    total.add(Measurements(queue.counters, gauges, queue.sketches))
