"""See what alerts fire and have fired, silence them, and try the webhook."""

from typing import Annotated

import msgspec
from msgspec import Meta

from celery5.app import App
from celery5.observability.alerts import AlertState
from celery5.operations.operation import Changed, Effect, Nothing, Operation, Text
from celery5.protocol.observability.alerting import AlertRule, AlertTransition


async def list_alerts(app: App, _: Nothing) -> list[AlertState]:
    """Show each rule, and each of its alerts that is pending or fires."""
    return await app.alerts.alist()


async def list_rules(app: App, _: Nothing) -> list[AlertRule]:
    """Show the rules: those of the application, of its settings, and those built in."""
    return list(app.alerts.rules())


class AlertHistory(msgspec.Struct, frozen=True):
    """How many alerts."""

    count: Annotated[int, Meta(ge=1, le=500)] = 50


async def read_history(app: App, asked: AlertHistory) -> list[AlertTransition]:
    """Show which alerts have fired and resolved, the newest first."""
    return await app.alerts.ahistory(count=asked.count)


class NewSilence(msgspec.Struct, frozen=True):
    """A rule to silence."""

    # Its name; `*` for all rules.
    name: Text
    # For so many seconds.
    seconds: Annotated[float, Meta(ge=1, le=90 * 86400)] = 3600.0
    why: Annotated[str, Meta(max_length=500)] = ""


async def silence(app: App, asked: NewSilence) -> Changed:
    """Notify nobody of the alerts of a rule for some time."""
    await app.alerts.asilence(asked.name, asked.seconds, asked.why)
    return Changed(summary=f"{asked.name} is silenced for {asked.seconds:g} s", count=1)


class OneRule(msgspec.Struct, frozen=True):
    """A rule of alerts."""

    name: Text


async def unsilence(app: App, asked: OneRule) -> Changed:
    """End the silence of a rule."""
    done = await app.alerts.aunsilence(asked.name)
    return Changed(
        summary=f"{asked.name} {'notifies again' if done else 'was not silenced'}", count=int(done)
    )


async def try_webhook(app: App, _: Nothing) -> Changed:
    """Send a test notification to the webhook, from the machine of the dashboard."""
    name = await app.alerts.atest()
    await app.audit.arecord_sending("alert:test", name)
    return Changed(summary=f"notification {name} is sent", count=1)


ALERT_OPERATIONS = (
    Operation("alert:list", list_alerts),
    Operation("alert:rules", list_rules),
    Operation("alert:history", read_history),
    Operation("alert:silence", silence, Effect.CHANGE),
    Operation("alert:unsilence", unsilence, Effect.CHANGE),
    Operation("alert:test", try_webhook, Effect.CHANGE),
)
"""The operations on alerts."""
