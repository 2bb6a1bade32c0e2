"""The metrics of an application: `app.metrics` reads their history, and sends them to other systems."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from celery5.application import Application
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import observability as calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.errors import UnknownQueue
from celery5.observability.outlets import MetricsOutlet, StatsDOutlet
from celery5.observability.overview import OverviewReader, WorkerReader
from celery5.observability.storage import read_memory, read_storage
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.observability.families import (
    MetricFamily,
    SketchSample,
    make_counter,
    make_gauge,
)
from celery5.protocol.observability.overview import Overview, ReportingProcess, WorkersOverview
from celery5.protocol.observability.report import Measurements, Series, get_labels
from celery5.protocol.observability.rollup import (
    CLUSTER,
    HOUR,
    HOURS,
    MINUTE,
    MINUTES,
    MetricsGroup,
    Tier,
    add_queue,
    count_attempts,
    name_point,
    read_index,
    sum_points,
    unpack_chunk,
    unpack_point,
)
from celery5.protocol.observability.sketch import Sketch
from celery5.protocol.observability.storage import Storage
from celery5.results.job_details import AppState

FINE_HISTORY = 6 * HOUR
"""Seconds: the history of a longer time is given in hours."""
STATE_FIELDS = 60
"""Fields of the hour that is under way, read in one call."""
QUEUES_AT_ONCE = 10
"""Queues whose points are read at once: no more than these are in memory."""
MAX_READINGS = 3
"""How often a queue is read again that was saved during the read."""


class TaskNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs of one task on one queue, in some time."""

    task: str
    # Attempts that have ended, by their state.
    counts: dict[str, int]
    # Percentiles of the seconds that attempts ran, and that they waited: p50, p95 and p99; None when none has run.
    run: dict[str, float] | None
    wait: dict[str, float] | None

    @property
    def failed_share(self) -> float | None:
        """The share of the attempts that were retried or became dead letters; None when none has run to its end."""
        return count_attempts(self.counts).failed_share


class HistoryPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a queue in a minute or an hour, or in the time of a summary."""

    # When it began, in seconds since 1970, and how long it was.
    at: int
    seconds: int
    tasks: list[TaskNumbers]
    # The backlog (see QueueDepth), the age of its oldest job in seconds, dead letters, jobs of the backlog that limits
    # held and overdue ones, jobs that waited for their time, and live runs of workflows: measured once a minute; of an
    # hour, the largest.
    depth: float = 0
    oldest: float = 0
    dead: float = 0
    held: float = 0
    overdue: float = 0
    scheduled: float = 0
    runs: float = 0
    # Whether its time is over. While it is not, its numbers still grow: charts leave it out, for it would be a fall.
    is_over: bool = True


class QueueSummary(HistoryPoint, frozen=True, kw_only=True):
    """What was measured of a queue in some time until now."""

    # The live workers that read it, each with how old its last report is, and whether that is stale: what it has
    # measured since is missing here.
    processes: tuple[ReportingProcess, ...] = ()


def select_over(points: Iterable[HistoryPoint]) -> list[HistoryPoint]:
    """Return the points that a chart draws: those whose time is over."""
    return [point for point in points if point.is_over]


class Metrics:
    """Reads the history of the application's metrics, and adds outlets for them."""

    REACHED_AS = "app.metrics."

    def __init__(self, app: Application) -> None:
        self._app = app
        self._outlets: list[MetricsOutlet] = []
        self._overview = OverviewReader(app)
        self._workers = WorkerReader(app)

    @property
    def outlets(self) -> Sequence[MetricsOutlet]:
        """Who gets the reports of each process, besides Redis."""
        url = self._app.settings.statsd
        return (*self._outlets, StatsDOutlet(url)) if url else tuple(self._outlets)

    def add_outlet(self, outlet: MetricsOutlet) -> None:
        """Have the metrics of each process sent to `outlet`, too."""
        self._outlets.append(outlet)

    async def ahistory(
        self, queue: str = "", *, since: float = HOUR, until: float = 0, step: int | None = None
    ) -> list[HistoryPoint]:
        """Return the measurements of a queue, or of all queues together, the oldest first.

        Args:
            queue: The name of the queue. Default: all queues. Their jobs are added up; of `oldest` it is the largest.
            since: Seconds ago at which it begins. Minutes are kept for 7 days, hours for 90.
            until: Seconds ago at which it ends.
            step: 60 for minutes, 3600 for hours. Default: minutes, for more than six hours hours.

        Raises:
            UnknownQueue: There is no queue of that name.
        """
        step = step or (MINUTE if since - until <= FINE_HISTORY else HOUR)
        if step not in _TIERS:
            raise ValueError(f"step is {step!r}: give 60 for minutes or 3600 for hours")
        now = time.time()
        begin, end = now - since, now - until
        names = [queue] if queue else [CLUSTER, *await self._list_queues()]
        totals: dict[int, Measurements] = {}
        for start in range(0, len(names), QUEUES_AT_ONCE):
            part = names[start : start + QUEUES_AT_ONCE]
            stored = await self._read_points(part, _TIERS[step], begin, end)
            for name in part:
                by_time: dict[int, list[Measurements]] = {}
                for at, point in stored.pop(name).unpack():
                    if begin - step < at <= end:
                        by_time.setdefault(at // step * step, []).append(point)
                for at, found in by_time.items():
                    add_queue(totals.setdefault(at, Measurements()), sum_points(found))
        if queue and not totals:
            await self._refuse_unknown(queue)
        return [
            _make_point(at, step, total, is_over=at + step <= now) for at, total in sorted(totals.items())
        ]

    @blocking(ahistory)
    def history(self) -> None: ...

    async def _read_points(
        self, queues: Sequence[str], tier: Tier, begin: float, end: float
    ) -> "dict[str, _StoredPoints]":
        """Return the points of some queues: those that are packed, those that wait for it, and what is under way.

        That takes several trips. The mark of a queue tells whether it was saved between them; then it is read again.
        """
        redis, keys = await self._app.connections.get_async_driver(), self._app.keys
        prefix = keys.metrics_minutes_prefix if tier is MINUTES else keys.metrics_hours_prefix
        found: dict[str, _StoredPoints] = {}
        left = list(queues)
        for _ in range(MAX_READINGS):
            states = await redis.perform_all(
                [calls.read_state(keys, [f"group:{queue}", f"mark:group:{queue}"]) for queue in left]
            )
            for queue, state in zip(left, states, strict=True):
                found[queue] = _StoredPoints(
                    MetricsGroup.unpack(state.get(f"group:{queue}"), state.get(f"mark:group:{queue}"))
                )
            parts = [part for queue in left for part in found[queue].list_fields(queue, tier)]
            waiting = await redis.perform_all([calls.read_state(keys, fields) for fields in parts])
            for fields, contents in zip(parts, waiting, strict=True):
                found[fields[0].split(":", 2)[2]].waiting.update(contents)
            packed = await redis.perform_all(
                [calls.read_points(prefix, queue, begin - tier.chunk, end) for queue in left]
            )
            marks = await redis.perform_all(
                [calls.read_state(keys, [f"mark:group:{queue}"]) for queue in left]
            )
            for queue, chunks in zip(left, packed, strict=True):
                found[queue].packed = [chunk for _, chunk in chunks]
            left = [
                queue
                for queue, mark in zip(left, marks, strict=True)
                if mark.get(f"mark:group:{queue}", b"").decode(errors="replace") != found[queue].group.mark
            ]
            if not left:
                break
        return found

    async def asummary(self, queue: str = "", *, since: float = HOUR) -> dict[str, QueueSummary]:
        """Return what was measured in all of some time until now, by queue, and how old the reports of its workers are.

        It begins on the full hour, since percentiles of minutes that are packed cannot be merged.

        Args:
            queue: The name of the queue. Default: each queue that has metrics.
            since: Seconds ago at which it begins, at the latest: at most 90 days.

        Raises:
            UnknownQueue: There is no queue of that name.
        """
        names = [queue] if queue else await self._list_queues()
        now = time.time()
        begin = int(now - since) // HOUR * HOUR
        summaries: dict[str, QueueSummary] = {}
        processes = await self._workers.read_processes()
        for start in range(0, len(names), QUEUES_AT_ONCE):
            part = names[start : start + QUEUES_AT_ONCE]
            stored = await self._read_points(part, HOURS, begin, now)
            for name in part:
                total = sum_points(point for at, point in stored.pop(name).unpack() if at >= begin)
                if total != Measurements():
                    summaries[name] = QueueSummary(
                        **_get_fields(_make_point(begin, int(now) - begin, total)),
                        processes=tuple(process for process in processes if name in process.queues),
                    )
        if queue and not summaries:
            await self._refuse_unknown(queue)
        return summaries

    @blocking(asummary)
    def summary(self) -> None: ...

    async def _list_queues(self) -> list[str]:
        """Return the queues that have metrics, sorted."""
        return sorted(set(await self._read_group_names()) - {CLUSTER})

    async def _read_group_names(self) -> list[str]:
        redis = await self._app.connections.get_async_driver()
        found = await redis.perform(calls.read_state(self._app.keys, ["index"]))
        return read_index(found.get("index", b""))

    async def _refuse_unknown(self, queue: str) -> None:
        """Raise UnknownQueue unless a task has this queue, jobs were sent to it, or it has older metrics."""
        redis, app = await self._app.connections.get_async_driver(), self._app
        used = await redis.perform(queue_calls.list_queues(app.keys))
        used_shards = {*app.brokers.list_shards(queue, used)} & {*used}
        if used_shards or queue in {task.queue for task in app.tasks.values()} | {*await self._list_queues()}:
            return
        if not await redis.perform(dead_letter_calls.queue_exists(app.queue(queue))):
            raise UnknownQueue(queue, used)

    async def aoverview(self, *, since: float = HOUR) -> Overview:
        """Return how the queues, tasks and workers of the application stand.

        What it reads does not grow with the application: `left_out` says what is not shown. A broker that is
        unreachable is named, and the others are shown.

        Args:
            since: Seconds ago from which on attempts of tasks are counted, 60 to 21,600 (six hours).

        Raises:
            BrokerError: No broker can be reached.
            Misconfigured: `since` is out of range.
        """
        return await self._overview.read(self._get_async_driver, since)

    @blocking(aoverview)
    def overview(self) -> None: ...

    async def aworkers(self, state: AppState | None = None) -> WorkersOverview:
        """Return the live workers and how each stands, and those that were lost in the last hour.

        A frozen worker, and one whose event loop is blocked, is `silent`; one that ended in order is in neither.

        Args:
            state: What `app.info()` has returned just now, so that it is not read a second time.

        Raises:
            BrokerError: No broker can be reached.
        """
        return await self._workers.read(state)

    @blocking(aworkers)
    def workers(self) -> None: ...

    async def aprocesses(self) -> tuple[ReportingProcess, ...]:
        """Return all live processes, and those that have reported in the last minutes, with how old each report is.

        What was measured, as `summary` and `overview` show it, has what these processes have reported.

        Raises:
            BrokerError: No broker can be reached, or not the one that has the reports.
        """
        return tuple(await self._workers.read_processes())

    @blocking(aprocesses)
    def processes(self) -> None: ...

    async def amemory(self) -> tuple[ServerMemory, ...]:
        """Return how full the memory of the server of each broker is.

        A broker that is unreachable is missing, and one that does not say.
        """
        return tuple(await read_memory(self._app, self._get_async_driver))

    @blocking(amemory)
    def memory(self) -> None: ...

    async def astorage(self) -> Storage:
        """Return what Redis holds for the application: servers, queues, streams, history.

        Bytes are estimates from a few entries of each key, those of results from a sample of at most 10,000 keys. Of
        queues the 200 with the most entries are measured. A broker that is unreachable is named, and the others are
        shown.

        Raises:
            BrokerError: No broker can be reached.
        """
        return await read_storage(self._app, self._get_async_driver)

    @blocking(astorage)
    def storage(self) -> None: ...

    async def _get_async_driver(self, broker: str) -> AsyncDriver:
        return await self._app.brokers.get(broker).get_async_driver()

    async def atotals(self) -> list[MetricFamily]:
        """Return the metrics of the whole cluster, as `/metrics/cluster` has them."""
        redis, keys = await self._app.connections.get_async_driver(), self._app.keys
        names = await self._read_group_names()
        families: dict[str, MetricFamily] = {}
        for start in range(0, len(names), STATE_FIELDS):
            part = [f"group:{name}" for name in names[start : start + STATE_FIELDS]]
            stored: dict[str, bytes] = await redis.perform(calls.read_state(keys, part))
            for name, packed in stored.items():
                _add_families(families, name.partition(":")[2], MetricsGroup.unpack(packed).totals)
        return list(families.values())

    @blocking(atotals)
    def totals(self) -> None: ...


@dataclass(slots=True)
class _StoredPoints:
    """The points of one queue, still packed: a long history takes many times more when it is not."""

    group: MetricsGroup
    packed: list[bytes] = field(default_factory=list[bytes])
    waiting: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def list_fields(self, queue: str, tier: Tier) -> list[list[str]]:
        """Return the fields of the points that wait, in parts of one call."""
        tiers = (MINUTES, HOURS) if tier is HOURS else (MINUTES,)
        fields = [
            name_point(source_tier, at, queue)
            for source_tier in tiers
            for at in self.group.waiting[source_tier.name]
        ]
        return [fields[start : start + STATE_FIELDS] for start in range(0, len(fields), STATE_FIELDS)]

    def unpack(self) -> Iterator[tuple[int, Measurements]]:
        """Yield when each point began, in seconds since 1970, and what was measured."""
        for chunk in self.packed:
            yield from unpack_chunk(chunk)
        for name, content in self.waiting.items():
            yield int(name.split(":")[1]), unpack_point(content)
        if self.group.minute:
            yield self.group.minute, self.group.current


def _add_families(families: dict[str, MetricFamily], queue: str, totals: Measurements) -> None:
    """Add the totals of one group to families."""

    def labels(series: Series) -> dict[str, str]:
        return get_labels(series) if queue == CLUSTER else {"queue": queue, **get_labels(series)}

    makers: tuple[tuple[dict[Series, float], Callable[..., MetricFamily]], ...] = (
        (totals.counters, make_counter),
        (totals.gauges, make_gauge),
    )
    for numbers, make in makers:
        for series, value in numbers.items():
            new = make(series[0], HELP, (value, labels(series)))
            known = families.get(series[0], new)
            if known is not new:
                new = msgspec.structs.replace(known, samples=[*known.samples, *new.samples])
            families[series[0]] = new
    for series, sketch in totals.sketches.items():
        known = families.get(series[0], MetricFamily(series[0], "histogram", HELP))
        sample = SketchSample(sketch, labels(series))
        families[series[0]] = msgspec.structs.replace(known, sketches=[*known.sketches, sample])


HELP = "Of the whole cluster: see the same metric of a process."
"""What the metrics of a cluster say of themselves."""


def _make_point(at: int, seconds: int, point: Measurements, *, is_over: bool = True) -> HistoryPoint:
    tasks: dict[str, dict[str, Any]] = {}

    def entry(series: Series) -> dict[str, Any]:
        task = get_labels(series).get("task", "")
        return tasks.setdefault(task, {"task": task, "counts": {}, "run": None, "wait": None})

    for series, value in point.counters.items():
        if series[0] == "celery5_jobs_total":
            counts, state = entry(series)["counts"], get_labels(series).get("state", "")
            counts[state] = counts.get(state, 0) + int(value)
    for series, sketch in point.sketches.items():
        if series[0] in _SKETCHES:
            entry(series)[_SKETCHES[series[0]]] = _percentiles(sketch)
    gauges = {name: point.gauges.get((metric,), 0.0) for name, metric in _GAUGES.items()}
    return HistoryPoint(
        at=at,
        seconds=seconds,
        tasks=[TaskNumbers(**tasks[task]) for task in sorted(tasks)],
        is_over=is_over,
        **gauges,
    )


def _get_fields(point: HistoryPoint) -> dict[str, Any]:
    return {name: getattr(point, name) for name in point.__struct_fields__}


def _percentiles(sketch: Sketch) -> dict[str, float] | None:
    numbers = {name: sketch.quantile(fraction) for name, fraction in _FRACTIONS.items()}
    return {name: round(value, 6) for name, value in numbers.items() if value is not None} or None


_TIERS = {MINUTE: MINUTES, HOUR: HOURS}
_FRACTIONS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_SKETCHES = {"celery5_job_run_seconds": "run", "celery5_job_wait_seconds": "wait"}
_GAUGES = {
    "depth": "celery5_queue_depth",
    "oldest": "celery5_queue_oldest_seconds",
    "dead": "celery5_queue_dead",
    "held": "celery5_queue_held",
    "overdue": "celery5_queue_overdue",
    "scheduled": "celery5_queue_scheduled",
    "runs": "celery5_queue_runs",
}
