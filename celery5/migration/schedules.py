"""Change the entries of beat to schedules of celery5."""

import ast
from collections.abc import Callable

from celery5.migration.index import get_dotted

_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
"""The parameters of Celery's `crontab`, in their order."""
_LINE = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
"""The fields of a line of a crontab, in their order."""


def make_line(fields: dict[str, str]) -> str:
    """Return a line of a crontab; '' when both fields of days are set: Celery wants both, a crontab either."""
    fields = {name: text.replace(" ", "") for name, text in fields.items()}
    if fields.get("day_of_week", "*") != "*" and fields.get("day_of_month", "*") != "*":
        return ""
    return " ".join(fields.get(name, "*") or "*" for name in _LINE)


def parse_crontab_call(call: ast.Call) -> str:
    """Return the line of a crontab for `crontab(minute=0)`; '' where it cannot be known."""
    fields: dict[str, str] = {}
    named = [
        *zip(_FIELDS, call.args, strict=False),
        *((option.arg, option.value) for option in call.keywords),
    ]
    for name, value in named:
        text = _read_field(value)
        if name not in _FIELDS or text is None:
            return ""
        fields[name] = text
    return make_line(fields)


def _read_field(value: ast.expr) -> str | None:
    match value:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=int(number)):
            return str(number)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            parts = [_read_field(element) for element in elements]
            return ",".join(part for part in parts if part) if all(parts) else None
        case _:
            return None


def change_beat_schedule(value: ast.expr, render: Callable[[ast.expr], str]) -> str | None:
    """Return the setting `schedules` for `beat_schedule`, as source; None where an entry cannot be changed."""
    if not isinstance(value, ast.Dict):
        return None
    entries: list[str] = []
    for key, entry in zip(value.keys, value.values, strict=True):
        if key is None or not isinstance(entry, ast.Dict):
            return None
        fields = _change_entry(entry, render)
        if fields is None:
            return None
        lines = "".join(f"\n        {field}," for field in fields)
        entries.append(f"\n    {render(key)}: {{{lines}\n    }},")
    return f"{{{''.join(entries)}\n}}" if entries else "{}"


def _change_entry(entry: ast.Dict, render: Callable[[ast.expr], str]) -> list[str] | None:
    fields: list[str] = []
    for key, value in zip(entry.keys, entry.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        if name in ("task", "args", "kwargs"):
            text = render(value)
            fields.append(
                f'"{name}": {f"list({text})" if name == "args" and not _is_literal(value) else text}'
            )
        elif name == "schedule":
            when = _change_when(value, render)
            if when is None:
                return None
            fields.append(when)
        elif name == "options":
            options = _change_options(value, render)
            if options is None:
                return None
            fields += options
        elif name != "relative":
            return None
    return fields


def _is_literal(value: ast.expr) -> bool:
    return isinstance(value, ast.List | ast.Tuple)


def _change_when(value: ast.expr, render: Callable[[ast.expr], str]) -> str | None:
    if isinstance(value, ast.Call):
        name = get_dotted(value.func).rpartition(".")[2]
        if name == "crontab":
            line = parse_crontab_call(value)
            return f'"cron": "{line}"' if line else None
        if name == "timedelta":
            return f'"every": {render(value)}'
        if name == "schedule" and len(value.args) == 1 and not value.keywords:
            return f'"every": {render(value.args[0])}'
        return None
    is_number = isinstance(value, ast.BinOp) or (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float)
    )
    return f'"every": {render(value)}' if is_number else None


def _change_options(value: ast.expr, render: Callable[[ast.expr], str]) -> list[str] | None:
    if not isinstance(value, ast.Dict):
        return None
    kept: list[str] = []
    for key, option in zip(value.keys, value.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else None
        if name not in ("queue", "expires", "time_limit", "soft_time_limit", "ignore_result"):
            return None
        kept.append(f'"{name}": {render(option)}')
    return [f'"options": {{{", ".join(kept)}}}'] if kept else []
