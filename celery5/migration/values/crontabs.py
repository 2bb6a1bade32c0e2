"""Translate the crontabs of Celery."""

import ast
import re
from collections.abc import Mapping

_FIELDS = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
"""The parameters of Celery's `crontab`, in their order."""
_LINE = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
"""The fields of a line of a crontab, in their order."""
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
