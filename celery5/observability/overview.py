"""Read the overview of an application: its queues, tasks and workers as one value, in a few trips."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import observability as calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.queues import QueueState
from celery5.broker.colour import AwaitableConnections
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import UNREACHABLE, skip_unreachable
from celery5.errors import Misconfigured
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.job.dead_letters import make_dead_job
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.overview import (
    DueSchedule,
    LastError,
    LeftOut,
    Overview,
    OverviewTotals,
    QueueMinute,
    QueueOverview,
    TaskMinute,
    TaskOverview,
    UnreachableBroker,
    WorkerOverview,
    find_failing_since,
    get_rate_window,
    group_starts,
    judge_queue,
    judge_worker,
    measure_flow,
)
from celery5.protocol.observability.report import (
    Measurements,
    MetricsReport,
    Series,
    get_labels,
    unpack_report,
)
from celery5.protocol.observability.rollup import (
    HOUR,
    HOURS,
    MINUTE,
    MINUTES,
    STALE_AFTER,
    MetricsGroup,
    Tier,
    name_point,
    read_index,
    sum_points,
    unpack_chunk,
    unpack_point,
)
from celery5.protocol.observability.sketch import Sketch
from celery5.protocol.scheduling.periodic import decode_schedule
from celery5.results.job_details import AppState, read_app_state

MAX_SINCE = 6 * HOUR
"""Seconds that an overview looks back at most: it reads minutes."""
MAX_QUEUES = 200
"""Queues that are shown."""
MAX_HISTORIES = 100
"""Queues whose history is read: those with the most jobs first."""
MAX_TASKS = 200
"""Tasks that are shown: those that failed first, then the busiest."""
MAX_WORKERS = 200
"""Workers that are shown: those with something wrong first."""
MAX_REPORTS = 500
"""Reports of processes that are read at once, the newest."""
MAX_DEAD_QUEUES = 20
"""Queues whose newest dead letters are read for the last errors of tasks."""
DEAD_READ = 5
"""Dead letters that are read of each."""
DEAD_KEPT = 30.0
"""Seconds for which they count, unless the number of dead letters changes."""
MAX_SCHEDULE_QUEUES = 20
"""Queues whose schedules are read."""
MAX_DUE = 10
"""Schedules that are shown."""
MAX_MESSAGE = 200
"""Characters of an error's message."""
FIELDS_AT_ONCE = 60
"""Fields of the history in one call."""

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
FAILED_STATES = ("RETRY", "DEAD")
BREAKERS = ("celery5_breaker_state", "celery5_connection_breaker_state")
JOBS, RUN, WAIT = "celery5_jobs_total", "celery5_job_run_seconds", "celery5_job_wait_seconds"


class QueueHistory(NamedTuple):
    """What was measured of a queue."""

    # Minutes by when they began: counters and gauges of the time of the overview.
    minutes: Mapping[int, Measurements]
    # The distributions of that time, from the full hour on.
    distributions: Measurements


class ProcessNews(NamedTuple):
    """The last report of a process."""

    # When it came, by the clock of Redis.
    at: float
    report: MetricsReport


class DeadNews(NamedTuple):
    """The last errors of tasks on one queue."""

    # When they were read, and how many dead letters there were.
    at: float
    dead: int
    errors: Mapping[str, LastError]


