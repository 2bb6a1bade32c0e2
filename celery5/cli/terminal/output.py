"""Write values as text, for people and for programs."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import zip_longest
from typing import NamedTuple

import click

from celery5.protocol.masking import escape_json, escape_text

_ENDS = re.compile(r"[\r\n\t]+")
_COMMAND = re.compile(r"(?<![\w./-])(?<!\.py )(?<!django-admin )celery5 (?=([a-z][a-z0-9-]*)\b)")
_USAGE = re.compile(r"(?<![\w./-])celery5 (?=-A module|--app-name NAME)")


MAX_CELL_WIDTH = 240
"""Characters of a long value that a cell shows."""
KEPT_AT_END = 90
"""Those of them that are its end."""
LONGEST_WORD = 30
"""Characters of a word that is left out rather than cut."""
MAX_TABLE_WIDTH = 120
"""The width of a table with a long column where there is no terminal."""
SHORTEST_CELL = 20
"""The width down to which a column with longer texts is made narrower, so that a table fits on the terminal."""
SHORT_CELL, LONG_CELL = 12, 40
"""Characters of a cell up to which it is not wrapped, such as `19 min ago`, and from which on it is a text."""
ID_COLUMNS = frozenset(
    {
        *(
            "id",
            "entry",
            "error group",
            "job",
            "run",
            "task",
            "workflow",
            "schedule",
            "event",
            "stream",
            "group",
        ),
        *("processor", "queue", "queues", "name", "worker", "router", "scheduler", "controller", "publisher"),
        *("process", "lost", "member"),
    }
)
"""The columns, by their titles, that hold what a person copies into the next command: no word of them is cut."""
KEPT_COLUMNS = frozenset(
    {
        *(
            "id",
            "entry",
            "job",
            "run",
            "state",
            "status",
            "is",
            "condition",
            "error",
            "reason",
            "why",
            "alert",
        ),
        *("description", "backlog", "value", "what", "outcome", "action", "next"),
    }
)
"""The columns, by their titles, that are left out last where a table does not fit on the terminal."""
SHOWN_COLUMNS = frozenset({"id", "job", "run"})
"""The columns, by their titles, that are never left out: what the next command is about."""


WHOLE_SENTENCE = 10_000
"""Characters of the first sentence of a help text in a list of commands: all of it, since click else cuts it."""


class CommandGroup(click.Group):
    """A group whose list of commands has the whole first sentence of each: click wraps it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names and the first sentences of all commands."""
        names = self.list_commands(ctx)
        commands = {name: self.get_command(ctx, name) for name in names}
        rows = [
            (name, command.get_short_help_str(WHOLE_SENTENCE))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def to_json(value: object) -> str:
    """Return a value as JSON on one line."""
    import msgspec  # a probe uses this module, too, and needs no JSON

    return escape_json(msgspec.json.encode(value).decode())


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Write text without control characters other than tabs and line ends.

    Commands write only by this function, since their text comes from other processes and from anyone who can write
    to Redis.
    """
    click.echo(escape_text(text, keep="\n\t"), err=err, nl=nl)


def format_fields(fields: Mapping[str, object]) -> str:
    """Return fields as text, a line for each."""
    width = max(map(len, fields))
    return "\n".join(f"{name:{width}}  {format_cell(value)}" for name, value in fields.items())


def format_table(rows: Sequence[Mapping[str, object]], *, empty: str, long: str = "") -> str:
    """Return rows as a table with the names of their fields above; `empty` without rows.

    On a terminal it is as wide as that: cells are wrapped between words, and where that is not enough, the least
    important columns are left out, which a line below says. Programs that read a table search it for words, so
    without a terminal each row is one line.

    Args:
        rows: The cells of each row, by the titles of their columns.
        empty: What to return without rows.
        long: A column that, without a terminal, is only as wide as fits on MAX_TABLE_WIDTH: in a row with a longer
            value the others follow that.
    """
    if not rows:
        return empty
    titles = list(rows[0])
    shown = [
        [
            _format_whole(value) if title in ID_COLUMNS else format_cell(value)
            for title, value in zip(titles, row.values(), strict=True)
        ]
        for row in rows
    ]
    widths = [max(len(title), *(len(row[column]) for row in shown)) for column, title in enumerate(titles)]
    if sys.stdout.isatty():
        return _format_to_fit(titles, shown, get_terminal_width())
    if long:
        index = titles.index(long)
        left = get_terminal_width() - sum(widths) - 2 * (len(widths) - 1)
        widths[index] = max(len(long), min(widths[index], widths[index] + left))
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (titles, *shown))


