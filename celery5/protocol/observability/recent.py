"""Add up what was measured in the last hours, by queue and by task."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.protocol.observability.job_tally import UNKNOWN_TASK
from celery5.protocol.observability.overview import (
    FailureOnset,
    LastError,
    TaskMinute,
    TaskOverview,
    fails_now,
    find_onset,
    get_rate_window,
)
from celery5.protocol.observability.report import Measurements, get_labels
from celery5.protocol.observability.rollup import MINUTE, count_attempts, count_by_task
from celery5.protocol.observability.sketch import Sketch

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

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


class DeadCount(NamedTuple):
    """The dead letters of a queue: how many there are, and when the oldest came, in seconds since 1970."""

    letters: int
    # Infinite where there is none.
    oldest: float


class _Task:
    """What was measured of one task, on all of its queues together."""

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # How many attempts ended, by minute and state.
        self.minutes: defaultdict[int, dict[str, int]] = defaultdict(dict)
        self.durations: dict[DurationKind, Sketch] = {"run": Sketch(), "wait": Sketch()}

    def add(self, at: int, state: str, count: int) -> None:
        """Count attempts that ended in a state."""
        minute = self.minutes[at]
        minute[state] = minute.get(state, 0) + count

    def list_minutes(self) -> list[TaskMinute]:
        """Return its minutes, the oldest first."""
        return [make_task_minute(at, by_state) for at, by_state in sorted(self.minutes.items())]

    def is_resolved(self, onset: FailureOnset, dead: Mapping[str, DeadCount]) -> bool:
        """Return whether nothing is left to do: each failure became a dead letter, and its queues have none now.

        The dead letters were replayed or purged. A retried attempt leaves none, so it counts until the task succeeds.
        """
        since = [by_state for at, by_state in self.minutes.items() if at >= onset.at]
        failed = count_attempts(_add_up(since)).failed
        made_dead = sum(by_state.get("DEAD", 0) for by_state in since)
        is_known = min(self.minutes, default=onset.at + 1) <= onset.at
        return (
            is_known
            and failed == made_dead
            and all(queue in dead and not dead[queue].letters for queue in self.queues)
        )

    def has_lost_dead(self, onset: FailureOnset, dead: Mapping[str, DeadCount]) -> bool:
        """Return whether dead jobs of it were purged or replayed since it fails.

        More died than its queues have now, or some died before the oldest one that is there. When the first job died of
        a cause is counted among those that are there, so nobody knows it then.
        """
        made_dead = {
            at: by_state["DEAD"]
            for at, by_state in self.minutes.items()
            if at >= onset.at and by_state.get("DEAD")
        }
        if not made_dead or not self.queues <= dead.keys():
            return False
        oldest = min(dead[queue].oldest for queue in self.queues)
        return (
            sum(made_dead.values()) > sum(dead[queue].letters for queue in self.queues)
            or min(made_dead) + MINUTE <= oldest
        )

    def make_overview(
        self,
        name: str,
        error: LastError | None,
        first: int,
        now: float,
        earlier: Sequence[TaskMinute],
        dead: Mapping[str, DeadCount],
    ) -> TaskOverview:
        """Return what the overview says of it. Rates are measured from the minute `first` on, at the earliest."""
        attempts = count_attempts(_add_up(self.minutes.values()))
        begin, end = get_rate_window(first, now)
        lately = count_attempts(
            _add_up(by_state for at, by_state in self.minutes.items() if begin <= at < end)
        )
        minutes = self.list_minutes()
        onset = find_onset([*earlier, *minutes])
        fails = onset is not None and fails_now(onset, now) and not self.is_resolved(onset, dead)
        if onset is not None and error is not None and self.has_lost_dead(onset, dead):
            error = msgspec.structs.replace(error, first=None)
        return TaskOverview(
            name=name,
            queues=tuple(sorted(self.queues)),
            ended=attempts.ended,
            failed=attempts.failed,
            failed_share=attempts.failed_share,
            ended_per_minute=lately.ended / (end - begin) * MINUTE,
            failed_per_minute=lately.failed / (end - begin) * MINUTE,
            run=_get_percentiles(self.durations["run"]),
            wait=_get_percentiles(self.durations["wait"]),
            failing_since=onset.get_time(error) if onset is not None and fails else None,
            last_error=error,
        )


def make_task_minute(at: int, by_state: Mapping[str, int], span: int = MINUTE) -> TaskMinute:
    """Return a minute, or an hour, of a task, of how many of its attempts ended in each state."""
    attempts = count_attempts(by_state)
    return TaskMinute(at, attempts.finished, attempts.failed, span)


def _add_up(parts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: defaultdict[str, int] = defaultdict(int)
    for by_state in parts:
        for state, count in by_state.items():
            total[state] += count
    return total


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
    dead: Mapping[str, DeadCount] | None = None,
) -> list[TaskOverview]:
    """Return what the overview says of tasks: first those that fail, then the busiest.

    Args:
        histories: The time of the overview, by queue.
        errors: The last error of each task.
        now: The time.
        earlier: What came before, of the tasks that fail since their first minute.
        dead: The dead letters of each queue, as far as they are known.
    """
    tasks = _read_tasks(histories)
    first = find_first_minute(histories, now)
    overviews = [
        task.make_overview(
            name, find_error(errors, name), first, now, (earlier or {}).get(name, ()), dead or {}
        )
        for name, task in tasks.items()
        if task.minutes
    ]
    return sorted(overviews, key=lambda task: (task.failing_since is None, -task.ended, task.name))


def find_error(errors: Mapping[str, LastError], task: str) -> LastError | None:
    """Return the last error of a task; for unknown tasks together, the newest error of any of them."""
    if task != UNKNOWN_TASK:
        return errors.get(task)
    unknown = (error for error in errors.values() if error.type == "UnknownTask")
    return max(unknown, key=lambda error: error.at, default=None)


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