class OverviewReader:
    """Reads overviews of one application, and remembers of its history what does not change any more."""

    def __init__(self, app: Application) -> None:
        self._app = app
        # Points that are over, by the field or the stream that they are read from.
        self._points: dict[str, list[tuple[int, Measurements]]] = {}
        self._processes: dict[str, ProcessNews] = {}
        self._last_report = ""
        self._dead: dict[str, DeadNews] = {}

    async def read(self, connections: AwaitableConnections, since: float) -> Overview:
        """Return the overview. Raises BrokerError when no broker can be reached, Misconfigured for a wrong time."""
        if not MINUTE <= since <= MAX_SINCE:
            raise Misconfigured(f"since is {since!r}: give seconds, {MINUTE} to {MAX_SINCE}")
        redis = await connections.get_async_driver()
        with skip_unreachable() as unreachable:
            state = await read_app_state(self._app, redis, None, most=MAX_QUEUES)
            # Minutes and reports have their times from there, too.
            now = await redis.perform(dead_letter_calls.get_server_time()) / 1000
            try:
                histories = await self._read_histories(redis, state, now - since, now)
                await self._read_reports(redis, now)
            except UNREACHABLE:  # the default broker, which has the history
                histories = {}
            errors = await self._read_last_errors(redis, state, now)
            schedules = await self._read_schedules(redis, now)
        return self._assemble(
            state,
            histories,
            now,
            since=now - since,
            errors=errors,
            schedules=schedules,
            unreachable=tuple(
                UnreachableBroker(broker, get_error_text(error)) for broker, error in unreachable.items()
            ),
        )

    def _assemble(
        self,
        state: AppState,
        histories: Mapping[str, QueueHistory],
        now: float,
        *,
        since: float,
        errors: Mapping[str, LastError],
        schedules: tuple[DueSchedule, ...],
        unreachable: tuple[UnreachableBroker, ...],
    ) -> Overview:
        queues = [_make_queue(queue, histories.get(queue.queue), now) for queue in state.queues.values()]
        tasks = _make_tasks(histories, errors, now)
        tasks.sort(key=lambda task: (task.failing_since is None, -task.ended, task.name))
        workers = self._make_workers(state, now)
        workers.sort(key=lambda worker: (worker.health == "ok", worker.name))
        left_out = LeftOut(
            queues=state.left_out,
            tasks=max(0, len(tasks) - MAX_TASKS),
            workers=max(0, len(workers) - MAX_WORKERS),
            histories=max(0, len(state.queues) - MAX_HISTORIES),
        )
        starts = [news.report.origin.started for news in self._processes.values()]
        return Overview(
            app=self._app.name,
            at=now,
            since=since,
            totals=_make_totals(state, queues, tasks, len(workers), histories, now),
            queues=tuple(queues),
            tasks=tuple(tasks[:MAX_TASKS]),
            workers=tuple(sorted(workers[:MAX_WORKERS], key=lambda worker: worker.name)),
            schedules=schedules,
            starts=group_starts(at for at in starts if at),
            unreachable=unreachable,
            left_out=left_out,
        )

    async def _read_histories(
        self, redis: AsyncDriver, state: AppState, begin: float, now: float
    ) -> dict[str, QueueHistory]:
        """Read the minutes of the busiest queues, and the hours for their percentiles, in two trips after the index."""
        keys = self._app.keys
        index = read_index((await redis.perform(calls.read_state(keys, ["index"]))).get("index", b""))
        by_jobs = sorted(state.queues.values(), key=lambda queue: -queue.waiting - queue.running)
        names = [queue.queue for queue in by_jobs if queue.queue in index][:MAX_HISTORIES]
        if not names:
            return {}
        states = await redis.perform_all([calls.read_state(keys, [f"group:{name}"]) for name in names])
        groups = {
            name: MetricsGroup.unpack(state.get(f"group:{name}"))
            for name, state in zip(names, states, strict=True)
        }
        plans = {name: _plan_history(name, group.waiting, begin, now) for name, group in groups.items()}
        fields = [field for plan in plans.values() for field in plan.fields if field not in self._points]
        chunks = [chunk for plan in plans.values() for chunk in plan.chunks if chunk.key not in self._points]
        reads: list[Call[Any]] = [
            calls.read_state(keys, fields[start : start + FIELDS_AT_ONCE])
            for start in range(0, len(fields), FIELDS_AT_ONCE)
        ]
        reads += [
            calls.read_points(
                keys.metrics_minutes_prefix if chunk.tier is MINUTES else keys.metrics_hours_prefix,
                chunk.queue,
                chunk.at,
                chunk.at + chunk.tier.chunk - 1,
            )
            for chunk in chunks
        ]
        replies = await redis.perform_all(reads) if reads else []
        stored: dict[str, bytes] = {}
        for reply in replies[: len(reads) - len(chunks)]:
            stored.update(reply)
        self._remember(plans.values(), stored, zip(chunks, replies[len(reads) - len(chunks) :], strict=True))
        return {name: self._make_history(plan, groups[name], begin) for name, plan in plans.items()}

    def _remember(
        self,
        plans: Iterable["_HistoryPlan"],
        stored: Mapping[str, bytes],
        chunks: Iterable[tuple["_Chunk", list[tuple[int, bytes]]]],
    ) -> None:
        """Keep the points that were read, and of the others those that are still needed."""
        points: dict[str, list[tuple[int, Measurements]]] = {}
        for plan in plans:
            for key in (*plan.fields, *(chunk.key for chunk in plan.chunks)):
                if key in self._points:
                    points[key] = self._points[key]
            for field in plan.fields:
                if field in stored:
                    points[field] = [(int(field.split(":")[1]), unpack_point(stored[field]))]
        for chunk, packed in chunks:
            found = [point for _, part in packed for point in unpack_chunk(part)]
            if found:  # else it may not be packed yet
                points[chunk.key] = found
        self._points = points

    def _make_history(self, plan: "_HistoryPlan", group: MetricsGroup, begin: float) -> QueueHistory:
        minutes: dict[int, list[Measurements]] = {}
        whole: list[Measurements] = []
        for key in (*plan.fields, *(chunk.key for chunk in plan.chunks)):
            is_minutes = key.startswith(f"{MINUTES.name}:")
            for at, point in self._points.get(key, ()):
                if is_minutes and at > begin - MINUTE:
                    minutes.setdefault(at, []).append(point)
                # Of minutes that are packed only some percentiles are left, which cannot be merged.
                if at >= plan.first_hour and (not is_minutes or key in plan.field_set):
                    whole.append(point)
        if group.minute:
            minutes.setdefault(group.minute, []).append(group.current)
            whole.append(group.current)
        sketches = sum_points([Measurements(sketches=point.sketches) for point in whole])
        return QueueHistory({at: sum_points(minutes[at]) for at in sorted(minutes)}, sketches)

    async def _read_reports(self, redis: AsyncDriver, now: float) -> None:
        """Read the reports that have come since the last overview, and forget processes that are silent."""
        found = await redis.perform(
            calls.read_latest_reports(self._app.keys, self._last_report, count=MAX_REPORTS)
        )
        if found:
            self._last_report = found[0].id
        processes = dict(self._processes)
        for stored in reversed(found):
            report = unpack_report(stored.packed)
            if report is not None:
                processes[report.process] = ProcessNews(stored.at, report)
        self._processes = {
            name: news for name, news in processes.items() if news.at > now - self._get_stale_after() * 4
        }

    def _get_stale_after(self) -> float:
        return max(STALE_AFTER, 3 * self._app.settings.metrics_interval)

    def _make_workers(self, state: AppState, now: float) -> list[WorkerOverview]:
        """Return the live workers: the incarnations of a process on several brokers are one."""
        brokers = self._app.brokers.names
        queues: defaultdict[str, list[str]] = defaultdict(list)
        running: defaultdict[str, int] = defaultdict(int)
        for queue in state.queues.values():
            for worker in queue.workers:
                if worker.alive:
                    name, at, broker = get_inbox_name(worker.name).rpartition("@")
                    name = name if at and broker in brokers else get_inbox_name(worker.name)
                    queues[name].append(queue.queue)
                    running[name] += worker.running
        news = {get_inbox_name(one.report.origin.name): one for one in self._processes.values()}
        return [
            _make_worker(name, queues[name], running[name], news.get(name), now, self._get_stale_after())
            for name in queues
        ]

    async def _read_last_errors(
        self, redis: AsyncDriver, state: AppState, now: float
    ) -> dict[str, LastError]:
        """Return the last errors of tasks, from the newest dead letters of the queues that have most."""
        with_dead = sorted(
            (queue for queue in state.queues.values() if queue.dead), key=lambda queue: -queue.dead
        )[:MAX_DEAD_QUEUES]
        wanted = [
            queue
            for queue in with_dead
            if (known := self._dead.get(queue.queue)) is None
            or known.dead != queue.dead
            or known.at < now - DEAD_KEPT
        ]
        reads = [
            dead_letter_calls.list_entries_backwards(
                self._app.queue(queue.queue), first="-", last="+", count=DEAD_READ
            )
            for queue in wanted
        ]
        try:
            replies = await redis.perform_all(reads) if reads else []
        except UNREACHABLE:
            replies = []
        kept = {queue.queue: self._dead[queue.queue] for queue in with_dead if queue.queue in self._dead}
        for queue, entries in zip(wanted, replies, strict=False):
            jobs = [
                make_dead_job(
                    queue.queue, one.entry, one.message, one.document, self._app.settings.message_limit
                )
                for one in reversed(entries)
                if not one.sink
            ]
            errors = {
                job.task: LastError(
                    type=job.type or job.reason,
                    message=job.message[:MAX_MESSAGE],
                    at=job.died,
                    queue=queue.queue,
                    job=job.id,
                )
                for job in jobs
            }
            kept[queue.queue] = DeadNews(now, queue.dead, errors)
        self._dead = kept
        last: dict[str, LastError] = {}
        for news in kept.values():
            for task, error in news.errors.items():
                if task not in last or last[task].at < error.at:
                    last[task] = error
        return last

    async def _read_schedules(self, redis: AsyncDriver, now: float) -> tuple[DueSchedule, ...]:
        """Return the schedules that fire next."""
        keys, limit = self._app.keys, self._app.settings.message_limit
        try:
            queues = await redis.perform(scheduling_calls.list_schedule_queues(keys))
            reads = [scheduling_calls.list_schedules(keys, queue) for queue in queues[:MAX_SCHEDULE_QUEUES]]
            replies = await redis.perform_all(reads) if reads else []
        except UNREACHABLE:
            return ()
        found = [decode_schedule(record, limit) for records in replies for record in records.values()]
        due = [
            DueSchedule(schedule.name, schedule.of.task, schedule.of.queue, schedule.next / 1000)
            for schedule in found
            if schedule is not None and schedule.is_active and schedule.next is not None
        ]
        return tuple(sorted(due, key=lambda schedule: (schedule.at, schedule.name))[:MAX_DUE])


