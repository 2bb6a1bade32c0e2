"""Compute when a trigger fires next. The only module that uses APScheduler, which is imported on first use.

APScheduler's triggers return wall-clock times without time zones; this module maps them to moments, so that a change of
the clock does what the guide promises: a wall-clock time that does not exist fires as much later as the clock was set
forward; one that occurs twice fires the first time only, unless the trigger names no hours.
"""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from datetime import time as time_of_day
from functools import lru_cache
from typing import Any

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.scheduling.triggers import (
    AllOf,
    AnyOf,
    AnyTrigger,
    Calendar,
    Cron,
    Interval,
    OnceTrigger,
)
from celery5.protocol.scheduling.zones import load_zone

DAY = timedelta(days=1)
MAX_AGREEMENT_STEPS = 10_000
"""Steps after which triggers that must fire together count as never doing so."""
_LAST = datetime(9000, 1, 1)
_YEARS = "1970-2199"
"""The years of a cron trigger that names none: the search for one that never fires ends soon."""

NextWallTime = Callable[[datetime], datetime | None]
"""Returns the first wall-clock time after a given one, both without a time zone."""


def get_next_fire_time(trigger: AnyTrigger, after: int) -> int | None:
    """Return the first moment after `after` at which `trigger` fires, in ms since 1970; None when there is none.

    The last result is cached: it holds for all moments before it, so triggers that are not due are not computed
    again.

    Raises:
        Misconfigured: The trigger makes no sense, or this machine lacks its time zone.
    """
    result = _get_last_result(trigger)
    if result.after is None or after < result.after or (result.at is not None and result.at <= after):
        result.at, result.after = _compute_next(trigger, after), after
    return result.at


class _LastResult(msgspec.Struct):
    """The last result for a trigger: it does not fire between `after` and `at`."""

    after: int | None = None
    at: int | None = None


@lru_cache(maxsize=1024)
def _get_last_result(_trigger: AnyTrigger) -> _LastResult:
    return _LastResult()


def _compute_next(trigger: AnyTrigger, after: int) -> int | None:
    match trigger:
        case Interval():
            return _next_of_interval(trigger, after)
        case OnceTrigger():
            return trigger.at if trigger.at > after else None
        case AnyOf():
            return min((time for time in _list_next(trigger.of, after) if time is not None), default=None)
        case AllOf():
            return _next_common(trigger, after)
        case Cron() | Calendar():
            return _next_by_clock(trigger, after)


def validate_trigger(trigger: AnyTrigger) -> AnyTrigger:
    """Return the trigger. Raises Misconfigured for one that makes no sense."""
    get_next_fire_time(trigger, 0)
    return trigger


