"""Write values as text, for people and for programs."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import NamedTuple

import click

from celery5.protocol.masking import cut_middle, escape_json, escape_text

_ENDS = re.compile(r"[\r\n\t]+")
_COMMAND = re.compile(r"(?<![\w./-])(?<!\.py )(?<!django-admin )celery5 (?=([a-z][a-z0-9-]*)\b)")
_USAGE = re.compile(r"(?<![\w./-])celery5 (?=-A module|--app-name NAME)")


MAX_CELL_WIDTH = 240
"""Characters of a long value that a cell shows."""
KEPT_AT_END = 90
"""Those of them that are its end."""
MAX_TABLE_WIDTH = 120
"""The width of a table with a long column where there is no terminal."""
SHORTEST_CELL = 24
"""The width down to which a column is cut so that a table fits on the terminal."""
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
        *("process", "lost"),
    }
)
"""The columns, by their titles, that hold what a person copies into the next command: they are never cut."""


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

    On a terminal, columns other than ID_COLUMNS are cut where that makes the table fit.

    Args:
        rows: The cells of each row, by the titles of their columns.
        empty: What to return without rows.
        long: A column that is only as wide as fits on the terminal: in a row with a longer value the others follow
            that. With it nothing is cut to fit.
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
    if long:
        index = titles.index(long)
        left = get_terminal_width() - sum(widths) - 2 * (len(widths) - 1)
        widths[index] = max(len(long), min(widths[index], widths[index] + left))
    elif sys.stdout.isatty():  # programs that read a table search it for words
        widths = fit_widths(titles, widths, get_terminal_width())
        shown = [list(map(cut_middle, row, widths)) for row in shown]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (titles, *shown))


def get_terminal_width() -> int:
    """Return the characters of a line of the terminal; MAX_TABLE_WIDTH where there is none."""
    import shutil  # a probe does without it

    return shutil.get_terminal_size((MAX_TABLE_WIDTH, 0)).columns


def fit_widths(titles: Sequence[str], natural: Sequence[int], width: int) -> list[int]:
    """Return the widths of columns, two spaces apart, in a table of at most this width.

    The widest columns are cut first, down to SHORTEST_CELL, and ID_COLUMNS never. Where the table would still be too
    wide, nothing is cut: the terminal breaks its lines in any case, and whole texts are worth more.
    """
    widths = list(natural)
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    spare = {
        column: widths[column] - max(SHORTEST_CELL, len(title))
        for column, title in enumerate(titles)
        if title not in ID_COLUMNS and widths[column] > max(SHORTEST_CELL, len(title))
    }
    return shrink_widest(widths, spare, excess) if sum(spare.values()) >= excess else widths


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
    cut = f"... ({len(text)} characters) ..."
    return text[: MAX_CELL_WIDTH - KEPT_AT_END] + cut + text[-KEPT_AT_END:]


def _format_whole(value: object) -> str:
    """Return a value on one line."""
    return to_one_line(value) if isinstance(value, str) else escape_text(to_json(value))


def to_one_line(text: str) -> str:
    """Return text from outside for use in a line of output: on one line, without control characters."""
    return escape_text(" ".join(_ENDS.split(text)))


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
