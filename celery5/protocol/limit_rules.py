"""Limit rules: when the Scheduler imposes a limit on a task, and what holds when operators have set another one."""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.limits import LimitOverride, Rate
from celery5.protocol.scheduling.zones import check_zone

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]

DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
"""The days of a week, as `datetime.weekday` counts them."""
_TIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_NAME_LENGTH = 100
"""The most characters of a rule's name."""


class TimeWindow(msgspec.Struct, frozen=True):
    """The hours of a day during which a limit rule holds, by the clock on the wall in `timezone`.

    `TimeWindow("22:00", "06:00")` ends on the next day. Two equal times make a whole day.
    """

    start: str  # HH:MM
    end: str  # HH:MM: the window ends before that minute
    days: tuple[Day, ...] = DAYS  # on which the window begins
    timezone: str = ""  # such as Europe/Berlin; '' for the setting `timezone`

    def validate(self, rule: str) -> "TimeWindow":
        """Return itself. Raises Misconfigured."""
        texts: tuple[object, object] = (self.start, self.end)
        for text in texts:
            if not isinstance(text, str) or not _TIME.fullmatch(text):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise Misconfigured(f"limit rule {rule}: {text!r} is no time of day: write 22:00")
        days: object = self.days
        is_list = isinstance(days, list | tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_list or not days or any(day not in DAYS for day in self.days):
            raise Misconfigured(f"limit rule {rule}: days are {days!r}: give some of {', '.join(DAYS)}")
        try:
            check_zone(self.timezone)
        except Misconfigured as error:
            raise Misconfigured(f"limit rule {rule}: {error}") from None
        return self

    def contains(self, local: datetime) -> bool:
        """Return whether a local time is in the window."""
        minute, start, end = 60 * local.hour + local.minute, _get_minute(self.start), _get_minute(self.end)
        if start < end:
            return start <= minute < end and self._begins_on(local)
        if minute >= start:
            return self._begins_on(local)
        return minute < end and self._begins_on(local - timedelta(days=1))

    def _begins_on(self, day: datetime) -> bool:
        return DAYS[day.weekday()] in self.days


class LimitRule(msgspec.Struct, frozen=True, kw_only=True):
    """A limit or a rate that the Scheduler imposes on a task while its conditions hold; without any, always."""

    name: str
    task: str
    override: LimitOverride
    during: TimeWindow | None = None
    check: str = ""  # the name of a global health check
    states: tuple[str, ...] = ()  # of the check in which the rule holds

    def validate(self) -> "LimitRule":
        """Return itself. Raises Misconfigured."""
        check_rule_name(self.name)
        if self.override.limit is None and not self.override.rate:
            raise Misconfigured(f"limit rule {self.name}: give limit=, rate= or both")
        self.override.validate(self.task)
        if self.during is not None:
            self.during.validate(self.name)
        return self

    def holds(self, local: datetime | None, state: str | None) -> bool:
        """Return whether the rule holds.

        Args:
            local: The time in the zone of its window; None if it has none.
            state: The state of its health check; None while that is unknown, when the rule does not hold.
        """
        if self.during is not None and (local is None or not self.during.contains(local)):
            return False
        return not self.check or state in self.states


class ImposedLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a Scheduler imposes: for each rule that holds, the limits by task."""

    by: str = ""  # the Scheduler
    rules: Mapping[str, Mapping[str, LimitOverride]] = {}

    def validate(self) -> "ImposedLimits":
        """Return itself. Raises Misconfigured."""
        for tasks in self.rules.values():
            for task, override in tasks.items():
                override.validate(task)
        return self


class RuleChanges(msgspec.Struct, frozen=True):
    """The rules that began to hold or impose something else, and those that ended."""

    begun: Mapping[str, Mapping[str, LimitOverride]]
    ended: tuple[str, ...]


def compare_rules(before: ImposedLimits | None, after: ImposedLimits) -> RuleChanges:
    """Return what differs between two evaluations, of the same Scheduler or of two."""
    rules_before: Mapping[str, Mapping[str, LimitOverride]] = before.rules if before is not None else {}
    begun = {rule: tasks for rule, tasks in after.rules.items() if rules_before.get(rule) != tasks}
    return RuleChanges(begun, tuple(sorted(rules_before.keys() - after.rules.keys())))


def merge_limits(
    operators: Mapping[str, LimitOverride], imposed: ImposedLimits
) -> Mapping[str, LimitOverride]:
    """Return what holds for each task: a Scheduler's limit replaces an operator's limit, and its rate their rate.

    Of several rules for one task, the lowest limit and the lowest rate hold.
    """
    if not imposed.rules:
        return operators
    merged = dict(operators)
    for task, by_rules in _get_strictest(imposed).items():
        set_by_operator = operators.get(task) or LimitOverride()
        keeps_one = (by_rules.limit is None and set_by_operator.limit is not None) or (
            not by_rules.rate and set_by_operator.rate
        )
        merged[task] = LimitOverride(
            limit=set_by_operator.limit if by_rules.limit is None else by_rules.limit,
            rate=by_rules.rate or set_by_operator.rate,
            by=f"{by_rules.by}, {set_by_operator.by}" if keeps_one and set_by_operator.by else by_rules.by,
        )
    return merged


def get_rules_of_task(task: str, imposed: ImposedLimits) -> tuple[str, ...]:
    """Return the names of the rules that impose something on a task now."""
    return tuple(sorted(rule for rule, tasks in imposed.rules.items() if task in tasks))


def check_rule_name(name: object) -> str:
    """Return the name of a rule. Raises Misconfigured."""
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_LENGTH or any(map(str.isspace, name)):
        raise Misconfigured(f"limit rule name {name!r}: use 1 to {_NAME_LENGTH} characters without spaces")
    return name


def _get_strictest(imposed: ImposedLimits) -> dict[str, LimitOverride]:
    strictest: dict[str, LimitOverride] = {}
    for rule, tasks in sorted(imposed.rules.items()):
        for task, override in tasks.items():
            other = strictest.get(task) or LimitOverride()
            limits = [limit for limit in (other.limit, override.limit) if limit is not None]
            rates = [rate for rate in (other.rate, override.rate) if rate]
            strictest[task] = LimitOverride(
                limit=min(limits, default=None),
                rate=min(rates, key=_get_frequency, default=""),
                by=f"{other.by}, rule {rule}" if other.by else f"rule {rule}",
            )
    return strictest


def _get_frequency(rate: str) -> float:
    return Rate(rate).count / Rate(rate).span


def _get_minute(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)
