"""Said: values as text, for people and for programs.

Floor: cli. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping, Sequence

import msgspec


def as_json(value: object) -> str:
    """One JSON value on one line."""
    return msgspec.json.encode(value).decode()


def from_json(text: bytes) -> dict[str, object]:
    """The fields of a JSON object, those that this version does not know included."""
    fields: dict[str, object] = msgspec.json.decode(text)
    return fields


def lines(fields: Mapping[str, object]) -> str:
    """One value of several fields, a line for each."""
    width = max(map(len, fields))
    return "\n".join(f"{name:{width}}  {_cell(value)}" for name, value in fields.items())


def table(rows: Sequence[Mapping[str, object]], *, nothing: str) -> str:
    """Values of the same fields, a line for each below their names; `nothing` when there are none."""
    if not rows:
        return nothing
    shown = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)


def _cell(value: object) -> str:
    return value.replace("\n", " ") if isinstance(value, str) else as_json(value)
