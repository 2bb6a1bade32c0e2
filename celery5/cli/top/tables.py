"""Make the tables of the screen from what was read: which columns there are, and what stands in each cell."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from celery5.cli.terminal.output import as_called, to_one_line
from celery5.cli.top.readings import ActiveJob
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.job.failure_groups import DeadJobGroup
from celery5.protocol.observability.overview import (
    LostWorker,
    Overview,
    QueueOverview,
    TaskOverview,
    WorkerOverview,
    describe_loss,
    describe_repaired,
    format_rate,
    format_share,
    select_unrepaired,
)
from celery5.protocol.observability.queue_depth import AT_LIMITS
from celery5.protocol.process.missing import StartAdvice
from celery5.protocol.process.recycling import format_mib


class View(StrEnum):
    """The views, in the order of their keys 1 to 5."""

    QUEUES = "queues"
    TASKS = "tasks"
    WORKERS = "workers"
    DEAD = "dead letters"
    JOBS = "running jobs"


Style = Literal["", "dim", "bold", "good", "busy", "bad", "key", "title"]
"""What a text looks like: `bad` is for what needs a person, `busy` for what is worth a look."""
SortValue = float | str


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in a table, and what its row is sorted by."""

    text: str
    style: Style = ""
    sort: SortValue = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    # Columns of higher rank are left out first where there is no room; those of rank 0 never.
    rank: int = 0
    is_number: bool = False
    # Whether long texts are cut before columns are left out.
    may_shrink: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    # What it stands for: the name of a queue, say.
    key: str
    cells: tuple[Cell, ...]
    needs_attention: bool = False