class _Chunk(NamedTuple):
    """A packed chunk of the history of a queue."""

    tier: Tier
    queue: str
    # When it begins, in seconds since 1970.
    at: int

    @property
    def key(self) -> str:
        """Under which it is remembered. No field of the history has this name."""
        return f"{self.tier.name}:chunk:{self.at}:{self.queue}"


class _HistoryPlan(NamedTuple):
    """Which points of a queue are needed: fields, and chunks that are packed."""

    first_hour: int
    fields: Sequence[str]
    chunks: Sequence[_Chunk]

    @property
    def field_set(self) -> frozenset[str]:
        return frozenset(self.fields)


def _plan_history(queue: str, waiting: Mapping[str, Sequence[int]], begin: float, now: float) -> _HistoryPlan:
    """Return what to read of a queue: for each hour its minutes, and when these are packed the hour itself, too."""
    first_hour = int(begin) // HOUR * HOUR
    fields = [name_point(MINUTES, at, queue) for at in waiting[MINUTES.name] if at >= first_hour]
    fields += [name_point(HOURS, at, queue) for at in waiting[HOURS.name] if at >= first_hour]
    chunks: list[_Chunk] = []
    for hour in range(first_hour, int(now) // HOUR * HOUR, HOUR):
        if any(hour <= at < hour + HOUR for at in waiting[MINUTES.name]):
            continue
        chunks.append(_Chunk(MINUTES, queue, hour))
        if hour not in waiting[HOURS.name]:
            chunks.append(_Chunk(HOURS, queue, hour // HOURS.chunk * HOURS.chunk))
    return _HistoryPlan(first_hour, fields, tuple(dict.fromkeys(chunks)))


def _make_queue(queue: QueueState, history: QueueHistory | None, now: float) -> QueueOverview:
    workers = sum(worker.alive for worker in queue.workers)
    measured: Mapping[int, Measurements] = history.minutes if history else {}
    minutes = [
        QueueMinute(at, _get_depth(point), sum(_count_states(point).values()))
        for at, point in measured.items()
    ]
    flow = measure_flow(minutes, now)
    return QueueOverview(
        name=queue.queue,
        waiting=queue.waiting,
        running=queue.running,
        held=queue.held,
        scheduled=queue.scheduled,
        dead=queue.dead,
        runs=queue.runs,
        oldest=queue.oldest_waiting,
        workers=workers,
        is_paused=queue.paused,
        flow=flow,
        verdict=judge_queue(
            waiting=queue.waiting,
            upcoming=queue.held + queue.scheduled,
            oldest=queue.oldest_waiting,
            workers=workers,
            is_paused=queue.paused,
            flow=flow,
        ),
    )


def _get_depth(point: Measurements) -> float | None:
    waiting = point.gauges.get(("celery5_queue_depth",))
    return None if waiting is None else waiting + point.gauges.get(("celery5_queue_held",), 0.0)


def _count_states(point: Measurements) -> dict[str, int]:
    """Return how many attempts have ended, by state."""
    counts: defaultdict[str, int] = defaultdict(int)
    for series, value in point.counters.items():
        if series[0] == JOBS:
            counts[get_labels(series).get("state", "")] += int(value)
    return counts


class _TaskNews:
    """What is measured of one task, of all its queues together."""

    def __init__(self) -> None:
        self.queues: set[str] = set()
        # Attempts that ended, by minute and state.
        self.minutes: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.run, self.wait = Sketch(), Sketch()

    def count(self, *states: str) -> int:
        """Return how many attempts have ended in these states; in any, without one."""
        return sum(
            number
            for counts in self.minutes.values()
            for state, number in counts.items()
            if not states or state in states
        )


def _make_tasks(
    histories: Mapping[str, QueueHistory], errors: Mapping[str, LastError], now: float
) -> list[TaskOverview]:
    tasks: defaultdict[str, _TaskNews] = defaultdict(_TaskNews)
    for queue, history in histories.items():
        for at, point in history.minutes.items():
            for series, value in point.counters.items():
                if series[0] == JOBS:
                    labels = get_labels(series)
                    news = tasks[labels.get("task", "")]
                    news.queues.add(queue)
                    news.minutes[at][labels.get("state", "")] += int(value)
        for series, sketch in history.distributions.sketches.items():
            news = tasks[get_labels(series).get("task", "")]
            if series[0] in (RUN, WAIT):
                (news.run if series[0] == RUN else news.wait).add_all(sketch)
    return [_make_task(name, news, errors.get(name), now) for name, news in tasks.items() if news.minutes]


def _make_task(name: str, news: _TaskNews, error: LastError | None, now: float) -> TaskOverview:
    failed = news.count(*FAILED_STATES)
    finished = failed + news.count("SUCCESS")
    begin, end = get_rate_window(min(news.minutes), now)
    lately = sum(sum(counts.values()) for at, counts in news.minutes.items() if begin <= at < end)
    minutes = [
        TaskMinute(
            at,
            sum(counts[state] for state in ("SUCCESS", *FAILED_STATES)),
            sum(counts[state] for state in FAILED_STATES),
        )
        for at, counts in news.minutes.items()
    ]
    return TaskOverview(
        name=name,
        queues=tuple(sorted(news.queues)),
        ended=news.count(),
        failed=failed,
        failed_share=failed / finished if finished else None,
        ended_per_minute=lately / (end - begin) * MINUTE,
        run=_get_percentiles(news.run),
        wait=_get_percentiles(news.wait),
        failing_since=find_failing_since(minutes, now),
        last_error=error,
    )


def _get_percentiles(sketch: Sketch) -> dict[str, float] | None:
    numbers = {name: sketch.quantile(fraction) for name, fraction in PERCENTILES.items()}
    return {name: round(value, 6) for name, value in numbers.items() if value is not None} or None


def _make_worker(
    name: str, queues: Sequence[str], running: int, news: ProcessNews | None, now: float, stale_after: float
) -> WorkerOverview:
    if news is None:
        health = judge_worker(reported=None, stale_after=stale_after, is_ready=False, lag=0.0, breakers=())
        return WorkerOverview(name=name, queues=tuple(queues), running=running, health=health)
    gauges, reported = news.report.measurements.gauges, max(0.0, now - news.at)
    origin = news.report.origin
    lag = gauges.get(("celery5_loop_lag_seconds",), 0.0)
    breakers = _find_open_breakers(gauges)
    memory = gauges.get(("process_resident_memory_bytes",))
    return WorkerOverview(
        name=name,
        queues=tuple(queues),
        running=running,
        health=judge_worker(
            reported=reported,
            stale_after=stale_after,
            is_ready=bool(gauges.get(("celery5_process_ready",))),
            lag=lag,
            breakers=breakers,
        ),
        host=news.report.process.rsplit(":", 2)[0],
        uptime=now - origin.started if origin.started else None,
        slots_used=int(gauges.get(("celery5_jobs_running",), 0)),
        slots=int(sum(value for series, value in gauges.items() if series[0] == "celery5_slots")),
        ended=origin.ended,
        lag=lag,
        memory=int(memory) if memory is not None else None,
        breakers=breakers,
        reported=reported,
    )


def _find_open_breakers(gauges: Mapping[Series, float]) -> tuple[str, ...]:
    """Return the circuit breakers that hold something up; those that only watch do not."""
    open_ones: set[str] = set()
    for series, value in gauges.items():
        labels = get_labels(series)
        if value and series[0] in BREAKERS and labels.get("mode") != "watch":
            open_ones.add(labels.get("of") or labels.get("breaker", ""))
    return tuple(sorted(open_ones))


def _make_totals(
    state: AppState,
    queues: Sequence[QueueOverview],
    tasks: Sequence[TaskOverview],
    workers: int,
    histories: Mapping[str, QueueHistory],
    now: float,
) -> OverviewTotals:
    first = min((at for history in histories.values() for at in history.minutes), default=int(now))
    begin, end = get_rate_window(first, now)
    failed = sum(
        number
        for history in histories.values()
        for at, point in history.minutes.items()
        if begin <= at < end
        for state_name, number in _count_states(point).items()
        if state_name in FAILED_STATES
    )
    return OverviewTotals(
        ended_per_second=sum(task.ended_per_minute for task in tasks) / MINUTE,
        failed_per_second=failed / (end - begin),
        waiting=sum(queue.waiting for queue in queues),
        running=sum(queue.running for queue in queues),
        held=sum(queue.held for queue in queues),
        scheduled=sum(queue.scheduled for queue in queues),
        dead=state.dead,
        workers=workers,
        routers=len(state.routers),
        schedulers=len(state.schedulers),
        controllers=len(state.controllers),
        publishers=len(state.publishers),
    )
