"""See what alerts fire, and silence them: `app.alerts`."""

import builtins
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from celery5.application import Application
from celery5.audit.actor import get_actor_name
from celery5.audit.recording import perform_audited
from celery5.broker.calls import alerts as calls
from celery5.broker.calls.alerts import MAX_SILENCE, MAX_TRANSITIONS, AlertSilence
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.colour import blocking, run_in_thread
from celery5.broker.driver import AsyncDriver
from celery5.errors import Misconfigured, UnknownName
from celery5.observability import webhook as webhooks
from celery5.observability.alert_declaration import DeclareAlert
from celery5.observability.storage import read_broker_memory, read_memory
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.counts import format_count
from celery5.protocol.health.server_memory import ServerMemory
from celery5.protocol.observability.alert_messages import make_alert_message
from celery5.protocol.observability.alert_rules import MeasuredCluster, read_conditions
from celery5.protocol.observability.alerting import (
    AlertInstance,
    AlertReading,
    AlertRule,
    AlertStatus,
    AlertTransition,
    Severity,
    UndeliveredNotification,
    explain_unjudged,
    is_silent,
)
from celery5.similar_names import join_names, suggest_known

ALL = "*"
"""The name that silences all rules."""


class AlertState(msgspec.Struct, frozen=True, kw_only=True):
    """A rule of which nothing is wrong, or one alert that is pending or firing."""

    name: str
    # The queue, task or group: `queue mail`; '' for the cluster, and for a rule that is inactive.
    subject: str
    # `inactive`, `pending`, `firing`, `silenced`: it fires, and nobody is notified; or `unknown`: nobody can judge it.
    status: AlertStatus
    severity: Severity
    # The threshold.
    above: float
    # What was measured last; None for nothing that is too high. With which value it fired; None for never, and where an
    # earlier version has not kept it.
    value: float | None = None
    fired_value: float | None = None
    # When that was measured, and so how old the description is; None for nothing that is too high.
    measured_at: float | None = None
    # Since when it is too high, and when it fired, in seconds since 1970; None for never.
    since: float | None = None
    fired_at: float | None = None
    description: str = ""
    # Until when the rule is silenced, who did it and why; None when it is not.
    silence: AlertSilence | None = None
    # Its last notification, if the webhook has not taken it; None otherwise.
    undelivered: UndeliveredNotification | None = None
    # Why it is not known whether that holds now: `cannot be judged: Redis is full ...`; '' where it is known.
    unjudged: str = ""

    @property
    def fires(self) -> bool:
        """Whether it fires, and is not silenced."""
        return self.status == "firing"


