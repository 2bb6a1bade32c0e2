"""Fire Times: when a trigger fires next. The one module that knows APScheduler, which is loaded when it is first asked.

APScheduler's triggers are asked for times of day as if there were no time zones at all; which moments those are is
decided here, so that a clock that is set does what the guide says: a time of day that does not exist fires as much
later as the clock was set forward, one that comes twice fires the first time only, unless the trigger names no hours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from datetime import time as time_of_day
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

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

DAY = timedelta(days=1)
MAX_AGREEMENT_STEPS = 10_000
"""Steps in which triggers that must agree do so, or never."""
_LAST = datetime(9000, 1, 1)
_YEARS = "1970-2199"
"""Where a cron trigger that names no years is looked for: one that never fits is so known in no time."""

NextWallTime = Callable[[datetime], datetime | None]
"""Gives the first time of day after another, neither of them in any zone."""


def get_next_fire_time(trigger: AnyTrigger, after: int) -> int | None:
    """The first moment after another at which `trigger` fires, in ms since 1970; None when there is none. Raises
    Misconfigured for a trigger that makes no sense, or whose time zone this machine does not know.

    What was found last holds for all moments before it: triggers of which none is due are not asked again.
    """
    last = _last(trigger)
    if last.after is None or after < last.after or (last.at is not None and last.at <= after):
        last.at, last.after = _following(trigger, after), after
    return last.at


@dataclass(slots=True)
class _Last:
    """What was found last for a trigger: nothing lies between the two."""

    after: int | None = None
    at: int | None = None


@lru_cache(maxsize=1024)
def _last(_trigger: AnyTrigger) -> _Last:
    return _Last()


def _following(trigger: AnyTrigger, after: int) -> int | None:
    match trigger:
        case Interval():
            return _interval(trigger, after)
        case OnceTrigger():
            return trigger.at if trigger.at > after else None
        case AnyOf():
            return min((each for each in _all(trigger.of, after) if each is not None), default=None)
        case AllOf():
            return _agreed(trigger, after)
        case Cron() | Calendar():
            return _by_clock(trigger, after)


def validate_trigger(trigger: AnyTrigger) -> AnyTrigger:
    """Itself. Raises Misconfigured for one that makes no sense."""
    get_next_fire_time(trigger, 0)
    return trigger


def _interval(trigger: Interval, after: int) -> int | None:
    if trigger.every < 1:
        raise Misconfigured("an interval is at least a thousandth of a second")
    past = after - trigger.start
    at = trigger.start if past < 0 else trigger.start + (past // trigger.every + 1) * trigger.every
    return None if trigger.end is not None and at > trigger.end else at


def _all(triggers: tuple[AnyTrigger, ...], after: int) -> list[int | None]:
    return [get_next_fire_time(each, after) for each in triggers]


def _agreed(trigger: AllOf, after: int) -> int | None:
    for _ in range(MAX_AGREEMENT_STEPS):
        times = [each for each in _all(trigger.of, after) if each is not None]
        if len(times) < len(trigger.of):
            return None
        latest = max(times)
        if min(times) == latest:
            return latest
        after = latest - 1
    return None


def _by_clock(trigger: Cron | Calendar, after: int) -> int | None:
    zone, step = _zone(trigger.zone), _steps(trigger)
    start = trigger.start if isinstance(trigger, Cron) and trigger.start is not None else after + 1
    try:
        found = _moment(step, zone, _datetime(max(after, start - 1)), every_hour=_twice(trigger))
    except OverflowError:  # beyond the year 9999
        return None
    at = None if found is None else round(found.timestamp() * 1000)
    end = trigger.end if isinstance(trigger, Cron) else None
    return None if at is None or (end is not None and at > end) else at


def _twice(trigger: Cron | Calendar) -> bool:
    return isinstance(trigger, Cron) and trigger.fires_every_hour


def _moment(step: NextWallTime, zone: tzinfo, after: datetime, *, every_hour: bool) -> datetime | None:
    """The first moment after another, both in UTC, at which it is one of the times of day that `step` gives."""
    while True:
        before, now, later = (_offset(zone, after + span) for span in (-DAY, timedelta(), DAY))
        if before == now == later:
            wall = step(_wall(after) + now)
            if wall is None:
                return None
            found = (wall - now).replace(tzinfo=UTC)
            if found <= after + DAY:
                return found
            # Nothing lies between: look from there, clocks may be set until then.
            after = max(after, found - DAY / 2)
            continue
        turn = _turn(zone, after - DAY, after + DAY)
        found_one = _around(step, zone, turn, after, every_hour=every_hour)
        if found_one is None or found_one <= after + DAY:
            return found_one
        after = max(after + DAY / 2, found_one - DAY / 2)


def _around(
    step: NextWallTime, zone: tzinfo, turn: datetime, after: datetime, *, every_hour: bool
) -> datetime | None:
    """The same, near a `turn` of the clock: by the old time as long as that counts, and by the new one."""
    old, new = _offset(zone, turn - timedelta(seconds=1)), _offset(zone, turn)
    forward = new > old
    # What was jumped over counts by the old time, so it fires later; what comes again does so for who names no hours.
    end_of_old = _wall(turn) + max(old, new)
    start_of_new = _wall(turn) + (new if forward or every_hour else old)
    found: list[datetime] = []
    by_old = step(_wall(after) + old)
    if by_old is not None and by_old < end_of_old:
        found.append((by_old - old).replace(tzinfo=UTC))
    by_new = step(max(_wall(after) + new, start_of_new - timedelta(microseconds=1)))
    if by_new is not None:
        found.append((by_new - new).replace(tzinfo=UTC))
    return min(found, default=None)


def _turn(zone: tzinfo, low: datetime, high: datetime) -> datetime:
    """The second at which the clock is set between two moments."""
    first = _offset(zone, low)
    if first == _offset(zone, high):  # set and set back within two days: the first of them
        high = low + (high - low) / 2
    span = int((high - low).total_seconds())
    near, far = 0, span
    while far - near > 1:
        middle = (near + far) // 2
        if _offset(zone, low + timedelta(seconds=middle)) == first:
            near = middle
        else:
            far = middle
    return (low + timedelta(seconds=far)).replace(microsecond=0)


def _offset(zone: tzinfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta()


def _wall(moment: datetime) -> datetime:
    return moment.replace(tzinfo=None)


def _datetime(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    if name.upper() in ("", "UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise Misconfigured(
            f"time zone {name!r} is not known on this machine: use a name like Europe/Berlin, "
            "and install tzdata where the system has none"
        ) from None


@lru_cache(maxsize=1024)
def _steps(trigger: Cron | Calendar) -> NextWallTime:
    """The times of day of a trigger, by APScheduler."""
    ours: Any = _cron(trigger) if isinstance(trigger, Cron) else _calendar(trigger)
    calendar = isinstance(trigger, Calendar)

    def step(after: datetime) -> datetime | None:
        if after >= _LAST:
            return None
        aware = (after + timedelta(microseconds=1)).replace(tzinfo=UTC)
        try:
            found = ours.get_next_fire_time(_just_before(trigger, after), aware)
            while calendar and found is not None and found < aware:
                found = ours.get_next_fire_time(found, found)
        except (OverflowError, ValueError):  # beyond the year 9999
            return None
        return None if found is None else found.replace(tzinfo=None)

    return step


def _just_before(trigger: Cron | Calendar, after: datetime) -> datetime | None:
    """The last fire time of a calendar of weeks and days that is a day before `after` at least: APScheduler counts one
    by one from the first, which would take longer each year. None where it begins, and for other triggers."""
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
    """What is wrong with a cron trigger: as it was written, and which of its fields it is."""
    said = repr(trigger.line) if trigger.line else ", ".join(f"{k}={v}" for k, v in trigger.fields.items())
    for name, value in trigger.fields.items():
        try:
            _ = _apscheduler_cron({name: value})
        except (ValueError, TypeError) as error:
            reason = str(error).removeprefix(f"Error validating expression {value!r}: ")
            field = "weekday" if trigger.line and name == "day_of_week" else name
            return f"cron {said}: the {field} {value!r} is wrong: {reason}"
    return f"cron {said}: {why}"


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
