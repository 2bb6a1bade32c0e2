"""Fire times: when triggers fire, above all when the clock is set."""

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5 import App
from celery5.errors import Misconfigured
from celery5.protocol.scheduling.declaration import at, calendar, cron, every, parse_trigger
from celery5.protocol.scheduling.triggers import (
    CRON_FIELDS,
    AnyTrigger,
    Cron,
    describe_trigger,
    validate_cron_fields,
    with_zone,
)
from celery5.scheduling import Periodic
from celery5.scheduling.fire_times import get_next_fire_time, validate_trigger
from tests.night import examples

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
SPRING = {BERLIN: "2026-03-29", NEW_YORK: "2026-03-08"}
"""The days on which 02:00 becomes 03:00."""
AUTUMN = {BERLIN: "2026-10-25", NEW_YORK: "2026-11-01"}
"""The days on which one hour comes twice: from 02:00 in Berlin, from 01:00 in New York."""
TWICE = {BERLIN: 2, NEW_YORK: 1}
ZONES = [BERLIN, NEW_YORK]


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def on(day: str, trigger: AnyTrigger, zone: str, days: int = 1) -> list[str]:
    """The local times, and offsets from UTC, at which a trigger fires on a day."""
    begin = datetime.combine(date.fromisoformat(day), time(), ZoneInfo(zone))
    end = ms(datetime.combine(date.fromisoformat(day) + timedelta(days), time(), ZoneInfo(zone)))
    found, now = [], ms(begin) - 1
    while (after := get_next_fire_time(with_zone(trigger, zone), now)) is not None and after < end:
        assert after > now
        now = after
        found.append(f"{datetime.fromtimestamp(now / 1000, ZoneInfo(zone)):%H:%M%z}"[:8])
    return found


@pytest.mark.parametrize("zone", ZONES)
def test_a_time_of_day_that_does_not_exist_fires_an_hour_later_once(zone: str) -> None:
    assert len(on(SPRING[zone], cron("30 2 * * *"), zone)) == 1
    assert on(SPRING[zone], cron("30 2 * * *"), zone)[0].startswith("03:30")
    assert on(SPRING[zone], cron("30 3 * * *"), zone)[0].startswith("03:30")
    assert [moment[:5] for moment in on(SPRING[zone], cron("0,30 2,3 * * *"), zone)] == ["03:00", "03:30"]
    assert on(SPRING[zone], calendar(days=1, time="02:30"), zone)[0].startswith("03:30")


@pytest.mark.parametrize("zone", ZONES)
def test_a_time_of_day_that_comes_twice_fires_the_first_time_only(zone: str) -> None:
    hour = TWICE[zone]
    first = on(AUTUMN[zone], cron(f"30 {hour} * * *"), zone)
    assert len(first) == 1
    summer = datetime.combine(date.fromisoformat(AUTUMN[zone]), time(hour, 30), ZoneInfo(zone))
    assert first[0][5:] == f"{summer:%z}"[:3]
    assert len(on(AUTUMN[zone], cron(f"*/10 {hour} * * *"), zone)) == 6
    assert len(on(AUTUMN[zone], calendar(days=1, time=f"0{hour}:30"), zone)) == 1


@pytest.mark.parametrize("zone", ZONES)
def test_who_names_no_hours_fires_at_even_intervals_all_day(zone: str) -> None:
    assert len(on(SPRING[zone], cron("*/10 * * * *"), zone)) == 23 * 6
    assert len(on(AUTUMN[zone], cron("*/10 * * * *"), zone)) == 25 * 6
    assert len(on(AUTUMN[zone], cron("@hourly"), zone)) == 25
    assert len(on(AUTUMN[zone], cron(minute="*/30"), zone)) == 50
    assert len(on(SPRING[zone], every(minutes=10), zone)) == 23 * 6
    assert len(on(AUTUMN[zone], every(minutes=10), zone)) == 25 * 6