class Alerts:
    """The alerts of an application: `app.alerts`."""

    REACHED_AS: ClassVar[str] = "app.alerts."

    def __init__(self, app: Application, declared: DeclareAlert) -> None:
        self._app = app
        self._declared = declared

    def rules(self) -> tuple[AlertRule, ...]:
        """Return all rules: those of the application and those built in. Raises Misconfigured."""
        return self._declared.resolve(self._app.settings, self._app.tasks)

    @property
    def webhook(self) -> "webhooks.AlertWebhook | None":
        """Where notifications are sent. Raises Misconfigured."""
        settings = self._app.settings
        if not settings.alert_webhook:
            return None
        return webhooks.parse_webhook(settings.alert_webhook, settings.alert_webhook_secret)

    async def alist(self) -> builtins.list[AlertState]:
        """Return each rule, or each of its alerts that is pending or firing.

        An alert whose last notification the webhook has not taken is there for a day, also when it is resolved. While
        the rules cannot be evaluated, those on memory are judged here and now, and the others are `unknown`.
        """
        rules = self.rules()
        redis = await self._app.connections.get_async_driver()
        states = await _list(self._app, redis, rules)
        unjudged = await _explain_unjudged(self._app, redis)
        if unjudged:
            memory = await read_memory(self._app, partial(_get_driver, self._app))
            states = _judge_now(states, rules, memory, unjudged)
        return states

    @blocking(alist)
    def list(self) -> None: ...

    async def asilence(self, name: str, seconds: float, why: str = "") -> AlertSilence:
        """Notify nobody of a rule's alerts for some time, `*` for those of all rules.

        If it still fires then, a notification is sent.

        Raises:
            Misconfigured: There is no such rule, or the time is longer than 30 days.
        """
        silence = self._make_silence(name, seconds, why)
        redis = await self._app.connections.get_async_driver()
        await _silence(self._app, redis, silence, seconds)
        return silence

    @blocking(asilence)
    def silence(self) -> None: ...

    async def aunsilence(self, name: str) -> bool:
        """End the silence of a rule. Return whether there was one."""
        redis = await self._app.connections.get_async_driver()
        return await _unsilence(self._app, redis, name)

    @blocking(aunsilence)
    def unsilence(self) -> None: ...

    async def ahistory(self, *, limit: int = MAX_TRANSITIONS) -> builtins.list[AlertTransition]:
        """Return what has fired or resolved, the newest first: the last 500 at most."""
        redis = await self._app.connections.get_async_driver()
        return await _read_history(self._app, redis, limit)

    @blocking(ahistory)
    def history(self) -> None: ...

    async def atest(self) -> str:
        """Send a test notification to the webhook from this process; return its id.

        Raises:
            Misconfigured: There is no webhook.
            WebhookRefused: The notification did not arrive, or was refused.
        """
        webhook, name, body = self._make_test()
        await run_in_thread(lambda: webhook.post(name, body, time.time()))
        return name

    @blocking(atest)
    def test(self) -> None: ...

    def _make_test(self) -> "tuple[webhooks.AlertWebhook, str, bytes]":
        webhook, now = self.webhook, time.time()
        if webhook is None:
            raise Misconfigured("there is no webhook: set alert_webhook and alert_webhook_secret")
        transition = AlertTransition(
            id=f"alert_test_{now * 1000:.0f}",
            change="fired",
            name="test",
            subject="",
            severity="warning",
            at=now,
            since=now,
            value=0,
            above=0,
            description=f"a test, sent by {get_actor_name()}",
        )
        return webhook, transition.id, make_alert_message(self._app.name, transition, is_test=True)

    def _make_silence(self, name: str, seconds: float, why: str) -> AlertSilence:
        names = [rule.name for rule in self.rules()]
        if name != ALL and name not in names:
            raise UnknownName(f"there is no alert {name!r}; {suggest_known(name, names)}")
        if isinstance(seconds, bool) or not 0 < seconds <= MAX_SILENCE or math.isnan(seconds):
            raise Misconfigured(f"seconds is {seconds!r}: give up to {MAX_SILENCE:.0f}, which is 30 days")
        return AlertSilence(name=name, until=time.time() + seconds, by=get_actor_name(), why=why)


def summarize_alerts(states: Sequence[AlertState]) -> str:
    """Return one line on what fires, and on notifications that do not arrive; '' for nothing."""
    firing = [
        f"{state.name} ({state.subject})" if state.subject else state.name for state in states if state.fires
    ]
    undelivered = sum(state.undelivered is not None for state in states)
    parts = [join_names(firing, 5)] if firing else []
    if unjudged := describe_unjudged(states):
        parts.append(unjudged)
    if undelivered:
        of = f"{undelivered} alert{'s' if undelivered > 1 else ''}"
        parts.append(f"the webhook has not taken the last notification of {of}")
    return "; ".join(parts)


def describe_unjudged(states: Sequence[AlertState]) -> str:
    """Return in words that alerts cannot be judged, how many and why; '' where all can."""
    found = [state for state in states if state.status == "unknown"]
    return f"{format_count(len(found), 'alert')} {found[0].unjudged}" if found else ""


async def _get_driver(app: Application, broker: str) -> AsyncDriver:
    return await app.brokers.get(broker).get_async_driver()


async def _explain_unjudged(app: Application, redis: AsyncDriver) -> str:
    """Return why it is not known now which alerts fire; '' where it is."""
    memory = await read_broker_memory(DEFAULT_BROKER, redis)
    evaluated = (await redis.perform(calls.read_alerts(app.keys))).evaluated
    return explain_unjudged(
        is_full=memory is not None and memory.is_full,
        evaluated=evaluated,
        interval=app.settings.metrics_interval,
        now=await redis.perform(SERVER_TIME),
    )


def _judge_now(
    states: Sequence[AlertState],
    rules: Sequence[AlertRule],
    memory: Sequence[ServerMemory],
    unjudged: str,
) -> builtins.list[AlertState]:
    """Return the states while the rules cannot be evaluated.

    How full memory is can be read all the same. What fired at the last evaluation is likely to fire still, so it says
    so; of what did not, nothing is known.
    """
    on_memory = {rule.name: rule for rule in rules if rule.condition.measure == "memory"}
    judged = dict[str, builtins.list[AlertState]]()
    for rule in on_memory.values():
        found = {state.subject: state for state in states if state.name == rule.name}
        judged[rule.name] = [
            _judge_memory(rule, subject, reading, found)
            for (_, subject), reading in read_conditions([rule], _measure(memory), ()).items()
        ]
    result = builtins.list[AlertState]()
    for state in states:
        if state.name in on_memory:
            result += judged.pop(state.name, [])
        elif state.status == "inactive":
            result.append(
                msgspec.structs.replace(state, status="unknown", description=unjudged, unjudged=unjudged)
            )
        else:
            words = f"{state.description}; {unjudged}"
            result.append(msgspec.structs.replace(state, description=words, unjudged=unjudged))
    return result