@dataclass(frozen=True, slots=True)
class TopTable:
    """A table with all of its rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    # What stands there when it has no rows.
    empty: str = ""
    # What is not shown, or why nothing is; '' for nothing.
    note: str = ""


def arrange_rows(table: TopTable, *, filter_text: str, sort: str) -> tuple[Row, ...]:
    """Return the rows that a text is in, sorted by a column: numbers from the largest, texts from A.

    Args:
        table: The table.
        filter_text: Any part of any cell, in upper or lower case.
        sort: The title of the column; '' for the order of the table.
    """
    wanted = filter_text.casefold()
    rows = [
        row
        for row in table.rows
        if not wanted
        or any(wanted in cell.text.casefold() for cell in row.cells)
        or wanted in row.key.casefold()
    ]
    titles = [column.title for column in table.columns]
    if sort in titles:
        number = titles.index(sort)
        rows.sort(key=lambda row: _get_sort_key(row.cells[number].sort))
    return tuple(rows)


def _get_sort_key(value: SortValue) -> tuple[int, float, str]:
    return (0, -value, "") if isinstance(value, int | float) else (1, 0.0, value.casefold())


def make_queue_table(overview: Overview) -> TopTable:
    """Return the queues: those that need a person first, then those with most jobs."""
    queues = sorted(
        overview.queues, key=lambda queue: (not queue.verdict.needs_attention, -queue.backlog, queue.name)
    )
    columns = (
        Column("queue", may_shrink=True),
        Column("backlog", is_number=True),
        Column("oldest", 3, is_number=True),
        Column("in", 2, is_number=True),
        Column("out", 2, is_number=True),
        Column("running", 1, is_number=True),
        Column(AT_LIMITS, 5, is_number=True),
        Column("scheduled", 4, is_number=True),
        Column("dead", 1, is_number=True),
        Column("runs", 6, is_number=True),
        Column("workers", 4, is_number=True),
        Column("verdict"),
    )
    return TopTable(
        columns,
        tuple(map(_make_queue_row, queues)),
        empty="no queues yet: nothing was sent",
        note=_join_notes(_note_left_out(overview.left_out.queues, "queue"), "in, out", overview.queue_window),
    )


def _make_queue_row(queue: QueueOverview) -> Row:
    flow, verdict = queue.flow, queue.verdict
    style: Style = "bad" if verdict.needs_attention else "dim" if verdict.condition == "steady" else "busy"
    cells = (
        _text(queue.name),
        _count(queue.backlog),
        _span(queue.oldest),
        _rate(None if flow is None else flow.incoming),
        _rate(None if flow is None else flow.outgoing),
        _count(queue.running),
        _count(queue.held),
        _count(queue.scheduled),
        _count(queue.dead),
        _count(queue.runs),
        _count(queue.workers),
        Cell(to_one_line(verdict.text), style, verdict.text),
    )
    return Row(queue.name, cells, verdict.needs_attention)


def make_task_table(overview: Overview, now: float) -> TopTable:
    """Return the tasks: those that fail first, then the busiest."""
    kills = any(task.deaths for task in overview.tasks)
    columns = (
        Column("task", may_shrink=True),
        *([Column("died", is_number=True)] if kills else []),
        Column("per min", 1, is_number=True),
        Column("failed", is_number=True),
        Column("run p50", 3, is_number=True),
        Column("p95", 2, is_number=True),
        Column("p99", 4, is_number=True),
        Column("wait p95", 2, is_number=True),
        Column("fails for", is_number=True),
        Column("last error", 5, may_shrink=True),
    )
    return TopTable(
        columns,
        tuple(_make_task_row(task, now, kills=kills) for task in overview.tasks),
        empty="no attempt has ended lately, as far as metrics are stored",
        note=_join_notes(_note_left_out(overview.left_out.tasks, "task"), "per min", overview.task_window),
    )


def _make_task_row(task: TaskOverview, now: float, *, kills: bool) -> Row:
    """Return the row of a task. `kills`: whether there is a column for workers that died."""
    is_failing = task.failing_since is not None
    share = task.failed_share
    since = None if task.failing_since is None else max(0.0, now - task.failing_since)
    error = task.last_error
    text = task.unknown_error if error is None else error.describe(now)
    cells = (
        _text(task.name),
        *(
            [Cell(f"{task.deaths:,}" if task.deaths else "", "bad" if task.kills else "", float(task.deaths))]
            if kills
            else []
        ),
        Cell(f"{task.ended_per_minute:,.0f}", "" if task.ended_per_minute else "dim", task.ended_per_minute),
        Cell(
            "" if share is None else format_share(share),
            "bad" if is_failing else "" if share else "dim",
            share or 0.0,
        ),
        _percentile(task.run, "p50"),
        _percentile(task.run, "p95"),
        _percentile(task.run, "p99"),
        _percentile(task.wait, "p95"),
        Cell("" if since is None else format_duration(since), "bad", since or 0.0),
        _text(text, "" if is_failing else "dim"),
    )
    return Row(task.name, cells, task.needs_attention)


def make_worker_table(overview: Overview) -> TopTable:
    """Return the workers: those with something wrong first."""
    advice = StartAdvice(is_controlled=bool(overview.totals.controllers))
    workers = sorted(overview.workers, key=lambda worker: (worker.health == "ok", worker.name))
    columns = (
        Column("worker", may_shrink=True),
        Column("host", 3, may_shrink=True),
        Column("up", 2, is_number=True),
        Column("slots", 1, may_shrink=True),
        Column("ended", 2, is_number=True),
        Column("lag", 4, is_number=True),
        Column("memory", 3, is_number=True),
        Column("queues", 5, may_shrink=True),
        Column("report", 4, is_number=True),
        Column("health"),
    )
    return TopTable(
        columns,
        (*map(_make_lost_row, select_unrepaired(overview.lost)), *map(_make_worker_row, workers)),
        empty=as_called(f"no worker is running: {advice.format_start('worker')}"),
        note="; ".join(
            filter(
                None,
                (_note_left_out(overview.left_out.workers, "worker"), describe_repaired(overview.lost)),
            )
        ),
    )


def _make_lost_row(lost: LostWorker) -> Row:
    cells = (
        _text(lost.name),
        *(_text("") for _ in range(6)),
        _text(", ".join(lost.queues), "dim"),
        _text(""),
        _text(f"{lost.health}; {describe_loss(lost)}", "bad"),
    )
    return Row(lost.worker, cells, needs_attention=True)


def _make_worker_row(worker: WorkerOverview) -> Row:
    style: Style = "bad" if worker.needs_attention else "dim"
    memory = "" if worker.memory is None else format_mib(worker.memory)
    cells = (
        _text(worker.name),
        _text(worker.host or ""),
        _span(worker.uptime),
        Cell(worker.slots_text, "", float(worker.running or 0)),
        _count(worker.ended),
        Cell(
            "" if worker.lag is None else format_duration(worker.lag),
            "" if worker.lag else "dim",
            worker.lag or 0.0,
        ),
        Cell(memory, "", float(worker.memory or 0)),
        _text(", ".join(worker.queues), "dim"),
        _span(worker.reported),
        _text(worker.health, style),
    )
    return Row(worker.name, cells, style == "bad")


def make_dead_table(groups: Sequence[DeadJobGroup] | None, note: str, now: float) -> TopTable:
    """Return the dead letters by task and error, the largest group first; None while they have not been read."""
    columns = (
        Column("count", is_number=True),
        Column("task", may_shrink=True),
        Column("error", may_shrink=True),
        Column("message", 2, may_shrink=True),
        Column("reason", 3),
        Column("queue", 1, may_shrink=True),
        Column("last", is_number=True),
    )
    rows = [
        Row(
            group.id,
            (
                _count(group.count),
                _text(group.task),
                _text(group.type),
                _text(group.pattern, "dim"),
                _text(", ".join(group.reasons), "dim"),
                _text(", ".join(group.queues)),
                Cell(format_age(min(group.last_died, now), now), "", -group.last_died),
            ),
        )
        for group in groups or ()
    ]
    return TopTable(columns, tuple(rows), empty="reading" if groups is None else "no dead letters", note=note)


def make_job_table(jobs: Sequence[ActiveJob] | None, note: str) -> TopTable:
    """Return the jobs that run, the longest first; None while they have not been read."""
    columns = (
        Column("task", may_shrink=True),
        Column("for", is_number=True),
        Column("worker", 1, may_shrink=True),
        Column("queue", 3, may_shrink=True),
        Column("attempt", 4, is_number=True),
        Column("progress", 2, may_shrink=True),
        Column("arguments", 5, may_shrink=True),
        Column("id", 6),
    )
    rows = [
        Row(
            job.id,
            (
                _text(job.task),
                _span(job.seconds),
                _text(job.worker),
                _text(job.queue),
                _count(job.attempt),
                _text(job.progress),
                _text(job.arguments, "dim"),
                _text(job.id, "dim"),
            ),
        )
        for job in jobs or ()
    ]
    return TopTable(
        columns, tuple(rows), empty="asking the workers" if jobs is None else "no job runs", note=note
    )


def _note_left_out(count: int, noun: str) -> str:
    return f"{format_count(count, f'more {noun}')} not shown" if count else ""


def _join_notes(left_out: str, columns: str, window: str) -> str:
    """Return what is not shown, and over which time the rates in some columns were measured."""
    return "; ".join(note for note in (left_out, f"{columns}: {window}" if window else "") if note)


def _text(text: str, style: Style = "") -> Cell:
    shown = to_one_line(text)
    return Cell(shown, style, shown)


def _count(number: int | None) -> Cell:
    return (
        Cell("", "dim", 0.0)
        if number is None
        else Cell(f"{number:,}", "" if number else "dim", float(number))
    )


def _span(seconds: float | None) -> Cell:
    return Cell("" if seconds is None else format_duration(seconds), "", seconds or 0.0)


def _rate(per_second: float | None) -> Cell:
    if per_second is None:
        return Cell("", "dim", 0.0)
    return Cell(format_rate(per_second) if per_second else "0", "" if per_second else "dim", per_second)


def _percentile(percentiles: dict[str, float] | None, name: str) -> Cell:
    seconds = (percentiles or {}).get(name)
    return Cell("" if seconds is None else format_duration(seconds), "", seconds or 0.0)


BARS = " ▁▂▃▄▅▆▇█"


def make_sparkline(values: Sequence[float | None], width: int) -> str:
    """Return values as bars, the last ones on the right; gaps where nothing was measured.

    Of several values that share a bar the largest counts, so that no peak is lost.
    """
    if not values or width < 1:
        return ""
    per_bar = -(-len(values) // width)
    padded = [None] * (-len(values) % per_bar) + list(values)
    bars = [
        max((value for value in padded[start : start + per_bar] if value is not None), default=None)
        for start in range(0, len(padded), per_bar)
    ]
    top = max((bar for bar in bars if bar is not None), default=0.0)
    return "".join(
        " "
        if bar is None
        else BARS[1]
        if not top or bar <= 0
        else BARS[max(1, -(-int(bar * 8000 / top) // 1000))]
        for bar in bars
    )
