"""Change the entries of beat to schedules of celery5."""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from celery5.migration.index import get_dotted

_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
"""The parameters of Celery's `crontab`, in their order."""
_LINE = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
"""The fields of a line of a crontab, in their order."""

MAX_SHOWN = 60
"""The longest part of the source that an advice repeats."""
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_RANGES: Mapping[str, tuple[int, int, tuple[str, ...]]] = {
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day_of_month": (1, 31, ()),
    "month_of_year": (1, 12, _MONTHS),
    "day_of_week": (0, 6, _WEEKDAYS),
}
"""The lowest and the highest number of each field, and the names from the lowest on."""
_PART = re.compile(r"(?:(\*)|(\w+?)(?:-(\w+))?)(?:/(\d{1,4}))?")
_NAME_BY_FIELD = {"day_of_month": "day", "month_of_year": "month"}
"""The names of our fields that differ from Celery's."""


def make_line(fields: Mapping[str, str]) -> str:
    """Return a line of a crontab; '' when both fields of days are set: Celery wants both, a crontab either.

    Raises:
        ValueError: Celery could not read a field either.
    """
    texts = {name: _translate_field(name, fields.get(name) or "*") for name in _LINE}
    if texts["day_of_week"] != "*" and texts["day_of_month"] != "*":
        return ""
    return " ".join(texts.values())


def make_cron_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """Return the same by fields, as `cron(...)` takes them: all of them must match. Raises ValueError."""
    texts = {name: _translate_field(name, fields.get(name) or "*") for name in _LINE}
    if texts["day_of_week"] != "*":
        numbers = sorted(_expand_field("day_of_week", texts["day_of_week"]))
        texts["day_of_week"] = ",".join(_WEEKDAYS[number] for number in numbers)
    named = {_NAME_BY_FIELD.get(name, name): text for name, text in texts.items()}
    return {name: text for name, text in named.items() if text != "*" or name in ("minute", "hour")}


def _translate_field(name: str, text: str) -> str:
    """Return a field as a crontab has it: numbers in place of what only Celery reads, such as `22-4`."""
    text = text.replace(" ", "").lower()
    low, high, _ = _RANGES[name]
    if len(_expand_field(name, text)) == high - low + 1:
        return "*"
    return ",".join(_translate_part(name, part) for part in text.split(","))


def _translate_part(name: str, part: str) -> str:
    low, high, names = _RANGES[name]
    star, first, last, step = _read_part(name, part)
    begin, end = (low, high) if star else (_read_number(name, first), _read_number(name, last or first))
    words = {word for word in (first, last) if word}
    is_plain = begin <= end and (words <= set(names) or all(word.isdigit() for word in words))
    if is_plain and (not step or (0 < int(step) <= end - begin and not (first and not first.isdigit()))):
        return part
    return ",".join(map(str, sorted(_expand_field(name, part))))


def _expand_field(name: str, text: str) -> set[int]:
    """Return the numbers of a field, as Celery reads it: a range may go on at the beginning."""
    low, high, _ = _RANGES[name]
    numbers: set[int] = set()
    for part in text.split(","):
        star, first, last, step = _read_part(name, part)
        begin, end = (low, high) if star else (_read_number(name, first), _read_number(name, last or first))
        span = [*range(begin, end + 1)] if begin <= end else [*range(begin, high + 1), *range(low, end + 1)]
        if step and int(step) == 0:
            raise ValueError(f"its {name} {part!r} has a step of 0")
        numbers.update(span[:: int(step or 1)])
    return numbers


def _read_part(name: str, part: str) -> tuple[str, str, str, str]:
    match = _PART.fullmatch(part)
    star, first, last, step = (group or "" for group in match.groups()) if match else ("", "", "", "")
    if not (star or first) or (step and not star and not last):
        raise ValueError(f"Celery reads no {name} {part!r}")
    return star, first, last, step


def _read_number(name: str, text: str) -> int:
    low, high, names = _RANGES[name]
    number = names.index(text[:3]) + low if text[:3] in names else int(text) if text.isdecimal() else -1
    if not low <= number <= high:
        raise ValueError(f"Celery reads no {name} {text!r}")
    return number


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
    try:
        return make_line(fields)
    except ValueError:
        return ""


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
