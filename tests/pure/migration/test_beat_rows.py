"""Beat rows: the rows of django-celery-beat become schedules that an application takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.errors import Misconfigured
from celery5.migration.rows.beat import export_beat_rows
from celery5.migration.values.crontabs import make_line

INTERVAL = {
    "model": "django_celery_beat.intervalschedule",
    "pk": 1,
    "fields": {"every": 10, "period": "minutes"},
}
CRONTAB: dict[str, Any] = {
    "model": "django_celery_beat.crontabschedule",
    "pk": 1,
    "fields": {
        "minute": "*/5",
        "hour": "8, 9",
        "day_of_month": "*",
        "day_of_week": "mon-fri",
        "month_of_year": "*",
        "timezone": "Europe/Berlin",
    },
}
BOTH = {**CRONTAB, "pk": 2, "fields": {**CRONTAB["fields"], "day_of_month": "1"}}
BAD_HOUR = {**CRONTAB, "pk": 3, "fields": {**CRONTAB["fields"], "hour": "25"}}
NO_STEP = {**CRONTAB, "pk": 5, "fields": {**CRONTAB["fields"], "hour": "*/0"}}
BAD_ZONE = {**CRONTAB, "pk": 4, "fields": {**CRONTAB["fields"], "timezone": "Europe/Berln"}}
TINY = {**INTERVAL, "pk": 2, "fields": {"every": 10, "period": "microseconds"}}
LONG = {**INTERVAL, "pk": 3, "fields": {"every": 1_234_567_891, "period": "microseconds"}}
CLOCKED = {
    "model": "django_celery_beat.clockedschedule",
    "pk": 1,
    "fields": {"clocked_time": "2030-01-01T00:00:00Z"},
}

SCHEDULES = [INTERVAL, TINY, LONG, CRONTAB, BOTH, BAD_HOUR, BAD_ZONE, NO_STEP, CLOCKED]


def row(name: str, **fields: Any) -> dict[str, Any]:
    """Return a row of PeriodicTask, as dumpdata prints it."""
    empty = {"args": "[]", "kwargs": "{}", "queue": None, "enabled": True, "interval": None, "crontab": None}
    return {
        "model": "django_celery_beat.periodictask",
        "pk": name,
        "fields": {"name": name, "task": "shop.add", **empty, **fields},
    }


def export(folder: Path, *rows: object) -> tuple[str, list[str]]:
    file = folder / "beat.json"
    file.write_text(json.dumps([*SCHEDULES, *rows]))
    return export_beat_rows(file)


def test_rows_become_schedules_that_an_application_takes(tmp_path: Path) -> None:
    text, left = export(
        tmp_path,
        row("often", interval=1, args='[1, "ä\\""]', kwargs='{"y": {"z": [true, 1.5]}}', expire_seconds=30),
        row("Büro: früh", crontab=1, args="[1]", queue="slow"),
        row("once", clocked=1, args="[1]", one_off=True),
    )
    assert left == []
    (tmp_path / "shop.toml").write_text(text)
    app = App("shop", broker="redis://127.0.0.1:1", config=str(tmp_path / "shop.toml"))

    @app.task(name="shop.add")
    def add(x: int, z: str = "", y: Any = None) -> None: ...

    declared = app.schedule.list_declared()
    app.schedule.check_configured(app.settings)
    assert set(declared) == {"often", "Büro: früh", "once"}
    assert declared["Büro: früh"].call.task.send_options.queue == "slow"
    assert 'cron = "*/5 8,9 * * mon-fri"\ntimezone = "Europe/Berlin"' in text
    assert "every = 600\n" in text
    assert 'at = "2030-01-01T00:00:00+00:00"' in text


@pytest.mark.parametrize("days", ["0-6", "sun-sat", "*/1", "4-3", "0,1-6"])
def test_a_field_with_all_days_leaves_the_other_one_to_decide(days: str) -> None:
    assert make_line({"day_of_week": days, "day_of_month": "1"}) == "* * 1 * *"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"interval": 1, "enabled": False}, "it is not enabled"),
        ({"interval": 1, "args": "[null]"}, "null, which TOML lacks"),
        ({"interval": 1, "args": "{"}, "its args are no JSON"),
        ({"interval": 7}, "the row of its interval is not in the file"),
        ({"interval": 2}, "an interval is at least a thousandth of a second"),
        ({"interval": 1, "one_off": True}, "it is to run once, at the next time of its interval"),
        ({"crontab": 3}, "Celery reads no hour '25'"),
        ({"crontab": 5}, "its hour '*/0' has a step of 0"),
        ({"crontab": 4}, "did you mean 'Europe/Berlin'"),
        ({"solar": 1}, "there are no schedules by the sun"),
        ({}, "it has no interval and no crontab"),
        ({"interval": 1, "task": ""}, "it has no task"),
    ],
)
def test_row_without_a_counterpart_is_left_out_and_named(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    text, left = export(tmp_path, row("one", **fields), row("other", interval=1))
    assert [line for line in left if line.startswith("one: ") and why in line]
    assert "[schedules.other]" in text
    assert "[schedules.one]" not in text


def test_bounds_of_a_row_bound_its_schedule_and_what_is_not_taken_is_named(tmp_path: Path) -> None:
    text, left = export(
        tmp_path,
        row("b", crontab=2, start_time="2030-01-01T00:00:00Z", expires="2031-01-01T00:00:00.5+01:00"),
        row("i", interval=3, priority=5, headers='{"a": 1}', routing_key="r", exchange=None),
    )
    assert (
        'cron = {"minute" = "*/5", "hour" = "8,9", "day" = "1", "day_of_week" = "mon,tue,wed,thu,fri"}'
        in text
    )
    assert 'start = "2030-01-01T00:00:00+00:00"\nend = "2031-01-01T00:00:00.5+01:00"' in text
    assert "every = 1234.567891\n" in text
    assert left == ["i: its priority: 5", 'i: its headers: {"a": 1}', "i: its routing_key: r"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[]", '[{"model": 3}]', "[" * 100_000])
def test_file_that_is_no_fixture_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "beat.json"
    file.write_text(content)
    with pytest.raises(Misconfigured) as caught:
        export_beat_rows(file)
    assert "\n" not in str(caught.value)
