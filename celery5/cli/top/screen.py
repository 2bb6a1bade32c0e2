"""Draw the screen: what was read, as lines of the size of the terminal."""

import time
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style as RichStyle
from rich.text import Text

from celery5.cli.terminal.output import as_called, to_one_line
from celery5.cli.top.details import make_details
from celery5.cli.top.layout import Line, Segment, cut_line, format_top_table, get_window
from celery5.cli.top.readings import Reading
from celery5.cli.top.state import ScreenState, SeenRows, find_selected
from celery5.cli.top.tables import (
    Style,
    TopTable,
    View,
    arrange_rows,
    make_dead_table,
    make_job_table,
    make_queue_table,
    make_task_table,
    make_worker_table,
)
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_duration
from celery5.protocol.observability.overview import Overview, format_rate, select_unrepaired

SMALLEST = (40, 10)
"""Columns and lines that the screen needs."""
STYLES: Mapping[Style, RichStyle] = {
    "": RichStyle(),
    "dim": RichStyle(dim=True),
    "bold": RichStyle(bold=True),
    "good": RichStyle(color="green"),
    "busy": RichStyle(color="yellow"),
    "bad": RichStyle(color="red", bold=True),
    "key": RichStyle(reverse=True),
    "title": RichStyle(dim=True, underline=True),
}
HELP = (
    "1-5, tab       switch to queues, tasks, workers, dead letters, running jobs",
    "up, down, j, k select a row",
    "enter          open or close the details of the selected row",
    "/              show only rows with a text; escape shows all again",
    "s              sort by the next column",
    "p              pause or resume the selected queue, in all workers",
    "R              replay the dead letters of the selected group",
    "r              read again at once",
    "q              quit",
    "",
    "Red is only what needs a person: a queue that grows or that nobody works on,",
    "a task that fails, a worker that does not report or is not ready.",
    "in, out and per min are measured in the last three whole minutes; failed and",
    "the percentiles in the last hour.",
)
HINTS: Mapping[View, str] = {
    View.QUEUES: "enter details  p pause  s sort  / filter  ? help  q quit",
    View.TASKS: "enter why it fails  s sort  / filter  ? help  q quit",
    View.WORKERS: "enter what runs  s sort  / filter  ? help  q quit",
    View.DEAD: "enter details  R replay  s sort  / filter  ? help  q quit",
    View.JOBS: "enter details  s sort  / filter  ? help  q quit",
}


def make_table(view: View, reading: Reading) -> TopTable:
    """Return the table of a view."""
    overview = reading.overview
    if overview is None:
        return TopTable((), (), empty="" if reading.error else "reading")
    match view:
        case View.QUEUES:
            return make_queue_table(overview)
        case View.TASKS:
            return make_task_table(overview, overview.at)
        case View.WORKERS:
            return make_worker_table(overview)
        case View.DEAD:
            return make_dead_table(reading.dead, reading.dead_note, overview.at)
        case View.JOBS:
            return make_job_table(reading.jobs, reading.jobs_note)


def look(state: ScreenState, reading: Reading) -> SeenRows:
    """Return what a key acts on."""
    table = make_table(state.view, reading)
    rows = arrange_rows(table, filter_text=state.filter_text, sort=state.sorts.get(state.view, ""))
    queues = reading.overview.queues if reading.overview else ()
    paused = frozenset(queue.name for queue in queues if queue.is_paused)
    return SeenRows(table, rows, paused, tuple(reading.dead or ()))


def draw(state: ScreenState, reading: Reading, *, age: float, width: int, height: int) -> list[Line]:
    """Return the lines of the screen, exactly `height`, none longer than `width`.

    Args:
        state: What the screen shows.
        reading: What was read.
        age: Seconds since it was read.
        width: Columns of the terminal.
        height: Lines of it.
    """
    if width < SMALLEST[0] or height < SMALLEST[1]:
        text = f"the terminal is too small: {SMALLEST[0]} columns and {SMALLEST[1]} lines are needed"
        return _fill([((text, ""),)], width, height)
    head: list[Line] = [*_draw_head(reading, age, width), _draw_tabs(state), ()]
    foot = _draw_foot(state)
    space = height - len(head) - 1
    if state.shows_help:
        body = _scroll([_plain(line) for line in HELP], state.scrolled, space)
    elif state.details:
        body = _scroll(make_details(state.view, state.details, reading, width), state.scrolled, space)
    else:
        body = _draw_table(state, reading, width, space)
    return _fill([*head, *_fill(body, width, space), foot], width, height)


