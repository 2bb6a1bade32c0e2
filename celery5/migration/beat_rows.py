"""Write the rows of django-celery-beat, as `manage.py dumpdata django_celery_beat` prints them, as schedules."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from celery5.errors import Misconfigured
from celery5.migration.schedules import make_line

MAX_FILE = 64 * 1024 * 1024
"""The largest file of rows that is read, in bytes."""
_PERIODS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1, "microseconds": 1e-6}
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
        except ValueError as error:
            left.append(f"{name}: {error}")
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
    yield from _make_times(row, by_model)
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


def _make_times(row: Row, by_model: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    kinds = ("interval", "crontab", "clocked", "solar")
    kind = next((kind for kind in kinds if row.get(kind) is not None), "")
    if not kind:
        raise ValueError("it has no interval and no crontab")
    when = by_model.get(f"{kind}schedule", {}).get(str(row[kind]))
    if kind == "solar":
        raise ValueError("there are no schedules by the sun: give a crontab, and let the task wait")
    if when is None:
        raise ValueError(f"the row of its {kind} is not in the file")
    if kind == "interval":
        every, period = when.get("every"), _PERIODS.get(str(when.get("period")))
        if not isinstance(every, int) or period is None:
            raise ValueError("its interval is no number of seconds, minutes, hours or days")
        yield f"every = {every * period:g}" if every * period < 1e6 else f"every = {int(every * period)}"
        if row.get("start_time"):
            yield f"start = {_quote(_to_moment(str(row['start_time'])))}"
    elif kind == "clocked":
        yield f"at = {_quote(_to_moment(str(when.get('clocked_time'))))}"
    else:
        line = make_line({name: str(value) for name, value in when.items()})
        if not line:
            raise ValueError(
                "Celery wants both of its days to match, a crontab either of them: give two schedules"
            )
        yield f"cron = {_quote(line)}"
        if when.get("timezone"):
            yield f"timezone = {_quote(str(when['timezone']))}"


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