def _measure(memory: Sequence[ServerMemory]) -> MeasuredCluster:
    return MeasuredCluster(at=time.time(), memory=tuple(memory))


def _judge_memory(
    rule: AlertRule, subject: str, reading: AlertReading, states: Mapping[str, AlertState]
) -> AlertState:
    """Return the state of an alert on memory by what was read just now."""
    before = states.get(subject)
    silence = next((state.silence for state in states.values()), None)
    is_high = reading.value > rule.condition.above
    status: AlertStatus = "inactive" if not is_high else "silenced" if silence is not None else "firing"
    return AlertState(
        name=rule.name,
        subject=subject if is_high else "",
        status=status,
        severity=rule.severity,
        above=rule.condition.above,
        value=reading.value if is_high else None,
        fired_value=before.fired_value if before is not None and is_high else None,
        measured_at=time.time() if is_high else None,
        since=before.since if before is not None and is_high else None,
        fired_at=before.fired_at if before is not None and is_high else None,
        description=reading.description if is_high else "",
        silence=silence,
        undelivered=None if before is None else before.undelivered,
    )


async def _list(
    app: Application, redis: AsyncDriver, rules: tuple[AlertRule, ...]
) -> builtins.list[AlertState]:
    read = await redis.perform(calls.read_alerts(app.keys))
    silences = await redis.perform(calls.read_silences(app.keys))
    undelivered = await redis.perform(calls.read_undelivered(app.keys))
    now = time.time()
    live = {name: silence for name, silence in silences.items() if silence.until > now}
    by_rule: dict[str, builtins.list[AlertInstance]] = {}
    for instance in read.stored.instances:
        by_rule.setdefault(instance.name, []).append(instance)
    states: builtins.list[AlertState] = []
    for rule in rules:
        found = by_rule.pop(rule.name, [])
        if not found:
            silence = live.get(rule.name, live.get(ALL))
            states.append(
                AlertState(
                    name=rule.name,
                    subject="",
                    status="inactive",
                    severity=rule.severity,
                    above=rule.condition.above,
                    silence=silence,
                )
            )
        states += [_make_state(instance, live, now) for instance in found]
    # What rules have found that other processes declare.
    states += [_make_state(instance, live, now) for found in by_rule.values() for instance in found]
    states = [
        msgspec.structs.replace(state, undelivered=undelivered.pop((state.name, state.subject), None))
        for state in states
    ]
    above = {rule.name: rule.condition.above for rule in rules}
    severities: dict[str, Severity] = {rule.name: rule.severity for rule in rules}
    states += [
        AlertState(
            name=name,
            subject=subject,
            status="inactive",
            severity=severities.get(name, "warning"),
            above=above.get(name, 0.0),
            undelivered=notification,
        )
        for (name, subject), notification in undelivered.items()
    ]
    return states


def _make_state(instance: AlertInstance, live: Mapping[str, AlertSilence], now: float) -> AlertState:
    until = {name: silence.until for name, silence in live.items()}
    is_silenced = instance.status == "firing" and is_silent(instance.name, until, now)
    return AlertState(
        name=instance.name,
        subject=instance.subject,
        status="silenced" if is_silenced else instance.status,
        severity=instance.severity,
        above=instance.above,
        value=instance.value,
        fired_value=instance.fired_value,
        measured_at=instance.measured_at,
        since=instance.since,
        fired_at=instance.fired_at,
        description=instance.description,
        silence=live.get(instance.name, live.get(ALL)),
    )


async def _silence(app: Application, redis: AsyncDriver, silence: AlertSilence, seconds: float) -> bool:
    call = calls.set_silence(app.keys, silence, seconds=seconds)
    how = {"seconds": seconds, "why": silence.why}
    return await perform_audited(app, redis, call, "alert:silence", silence.name, how)


async def _unsilence(app: Application, redis: AsyncDriver, name: str) -> bool:
    call = calls.set_silence(app.keys, AlertSilence(name=name, until=0), seconds=0)
    return await perform_audited(app, redis, call, "alert:unsilence", name)


async def _read_history(app: Application, redis: AsyncDriver, limit: int) -> builtins.list[AlertTransition]:
    if isinstance(limit, bool) or not limit >= 1:
        raise Misconfigured(f"limit is {limit!r}: give 1 or more")
    return await redis.perform(calls.read_alert_history(app.keys, count=limit))
