"""Change the entries of `beat_schedule` to those of `schedules`."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from celery5.migration.project.index import get_dotted
from celery5.migration.values.crontabs import parse_crontab_call

MAX_SHOWN = 60
"""The longest part of the source that an advice repeats."""


@dataclass(frozen=True)
class Entries:
    """What becomes of the entries of a setting."""

    changed: tuple[str, ...]  # the source of those that can be changed
    left: Mapping[ast.expr, tuple[str, str]]  # the keys of the others, with their source and advice


def change_beat_schedule(value: ast.expr, render: Callable[[ast.expr], str]) -> Entries | None:
    """Return the entries of `schedules` for those of `beat_schedule`; None where they cannot be read."""
    if not isinstance(value, ast.Dict):
        return None
    entries: list[str] = []
    left: dict[ast.expr, tuple[str, str]] = {}
    for key, entry in zip(value.keys, value.values, strict=True):
        if key is None or not isinstance(entry, ast.Dict):
            return None
        try:
            fields = _change_entry(entry, render)
        except ValueError as error:
            left[key] = f"{render(key)}: {render(entry)}", str(error)
            continue
        lines = "".join(f"\n        {field}," for field in fields)
        entries.append(f"\n    {render(key)}: {{{lines}\n    }}")
    return Entries(tuple(entries), left)


def _change_entry(entry: ast.Dict, render: Callable[[ast.expr], str]) -> list[str]:
    """Return the fields of an entry. Raises ValueError with advice for a change by hand."""
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
                raise ValueError(
                    f'it stays in the old setting, as {_shorten(render(value))} has no counterpart: "cron", "every" or '
                    '"at" in the setting schedules; a task checks other conditions itself (celery5 '
                    "docs periodic)"
                )
            fields.append(when)
        elif name == "options":
            options = _change_options(value, render)
            if options is None:
                raise ValueError(
                    f"it stays in the old setting, as its options are {_shorten(render(value))}: queue, expires, "
                    "time_limit, soft_time_limit and ignore_result may be there; the others are options of the task"
                )
            fields += options
        elif name != "relative":
            raise ValueError(f"it stays in the old setting, as an entry of schedules has no field {name!r}")
    return fields


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


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
