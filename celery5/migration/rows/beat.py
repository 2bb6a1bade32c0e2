"""Write the rows of django-celery-beat, as `manage.py dumpdata django_celery_beat` prints them, as schedules."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from celery5.errors import Misconfigured
from celery5.migration.values.crontabs import make_cron_fields, make_line
from celery5.protocol.scheduling.declaration import parse_trigger
from celery5.protocol.scheduling.triggers import validate_cron_fields

MAX_FILE = 64 * 1024 * 1024
"""The largest file of rows that is read, in bytes."""
_PERIODS = ("days", "hours", "minutes", "seconds", "microseconds")
_NOT_TAKEN = ("priority", "headers", "exchange", "routing_key")
"""Fields of a row that a job of ours has no place for, or that mean something else on each broker."""
_UNSET = (None, "", "{}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
Row = Mapping[str, Any]


def export_beat_rows(file: Path) -> tuple[str, list[str]]:
    """Return a configuration in TOML with the schedules of the rows, and what it leaves out, a line for each.

    Raises:
        Misconfigured: The file cannot be read, or is no fixture of django-celery-beat.
    """
    rows = _read_rows(file)
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        model = str(row.get("model", "")).lower()
        fields = row.get("fields")
        if model.startswith("django_celery_beat.") and isinstance(fields, dict):
            by_model.setdefault(model.partition(".")[2], {})[str(row.get("pk"))] = cast("Row", fields)
    tasks = by_model.get("periodictask", {})
    if not tasks:
        raise Misconfigured(
            f"{file} has no rows of django_celery_beat.periodictask: manage.py dumpdata django_celery_beat"
        )
    tables: list[str] = []
    left: list[str] = []
    for row in tasks.values():
        name = str(row.get("name", ""))
        try:
            tables.append("\n".join(_make_table(name, row, by_model)))
        except (ValueError, Misconfigured) as error:
            left.append(f"{name}: {error}")
            continue
        left += [f"{name}: its {field}: {row[field]}" for field in _NOT_TAKEN if row.get(field) not in _UNSET]
    return "\n\n".join(tables) + "\n" if tables else "", left


def _read_rows(file: Path) -> Sequence[Row]:
    try:
        if file.stat().st_size > MAX_FILE:
            raise Misconfigured(f"{file} is larger than {MAX_FILE // 1024 // 1024} MiB")
        rows = json.loads(file.read_bytes())
    except OSError as error:
        raise Misconfigured(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"{file} is no JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in cast("list[object]", rows)):
        raise Misconfigured(f"{file} is no list of rows: manage.py dumpdata django_celery_beat > {file.name}")
    return cast("Sequence[Row]", rows)


def _make_table(name: str, row: Row, by_model: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    """Yield the lines of the table of a schedule. Raises ValueError for what has no counterpart."""
    if not row.get("enabled", True):
        raise ValueError("it is not enabled")
    if row.get("last_run_at") and row.get("one_off"):
        raise ValueError("it was to run once, and has run")
    task = row.get("task")
    if not isinstance(task, str) or not task:
        raise ValueError("it has no task")
    yield f"[schedules.{name if _BARE.fullmatch(name) else _quote(name)}]"
    yield f"task = {_quote(task)}"
    when = _make_times(row, by_model)
    trigger = parse_trigger(when)  # a table that is refused would stop the whole application
    validate_cron_fields(trigger)
    yield from (f"{key} = {_to_toml(value)}" for key, value in when.items())
    args, kwargs = _read_json(row, "args", list), _read_json(row, "kwargs", dict)
    if args:
        yield f"args = {_to_toml(args)}"
    if kwargs:
        yield f"kwargs = {_to_toml(kwargs)}"
    options: dict[str, object] = {}
    if row.get("queue"):
        options["queue"] = str(row["queue"])
    if isinstance(row.get("expire_seconds"), int | float):
        options["expires"] = row["expire_seconds"]
    if options:
        yield f"options = {_to_toml(options)}"


def _make_times(row: Row, by_model: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Return the words of a table that say when. Raises ValueError for what has no counterpart."""
    kinds = ("interval", "crontab", "clocked", "solar")
    kind = next((kind for kind in kinds if row.get(kind) is not None), "")
    if not kind:
        raise ValueError("it has no interval and no crontab")
    when = by_model.get(f"{kind}schedule", {}).get(str(row[kind]))
    if kind == "solar":
        raise ValueError("there are no schedules by the sun: give a crontab, and let the task wait")
    if when is None:
        raise ValueError(f"the row of its {kind} is not in the file")
    if kind == "clocked":
        return {"at": _to_moment(str(when.get("clocked_time")))}
    if row.get("one_off"):
        raise ValueError(f"it is to run once, at the next time of its {kind}: give that time, at = ...")
    bounds = {name: _to_moment(str(row[key])) for name, key in _BOUNDS.items() if row.get(key)}
    if kind == "interval":
        return {"every": _read_interval(when), **bounds}
    fields = {name: str(value) for name, value in when.items()}
    zone = {"timezone": str(when["timezone"])} if when.get("timezone") else {}
    return {"cron": make_line(fields) or make_cron_fields(fields), **zone, **bounds}


_BOUNDS = {"start": "start_time", "end": "expires"}
"""The fields of a row for the words of a table."""


def _read_interval(when: Row) -> float:
    """Return an interval in seconds. Raises ValueError."""
    every, period = when.get("every"), str(when.get("period"))
    if not isinstance(every, int) or period not in _PERIODS:
        raise ValueError("its interval is no number of seconds, minutes, hours or days")
    try:
        seconds = timedelta(**{period: every}).total_seconds()
    except OverflowError:
        raise ValueError("its interval is too long") from None
    return int(seconds) if seconds.is_integer() else seconds


def _to_moment(text: str) -> str:
    """Return a time of Django's with its zone; one without has that of UTC."""
    text = text.replace("Z", "+00:00")
    return text if re.search(r"[+-]\d\d:\d\d$", text) else f"{text}+00:00"


def _read_json(row: Row, name: str, kind: type[Any]) -> Any:
    """Return the arguments of a row, which are JSON in a text."""
    text = row.get(name) or ("[]" if kind is list else "{}")
    try:
        value = json.loads(str(text))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ValueError(f"its {name} are no JSON: {str(text)[:80]}")
    return value


def _quote(text: str) -> str:
    """Return a text as TOML has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _to_toml(value: object) -> str:
    """Return a value of JSON as TOML. Raises ValueError for null, which TOML lacks."""
    if isinstance(value, str):
        return _quote(value)
    if value is None:
        raise ValueError("its arguments have a null, which TOML lacks: app.schedule(task.s(...), when)")
    if isinstance(value, list):
        return f"[{', '.join(_to_toml(item) for item in cast('list[object]', value))}]"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return f"{{{', '.join(f'{_quote(key)} = {_to_toml(item)}' for key, item in items)}}}"
    return json.dumps(value)
