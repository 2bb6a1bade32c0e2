"""Lay texts out in the width of a terminal: columns of a table, and lines that are cut."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from celery5.cli.terminal.output import ID_COLUMNS, shrink_widest, to_one_line
from celery5.cli.top.tables import Cell, Column, Row, Style, TopTable

Segment = tuple[str, Style]
Line = tuple[Segment, ...]
GAP = 2
"""Spaces between two columns."""
SHORTEST = 12
"""The width down to which a column is cut before others are left out."""


def fit_columns(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """Return the width of each column, 0 for one that is left out.

    ID_COLUMNS are cut only when all others are cut or left out.

    Args:
        columns: The columns.
        natural: The width that each would need.
        width: The width that there is.
    """
    widths = list(natural)
    by_rank = sorted((column.rank, number) for number, column in enumerate(columns) if column.rank)
    while (excess := _sum(widths) - width) > 0:
        spare = _find_spare(columns, widths, is_ranked=bool(by_rank))
        if sum(spare.values()) >= excess:
            return shrink_widest(widths, spare, excess)
        if not by_rank:
            widths = shrink_widest(widths, spare, excess)
            ids = _find_spare(columns, widths, is_ranked=False, ids=True)
            return shrink_widest(widths, ids, _sum(widths) - width)
        widths[by_rank.pop()[1]] = 0
    return widths


def _find_spare(
    columns: Sequence[Column], widths: Sequence[int], *, is_ranked: bool, ids: bool = False
) -> dict[int, int]:
    """Return by how much columns may be cut: those that may be left out, or when none is left, all others."""
    return {
        number: widths[number] - SHORTEST
        for number, column in enumerate(columns)
        if column.may_shrink
        and bool(column.rank) is is_ranked
        and (column.title in ID_COLUMNS) is ids
        and widths[number] > SHORTEST
    }


def _sum(widths: Sequence[int]) -> int:
    shown = [width for width in widths if width]
    return sum(shown) + GAP * max(0, len(shown) - 1)


def format_row(columns: Sequence[Column], cells: Sequence[Cell], widths: Sequence[int]) -> Line:
    """Return the cells of a row as a line, in columns of these widths."""
    segments: list[Segment] = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        if not width:
            continue
        if segments:
            segments.append((" " * GAP, ""))
        text = cut(cell.text, width)
        padding = " " * (width - cell_len(text))
        segments.append((padding + text if column.is_number else text + padding, cell.style))
    return tuple(segments)


def format_top_table(
    table: TopTable, rows: Sequence[Row], *, width: int, sort: str = ""
) -> tuple[Line, list[Line]]:
    """Return the titles of a table and its rows as lines that fit into a width."""
    titles = [f"{column.title}{'↓' if column.title == sort else ''}" for column in table.columns]
    natural = [
        max([cell_len(title), *(cell_len(row.cells[number].text) for row in rows)])
        for number, title in enumerate(titles)
    ]
    # A column that says nothing about any row is left out first.
    columns = [
        Column(column.title, column.rank + 10, column.is_number, column.may_shrink)
        if column.rank and all(row.cells[number].text in ("", "0") for row in rows)
        else column
        for number, column in enumerate(table.columns)
    ]
    widths = fit_columns(columns, natural, width)
    head = format_row(table.columns, [Cell(title, "title") for title in titles], widths)
    return head, [format_row(table.columns, row.cells, widths) for row in rows]


def cut(text: str, width: int) -> str:
    """Return a text in at most this many cells, with an ellipsis where something is cut off."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 1 else "…"[:width]


def cut_line(line: Line, width: int) -> Line:
    """Return a line in at most this many cells, without any control character: much of it comes from others."""
    left, segments = width, list[Segment]()
    for text, style in line:
        if left <= 0:
            break
        shown = cut(to_one_line(text), left)
        segments.append((shown, style))
        left -= cell_len(shown)
    return tuple(segments)


def get_window(count: int, selected: int, height: int) -> tuple[int, int]:
    """Return which of `count` rows are shown in a height, so that the selected one is among them."""
    first = max(0, min(selected - height // 2, count - height))
    return first, min(count, first + height)
