"""Declare periodic tasks: `Periodic`, and when they run: `cron`, `every`, `calendar` and `at`, combined by `|` and `&`.

A declaration is checked and stored. Its triggers are those of APScheduler 3.11, which only a Scheduler loads to compute
the fire times: no worker or producer does.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.job import is_span, to_seconds
from celery5.protocol.scheduling.periodic import Misfire, MisfirePolicy, OverlapPolicy
from celery5.protocol.scheduling.triggers import (
    CRON_FIELDS,
    AllOf,
    AnyOf,
    AnyTrigger,
    Calendar,
    Cron,
    Interval,
    OnceTrigger,
    Trigger,
    parse_crontab,
    refuse_weekday_numbers,
    unwrap_names,
    validate_cron_fields,
)
from celery5.protocol.scheduling.zones import check_zone

MAX_INTERVAL = timedelta(days=36_525)
"""The longest interval: a hundred years. What is longer is a mistake, or will not be fired by this version."""
MAX_JITTER = 86_400.0
_LAST = 253_402_300_799_999
"""The last ms of the year 9999, after which no calendar goes on."""
_TOO_LONG = "an interval is a number of seconds, or a timedelta, of 100 years at most"

When = str | float | timedelta | datetime | AnyTrigger | Mapping[str, Any]
"""A line of a crontab, seconds, an interval, a moment, or what the functions of this module return."""


class Periodic(msgspec.Struct, frozen=True):
    """A task that runs by the clock: the value of `@app.task(schedule=...)` when a time alone is not enough."""

    # A line of a crontab, seconds, a timedelta, a datetime, or what `cron`, `every`, `calendar` and `at` return.
    when: Any
    # The name of the schedule; '' for that of the task.
    name: str = ""
    # The arguments of the task.
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    # What becomes of fire times that were not published in time.
    misfire: Misfire | MisfirePolicy = "once"
    # What happens while the previous job has not ended: `allow`, `skip`, or `queue`, where at most one waits.
    overlap: OverlapPolicy = "allow"
    # Each fire is delayed by a random time of up to this many seconds.
    jitter: float | timedelta = 0.0


def parse_schedule(schedule: object, task: str) -> tuple[Periodic, ...]:
    """Return the schedules of the option `schedule=` of a task: one, or a list of them. Raises Misconfigured."""
    if schedule is None:
        return ()
    values = cast("list[object]", schedule) if isinstance(schedule, list | tuple) else [schedule]
    schedules = tuple(
        [value if isinstance(value, Periodic) else Periodic(cast("Any", value)) for value in values]
    )
    names = [periodic.name for periodic in schedules]
    if len(set(names)) < len(names):
        raise Misconfigured(f"task {task} has several schedules: give each a name, Periodic(..., name=...)")
    for periodic in schedules:
        try:
            resolve_parts(periodic)
        except Misconfigured as error:
            raise Misconfigured(f"task {task}: schedule: {error}") from None
    return schedules


def resolve_parts(periodic: Periodic) -> tuple[AnyTrigger, Misfire, float]:
    """Return the trigger, the misfire policy and the seconds of jitter of a declaration. Raises Misconfigured."""
    misfire = periodic.misfire if isinstance(periodic.misfire, Misfire) else Misfire(periodic.misfire)
    jitter = to_seconds(periodic.jitter) if is_span(periodic.jitter) else None
    if periodic.overlap not in ("allow", "skip", "queue"):
        raise Misconfigured(f"overlap {periodic.overlap!r} is not known: allow, skip or queue")
    if jitter is None or not 0 <= jitter <= MAX_JITTER:
        raise Misconfigured(f"jitter is {periodic.jitter!r}: give 0 seconds to a day")
    if periodic.name and (len(periodic.name) > 200 or any(character < " " for character in periodic.name)):
        raise Misconfigured(f"a schedule's name has at most 200 characters, and {periodic.name!r} is none")
    trigger = parse_trigger(periodic.when)
    validate_cron_fields(trigger)
    return trigger, misfire.validate(), jitter


def cron(
    line: str | None = None,
    *,
    timezone: str = "",
    start: datetime | None = None,
    end: datetime | None = None,
    **fields: str | int,
) -> AnyTrigger:
    """Return a trigger that fires at matching wall-clock times.

    Args:
        line: A line of a crontab.
        timezone: A name like Europe/Berlin; '' for the setting `timezone`.
        start: The trigger does not fire before this moment.
        end: The trigger does not fire after this moment.
        fields: `year`, `month`, `day`, `week`, `day_of_week`, `hour`, `minute` or `second`, instead of a line: each
            as in a crontab, `last`, `1st mon` or a number; days of the week by name only. Fields smaller than the
            smallest of these are 0, larger ones are any.

    Raises:
        Misconfigured: The arguments make no sense.
    """
    if line is not None:
        if fields:
            raise Misconfigured("cron takes a line of a crontab or fields by name, not both")
        if not isinstance(cast("object", line), str):
            raise Misconfigured(f"cron: {line!r} is no line of a crontab: give a text, like '0 3 * * *'")
        trigger = parse_crontab(line, check_zone(timezone))
        bound = {"start": _ms(start), "end": _ms(end)}
        return _bounded(trigger, bound) if start or end else trigger
    unknown = sorted(set(fields) - set(CRON_FIELDS))
    if unknown or not fields:
        what = f"{unknown[0]!r} is no field" if unknown else "one field at least is needed"
        raise Misconfigured(f"cron: {what}; fields: {', '.join(CRON_FIELDS)}")
    texts: dict[str, Any] = {name: _field(name, value) for name, value in fields.items()}
    if "day_of_week" in texts:
        refuse_weekday_numbers(texts["day_of_week"])
    texts = {name: unwrap_names(name, text) for name, text in texts.items()}
    return Cron(**texts, zone=check_zone(timezone), start=_ms(start), end=_ms(end))


def every(
    seconds: float | timedelta = 0,
    *,
    minutes: float = 0,
    hours: float = 0,
    days: float = 0,
    start: datetime | None = None,
    end: datetime | None = None,
) -> AnyTrigger:
    """Return a trigger that fires at regular intervals.

    Args:
        start: The intervals are counted from this moment; without it from 1970 in UTC, so that five minutes are
            those of the clock on every machine.
        end: The trigger does not fire after this moment.

    Raises:
        Misconfigured: The interval is less than a millisecond or more than 100 years.
    """
    try:
        span = seconds if isinstance(seconds, timedelta) else timedelta(seconds=_number("seconds", seconds))
        span += timedelta(
            minutes=_number("minutes", minutes), hours=_number("hours", hours), days=_number("days", days)
        )
    except (ValueError, OverflowError):  # not a number, or more than there are
        raise Misconfigured(_TOO_LONG) from None
    if span > MAX_INTERVAL:
        raise Misconfigured(_TOO_LONG)
    ms = round(span / timedelta(milliseconds=1))
    if ms < 1:
        raise Misconfigured("an interval is at least a thousandth of a second")
    return Interval(every=ms, start=_ms(start) or 0, end=_ms(end))


def calendar(
    *,
    years: int = 0,
    months: int = 0,
    weeks: int = 0,
    days: int = 0,
    time: str | time = "00:00",
    first: date | str = "2024-01-01",
    last: date | str | None = None,
    timezone: str = "",
) -> AnyTrigger:
    """Return a trigger that fires at a wall-clock time, at an interval of years, months, weeks and days.

    Dates that a month does not have are left out.

    Args:
        time: The wall-clock time.
        first: The date to count from; by default a Monday and the first of a month and a year.
        last: The last date.
        timezone: A name like Europe/Berlin; '' for the setting `timezone`.

    Raises:
        Misconfigured: The arguments make no sense.
    """
    spans: dict[str, object] = {"years": years, "months": months, "weeks": weeks, "days": days}
    for name, value in spans.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Misconfigured(f"calendar: {name} is {value!r}: give a whole number, 0 or more")
    if not any(spans.values()):
        raise Misconfigured(
            "calendar: every how many years, months, weeks or days? One of them is 1 at least"
        )
    return Calendar(
        years=years,
        months=months,
        weeks=weeks,
        days=days,
        time=_time(time),
        first=_date(first),
        last=None if last is None else _date(last),
        zone=check_zone(timezone),
    )


def at(moment: datetime) -> AnyTrigger:
    """Return a trigger that fires once. Raises Misconfigured for a time without a time zone."""
    ms = _ms(moment)
    if ms is None:
        raise Misconfigured("at takes an aware datetime")
    return OnceTrigger(at=ms)


def parse_trigger(when: object) -> AnyTrigger:
    """Return the trigger that `when` describes. Raises Misconfigured."""
    if isinstance(when, Trigger):
        return cast("AnyTrigger", when)
    if isinstance(when, str):
        return cron(when)
    if isinstance(when, datetime):
        return at(when)
    if isinstance(when, timedelta | int | float) and not isinstance(when, bool):
        return every(when)
    if isinstance(when, Mapping):
        return _from_table(cast("Mapping[str, Any]", when))
    raise Misconfigured(
        f"{when!r} does not say when: give a line of a crontab, seconds, a timedelta, a datetime, "
        "or what cron, every, calendar or at of celery5 give"
    )


def _from_table(table: Mapping[str, Any]) -> AnyTrigger:
    """Return the trigger of a table in a configuration.

    {cron = "0 3 * * *"}, {every = 30}, {calendar = {months = 1}}, {at = ...}, {any = [...]} or {all = [...]}, each
    with the arguments of the function of that name.
    """
    options = dict(table)
    kinds = [key for key in ("cron", "every", "calendar", "at", "any", "all") if key in options]
    if len(kinds) != 1:
        raise Misconfigured(
            f"{dict(table)!r} does not say when: give one of cron, every, calendar, at, any, all"
        )
    kind, value = kinds[0], options.pop(kinds[0])
    try:
        if kind in ("any", "all") and isinstance(value, list):
            parts = tuple(parse_trigger(part) for part in cast("list[object]", value))
            return AnyOf(of=parts) if kind == "any" else AllOf(of=parts)
        if kind == "at":
            return at(value if isinstance(value, datetime) else datetime.fromisoformat(str(value)))
        for key in ("start", "end"):
            if isinstance(options.get(key), str):
                options[key] = datetime.fromisoformat(options[key])
        if isinstance(value, Mapping):
            options |= cast("Mapping[str, Any]", value)
        else:
            options["line" if kind == "cron" else "seconds"] = value
        makers: dict[str, Callable[..., AnyTrigger]] = {"cron": cron, "every": every, "calendar": calendar}
        return makers[kind](**options)
    except (TypeError, ValueError, KeyError) as error:
        raise Misconfigured(f"{dict(table)!r} does not say when: {error}") from None


def _bounded(trigger: AnyTrigger, bound: dict[str, Any]) -> AnyTrigger:
    if isinstance(trigger, AnyOf):
        return AnyOf(of=tuple(_bounded(part, bound) for part in trigger.of))
    return msgspec.structs.replace(trigger, **bound)


def _ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    if not isinstance(cast("object", moment), datetime) or moment.utcoffset() is None:
        raise Misconfigured(f"{moment!r} has no time zone: use datetime.now(UTC) or another aware time")
    ms = round(moment.timestamp() * 1000)
    if ms > _LAST:
        raise Misconfigured(f"{moment} is after the year 9999")
    return ms


def _time(value: "str | time") -> str:
    try:
        parsed = value if isinstance(value, time) else time.fromisoformat(value)
    except (TypeError, ValueError):
        raise Misconfigured(f"{value!r} is no time of day: give one like 03:00") from None
    return parsed.replace(microsecond=0, tzinfo=None).isoformat()


def _date(value: date | str) -> str:
    try:
        return (value if isinstance(value, date) else date.fromisoformat(value)).isoformat()[:10]
    except (TypeError, ValueError):
        raise Misconfigured(f"{value!r} is no date: give one like 2026-01-31") from None


def _field(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Misconfigured(f"cron: {name} is {value!r}: give a text or a whole number, or leave it out")
    return str(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Misconfigured(f"{name} is {value!r}: give a number")
    return value
