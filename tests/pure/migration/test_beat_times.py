"""Beat times: what is printed for a crontab of django-celery-beat fires when Celery's own crontab would."""

import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from celery5.migration.rows.beat import export_beat_rows
from celery5.protocol.scheduling.declaration import parse_trigger
from celery5.protocol.scheduling.triggers import with_zone
from celery5.scheduling.fire_times import get_next_fire_time
from tests.night import examples

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")
schedules: Any = pytest.importorskip("celery.schedules")
ZONES = ("UTC", "Asia/Kolkata", "America/Phoenix")
"""Zones that set no clock: Celery and celery5 differ there, and celery5 has tests of its own."""
OLD = {zone: celery.Celery("old", set_as_current=False, timezone=zone) for zone in ZONES}


def parts_of(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    """Return parts of a field that Celery reads: numbers, names, ranges that may go on at the beginning, steps."""
    numbers = st.integers(low, high).map(str)
    words = numbers | st.sampled_from(names) if names else numbers
    spans = st.tuples(words, words).map("-".join)
    steps = st.integers(1, high + 5).map(str)
    return st.one_of(
        words,
        spans,
        st.just("*"),
        st.tuples(st.just("*"), steps).map("/".join),
        st.tuples(spans, steps).map("/".join),
    )


def fields_of(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    """Return fields: some parts, and often all."""
    return st.just("*") | st.lists(parts_of(low, high, names), min_size=1, max_size=3).map(",".join)


DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "Monday", "friday")
MONTHS = ("jan", "feb", "mar", "apr", "june", "December")
crontabs = st.fixed_dictionaries(
    {
        "minute": fields_of(0, 59),
        "hour": fields_of(0, 23),
        "day_of_month": fields_of(1, 31),
        "month_of_year": fields_of(1, 12, MONTHS),
        "day_of_week": fields_of(0, 6, DAYS),
    }
)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1)).map(lambda at: at.replace(tzinfo=UTC))


def list_times_of_celery(fields: dict[str, str], zone: str, begin: datetime) -> list[datetime]:
    """Return the next times at which Celery's beat sends a job."""
    crontab: Any = schedules.crontab(**fields, app=OLD[zone], nowfun=lambda: begin)
    times: list[datetime] = []
    last = begin
    for _ in range(8):
        try:
            local, delta, _ = crontab.remaining_delta(last, tz=ZoneInfo(zone))
        except RuntimeError:  # a date that is in no year
            assume(False)
        last = (local + delta).astimezone(UTC)
        if last - begin > timedelta(days=3000):
            break
        times.append(last)
    return times


@given(crontabs, st.sampled_from(ZONES), moments)
@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_crontabs_fire_when_celery_would_send(
    tmp_path: Path, fields: dict[str, str], zone: str, begin: datetime
) -> None:
    file = tmp_path / "beat.json"
    crontab = {"model": "django_celery_beat.crontabschedule", "pk": 1, "fields": {**fields, "timezone": zone}}
    task = {
        "model": "django_celery_beat.periodictask",
        "pk": 1,
        "fields": {"name": "t", "task": "t", "crontab": 1},
    }
    file.write_text(json.dumps([crontab, task]))
    wanted = list_times_of_celery(fields, zone, begin)
    text, left = export_beat_rows(file)
    assert left == []
    table = tomllib.loads(text)["schedules"]["t"]
    del table["task"]
    trigger = with_zone(parse_trigger(table), "UTC")
    now, found = round(begin.timestamp() * 1000), list[datetime]()
    for _ in wanted:
        now = get_next_fire_time(trigger, now) or 0
        found.append(datetime.fromtimestamp(now / 1000, UTC))
    assert found == wanted