def _format_to_fit(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table of at most this width, unless even its least columns are wider."""
    columns = list(map(_measure, titles, zip(*rows, strict=True)))
    left_out = set(choose_left_out(columns, width))
    kept = [index for index in range(len(columns)) if index not in left_out]
    spare = {place: columns[index].natural - columns[index].least for place, index in enumerate(kept)}
    widths = [columns[index].natural for index in kept]
    widths = shrink_widest(widths, spare, max(0, sum(widths) + 2 * (len(widths) - 1) - width))
    lines = [
        line
        for row in (titles, *rows)
        for line in _wrap_row([row[index] for index in kept], widths, [columns[index] for index in kept])
    ]
    if left_out:
        names = ", ".join(titles[index] for index in sorted(left_out))
        lines += _wrap(f"not shown for lack of width: {names}; --json has all", width, breaks_words=False)
    return "\n".join(lines)


class TableColumn(NamedTuple):
    """A column of a table on a terminal."""

    title: str
    # Its width where there is room, and the width that its longest words need.
    natural: int
    least: int
    # Whether a cell of it says anything: none is only '' or 0.
    says_something: bool = True


def _measure(title: str, cells: Sequence[str]) -> TableColumn:
    """Return a column as wide as needed: short cells stay whole, and a text does not become a column of words."""
    words = [word for cell in cells for word in cell.split()]
    longest, widest = max(map(len, words), default=0), max(map(len, cells))
    if widest <= SHORT_CELL:
        least = widest
    elif title in ID_COLUMNS:
        least = longest
    else:
        least = SHORTEST_CELL if widest > LONG_CELL else min(longest, SHORTEST_CELL)
    return TableColumn(
        title,
        max(len(title), widest),
        max(least, *map(len, title.split())),
        any(word != "0" for word in words),
    )


def choose_left_out(columns: Sequence[TableColumn], width: int) -> list[int]:
    """Return the places of the columns to leave out of a table of this width, the least important first.

    First those that say nothing, then numbers, times and details, then names other than that of the row, then what
    KEPT_COLUMNS has; of each, those on the right first. The first column and SHOWN_COLUMNS are always shown.
    """

    def rank(index: int) -> tuple[int, int]:
        column = columns[index]
        is_kept, is_id = column.title in KEPT_COLUMNS, column.title in ID_COLUMNS
        return (0 if not column.says_something else 3 if is_kept else 2 if is_id else 1, -index)

    left_out: list[int] = []
    needed = sum(column.least for column in columns) + 2 * (len(columns) - 1)
    droppable = [index for index in range(1, len(columns)) if columns[index].title not in SHOWN_COLUMNS]
    for index in sorted(droppable, key=rank):
        if needed <= width:
            break
        left_out.append(index)
        needed -= columns[index].least + 2
    return left_out


def _wrap_row(cells: Sequence[str], widths: Sequence[int], columns: Sequence[TableColumn]) -> Iterator[str]:
    """Yield the lines of a row whose cells are wrapped to these widths."""
    wrapped = [
        _wrap(cell, width, breaks_words=column.title not in ID_COLUMNS)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    ]
    for parts in zip_longest(*wrapped, fillvalue=""):
        yield "  ".join(map(str.ljust, parts, widths)).rstrip()


def _wrap(text: str, width: int, *, breaks_words: bool) -> list[str]:
    if len(text) <= width:
        return [text]
    import textwrap  # a probe does without it

    return textwrap.wrap(text, width, break_long_words=breaks_words, break_on_hyphens=False)


def get_terminal_width() -> int:
    """Return the characters of a line of the terminal; MAX_TABLE_WIDTH where there is none."""
    import shutil  # a probe does without it

    return shutil.get_terminal_size((MAX_TABLE_WIDTH, 0)).columns


def shrink_widest(widths: Sequence[int], spare: Mapping[int, int], excess: int) -> list[int]:
    """Return widths of columns without the excess, as far as there is spare width: the widest are cut first.

    Args:
        widths: The widths.
        spare: By how much which columns may be cut.
        excess: By how much all of them together are too wide.
    """
    shrunk, left = list(widths), dict(spare)
    for _ in range(min(excess, sum(spare.values()))):
        widest = max((column for column, rest in left.items() if rest), key=shrunk.__getitem__)
        shrunk[widest] -= 1
        left[widest] -= 1
    return shrunk


def format_details(fields: Mapping[str, object], traceback: str) -> str:
    """Return fields as text, and below them a traceback, '' for none."""
    text = format_fields(fields)
    return f"{text}\n\n{clean_lines(traceback)}" if traceback else text


def print_details(parts: Iterable[str], *, empty: str) -> None:
    """Write texts one by one, with a line between them, since there may be many; `empty` without any."""
    number = 0
    for number, part in enumerate(parts, 1):
        echo(("\n" if number > 1 else "") + part)
    if not number:
        echo(empty)


def print_array(items: Iterable[object]) -> None:
    """Write one array of JSON, item by item, since there may be many."""
    number = 0
    for number, item in enumerate(items, 1):
        echo(("[" if number == 1 else ",") + to_json(item), nl=False)
    echo("]" if number else "[]")


def format_cell(value: object) -> str:
    """Return a value on one line, shortened to MAX_CELL_WIDTH: the end is kept, as what to do comes last."""
    text = _format_whole(value)
    if len(text) <= MAX_CELL_WIDTH:
        return text
    begin, end = text[: MAX_CELL_WIDTH - KEPT_AT_END], text[-KEPT_AT_END:]
    # Between words, where there are any: half a name in an error is taken for a whole one.
    begin = begin[: begin.find(" ", len(begin) - LONGEST_WORD)] if " " in begin[-LONGEST_WORD:] else begin
    end = end[end.index(" ") + 1 :] if " " in end[:LONGEST_WORD] else end
    return f"{begin}... ({len(text)} characters) ...{end}"


def _format_whole(value: object) -> str:
    """Return a value on one line."""
    return to_one_line(value) if isinstance(value, str) else escape_text(to_json(value))


def to_one_line(text: str) -> str:
    """Return text from outside for use in a line of output: on one line, without control characters.

    Commands in it are shown as the user would call them: much of what processes say ends with what to do.
    """
    return as_called(escape_text(" ".join(_ENDS.split(text))))


def clean_lines(text: str) -> str:
    """Return a text of several lines without control characters."""
    return "\n".join(escape_text(line) for line in text.rstrip().expandtabs().split("\n"))


def format_time(moment: float) -> str:
    """Return a time in seconds since 1970 as text in UTC; '' for 0 and times out of range."""
    if not 0 < moment < 32_503_680_000:
        return ""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}Z"


def format_progress(done: float, total: float | None, note: str) -> str:
    """Return the progress of a job for people: `30 of 120 (25 %): resizing`."""
    from celery5.protocol.job.progress import get_fraction  # a probe uses this module, too, and needs no jobs

    fraction = get_fraction(done, total)
    text = (
        f"{done:.12g}"
        if total is None or fraction is None
        else f"{done:.12g} of {total:.12g} ({int(fraction * 100)} %)"
    )
    return f"{text}: {note}" if note else text


class Invocation(NamedTuple):
    """How the user called celery5."""

    # The program: `celery5`, or `python manage.py celery5`.
    program: str = "celery5"
    # The flags before the command, which name the application.
    flags: tuple[str, ...] = ()
    # Whether the program knows the application without flags.
    has_application: bool = False
    # Returns the names of all commands: other words after `celery5` are prose.
    list_commands: Callable[[], Collection[str]] = tuple


INVOCATION: ContextVar[Invocation] = ContextVar("how the user called celery5", default=Invocation())  # noqa: B039  it is frozen


def as_called(text: str) -> str:
    """Return a text for people with its commands as the user would call them.

    A command that names an application stays unchanged: it is an example. Only the placeholder `-A module` is replaced.
    """
    call = INVOCATION.get()
    if call.program == "celery5" and not call.flags:
        return text
    import shlex  # a probe does without it

    commands = call.list_commands()
    begin = f"{call.program} {shlex.join(call.flags)}".rstrip()
    text = _COMMAND.sub(lambda found: f"{begin} " if found[1] in commands else found[0], text)
    return _USAGE.sub(lambda _: f"{call.program} ", text)


def echo_hint(text: str, *, err: bool = False) -> None:
    """Write a text for people with its commands as the user would call them."""
    echo(as_called(text), err=err)
