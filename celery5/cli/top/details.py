"""Write down what is known of the selected row: since when a task fails and why, whether a queue catches up."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from celery5.cli.terminal.output import as_called, format_time, to_one_line
from celery5.cli.top.layout import Line
from celery5.cli.top.readings import ActiveJob, Reading
from celery5.cli.top.tables import Style, View, make_sparkline
from celery5.observability.metrics import HistoryPoint
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.job.failure_groups import DeadJobGroup
from celery5.protocol.observability.overview import (
    LostWorker,
    Overview,
    QueueOverview,
    TaskOverview,
    WorkerOverview,
    describe_deaths,
    describe_flow,
    format_share,
)
from celery5.protocol.observability.queue_depth import AT_LIMITS, TaskDeaths
from celery5.protocol.observability.rollup import MINUTE, count_attempts
from celery5.protocol.process.recycling import format_mib
from celery5.protocol.scaling.resource_budget import show_use

N = TypeVar("N", QueueOverview, TaskOverview, WorkerOverview)
Measure = Callable[[HistoryPoint], float]
Formatter = Callable[[float], str]

MINUTES_SHOWN = 60
"""Minutes of a sparkline."""
VALUES = 28
"""The width of what stands behind a sparkline."""
LABEL = 14
"""The width of what stands before a value."""
TRACEBACK_LINES = 30
"""The last lines of a traceback that are shown."""


def make_details(view: View, key: str, reading: Reading, width: int) -> list[Line]:
    """Return the details of a row as lines for a width; one line that says so when it is not there any more."""
    bars = max(10, min(MINUTES_SHOWN, width - LABEL - VALUES))
    overview = reading.overview
    if overview is None:
        return [_plain("nothing was read yet", "dim")]
    histories = reading.histories if reading.details_of == key else None
    failures = reading.failures if reading.details_of == key else None
    lines: list[Line] | None = None
    if view is View.QUEUES and (queue := _find(overview.queues, key)) is not None:
        lines = _describe_queue(queue, overview, histories, bars)
    elif view is View.TASKS and (task := _find(overview.tasks, key)) is not None:
        lines = _describe_task(task, overview, histories, failures, bars)
    elif view is View.WORKERS and (worker := _find(overview.workers, key)) is not None:
        jobs = None if reading.jobs is None else [job for job in reading.jobs if job.worker == key]
        lines = _describe_worker(worker, jobs, reading.jobs_note)
    elif view is View.WORKERS and (
        lost := next((process for process in overview.lost if process.worker == key), None)
    ):
        lines = _describe_lost(lost, overview.at)
    elif view is View.DEAD:
        group = next((group for group in reading.dead or () if group.id == key), None)
        lines = None if group is None else _describe_group(group, overview.at)
    elif view is View.JOBS:
        job = next((job for job in reading.jobs or () if job.id == key), None)
        lines = None if job is None else _describe_job(job)
    return [_plain("it is not there any more", "dim")] if lines is None else lines


def _find(items: Iterable[N], name: str) -> N | None:
    return next((item for item in items if item.name == name), None)


def _describe_queue(
    queue: QueueOverview,
    overview: Overview,
    histories: Mapping[str, Sequence[HistoryPoint]] | None,
    bars: int,
) -> list[Line]:
    flow = queue.flow
    lines = [
        _title(f"queue {queue.name}"),
        _field("verdict", queue.verdict.text, "bad" if queue.verdict.needs_attention else "bold"),
        *([_field("paused", queue.pause.describe(overview.at))] if queue.pause is not None else []),
        _field("backlog", f"{queue.backlog:,}{_since(queue.oldest)}"),
        _field("waiting", f"{queue.waiting:,} for a worker"),
        _field("running", f"{queue.running:,}"),
        _field(AT_LIMITS, f"{queue.held:,}{': ' + queue.held_by if queue.held_by else ''}"),
        *([_field("resources", queue.lacks, "bad")] if queue.lacks else []),
        *([_field("unknown tasks", queue.awaits, "bad")] if queue.awaits else []),
        _field("scheduled", f"{queue.scheduled:,}"),
        _field("dead", f"{queue.dead:,}"),
    ]
    if flow is not None:
        lines.append(_field("jobs", describe_flow(flow)))
    workers = [worker.name for worker in overview.workers if queue.name in worker.queues]
    lines.append(_field("workers", ", ".join(workers) or "none", "" if workers else "bad"))
    points = (histories or {}).get(queue.name)
    if points is None:
        return [*lines, (), _plain("reading the history", "dim")]
    return [
        *lines,
        (),
        *_draw("backlog", _by_minute(points, overview.at, lambda point: point.depth), bars, _number),
        *_draw("ended", _by_minute(points, overview.at, _count_ended), bars, _per_minute),
        *_draw("dead", _by_minute(points, overview.at, lambda point: point.dead), bars, _number),
    ]


def _describe_task(
    task: TaskOverview,
    overview: Overview,
    histories: Mapping[str, Sequence[HistoryPoint]] | None,
    failures: Sequence[DeadJob] | None,
    bars: int,
) -> list[Line]:
    since = task.failing_since
    share = "no attempt has run" if task.failed_share is None else format_share(task.failed_share)
    lines = [
        _title(f"task {task.name}"),
        _field("queues", ", ".join(task.queues)),
        _field("attempts", f"{task.ended:,} in the last {format_duration(overview.at - overview.since)}"),
        _field("failed", f"{task.failed:,} ({share})", "bad" if since is not None else ""),
    ]
    if since is not None:
        lines.append(_field("fails since", f"{format_time(since)} ({format_age(since, overview.at)})", "bad"))
    if task.deaths:
        deaths = TaskDeaths(task.deaths, task.poisoned, task.last_death or 0.0)
        lines.append(_field("workers", describe_deaths(deaths, overview.at), "bad" if task.kills else ""))
    if error := task.last_error.describe(overview.at) if task.last_error else task.unknown_error:
        lines.append(_field("last error", error))
    lines += [_field("run", _percentiles(task.run)), _field("wait", _percentiles(task.wait)), ()]
    if histories is None or failures is None:
        return [*lines, _plain("reading the history", "dim")]
    points = [point for found in histories.values() for point in found]
    ended = _by_minute(points, overview.at, lambda point: count_of(point, task.name, "ended"))
    failed = _by_minute(points, overview.at, lambda point: count_of(point, task.name, "failed"))
    lines += [*_draw("ended", ended, bars, _per_minute), *_draw("failed", failed, bars, _per_minute)]
    lines += [(), _title("the last failures" if failures else "no dead letters of it among the newest")]
    return [*lines, *(_summarize(job, overview.at) for job in failures)]


def _describe_worker(worker: WorkerOverview, jobs: Sequence[ActiveJob] | None, note: str) -> list[Line]:
    is_well = not worker.needs_attention
    lines = [
        _title(f"worker {worker.name}"),
        _field("health", worker.health, "" if is_well else "bad"),
        _field("host", worker.host or "not known yet"),
        _field("queues", ", ".join(worker.queues)),
    ]
    if worker.uptime is not None and worker.lag is not None:
        lines += [
            _field("up", format_duration(worker.uptime)),
            _field("slots", worker.slots_text),
            *([_field("resources", show_use(worker.resources))] if worker.resources else []),
            _field("ended", format_count(worker.ended or 0, "attempt")),
            _field("loop lag", format_duration(worker.lag)),
            _field("memory", "" if worker.memory is None else format_mib(worker.memory)),
            _field("report", format_age(0.0, worker.reported or 0.0)),
        ]
    lines += [(), _title("what runs")]
    if jobs is None:
        return [*lines, _plain(note or "asking the worker", "dim")]
    return (
        [*lines, *(_summarize_running(job) for job in jobs)]
        if jobs
        else [*lines, _plain(note or "nothing", "dim")]
    )


def _describe_lost(lost: LostWorker, now: float) -> list[Line]:
    return [
        _title(f"{lost.kind} {lost.worker}"),
        _field("health", lost.health, "" if lost.is_repaired else "bad"),
        _field("lost", f"{format_time(lost.at)} ({format_age(min(lost.at, now), now)})"),
        *([_field("controller", lost.controller)] if lost.controller else []),
        _field("queues", ", ".join(lost.queues)),
        _field("jobs", lost.work),
        (),
        _title("what it had begun" if lost.jobs else "it had begun nothing"),
        *(_plain(to_one_line(f"{job.task}  {job.id}  {job.fate}")) for job in lost.jobs),
    ]


def _describe_group(group: DeadJobGroup, now: float) -> list[Line]:
    first, last = (format_age(min(died, now), now) for died in (group.first_died, group.last_died))
    lines = [
        _title(f"{format_count(group.count, 'dead letter')} of {group.task or 'unknown tasks'}"),
        _field("group", group.id),
        _field("queues", ", ".join(group.queues)),
        _field("reasons", ", ".join(group.reasons)),
        _field("error", f"{group.type}: {group.message}"),
        _field("first died", first),
        _field("last died", last),
        (),
        _title("the newest"),
        *(_plain(job_id) for job_id in group.ids),
    ]
    if group.traceback:
        shown = group.traceback.rstrip().splitlines()[-TRACEBACK_LINES:]
        lines += [(), _title("traceback of the newest"), *(_plain(to_one_line(text)) for text in shown)]
    return lines


def _describe_job(job: ActiveJob) -> list[Line]:
    return [
        _title(f"job {job.id}"),
        _field("task", job.task),
        _field("worker", job.worker),
        _field("queue", job.queue),
        _field("runs for", format_duration(job.seconds)),
        _field("attempt", str(job.attempt)),
        _field("arguments", job.arguments),
        _field("progress", job.progress or "none reported"),
        (),
        _plain(f"{as_called(f'celery5 task show {job.id}')}   the whole story", "dim"),
        _plain(f"{as_called(f'celery5 task revoke {job.id}')}   stops it", "dim"),
    ]


def _summarize(job: DeadJob, now: float) -> Line:
    ago = format_age(min(job.died, now), now)
    return (
        (f"{ago:>12}  ", "dim"),
        (to_one_line(job.error or job.reason), ""),
        (f"  {to_one_line(job.id)}", "dim"),
    )


def _summarize_running(job: ActiveJob) -> Line:
    return (
        (f"{format_duration(job.seconds):>8}  ", ""),
        (to_one_line(job.task), "bold"),
        (f"  {to_one_line(job.progress or job.arguments)}", "dim"),
        (f"  {to_one_line(job.id)}", "dim"),
    )


def _by_minute(points: Iterable[HistoryPoint], now: float, measure: Measure) -> list[float | None]:
    """Return a number for each of the last minutes; None where nothing was measured, or the minute is not over."""
    last = int(now // MINUTE) * MINUTE
    first = last - (MINUTES_SHOWN - 1) * MINUTE
    values: dict[int, float] = {}
    for point in points:
        if first <= point.at <= last and point.is_over:
            values[point.at] = values.get(point.at, 0.0) + measure(point)
    return [values.get(at) for at in range(first, last + 1, MINUTE)]


def _count_ended(point: HistoryPoint) -> float:
    return float(sum(count_attempts(task.counts).ended for task in point.tasks))


def count_of(point: HistoryPoint, name: str, what: Literal["ended", "failed"]) -> float:
    """Return how many attempts of a task ended, or failed, in a minute of its history."""
    attempts = [count_attempts(task.counts) for task in point.tasks if task.task == name]
    return float(sum(attempt.ended if what == "ended" else attempt.failed for attempt in attempts))


def _draw(label: str, values: Sequence[float | None], bars: int, format_value: Formatter) -> list[Line]:
    """Return a sparkline with its label, its last whole minute and its largest value."""
    known = [value for value in values if value is not None]
    if not known:
        return [_field(label, "not measured yet", "dim")]
    newest = next(value for value in reversed(values) if value is not None)
    return [
        (
            (f"{label:{LABEL}}", "dim"),
            (make_sparkline(values, bars), "good"),
            (f"  {format_value(newest)}, most {format_value(max(known))}", "dim"),
        )
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _per_minute(value: float) -> str:
    return f"{value:,.0f}/min"


def _percentiles(percentiles: Mapping[str, float] | None) -> str:
    if not percentiles:
        return "not measured yet"
    return ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in percentiles.items())


def _since(oldest: float | None) -> str:
    return "" if oldest is None else f", the oldest for {format_duration(oldest)}"


def _title(text: str) -> Line:
    return _plain(to_one_line(text), "bold")


def _field(label: str, value: str, style: Style = "") -> Line:
    return ((f"{label:{LABEL}}", "dim"), (to_one_line(value), style))


def _plain(text: str, style: Style = "") -> Line:
    return ((text, style),)
