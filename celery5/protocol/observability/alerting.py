"""Decide which alerts fire, from what was measured and what was known before.

An alert is *inactive*, *pending* while its value is above the threshold for less than the time that it must hold, and
*firing* after that. It is *resolved*, and inactive again, when the value has been at or below a second, lower threshold
for a while. An alert of which nothing is measured keeps its status for some time, since a broker that is unreachable is
no sign that anything is better.

Source: the words are those of Prometheus (`for`, `keep_firing_for`, pending, firing) and Alertmanager (silence).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration

Severity = Literal["warning", "critical"]
AlertStatus = Literal["inactive", "pending", "firing", "silenced", "unknown"]
Change = Literal["fired", "resolved"]
Measure = Literal[
    "oldest",
    "failures",
    "no-workers",
    "dead-letters",
    "worker-deaths",
    "worker-lost",
    "member-missing",
    "not-undone",
    "stream-lag",
    "loop-lag",
    "memory",
]

KEPT_UNMEASURED = 300.0
"""Seconds after which an alert is given up of which nothing is measured any more."""
RESOLVE_SHARE = 0.8
"""The share of the threshold at which an alert resolves by default."""
LATE_AFTER = 45.0
"""Seconds without an evaluation after which nobody knows any more which alerts fire, whatever the interval is."""
LATE_INTERVALS = 4
"""The same in intervals: when the process that evaluates is killed, another one does it two intervals later."""
MAX_INSTANCES = 1000
"""Alerts that are pending or firing at once; further ones wait until there is room."""

NOT_MEASURED = f"; not measured since, so it stays for up to {format_duration(KEPT_UNMEASURED)}"
"""What is said of an alert of which nothing is measured now."""
_COUNTED_AS: Mapping[Measure, tuple[str, str]] = {
    "no-workers": ("job", "jobs"),
    "dead-letters": ("new dead letter", "new dead letters"),
    "worker-deaths": ("dead worker", "dead workers"),
    "worker-lost": ("lost process", "lost processes"),
    "member-missing": ("missing member", "missing members"),
    "not-undone": ("run", "runs"),
}
"""What measures count that are neither times nor shares."""

AlertKey = tuple[str, str]
"""The name of a rule and the subject: `("oldest-job", "queue mail")`."""


class AlertCondition(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, of what, and the threshold."""

    measure: Measure
    # It fires above this value: seconds, jobs, or a share between 0 and 1.
    above: float
    # It resolves at this value or below it; None: at 0.8 of the threshold.
    below: float | None = None
    # The one queue, task, or stream and group that is looked at; '': each one by itself.
    queue: str = ""
    task: str = ""
    stream: str = ""
    group: str = ""
    # Seconds over which failures, dead letters and deaths of workers are counted.
    within: float = 300.0
    # Jobs that must have ended within that time for a failure rate to count.
    least: int = 20

    @property
    def resolves_at(self) -> float:
        """The value at which it resolves."""
        return self.above * RESOLVE_SHARE if self.below is None else self.below


class AlertRule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule: when an alert fires, and when it resolves."""

    name: str
    condition: AlertCondition
    severity: Severity = "warning"
    # Seconds for which the value must be above the threshold.
    for_: float = 60.0
    # Seconds for which it must have been low again.
    keep_firing_for: float = 60.0


class AlertInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that is pending or firing."""

    name: str
    # The queue, task or group: `queue mail`; '' for the cluster.
    subject: str
    severity: Severity
    # When it became pending, in seconds since 1970.
    since: float
    value: float
    above: float
    description: str
    # When it was measured last.
    measured_at: float
    # When it fired, and the value with which it did; None while it is pending.
    fired_at: float | None = None
    fired_value: float | None = None
    # Since when the value is low again.
    low_since: float | None = None
    # Whether a notification was sent that it fires.
    is_notified: bool = False

    @property
    def status(self) -> AlertStatus:
        """`pending` or `firing`."""
        return "pending" if self.fired_at is None else "firing"


class AlertReading(msgspec.Struct, frozen=True):
    """What was measured for one rule and one subject."""

    value: float
    # In words, with the value.
    description: str