def _next_of_interval(trigger: Interval, after: int) -> int | None:
    if trigger.every < 1:
        raise Misconfigured("an interval is at least a thousandth of a second")
    past = after - trigger.start
    at = trigger.start if past < 0 else trigger.start + (past // trigger.every + 1) * trigger.every
    return None if trigger.end is not None and at > trigger.end else at


def _list_next(triggers: tuple[AnyTrigger, ...], after: int) -> list[int | None]:
    return [get_next_fire_time(part, after) for part in triggers]


def _next_common(trigger: AllOf, after: int) -> int | None:
    for _ in range(MAX_AGREEMENT_STEPS):
        times = [time for time in _list_next(trigger.of, after) if time is not None]
        if len(times) < len(trigger.of):
            return None
        latest = max(times)
        if min(times) == latest:
            return latest
        after = latest - 1
    return None


def _next_by_clock(trigger: Cron | Calendar, after: int) -> int | None:
    zone, step = load_zone(trigger.zone), _make_step(trigger)
    start = trigger.start if isinstance(trigger, Cron) and trigger.start is not None else after + 1
    try:
        moment = _find_moment(
            step, zone, _to_datetime(max(after, start - 1)), every_hour=_fires_in_repeated_hour(trigger)
        )
    except OverflowError:  # beyond the year 9999
        return None
    at = None if moment is None else round(moment.timestamp() * 1000)
    end = trigger.end if isinstance(trigger, Cron) else None
    return None if at is None or (end is not None and at > end) else at


def _fires_in_repeated_hour(trigger: Cron | Calendar) -> bool:
    return isinstance(trigger, Cron) and trigger.fires_every_hour


def _find_moment(step: NextWallTime, zone: tzinfo, after: datetime, *, every_hour: bool) -> datetime | None:
    """Return the first moment after `after`, both in UTC, whose wall-clock time is one that `step` returns."""
    while True:
        before, now, later = (_get_offset(zone, after + span) for span in (-DAY, timedelta(), DAY))
        if before == now == later:
            wall = step(_without_zone(after) + now)
            if wall is None:
                return None
            moment = (wall - now).replace(tzinfo=UTC)
            if moment <= after + DAY:
                return moment
            # It does not fire before that; search again from near it, since the clock may change until then.
            after = max(after, moment - DAY / 2)
            continue
        transition = _find_transition(zone, after - DAY, after + DAY)
        near = _find_moment_near(step, zone, transition, after, every_hour=every_hour)
        if near is None or near <= after + DAY:
            return near
        after = max(after + DAY / 2, near - DAY / 2)


def _find_moment_near(
    step: NextWallTime, zone: tzinfo, transition: datetime, after: datetime, *, every_hour: bool
) -> datetime | None:
    """Do the same near a transition of the clock: by the old offset until it ends, then by the new one."""
    old, new = _get_offset(zone, transition - timedelta(seconds=1)), _get_offset(zone, transition)
    forward = new > old
    # Skipped times count by the old offset, so they fire later. Repeated times fire again only without named hours.
    end_of_old = _without_zone(transition) + max(old, new)
    start_of_new = _without_zone(transition) + (new if forward or every_hour else old)
    moments: list[datetime] = []
    wall_by_old = step(_without_zone(after) + old)
    if wall_by_old is not None and wall_by_old < end_of_old:
        moments.append((wall_by_old - old).replace(tzinfo=UTC))
    wall_by_new = step(max(_without_zone(after) + new, start_of_new - timedelta(microseconds=1)))
    if wall_by_new is not None:
        moments.append((wall_by_new - new).replace(tzinfo=UTC))
    return min(moments, default=None)


def _find_transition(zone: tzinfo, low: datetime, high: datetime) -> datetime:
    """Return the second at which the clock is set between two moments."""
    first = _get_offset(zone, low)
    if first == _get_offset(zone, high):  # set forward and back within two days: find the first change
        high = low + (high - low) / 2
    span = int((high - low).total_seconds())
    near, far = 0, span
    while far - near > 1:
        middle = (near + far) // 2
        if _get_offset(zone, low + timedelta(seconds=middle)) == first:
            near = middle
        else:
            far = middle
    return (low + timedelta(seconds=far)).replace(microsecond=0)


def _get_offset(zone: tzinfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _without_zone(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


def _to_datetime(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


@lru_cache(maxsize=1024)
def _make_step(trigger: Cron | Calendar) -> NextWallTime:
    """Return the wall-clock times of a trigger, by APScheduler."""
    implementation: Any = _cron(trigger) if isinstance(trigger, Cron) else _calendar(trigger)
    calendar = isinstance(trigger, Calendar)

    def step(after: datetime) -> datetime | None:
        if after >= _LAST:
            return None
        aware = (after + timedelta(microseconds=1)).replace(tzinfo=UTC)
        try:
            fire_time = implementation.get_next_fire_time(_just_before(trigger, after), aware)
            while calendar and fire_time is not None and fire_time < aware:
                fire_time = implementation.get_next_fire_time(fire_time, fire_time)
        except (OverflowError, ValueError):  # beyond the year 9999
            return None
        return None if fire_time is None else fire_time.replace(tzinfo=None)

    return step


def _just_before(trigger: Cron | Calendar, after: datetime) -> datetime | None:
    """Return the last fire time of a calendar of weeks and days that is at least a day before `after`.

    APScheduler counts one by one from the first, which would take longer each year. None before the second fire
    time, and for other triggers.
    """
    if isinstance(trigger, Cron) or trigger.years or trigger.months:
        return None
    first, every = date.fromisoformat(trigger.first), 7 * trigger.weeks + trigger.days
    times = (after.date() - DAY - first).days // every
    if times < 1:
        return None
    at = time_of_day.fromisoformat(trigger.time)
    return datetime.combine(first + times * every * DAY, at, UTC)


def _cron(trigger: Cron) -> Any:
    if not trigger.fields:
        raise Misconfigured("a cron trigger names one field at least: minute, hour, day, ...")
    try:
        return _apscheduler_cron(trigger.fields)
    except (ValueError, TypeError) as error:
        raise Misconfigured(_cron_error(trigger, str(error))) from None


def _cron_error(trigger: Cron, why: str) -> str:
    """Return what is wrong with a cron trigger, as it was written, and in which of its fields."""
    text = repr(trigger.line) if trigger.line else ", ".join(f"{k}={v}" for k, v in trigger.fields.items())
    for name, value in trigger.fields.items():
        try:
            _ = _apscheduler_cron({name: value})
        except (ValueError, TypeError) as error:
            reason = str(error).removeprefix(f"Error validating expression {value!r}: ")
            field = "weekday" if trigger.line and name == "day_of_week" else name
            return f"cron {text}: the {field} {value!r} is wrong: {reason}"
    return f"cron {text}: {why}"


def _apscheduler_cron(fields: dict[str, str]) -> Any:
    from apscheduler.triggers.cron import CronTrigger

    return CronTrigger(**{"year": _YEARS, **fields}, timezone=UTC)


def _calendar(trigger: Calendar) -> Any:
    from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger

    try:
        at = time_of_day.fromisoformat(trigger.time)
        return CalendarIntervalTrigger(
            years=_whole(trigger.years),
            months=_whole(trigger.months),
            weeks=_whole(trigger.weeks),
            days=_whole(trigger.days),
            hour=at.hour,
            minute=at.minute,
            second=at.second,
            start_date=date.fromisoformat(trigger.first),
            end_date=None if trigger.last is None else date.fromisoformat(trigger.last),
            timezone=UTC,
        )
    except (ValueError, TypeError) as error:
        raise Misconfigured(f"a calendar trigger from {trigger.first} at {trigger.time}: {error}") from None


def _whole(number: int) -> int:
    if not 0 <= number <= 100_000:
        raise ValueError(f"{number} is no number of years, months, weeks or days")
    return number