@pytest.mark.parametrize("zone", [*ZONES, "Australia/Lord_Howe", "Pacific/Apia", "Africa/Casablanca", "UTC"])
@pytest.mark.parametrize(
    "line", ["30 2 * * *", "*/15 * * * *", "0 */4 * * *", "15 1-3 * * *", "0 12 * * mon"]
)
def test_fire_times_only_go_forward_and_are_the_same_wherever_one_starts(zone: str, line: str) -> None:
    trigger = with_zone(cron(line), zone)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    times, now = list[int](), ms(start)
    while now < ms(start + timedelta(days=365)) and len(times) < 3000:
        after = get_next_fire_time(trigger, now)
        assert after is not None
        assert after > now
        times.append(after)
        now = after
    for fire_time, other in list(pairwise(times))[::7]:
        assert get_next_fire_time(trigger, fire_time + (other - fire_time) // 3) == other
        assert get_next_fire_time(trigger, other - 1) == other


@given(st.integers(0, 4_000_000_000_000), st.integers(1, 10**9), st.integers(-(10**12), 10**12))
def test_an_interval_is_exact_however_long_it_goes_on(after: int, step: int, start: int) -> None:
    trigger = every(
        timedelta(milliseconds=step), start=datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=start)
    )
    found = get_next_fire_time(trigger, after)
    assert found is not None
    assert found > after
    assert (found - start) % step == 0
    assert found - step <= after or found == start


def test_triggers_are_joined() -> None:
    either = cron("0 9 * * *") | cron("0 17 * * mon-fri") | cron("0 9 * * sun")
    assert len(on("2026-06-05", either, BERLIN)) == 2  # a Friday
    assert len(on("2026-06-07", either, BERLIN)) == 1  # a Sunday: nine o'clock is one moment
    both = every(minutes=15) & cron("*/10 * * * *")
    assert [moment[3:5] for moment in on("2026-06-05", both, "UTC")][:3] == ["00", "30", "00"]
    never = cron("0 9 * * *") & cron("0 10 * * *")
    assert get_next_fire_time(never, 0) is None


def test_once_is_once_and_bounds_hold() -> None:
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    assert get_next_fire_time(at(moment), ms(moment) - 1) == ms(moment)
    assert get_next_fire_time(at(moment), ms(moment)) is None
    bounded = cron("0 * * * *", timezone="UTC", start=moment, end=moment + timedelta(hours=2))
    assert on("2026-05-01", bounded, "UTC") == ["00:00+00", "01:00+00", "02:00+00"]
    assert on("2026-04-30", bounded, "UTC") == []
    assert on("2026-05-01", every(hours=1, end=moment + timedelta(hours=1)), "UTC") == [
        "00:00+00",
        "01:00+00",
    ]


@given(
    after=st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)),
    weeks=st.integers(0, 3),
    days=st.integers(1, 9),
    zone=st.sampled_from(["UTC", BERLIN]),
)
def test_a_calendar_of_days_counts_from_its_first_day_however_long_ago(
    after: datetime, weeks: int, days: int, zone: str
) -> None:
    span, first = 7 * weeks + days, date(1000, 1, 1)
    found = get_next_fire_time(
        calendar(weeks=weeks, days=days, first=first, time="12:00", timezone=zone), ms(after)
    )
    assert found is not None
    local = datetime.fromtimestamp(found / 1000, ZoneInfo(zone))
    assert (local.hour, (local.date() - first).days % span) == (12, 0)
    assert timedelta() < local - after <= timedelta(days=span, hours=1)


def test_a_calendar_leaves_out_what_a_month_does_not_have() -> None:
    trigger, now, found = with_zone(calendar(months=1, first="2026-01-31", time="06:00"), "UTC"), 0, []
    for _ in range(4):
        now = get_next_fire_time(trigger, now) or 0
        found.append(f"{datetime.fromtimestamp(now / 1000, UTC):%m-%d}")
    assert found == ["01-31", "03-31", "05-31", "07-31"]
    assert on("2026-06-01", calendar(weeks=1), "UTC") == ["00:00+00"]  # a Monday
    assert on("2026-06-02", calendar(weeks=1), "UTC") == []