class AlertTransition(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that fired or resolved."""

    # The same whoever decides it, so that a receiver can drop repetitions.
    id: str
    change: Change
    name: str
    subject: str
    severity: Severity
    # When it fired or resolved, and since when the value was too high, in seconds since 1970.
    at: float
    since: float
    value: float
    above: float
    description: str
    # Nobody is notified.
    silenced: bool = False


class UndeliveredNotification(msgspec.Struct, frozen=True, kw_only=True):
    """The last notification of an alert that the webhook has not taken."""

    # The rule, the subject, what has changed, and when, in seconds since 1970.
    name: str
    subject: str
    change: Change
    at: float
    # How often it was tried, when last, in seconds since 1970, and why it was not taken then.
    tries: int
    tried_at: float
    why: str
    # Whether it is not sent any more.
    is_dropped: bool = False

    @property
    def description(self) -> str:
        """What is not delivered, why, and whether it is sent again, in a line."""
        then = "not sent any more" if self.is_dropped else "sent again"
        return f"{self.change}: {self.why} ({format_count(self.tries, 'try', 'tries')}, {then})"


class AlertDecision(msgspec.Struct, frozen=True):
    """The alerts as they are now, what has changed, and which of the changes somebody is notified of."""

    instances: tuple[AlertInstance, ...]
    transitions: tuple[AlertTransition, ...]

    @property
    def notifications(self) -> tuple[AlertTransition, ...]:
        """The transitions that somebody is notified of."""
        return tuple(transition for transition in self.transitions if not transition.silenced)


def decide_alerts(
    rules: Mapping[str, AlertRule],
    instances: Sequence[AlertInstance],
    readings: Mapping[AlertKey, AlertReading],
    silenced: Mapping[str, float],
    now: float,
) -> AlertDecision:
    """Return what becomes of all alerts.

    Args:
        rules: By name.
        instances: Those that were pending or firing before.
        readings: What was measured; what is missing could not be measured, or is gone.
        silenced: The rules that are silenced, and until when; '*' silences all.
        now: In seconds since 1970, as all times.
    """
    before = {(alert.name, alert.subject): alert for alert in instances}
    after: list[AlertInstance] = []
    transitions: list[AlertTransition] = []
    for key in [*before, *(key for key in readings if key not in before)]:
        is_silenced = is_silent(key[0], silenced, now)
        rule = rules.get(key[0])
        reading = None if rule is None else readings.get(key)
        instance = before.get(key)
        if rule is None or reading is None:
            instance, changes = _keep_unmeasured(instance, now)
        else:
            if instance is None and len(after) >= MAX_INSTANCES:
                continue
            instance, changes = _decide(rule, key[1], instance, reading, is_silenced, now)
        if instance is not None:
            after.append(instance)
        transitions += changes
    return AlertDecision(tuple(after), tuple(transitions))


def explain_unjudged(*, is_full: bool, evaluated: float | None, interval: float, now: float) -> str:
    """Return why nobody knows which alerts fire, in words; '' where it is known, or nobody has evaluated yet.

    Args:
        is_full: Whether the server that stores the alerts takes no writes.
        evaluated: When the rules were evaluated last, in seconds since 1970; None: not known.
        interval: Seconds between two evaluations.
        now: In seconds since 1970.
    """
    age = 0.0 if evaluated is None else now - evaluated
    since = f", the last evaluation was {format_age(now - age, now)}" if evaluated is not None else ""
    if is_full:
        return f"cannot be judged: Redis is full, and stores no alerts{since}"
    if age > max(LATE_AFTER, LATE_INTERVALS * interval):
        return f"cannot be judged: no process evaluates the rules{since}"
    return ""


def is_silent(name: str, silenced: Mapping[str, float], now: float) -> bool:
    """Return whether a rule is silenced."""
    return max(silenced.get(name, 0.0), silenced.get("*", 0.0)) > now


def _keep_unmeasured(
    instance: AlertInstance | None, now: float
) -> tuple[AlertInstance | None, list[AlertTransition]]:
    if instance is None:
        return None, []
    if now - instance.measured_at <= KEPT_UNMEASURED:
        words = instance.description.removesuffix(NOT_MEASURED) + NOT_MEASURED
        return msgspec.structs.replace(instance, description=words), []
    if instance.fired_at is None:
        return None, []
    gone = msgspec.structs.replace(instance, description="it is not measured any more")
    return None, [_make_transition("resolved", gone, now, is_silenced=not instance.is_notified)]


def _describe_held(rule: AlertRule, reading: AlertReading, fired_value: float | None, until: str) -> str:
    """Return in words why an alert fires whose value alone would not make it fire.

    Args:
        rule: Its rule.
        reading: What was measured now.
        fired_value: The value with which it fired; None where an earlier version has not kept it.
        until: When it resolves, in words.
    """
    fired = None if fired_value is None else format_value(rule.condition.measure, fired_value)
    return f"{reading.description}; {f'it fired at {fired}, and ' if fired else ''}resolves {until}"


def format_value(measure: Measure, value: float) -> str:
    """Return a value with its unit: `12 new dead letters`, `5 min`, `26 %`."""
    match measure:
        case "failures" | "memory":
            return f"{value * 100:.4g} %"
        case "oldest" | "stream-lag" | "loop-lag":
            return format_duration(value)
        case _:
            return format_count(math.floor(value), *_COUNTED_AS[measure])


def _decide(
    rule: AlertRule,
    subject: str,
    before: AlertInstance | None,
    reading: AlertReading,
    is_silenced: bool,
    now: float,
) -> tuple[AlertInstance | None, list[AlertTransition]]:
    """Return what becomes of one alert that is measured."""
    if (before is None or before.fired_at is None) and reading.value <= rule.condition.above:
        return None, []
    instance = AlertInstance(
        name=rule.name,
        subject=subject,
        severity=rule.severity,
        since=now if before is None else before.since,
        value=reading.value,
        above=rule.condition.above,
        description=reading.description,
        measured_at=now,
        fired_at=None if before is None else before.fired_at,
        fired_value=None if before is None else before.fired_value,
        is_notified=before is not None and before.is_notified,
    )
    if instance.fired_at is None:
        if now - instance.since < rule.for_:
            return instance, []
        fired = msgspec.structs.replace(
            instance, fired_at=now, fired_value=reading.value, is_notified=not is_silenced
        )
        return fired, [_make_transition("fired", fired, now, is_silenced=is_silenced)]
    if reading.value <= rule.condition.resolves_at:
        low_since = now if before is None or before.low_since is None else before.low_since
        if now - low_since >= rule.keep_firing_for:
            return None, [_make_transition("resolved", instance, now, is_silenced=not instance.is_notified)]
        until = f"when that has lasted {format_duration(rule.keep_firing_for)}"
        words = _describe_held(rule, reading, instance.fired_value, until)
        return msgspec.structs.replace(instance, low_since=low_since, description=words), []
    if reading.value <= rule.condition.above:
        until = f"at {format_value(rule.condition.measure, rule.condition.resolves_at)} or less"
        words = _describe_held(rule, reading, instance.fired_value, until)
        instance = msgspec.structs.replace(instance, description=words)
    if not instance.is_notified and not is_silenced:  # the silence is over, and it still fires
        noted = msgspec.structs.replace(instance, is_notified=True)
        return noted, [_make_transition("fired", noted, now, is_silenced=False)]
    return instance, []


def _make_transition(
    change: Change, instance: AlertInstance, now: float, *, is_silenced: bool
) -> AlertTransition:
    words = f"{instance.name}\n{instance.subject}\n{instance.since:.3f}\n{change}\n{is_silenced}"
    return AlertTransition(
        id="alert_" + hashlib.sha256(words.encode()).hexdigest()[:32],
        change=change,
        name=instance.name,
        subject=instance.subject,
        severity=instance.severity,
        at=now,
        since=instance.since,
        value=instance.value,
        above=instance.above,
        description=instance.description,
        silenced=is_silenced,
    )
