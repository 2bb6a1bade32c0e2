"""See what alerts fire and have fired, silence them, and try the webhook."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from celery5.operations.operation import Changed, Effect, Operation
from celery5.operations.parameters import Nothing, Text, about, as_duration
from celery5.protocol.observability.alerting import AlertRule, AlertTransition

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.observability.alerts import AlertState


async def list_alerts(app: "App", _: Nothing) -> "list[AlertState]":
    """Show each rule, and each of its alerts that is pending or fires."""
    return await app.alerts.alist()


async def list_rules(app: "App", _: Nothing) -> list[AlertRule]:
    """Show the rules: those of the application, of its settings, and those built in."""
    return list(app.alerts.rules())


class AlertHistory(msgspec.Struct, frozen=True):
    """How many alerts."""

    limit: Annotated[int, Meta(ge=1, le=500), about("Alerts at most.")] = 50


async def read_history(app: "App", asked: AlertHistory) -> list[AlertTransition]:
    """Show which alerts have fired and resolved, the newest first."""
    return await app.alerts.ahistory(limit=asked.limit)


class NewSilence(msgspec.Struct, frozen=True):
    """A rule to silence."""

    name: Annotated[Text, about("The rule; `*` for all rules.")]
    seconds: Annotated[
        float,
        as_duration(at_least=1, at_most=90 * 86400),
        about("For how long: 90 (seconds), 15m, 2h, 7d.", flag="--for", metavar="SPAN"),
    ] = 3600.0
    why: Annotated[str, Meta(max_length=500), about("Why, for others to read.")] = ""


async def silence(app: "App", asked: NewSilence) -> Changed:
    """Notify nobody of the alerts of a rule for some time."""
    silenced = await app.alerts.asilence(asked.name, asked.seconds, asked.why)
    return Changed(summary=f"{asked.name} is silenced for {asked.seconds:g} s", count=1, value=silenced)


class OneRule(msgspec.Struct, frozen=True):
    """A rule of alerts."""

    name: Annotated[Text, about("The rule.")]


async def unsilence(app: "App", asked: OneRule) -> Changed:
    """End the silence of a rule."""
    done = await app.alerts.aunsilence(asked.name)
    if not done:
        return Changed(summary="no silence is ended", count=0, failure=f"{asked.name} was not silenced")
    return Changed(summary=f"{asked.name}: not silenced any more", count=1)


async def try_webhook(app: "App", _: Nothing) -> Changed:
    """Send a test notification to the webhook, from the machine where this is done."""
    name = await app.alerts.atest()
    await app.audit.arecord_sending("alert:test", name)
    return Changed(summary=f"notification {name} is sent", count=1, value=name)


ALERT_OPERATIONS = (
    Operation("alert:list", list_alerts, result_module="celery5.observability.alerts"),
    Operation("alert:rules", list_rules),
    Operation("alert:history", read_history),
    Operation("alert:silence", silence, Effect.ADJUST),
    Operation("alert:unsilence", unsilence, Effect.ADJUST),
    Operation("alert:test", try_webhook, Effect.NOTIFY),
)
"""The operations on alerts."""
