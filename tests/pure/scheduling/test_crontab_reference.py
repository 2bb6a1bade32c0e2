"""Crontab lines against a reference of their own: minute by minute, by the standard's numbers, in zones with DST."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5 import App
from celery5.errors import Misconfigured
from celery5.limits import TimeWindow
from celery5.protocol.scheduling.triggers import AnyTrigger, parse_crontab, with_zone
from celery5.scheduling import Periodic, calendar, cron
from celery5.scheduling.fire_times import get_next_fire_time
from tests.night import examples

MINUTE = timedelta(minutes=1)
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # half an hour
    "America/Sao_Paulo",  # at midnight, until 2019
    "Africa/Casablanca",
    "Asia/Kolkata",
    "Atlantic/Azores",
]


def read_number(text: str, names: tuple[str, ...], low: int) -> int:
    return names.index(text.lower()) + low if text.lower() in names else int(text)


def read_field(text: str, low: int, high: int, names: tuple[str, ...] = ()) -> set[int]:
    """Return the numbers of a field of a crontab, as the manual page says."""
    found: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, dash, last = span.partition("-")
        if span == "*":
            begin, end = low, high
        else:
            begin = read_number(first, names, low)
            end = read_number(last, names, low) if dash else high if step else begin
        if end < begin:  # a range of names that goes on at the beginning
            found |= {*range(begin, high + 1), *range(low, end + 1)}
        else:
            found |= set(range(begin, end + 1, int(step or 1)))
    return found


class Reference:
    """The wall-clock times of a line."""

    def __init__(self, line: str) -> None:
        minute, hour, day, month, weekday = line.split()
        self.minutes, self.hours = read_field(minute, 0, 59), read_field(hour, 0, 23)
        self.days, self.months = read_field(day, 1, 31), read_field(month, 1, 12, MONTHS)
        self.weekdays = {number % 7 for number in read_field(weekday, 0, 6, DAYS)}
        self.needs_both = day.startswith("*") or weekday.startswith("*")
        self.is_hourly = len(self.hours) == 24

    def matches(self, wall: datetime) -> bool:
        is_day, is_weekday = wall.day in self.days, wall.isoweekday() % 7 in self.weekdays
        return (
            wall.minute in self.minutes
            and wall.hour in self.hours
            and wall.month in self.months
            and ((is_day and is_weekday) if self.needs_both else (is_day or is_weekday))
        )

    def list_fire_times(self, zone: ZoneInfo, begin: datetime, minutes: int) -> list[datetime]:
        """Return the moments of the minutes that follow `begin`."""
        fires: list[datetime] = []
        moment, offset = begin - 120 * MINUTE, (begin - 120 * MINUTE).astimezone(zone).utcoffset()
        assert offset is not None
        skipped_until, old = begin - 120 * MINUTE, offset
        for _ in range(minutes + 120):
            local = moment.astimezone(zone)
            new = local.utcoffset()
            assert new is not None
            if new > offset:  # what the clock skips fires by the old offset
                skipped_until, old = moment + (new - offset), offset
            offset = new
            is_missed = moment < skipped_until and self.matches((moment + old).replace(tzinfo=None))
            is_due = self.matches(local.replace(tzinfo=None)) and (local.fold == 0 or self.is_hourly)
            if (is_due or is_missed) and moment > begin:
                fires.append(moment)
            moment += MINUTE
        return fires


def lists_of(numbers: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(numbers, min_size=1, max_size=3).map(",".join)


def numbers_of(low: int, high: int) -> st.SearchStrategy[str]:
    """Fields of numbers: single ones, ranges, steps, and all."""
    spans = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return lists_of(
        st.one_of(
            st.integers(low, high).map(str),
            spans.map(lambda span: f"{span[0]}-{span[1]}"),
            st.integers(1, (high - low) // 2).map(lambda step: f"*/{step}"),
        )
    ) | st.just("*")


names = st.sampled_from(DAYS)
weekdays = (
    numbers_of(0, 6)
    | st.sampled_from(
        ["7", "0-7", "5-7", "1-5", "7,1", "0", "mon-fri", "sun-thu", "SUN-sat", "fri-mon", "*/3"]
    )
    | lists_of(names | st.tuples(names, names).map("-".join))
)
months = numbers_of(1, 12) | st.sampled_from(["jan", "mar-oct", "nov-feb", "Oct,mar"])
minutes = st.sampled_from(["*", "0", "*/10", "30", "0,30", "15-45/15"]) | numbers_of(0, 59)
ALL_HOURS = ["*", "*/1", "0-23", "0-11,12-23", "*/1,3", "0-23/1"]
hours = st.sampled_from([*ALL_HOURS, "1-3", "2", "0", "*/2"]) | numbers_of(0, 23)
lines = st.tuples(
    minutes, hours, st.just("*") | numbers_of(1, 31), st.just("*") | months, st.just("*") | weekdays
).map(" ".join)
moments = st.datetimes(datetime(2008, 1, 1), datetime(2036, 1, 1)).map(
    lambda at: at.replace(second=0, microsecond=0, tzinfo=UTC)
)


def find_changes(zone: str) -> list[datetime]:
    """Return the hours of a few years in which the clock of a zone is set."""
    hour, moment, found = timedelta(hours=1), datetime(2016, 1, 1, tzinfo=UTC), list[datetime]()
    info = ZoneInfo(zone)
    while moment.year < 2018:
        if moment.astimezone(info).utcoffset() != (moment + hour).astimezone(info).utcoffset():
            found.append(moment)
        moment += hour
    return found


CHANGES = {zone: find_changes(zone) for zone in ZONES}


def check(line: str, zone: str, begin: datetime) -> None:
    trigger = with_zone(parse_crontab(line), zone)
    wanted = Reference(line).list_fire_times(ZoneInfo(zone), begin, 1800)[:50]
    now, found = round(begin.timestamp() * 1000), list[datetime]()
    for _ in wanted:
        now = get_next_fire_time(trigger, now) or 0
        found.append(datetime.fromtimestamp(now / 1000, UTC))
    assert found == wanted, (line, zone)
    if len(wanted) < 50:
        after = get_next_fire_time(trigger, now if wanted else round(begin.timestamp() * 1000))
        assert after is None or after >= round((begin + 1800 * MINUTE).timestamp() * 1000)


@given(lines, st.sampled_from(ZONES), moments)
@settings(max_examples=examples(120), deadline=None)
def test_a_line_fires_when_the_reference_says_at_any_time(line: str, zone: str, begin: datetime) -> None:
    check(line, zone, begin)


@given(lines, st.sampled_from([zone for zone in ZONES if CHANGES[zone]]), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_a_line_fires_when_the_reference_says_near_a_change_of_the_clock(
    line: str, zone: str, data: st.DataObject
) -> None:
    change = data.draw(st.sampled_from(CHANGES[zone]))
    check(line, zone, change - data.draw(st.integers(0, 600)) * MINUTE)


@pytest.mark.parametrize("hour", ["*", "*/1", "0-23", "0-23/1", "0-11,12-23", "*/1,5"])
def test_hourly_triggers_fire_in_both_copies_of_a_repeated_hour(hour: str) -> None:
    begin = datetime(2026, 10, 25, 0, 50, tzinfo=UTC)  # 02:50 in Berlin, for the first time
    check(f"*/10 {hour} * * *", "Europe/Berlin", begin)
    trigger = cron(hour=hour, minute="*/10", timezone="Europe/Berlin")
    found = get_next_fire_time(trigger, round(begin.timestamp() * 1000))
    assert found == round((begin + 10 * MINUTE).timestamp() * 1000)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1, "'mon'"),
        ("0", "'sun'"),
        (7, "'sun'"),
        ("1-5", "'mon,tue,wed,thu,fri'"),
        ("mon,3", "'mon,wed'"),
        ("*/2", "'sun,tue,thu,sat'"),
        (9, "'mon-fri'"),
    ],
)
def test_a_number_of_a_weekday_by_keyword_is_refused_with_the_name_to_write(
    value: str | int, name: str
) -> None:
    table = {"cron": {"day_of_week": value}}
    for make in (lambda: cron(day_of_week=value), lambda: App("x").task(schedule=table)(one)):
        with pytest.raises(Misconfigured, match="give days by name") as caught:
            make()
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def one() -> None: ...


@pytest.mark.parametrize("value", ["mon", "sun", "mon-fri", "sun-thu", "fri-mon", "sat,sun", "Wed", "*"])
def test_a_name_of_a_weekday_by_keyword_means_what_it_means_in_a_line(value: str) -> None:
    for day in range(1, 15):
        after = round(datetime(2026, 6, day, 8, tzinfo=UTC).timestamp() * 1000)
        line = with_zone(parse_crontab(f"0 8 * * {value}"), "UTC")
        keyword = cron(day_of_week=value, hour=8, timezone="UTC")
        assert get_next_fire_time(line, after) == get_next_fire_time(keyword, after)


BAD = "Europe/Berln"
AT_NIGHT = TimeWindow("22:00", "06:00", timezone=BAD)
UNKNOWN_ZONES: list[tuple[str, Callable[[App], object]]] = [
    ("application", lambda _app: App("x", timezone=BAD)),
    ("cron by field", lambda _app: cron(hour=1, timezone=BAD)),
    ("cron by line", lambda _app: cron("0 8 * * *", timezone=BAD)),
    ("calendar", lambda _app: calendar(days=1, timezone=BAD)),
    ("table", lambda app: app.task(schedule={"cron": "0 8 * * *", "timezone": BAD})(one)),
    ("periodic", lambda app: app.task(schedule=Periodic({"calendar": {"days": 1, "timezone": BAD}}))(one)),
    ("limit rule", lambda app: app.limits.rule("r", task=app.task(one), limit=1, during=AT_NIGHT)),
]


@pytest.mark.parametrize(("what", "make"), UNKNOWN_ZONES, ids=[what for what, _ in UNKNOWN_ZONES])
def test_a_zone_that_nobody_knows_is_refused_where_it_is_declared(
    what: str, make: Callable[[App], object]
) -> None:
    with pytest.raises(Misconfigured, match="did you mean 'Europe/Berlin'") as caught:
        make(App("zones"))
    assert "\n" not in str(caught.value), what


def test_a_machine_without_zones_leaves_it_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.protocol.scheduling.zones.available_timezones", set)
    made: AnyTrigger = cron(hour=1, timezone="Mars/Phobos")
    with pytest.raises(Misconfigured, match="install tzdata"):
        get_next_fire_time(made, 0)


def test_reboot_is_refused_with_what_to_do() -> None:
    with pytest.raises(Misconfigured, match="@reboot' is no time"):
        cron("@reboot")