@pytest.mark.parametrize(
    ("line", "day", "fires"),
    [
        ("0 0 * * 0", "2026-06-07", True),  # Sunday is 0, and 7
        ("0 0 * * 7", "2026-06-07", True),
        ("0 0 * * 1-5", "2026-06-07", False),
        ("0 0 * * 1-5", "2026-06-08", True),
        ("0 0 * * mon,wed", "2026-06-10", True),
        ("0 0 13 * 5", "2026-06-13", True),  # a Saturday: either day will do, as in cron
        ("0 0 13 * 5", "2026-06-12", True),  # a Friday
        ("0 0 13 * 5", "2026-06-14", False),
        ("0 0 * * sun-thu", "2026-06-07", True),
        ("0 0 * * sun-thu", "2026-06-11", True),
        ("0 0 * * sun-thu", "2026-06-12", False),
        ("0 0 * * sun-sat", "2026-06-12", True),
        ("0 0 * * FRI-mon", "2026-06-07", True),
        ("0 0 * * fri-mon", "2026-06-09", False),
        ("0 0 * * */2", "2026-06-07", True),  # counted from Sunday
        ("0 0 * * */2", "2026-06-08", False),
        ("0 0 1 nov-feb *", "2026-01-01", True),
        ("0 0 1 nov-feb *", "2026-06-01", False),
        ("@weekly", "2026-06-07", True),
        ("@midnight", "2026-06-08", True),
        ("@annually", "2026-01-01", True),
        ("@Yearly", "2026-01-02", False),
    ],
)
def test_a_line_means_what_it_means_in_a_crontab(line: str, day: str, fires: bool) -> None:
    assert bool(on(day, cron(line), "UTC")) is fires


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("every day", "is no line of a crontab"),
        ("61 * * * *", "61"),
        ("0 0 * * 8", "no day of the week"),
        ("0 0 * * * Mars/Olympus", "cron"),
        ({"every": "often"}, "give a number"),
        ({"sometimes": True}, "does not say when"),
        (datetime(2026, 1, 1), "no time zone"),
        (True, "does not say when"),
        (0, "thousandth"),
        ({"calendar": {"days": -1}}, "days is -1"),
        ({"calendar": {}}, "1 at least"),
        ({"calendar": {"days": 1, "time": "noon"}}, "no time of day"),
        ({"cron": {"fortnight": 1}}, "no field"),
    ],
)
def test_what_does_not_say_when_is_refused_in_a_line(when: object, said: str) -> None:
    with pytest.raises(Misconfigured, match=said) as error:
        validate_trigger(parse_trigger(when))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300, 1e11])