def _fill(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    shown = [cut_line(line, width) for line in lines[:height]]
    return [*shown, *[()] * (height - len(shown))]


def _plain(text: str, style: Style = "") -> Line:
    return ((text, style),)


def _scroll(lines: Sequence[Line], scrolled: int, space: int) -> list[Line]:
    first = max(0, min(scrolled, len(lines) - space))
    return list(lines[first : first + space])


def _draw_head(reading: Reading, age: float, width: int) -> list[Line]:
    overview = reading.overview
    name = "celery5 top" if overview is None else to_one_line(overview.app)
    clock = "" if overview is None else time.strftime("%H:%M:%SZ", time.gmtime(overview.at))
    lines: list[Line] = [_spread(((name, "bold"),), ((clock, "dim"),), width)]
    if overview is None:
        lines += [()]
    else:
        lines += [_draw_totals(overview), _draw_attention(overview, reading.alerts)]
    if reading.error:
        shown = f"shown is what was read {format_duration(age)} ago: " if overview else ""
        lines.append(_plain(f"{shown}{reading.error}", "bad"))
    lines += _draw_missing(overview) if overview else []
    for broker in overview.unreachable if overview else ():
        text = f"broker {broker.broker} cannot be reached, what is there is not shown: {broker.error}"
        lines.append(((to_one_line(text), "bad"),))
    for memory in overview.memory if overview else ():
        if text := memory.describe():
            lines.append(((to_one_line(f"memory of broker {memory.broker}: {text}"), "bad"),))
    return lines[:6]


def _draw_missing(overview: Overview) -> list[Line]:
    """Return the first process that should work and does not, how many more there are, and what to do."""
    further = max(0, len(overview.missing) - 1) + overview.left_out.missing
    lines: list[Line] = []
    for member in overview.missing[:1]:
        more = f" (and {further} more: celery5 controller status)" if further else ""
        lines = [
            ((as_called(to_one_line(text)), "bad"),)
            for text in (member.describe(overview.at) + more, f"  {member.remedy}")
        ]
    return lines


def _spread(left: Line, right: Line, width: int) -> Line:
    used = sum(cell_len(text) for text, _ in (*left, *right))
    return (*left, (" " * max(1, width - used), ""), *right)


def _draw_totals(overview: Overview) -> Line:
    totals = overview.totals
    failing = any(task.failing_since is not None for task in overview.tasks)
    segments: list[Segment] = []
    for label, value, is_bad in (
        ("ended", format_rate(totals.ended_per_second), False),
        ("failed", format_rate(totals.failed_per_second), failing),
        ("backlog", f"{totals.backlog:,}", False),
        ("running", f"{totals.running:,}", False),
        ("dead", f"{totals.dead:,}", False),
        ("workers", f"{totals.workers:,}", not totals.workers),
        *([("lost", f"{totals.lost:,}", True)] if totals.lost else []),
    ):
        segments.append((f"{label} ", "dim"))
        segments.append((value, "bad" if is_bad else ""))
        segments.append(("   ", ""))
    return (*segments, (f"(ended, failed: {overview.task_window}; the others: now)", "dim"))


def _draw_attention(overview: Overview, alerts: str) -> Line:
    queues = sum(queue.verdict.needs_attention for queue in overview.queues)
    tasks = sum(task.needs_attention for task in overview.tasks)
    workers = sum(worker.needs_attention for worker in overview.workers)
    lost = select_unrepaired(overview.lost)
    workers += sum(process.kind == "worker" for process in lost)
    others = sum(process.kind != "worker" for process in lost)
    counts = (
        (queues, "queue", "queues"),
        (tasks, "task", "tasks"),
        (workers, "worker", "workers"),
        (others, "other process", "other processes"),
        (len(overview.missing) + overview.left_out.missing, "missing member", "missing members"),
    )
    problems = [format_count(count, singular, plural) for count, singular, plural in counts if count]
    problems += [f"alerts: {alerts}"] if alerts else []
    line: Line = (("needs attention: ", "dim"), (to_one_line(", ".join(problems)), "bad"))
    if not problems:
        line = (("nothing needs attention", "dim"),)
    if overview.schedules:
        first = overview.schedules[0]
        text = f"   next schedule {first.name} in {format_duration(max(0.0, first.at - overview.at))}"
        line = (*line, (to_one_line(text), "dim"))
    return line


def _draw_tabs(state: ScreenState) -> Line:
    segments: list[Segment] = []
    for number, view in enumerate(View, 1):
        segments.append((f" {number} {view.value} ", "key" if view is state.view else ""))
    return (*segments, ("   ", ""), *_describe_filter(state))


def _describe_filter(state: ScreenState) -> Line:
    return ((f"only {state.filter_text!r}", "busy"),) if state.filter_text and not state.is_typing else ()


def _draw_table(state: ScreenState, reading: Reading, width: int, space: int) -> list[Line]:
    seen = look(state, reading)
    if not seen.rows:
        is_filtered = bool(state.filter_text and seen.table.rows)
        text = f"no row has {state.filter_text!r}" if is_filtered else seen.table.empty
        return [_plain(text, "dim")]
    sort = state.sorts.get(state.view, "")
    head, lines = format_top_table(seen.table, seen.rows, width=width, sort=sort)
    notes: list[Line] = []
    if seen.table.note:
        notes.append(_plain(seen.table.note, "dim"))
    selected = find_selected(state, seen.rows)
    first, end = get_window(len(lines), selected, space - 1 - len(notes))
    shown = list(lines[first:end])
    if lines:
        shown[selected - first] = _highlight(lines[selected], width)
    return [head, *shown, *notes]


def _highlight(line: Line, width: int) -> Line:
    """Return the line of the selected row, over the whole width."""
    segments: list[Segment] = [(text, "key") for text, _ in line]
    used = sum(cell_len(text) for text, _ in line)
    return (*segments, (" " * max(0, width - used), "key"))


def _draw_foot(state: ScreenState) -> Line:
    if state.question is not None:
        return (
            (f"{to_one_line(state.question.text)} ", "bold"),
            (" y yes ", "key"),
            ("  any other key: no", "dim"),
        )
    if state.is_typing:
        return ((f"/{state.filter_text}", "bold"), ("▏", "bold"), ("  enter keeps it, escape ends it", "dim"))
    if state.notice:
        return ((to_one_line(state.notice), "bad" if state.is_bad_notice else "bold"),)
    if state.shows_help or state.details:
        return (("escape back  j k scroll  q quit", "dim"),)
    return ((HINTS[state.view], "dim"),)


def make_text(line: Line) -> Text:
    """Return a line for rich."""
    text = Text(no_wrap=True, end="")
    for part, style in line:
        text.append(part, STYLES[style])
    return text


def render(lines: Sequence[Line], console: Console) -> str:
    """Return the lines as what is written to a terminal that shows the screen before: each line is replaced."""
    with console.capture() as capture:
        for number, line in enumerate(lines):
            console.print(make_text(line), end="", soft_wrap=True, highlight=False)
            console.out("\n" if number + 1 < len(lines) else "", end="", highlight=False)
    rows = capture.get().split("\n")
    # Each line is erased before it is written: after a full line the cursor stands on the last column.
    return "\x1b[H\x1b[K" + "\r\n\x1b[K".join(rows)


def draw_once(reading: Reading, width: int) -> list[Line]:
    """Return all tables of an overview below each other, for a screen that is printed once."""
    lines: list[Line] = _draw_head(reading, 0.0, width)
    for view in (View.QUEUES, View.TASKS, View.WORKERS):
        table = make_table(view, reading)
        lines.append(())
        lines.append(_plain(view.value, "bold"))
        if not table.rows:
            lines.append(_plain(table.empty, "dim"))
            continue
        head, rows = format_top_table(table, table.rows, width=width)
        lines += [head, *rows]
        if table.note:
            lines.append(_plain(table.note, "dim"))
    return [cut_line(line, width) for line in lines]
