"""Add up what was measured in the last hours, by queue and by task."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.protocol.observability.overview import (
    LastError,
    TaskMinute,
    TaskOverview,
    fails_now,
    find_onset,
    get_rate_window,
)
from celery5.protocol.observability.report import Measurements, get_labels
from celery5.protocol.observability.rollup import MINUTE, count_by_task
from celery5.protocol.observability.sketch import Sketch

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
FAILED_STATES = ("RETRY", "DEAD")
"""The states in which attempts end that have failed."""

DurationKind = str
"""`run` or `wait`."""
Durations = Mapping[tuple[DurationKind, str], Sketch]
"""How long attempts ran and waited, by task."""
_DURATIONS: Mapping[str, DurationKind] = {
    "celery5_job_run_seconds": "run",
    "celery5_job_wait_seconds": "wait",
}


class RecentPoint(NamedTuple):
    """What was measured of a queue in a minute or an hour."""

    # When it began, in seconds since 1970.
    at: int
    # Attempts that have ended, by task and state.
    counts: Mapping[tuple[str, str], int]
    # The backlog; None when that was not measured.
    depth: float | None


class RecentHistory(NamedTuple):
    """What was measured of a queue lately."""

    # Minutes, the oldest first; several points may be of the same.
    minutes: Sequence[RecentPoint]
    # From the full hour on.
    durations: Durations


def read_point(at: int, measurements: Measurements) -> RecentPoint:
    """Return what an overview needs of a point."""
    return RecentPoint(
        at, count_by_task(measurements.counters), measurements.gauges.get(("celery5_queue_depth",))
    )


def read_durations(measurements: Measurements) -> Durations:
    """Return the durations of a point."""
    return {
        (_DURATIONS[series[0]], get_labels(series).get("task", "")): sketch
        for series, sketch in measurements.sketches.items()
        if series[0] in _DURATIONS
    }


def pack_durations(durations: Durations) -> bytes:
    """Return durations in few bytes, to be remembered: an hour of a hundred queues takes 60 MB less so."""
    return msgspec.msgpack.encode([(*name, sketch.to_wire()) for name, sketch in durations.items()])


def unpack_durations(packed: bytes) -> Durations:
    """Return the durations of what `pack_durations` has returned."""
    words = msgspec.msgpack.decode(packed, type=list[tuple[str, str, list[Any]]])
    return {(kind, task): Sketch.from_wire(wire) for kind, task, wire in words}


def add_up_durations(parts: Iterable[Durations]) -> dict[tuple[DurationKind, str], Sketch]:
    """Return the distributions of all parts together."""
    total: defaultdict[tuple[DurationKind, str], Sketch] = defaultdict(Sketch)
    for part in parts:
        for name, sketch in part.items():
            total[name].add_all(sketch)
    return dict(total)


class _Task:
    """What was measured of one task, on all of its queues together."""

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # How many attempts ended, by minute: all, those that have run to their end, and those that failed.
        self.minutes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self.durations: dict[DurationKind, Sketch] = {"run": Sketch(), "wait": Sketch()}

    def add(self, at: int, state: str, count: int) -> None:
        """Count attempts that ended in a state."""
        minute = self.minutes[at]
        minute[0] += count
        if state in FAILED_STATES:
            minute[2] += count
        if state == "SUCCESS" or state in FAILED_STATES:
            minute[1] += count

    def list_minutes(self) -> list[TaskMinute]:
        """Return its minutes, the oldest first."""
        return [TaskMinute(at, minute[1], minute[2]) for at, minute in sorted(self.minutes.items())]

    def make_overview(
        self, name: str, error: LastError | None, first: int, now: float, earlier: Sequence[TaskMinute]
    ) -> TaskOverview:
        """Return what the overview says of it. Rates are measured from the minute `first` on, at the earliest."""
        ended, finished, failed = (sum(minute[part] for minute in self.minutes.values()) for part in range(3))
        begin, end = get_rate_window(first, now)
        lately = sum(minute[0] for at, minute in self.minutes.items() if begin <= at < end)
        minutes = self.list_minutes()
        onset = find_onset([*earlier, *minutes])
        return TaskOverview(
            name=name,
            queues=tuple(sorted(self.queues)),
            ended=ended,
            failed=failed,
            failed_share=failed / finished if finished else None,
            ended_per_minute=lately / (end - begin) * MINUTE,
            failed_per_minute=sum(minute.failed for minute in minutes if begin <= minute.at < end)
            / (end - begin)
            * MINUTE,
            run=_get_percentiles(self.durations["run"]),
            wait=_get_percentiles(self.durations["wait"]),
            failing_since=onset.at if onset is not None and fails_now(onset, now) else None,
            last_error=error,
        )


def find_open_failures(
    histories: Mapping[str, RecentHistory], now: float
) -> dict[str, tuple[list[str], list[TaskMinute]]]:
    """Return the tasks that fail now and may have begun before their first minute: their queues and minutes."""
    found: dict[str, tuple[list[str], list[TaskMinute]]] = {}
    for name, task in _read_tasks(histories).items():
        minutes = task.list_minutes()
        onset = find_onset(minutes)
        if onset is not None and fails_now(onset, now) and not onset.is_certain:
            found[name] = (sorted(task.queues), minutes)
    return found


def make_task_overviews(
    histories: Mapping[str, RecentHistory],
    errors: Mapping[str, LastError],
    now: float,
    earlier: Mapping[str, Sequence[TaskMinute]] | None = None,
) -> list[TaskOverview]:
    """Return what the overview says of tasks: first those that fail, then the busiest.

    Args:
        histories: The time of the overview, by queue.
        errors: The last error of each task.
        now: The time.
        earlier: What came before, of the tasks that fail since their first minute.
    """
    tasks = _read_tasks(histories)
    first = find_first_minute(histories, now)
    overviews = [
        task.make_overview(name, errors.get(name), first, now, (earlier or {}).get(name, ()))
        for name, task in tasks.items()
        if task.minutes
    ]
    return sorted(overviews, key=lambda task: (task.failing_since is None, -task.ended, task.name))


def find_first_minute(histories: Mapping[str, RecentHistory], now: float) -> int:
    """Return the first minute that was measured, in seconds since 1970."""
    points = (point.at for history in histories.values() for point in history.minutes)
    return min(min(points, default=int(now)), int(now))


def _read_tasks(histories: Mapping[str, RecentHistory]) -> dict[str, _Task]:
    """Return what was measured of each task."""
    tasks: defaultdict[str, _Task] = defaultdict(_Task)
    for queue, history in histories.items():
        for point in history.minutes:
            for (name, state), count in point.counts.items():
                tasks[name].queues.add(queue)
                tasks[name].add(point.at, state, count)
        for (kind, name), sketch in history.durations.items():
            tasks[name].durations[kind].add_all(sketch)
    return dict(tasks)


def _get_percentiles(sketch: Sketch) -> dict[str, float] | None:
    numbers = {name: sketch.quantile(fraction) for name, fraction in PERCENTILES.items()}
    return {name: round(value, 6) for name, value in numbers.items() if value is not None} or None