def test_an_interval_that_is_no_span_of_time_is_refused(seconds: float) -> None:
    with pytest.raises(Misconfigured, match="an interval is a number of seconds"):
        every(seconds)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cron("0 3 * * *") | cast("Any", 3), r"\| joins triggers, and 3 is none"),
        (lambda: every(1) & cast("Any", "0 3 * * *"), "& joins triggers, and '0 3"),
        (lambda: calendar(months=0), "every how many years, months, weeks or days"),
        (lambda: calendar(days=-1), "days is -1: give a whole number"),
        (lambda: calendar(weeks=cast("Any", "x")), "weeks is 'x': give a whole number"),
        (lambda: cron(hour=cast("Any", None)), "hour is None: give a text or a whole number"),
        (lambda: cron(cast("Any", 5)), "5 is no line of a crontab"),
        (lambda: every(minutes=cast("Any", "x")), "minutes is 'x': give a number"),
        (lambda: at(datetime.fromisoformat("9999-12-31T23:59:59-05:00")), "after the year 9999"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(make: Callable[[], object], said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        make()


@pytest.mark.parametrize(
    ("trigger", "said"),
    [
        (
            cron("61  8 * * 1"),
            "cron '61 8 * * 1': the minute '61' is wrong: "
            "the last value (61) is higher than the maximum value (59)",
        ),
        (cron("0 0 1 foo *"), "cron '0 0 1 foo *': the month 'foo' is wrong: "),
        (cron("0 0 x 1 1"), "cron '0 0 x 1 1': the day 'x' is wrong: "),
        (cron("0 0 * * foo"), "cron '0 0 * * foo': the weekday 'foo' is wrong: "),
        (cron(hour=25, minute=1), "cron hour=25, minute=1: the hour '25' is wrong: "),
    ],
)
def test_a_field_of_cron_that_is_wrong_is_named_as_it_was_written(trigger: AnyTrigger, said: str) -> None:
    with pytest.raises(Misconfigured) as error:
        validate_trigger(trigger)
    assert str(error.value).startswith(said)


def test_what_begins_at_the_end_of_time_never_fires() -> None:
    assert get_next_fire_time(cron("* * * * *", start=datetime(9999, 12, 31, 23, 59, tzinfo=UTC)), 0) is None


def test_a_zone_that_nobody_knows_is_told() -> None:
    with pytest.raises(Misconfigured, match="Mars/Olympus"):
        validate_trigger(cron("0 0 * * *", timezone="Mars/Olympus"))


def test_a_configuration_says_the_same_in_tables() -> None:
    assert parse_trigger({"cron": "0 3 * * *", "timezone": BERLIN}) == cron("0 3 * * *", timezone=BERLIN)
    assert parse_trigger({"every": 30}) == every(30)
    assert parse_trigger({"every": {"minutes": 5}}) == every(minutes=5)
    assert parse_trigger({"any": ["0 3 * * *", {"every": 60}]}) == cron("0 3 * * *") | every(60)
    assert parse_trigger({"at": "2026-01-01T00:00:00+00:00"}) == at(datetime(2026, 1, 1, tzinfo=UTC))
    assert describe_trigger(with_zone(cron("0 3 * * *"), BERLIN)) == "cron 0 3 * * * Europe/Berlin"
    assert describe_trigger(cron("@daily")) == "cron @daily"
    assert describe_trigger(cron("0 3 13 * fri")) == "cron 0 3 13 * fri"
    assert describe_trigger(with_zone(cron(hour=3), BERLIN)) == "cron hour=3 Europe/Berlin"


def test_apscheduler_is_loaded_when_a_fire_time_is_asked_for_and_not_before() -> None:
    code = (
        "import sys\n"
        "from celery5 import App\n"
        "import celery5.processes.worker\n"
        "app = App('shop')\n"
        "@app.task(schedule='0 3 * * *')\n"
        "async def nightly() -> None: ...\n"
        "assert app.schedule.list_declared()\n"
        "print('apscheduler' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "False\n"


def test_what_was_found_is_not_looked_for_again_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    never, daily = cron(week=53, month=6, second=17), cron(hour=3, second=17)  # nobody else's
    assert get_next_fire_time(never, 0) is None
    first = get_next_fire_time(daily, 0)
    assert first == 3 * 3_600_000 + 17_000
    monkeypatch.setattr("celery5.scheduling.fire_times._compute_next", lambda _trigger, after: -after)
    assert get_next_fire_time(never, 10**12) is None
    assert get_next_fire_time(daily, first - 1) == first
    assert get_next_fire_time(daily, first) == -first
    assert get_next_fire_time(daily, 0) == 0  # the clock was put back


BAD_LINES = [
    *("61 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *", "* * * 13 * ", "* * * * 8", "60 * * * * *"),
    *(
        "*/0 * * * *",
        "*/60 * * * *",
        "5-1 * * * *",
        "5-7/9 * * * *",
        "a * * * *",
        "* * * foo *",
        "* * * * foo",
    ),
    *(
        "* * * * mon-fri/2",
        "* * * jan5 *",
        "* * lastfoo * *",
        "* * 6th+mon * *",
        ", * * * *",
    ),
    *("1, * * * *", "? * * * *", "-1 * * * *", "* * * 0 *"),
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_line_of_a_crontab_that_makes_no_sense_is_refused_where_it_is_declared(line: str) -> None:
    app = App("declaring")

    @app.task
    def t() -> None: ...

    for declare in (
        lambda: app.task(schedule=line)(t.function),
        lambda: app.schedule(t.s(), line),
        lambda: app.task(schedule=Periodic(every(60) | parse_trigger(line)))(t.function),
    ):
        with pytest.raises(Misconfigured) as caught:
            declare()
        assert "\n" not in str(caught.value)


def test_a_refused_schedule_names_the_task_the_field_and_its_bounds() -> None:
    with pytest.raises(Misconfigured) as caught:

        @App("declaring").task(name="shop.report", schedule="61 * * * *")
        def report() -> None: ...

    assert str(caught.value) == ("task shop.report: schedule: '61 * * * *': minute '61': give 0 to 59")


PARTS = st.one_of(
    st.builds("{}".format, st.integers(0, 70)),
    st.builds("{}-{}".format, st.integers(0, 70), st.integers(0, 70)),
    st.builds("{}-{}/{}".format, st.integers(0, 70), st.integers(0, 70), st.integers(0, 70)),
    st.builds("{}/{}".format, st.one_of(st.just("*"), st.integers(0, 70)), st.integers(0, 70)),
    st.sampled_from(
        ["*", "last", "1st mon", "last fri", "5th Sun", "jan", "feb-APR", "dec-jan", "Mon", "sat-sun"]
    ),
    st.text("0123456789*/-, abjlstmon?", max_size=6),
)


@settings(max_examples=examples(300))
@given(st.sampled_from(CRON_FIELDS), st.lists(PARTS, min_size=1, max_size=3).map(",".join))
def test_cron_field_is_refused_when_no_scheduler_could_use_it(field: str, value: str) -> None:
    from apscheduler.triggers.cron import CronTrigger

    def is_used(by: Callable[[], object]) -> bool:
        try:
            by()
        except (ValueError, Misconfigured):
            return False
        return True

    said: dict[str, Any] = {field: value}
    trigger = Cron(**said)
    ours = is_used(lambda: validate_cron_fields(trigger))
    theirs = is_used(lambda: CronTrigger(**said, timezone=UTC))
    assert ours <= theirs
    if theirs and not ours:  # APScheduler overlooks what follows a name
        assert re.search(r"[a-z]", value.lower())
