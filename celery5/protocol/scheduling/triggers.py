"""Define when schedules fire, as values that every Scheduler reads alike.

Times are ms since 1970. `celery5.scheduling.fire_times` computes the fire times, with APScheduler's triggers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.masking import collapse_whitespace


class Trigger(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field="when",
    forbid_unknown_fields=True,
):
    """When a schedule fires. `a | b` fires when either does, `a & b` when both do at the same moment."""

    def __or__(self, other: "Trigger") -> "AnyOf":
        _check_joined("|", other)
        return AnyOf(of=(*_parts(self, AnyOf), *_parts(other, AnyOf)))

    def __and__(self, other: "Trigger") -> "AllOf":
        _check_joined("&", other)
        return AllOf(of=(*_parts(self, AllOf), *_parts(other, AllOf)))


class Cron(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="cron"):
    """Fires at the times of day that match all fields."""

    year: str | None = None
    month: str | None = None
    day: str | None = None
    week: str | None = None
    day_of_week: str | None = None
    hour: str | None = None
    minute: str | None = None
    second: str | None = None
    zone: str = ""  # time zone; '' for the application's
    start: int | None = None
    end: int | None = None
    line: str = ""  # the crontab line that it was written as, if it was

    @property
    def fields(self) -> dict[str, str]:
        """Return the fields that are set."""
        return {name: value for name in CRON_FIELDS if (value := getattr(self, name)) is not None}

    @property
    def fires_every_hour(self) -> bool:
        """Return whether it fires in all hours. Then an hour that occurs twice counts twice."""
        if self.hour is not None:
            return _covers_all_hours(self.hour)
        return self.minute is not None or self.second is not None


class Interval(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="interval"):
    """Fires at an interval in ms, counted from `start`, independent of time zones and clock changes."""

    every: int
    start: int = 0
    end: int | None = None


class Calendar(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="calendar"):
    """Fires at a time of day, at an interval of years, months, weeks and days from the date `first` on."""

    years: int = 0
    months: int = 0
    weeks: int = 0
    days: int = 0
    time: str = "00:00:00"
    first: str = "2024-01-01"
    last: str | None = None
    zone: str = ""


class OnceTrigger(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="date"):
    """Fires once."""

    at: int


class AnyOf(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="or"):
    """Fires when any of these does; once if several do at the same moment."""

    of: tuple["AnyTrigger", ...]


class AllOf(Trigger, frozen=True, kw_only=True, omit_defaults=True, tag="and"):
    """Fires when all of these do at the same moment."""

    of: tuple["AnyTrigger", ...]


AnyTrigger = Cron | Interval | Calendar | OnceTrigger | AnyOf | AllOf
CRON_FIELDS = ("year", "month", "day", "week", "day_of_week", "hour", "minute", "second")
"""The fields of a cron trigger, as APScheduler names them."""
MAX_DEPTH = 5
"""The deepest nesting of combined triggers."""
MAX_COMBINED = 20
"""The most triggers in a combination."""


def with_zone(trigger: AnyTrigger, zone: str, depth: int = 0) -> AnyTrigger:
    """Return the trigger with `zone` wherever it names none.

    Raises Misconfigured for combinations beyond the limits.
    """
    if isinstance(trigger, AnyOf | AllOf):
        if depth >= MAX_DEPTH or not 0 < len(trigger.of) <= MAX_COMBINED:
            raise Misconfigured(
                f"a trigger may combine {MAX_COMBINED} others, {MAX_DEPTH} deep: make several schedules"
            )
        return msgspec.structs.replace(
            trigger, of=tuple(with_zone(part_trigger, zone, depth + 1) for part_trigger in trigger.of)
        )
    if isinstance(trigger, Cron | Calendar) and not trigger.zone:
        return msgspec.structs.replace(trigger, zone=zone)
    return trigger


def validate_cron_fields(trigger: AnyTrigger) -> None:
    """Raise Misconfigured for a cron trigger, alone or in a combination, with an invalid field.

    The rules are those of APScheduler, which no worker and no producer loads; a test holds the two together. It is
    stricter in one point: APScheduler ignores what follows a name, and reads `mon-fri/2` as `mon-fri`.
    """
    if isinstance(trigger, AnyOf | AllOf):
        for part_trigger in trigger.of:
            validate_cron_fields(part_trigger)
    elif isinstance(trigger, Cron):
        for name, value in trigger.fields.items():
            for part in _SEPARATOR.split(value.strip()):
                fault = _find_part_fault(name, part)
                if fault:
                    line = f"{trigger.line!r}: " if trigger.line else ""
                    raise Misconfigured(f"{line}{name} {part!r}: {fault}")


def _covers_all_hours(field: str) -> bool:
    """Return whether a valid field has each hour of the day: `*`, and as well `*/1`, `0-23` or `0-11,12-23`."""
    hours: set[int] = set()
    for part in _SEPARATOR.split(field.strip()):
        if (numbers := _NUMBERS.fullmatch(part)) is None:
            return False
        first, last, step = (None if group is None else int(group) for group in numbers.groups())
        begin = first or 0
        end = 23 if first is None or (last is None and step is not None) else begin if last is None else last
        hours.update(range(begin, min(end, 23) + 1, step or 1))
    return len(hours) == 24


def unwrap_names(field: str, text: str) -> str:
    """Return a field with each range of names that goes beyond the last one as a list: `sat-mon` as `sat,sun,mon`.

    APScheduler takes no such range.
    """
    return ",".join(_unwrap_range(_NAMED[field], part) for part in text.split(",")) if _NAMED[field] else text


def _unwrap_range(names: Sequence[str], part: str) -> str:
    first, dash, last = part.strip().lower().partition("-")
    if not dash or first not in names or last not in names or names.index(first) <= names.index(last):
        return part
    return ",".join((*names[names.index(first) :], *names[: names.index(last) + 1]))


def refuse_weekday_numbers(text: str) -> None:
    """Raise Misconfigured for days of the week by number, which mean other days in crontabs and in APScheduler."""
    if not any(character.isdigit() for character in text):
        return
    try:
        named = _name_weekdays(text)
    except Misconfigured:
        named = "mon-fri"
    if not set(named.split(",")).issubset(_NAMES):
        named = "mon-fri"
    raise Misconfigured(
        f"cron: day_of_week is {text!r}: give days by name, since numbers mean one day in crontabs and another in "
        f"APScheduler; as in a crontab it is {named!r}"
    )


def _find_part_fault(field: str, part: str) -> str:
    """Return what is wrong with one part of a field of a cron trigger; '' when nothing is."""
    low, high = _RANGES[field]
    numbers = _NUMBERS.fullmatch(part)
    if numbers:
        first, last, step = (None if group is None else int(group) for group in numbers.groups())
        begin = low if first is None else first
        end = (
            high if last is None and (step is not None or first is None) else begin if last is None else last
        )
        if begin < low or end > high:
            return f"give {low} to {high}"
        if begin > end:
            return "the second number is less than the first"
        if step is not None and not 0 < step <= (end or high) - begin:
            return f"the step must be 1 to {end - begin}"
        return ""
    names = _NAMED[field]
    words = _SPAN_OF_NAMES.fullmatch(part.lower())
    if names and words and all(group in names for group in words.groups() if group is not None):
        first_name, last_name = words.groups()
        backwards = last_name is not None and names.index(first_name) > names.index(last_name)
        return "the second name comes before the first" if backwards else ""
    if field == "day" and (part.lower() == "last" or _POSITION.fullmatch(part.lower())):
        return ""
    also = f", {names[0]} to {names[-1]}" if names else ", last or 1st mon" if field == "day" else ""
    return f"give {low} to {high}{also}, a range such as {low}-{low + 1}, * or */2"


_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_RANGES: Mapping[str, tuple[int, int]] = {
    "year": (1970, 9999),
    "month": (1, 12),
    "day": (1, 31),
    "week": (1, 53),
    "day_of_week": (0, 6),
    "hour": (0, 23),
    "minute": (0, 59),
    "second": (0, 59),
}
_NAMED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(CRON_FIELDS, ()),
    "month": _MONTHS,
    "day_of_week": _DAYS,
}
_SEPARATOR = re.compile(" *, *")
_NUMBERS = re.compile(r"(?:\*|([0-9]{1,9})(?:-([0-9]{1,9}))?)(?:/([0-9]{1,9}))?")
_SPAN_OF_NAMES = re.compile(r"([a-z]+)(?:-([a-z]+))?")
_POSITION = re.compile(rf"(?:1st|2nd|3rd|4th|5th|last) +(?:{'|'.join(_DAYS)})")


def describe_trigger(trigger: AnyTrigger) -> str:
    """Return a trigger in a few words, for people."""
    match trigger:
        case Cron(line=line) if line:
            return f"cron {line} {trigger.zone}".rstrip()
        case Cron():
            fields = trigger.fields.items()
            fields_text = " ".join(
                f"{name}={value}" for name, value in fields if value != "*" and (name, value) != _ZERO
            )
            return f"cron {fields_text or 'second=0'} {trigger.zone}".rstrip()
        case Interval():
            return f"every {trigger.every / 1000:g} s"
        case Calendar():
            names = ("years", "months", "weeks", "days")
            spans = [f"{getattr(trigger, name)} {name}" for name in names if getattr(trigger, name)]
            return f"every {' '.join(spans)} at {trigger.time} {trigger.zone}".rstrip()
        case OnceTrigger():
            return "once"
        case AnyOf(of=(Cron(line=line) as first, Cron(line=other))) if line and line == other:
            return describe_trigger(first)  # a crontab line with both days
        case AnyOf() | AllOf():
            word = " or " if isinstance(trigger, AnyOf) else " and "
            return word.join(f"({describe_trigger(part)})" for part in trigger.of)


_ZERO = ("second", "0")


def parse_crontab(line: str, zone: str = "") -> AnyTrigger:
    """Return the trigger of a crontab line: minute, hour, day of the month, month, day of the week.

    With six fields the first one is the second. Sunday is 0 or 7. When both days are given, either matches, as
    in cron. Raises Misconfigured.
    """
    words = CRONTAB_MACROS.get(line.strip().lower(), line).split()
    if words == ["@reboot"]:
        raise Misconfigured("'@reboot' is no time: a boot step runs something when a process starts")
    if len(words) not in (5, 6):
        raise Misconfigured(
            f"{line!r} is no line of a crontab: give five fields (minute hour day month weekday), six with seconds, "
            f"or {', '.join(CRONTAB_MACROS)}"
        )
    second, (minute, hour, day, month, weekday) = (words[0] if len(words) == 6 else "0"), words[-5:]
    is_any_day = day.startswith("*") or weekday.startswith("*")
    cron = Cron(
        second=second,
        minute=minute,
        hour=hour,
        day=day,
        month=unwrap_names("month", month),
        day_of_week=unwrap_names("day_of_week", _name_weekdays(weekday)),
        zone=zone,
        line=collapse_whitespace(line),
    )
    if is_any_day:
        return cron
    alternatives = msgspec.structs.replace(cron, day="*"), msgspec.structs.replace(cron, day_of_week="*")
    return AnyOf(of=alternatives)


CRONTAB_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _name_weekdays(field: str) -> str:
    """Return a crontab's field of weekdays by names, since APScheduler counts them from Monday."""
    return ",".join(_name_weekday_range(part) for part in field.lower().split(","))


def _name_weekday_range(part: str) -> str:
    span, slash, step = part.partition("/")
    if span == "*" and slash:
        span = "0-6"  # counted from Sunday
    first, dash, last = span.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        return part
    begin, end = int(first), int(last) if dash else int(first)
    if step and not dash:
        end = 6
    if not (0 <= begin <= 7 and begin <= end <= 7 and (not step or (step.isdigit() and int(step)))):
        raise Misconfigured(f"{part!r} is no day of the week in a crontab: 0 to 7, where 0 and 7 are Sunday")
    return ",".join(dict.fromkeys(_NAMES[number] for number in range(begin, end + 1, int(step or 1))))


def _check_joined(sign: str, other: object) -> None:
    if not isinstance(other, Trigger):
        raise Misconfigured(
            f"{sign} joins triggers, and {other!r} is none: give what cron, every, calendar or at give"
        )


def _parts(trigger: Trigger, kind: type[AnyOf] | type[AllOf]) -> tuple[AnyTrigger, ...]:
    return trigger.of if isinstance(trigger, kind) else (cast("Any", trigger),)
