"""Build the calls that keep the state, the notifications and the silences of alerts."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, script_call, to_ms
from celery5.broker.keys import Keys
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.observability.alert_rules import StoredAlerts
from celery5.protocol.observability.alerting import AlertKey, AlertTransition, UndeliveredNotification

SAVE_ALERTS = Script.load("observability/save_alerts", "clock")
NOTE_DELIVERY = Script.load("observability/note_delivery")
SET_SILENCE = Script.load("observability/set_silence")

STATE_TTL = 86_400.0
"""Seconds that alerts and notifications stay after the last evaluation."""
HISTORY_TTL = 90 * 86_400.0
"""Seconds that the history stays after the last alert."""
MAX_TRANSITIONS = 500
"""Alerts in the history, and notifications that wait."""
MAX_SILENCE = 30 * 86_400.0
"""The longest silence, in seconds."""


class AlertsRead(NamedTuple):
    """The alerts that are pending or firing."""

    # Changes whenever they are saved; '' when they never were.
    revision: str
    stored: StoredAlerts
    # When the rules were evaluated last, by the clock of Redis, in seconds since 1970; None: not known.
    evaluated: float | None = None


class AlertSilence(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that is silenced: nobody is notified of its alerts."""

    # `*` for all rules.
    name: str
    # In seconds since 1970.
    until: float
    by: str = ""
    why: str = ""


class WaitingNotification(NamedTuple):
    """A notification that is not sent yet."""

    id: str
    # None for one that cannot be read.
    transition: AlertTransition | None

    @property
    def alert(self) -> AlertKey:
        """The alert that it is of."""
        return ("", "") if self.transition is None else (self.transition.name, self.transition.subject)

    @property
    def at(self) -> float:
        """When it was decided on, by the clock of Redis, in seconds since 1970."""
        return int(self.id.partition("-")[0]) / 1000


def read_alerts(keys: Keys) -> Call[AlertsRead]:
    """Return the alerts that are pending or firing."""
    words = ("HMGET", keys.alerts, "revision", "alerts", "evaluated")
    return Call(words, _alerts, repeatable=True)


def save_alerts(
    keys: Keys,
    process: str,
    revision: str,
    stored: StoredAlerts,
    transitions: Sequence[AlertTransition],
) -> Call[str]:
    """Save alerts and their notifications; return the new revision.

    It returns '' and changes nothing when it is not the turn of `process`, or the revision is another one.
    """
    named = (keys.metrics_turn, keys.alerts, keys.alert_outbox, keys.alert_history)
    flat: list[Word] = []
    for transition in transitions:
        flat += [0 if transition.silenced else 1, msgspec.json.encode(transition)]
    words = (
        process,
        revision,
        stored.pack(),
        to_ms(STATE_TTL),
        to_ms(HISTORY_TTL),
        MAX_TRANSITIONS,
        *flat,
    )
    return script_call(SAVE_ALERTS, named, words, decode_text)


def read_outbox(keys: Keys, *, count: int = MAX_TRANSITIONS) -> Call[list[WaitingNotification]]:
    """Return notifications that are not sent yet, the oldest first."""
    return Call(("XRANGE", keys.alert_outbox, "-", "+", "COUNT", count), _notifications, repeatable=True)


def note_delivery(
    keys: Keys, notification: WaitingNotification, failure: UndeliveredNotification | None = None
) -> Call[bool]:
    """Store what became of a notification. It is removed when it was taken, or is dropped.

    Args:
        notification: The notification.
        failure: Why the webhook did not take it; None: it did.
    """
    is_done = failure is None or failure.is_dropped
    words = (
        notification.id if is_done else "",
        _name_alert(notification.alert),
        b"" if failure is None else msgspec.json.encode(failure),
        to_ms(STATE_TTL),
        MAX_TRANSITIONS,
    )
    named = (keys.alert_outbox, keys.alert_undelivered)
    return script_call(NOTE_DELIVERY, named, words, bool, repeatable=True)


def read_undelivered(keys: Keys) -> Call[dict[AlertKey, UndeliveredNotification]]:
    """Return the last notification of each alert that the webhook has not taken."""
    return Call(("HVALS", keys.alert_undelivered), _undelivered, repeatable=True)


def set_logged(keys: Keys, notification: str) -> Call[bool]:
    """Store which notification was logged last."""
    words = ("SET", keys.alert_logged, notification, "PX", to_ms(STATE_TTL))
    return Call(words, bool, repeatable=True)


def read_logged(keys: Keys) -> Call[str]:
    """Return the id of the last notification that was logged; '' for none."""
    return Call(("GET", keys.alert_logged), lambda raw: decode_text(raw or b""), repeatable=True)


def read_alert_history(keys: Keys, *, count: int) -> Call[list[AlertTransition]]:
    """Return alerts that fired or resolved, the newest first."""
    return Call(("XREVRANGE", keys.alert_history, "+", "-", "COUNT", count), _transitions, repeatable=True)


def set_silence(keys: Keys, silence: AlertSilence, *, seconds: float) -> Call[bool]:
    """Silence a rule for this many seconds; 0 ends its silence. Return whether something has changed."""
    until = to_ms(silence.until) if seconds else 0
    words = (silence.name, until, msgspec.json.encode(silence), max(1, to_ms(seconds)))
    return script_call(SET_SILENCE, (keys.alert_silences,), words, bool, repeatable=True)


def read_silences(keys: Keys) -> Call[dict[str, AlertSilence]]:
    """Return the silences by rule, also those that are over."""
    return Call(("HGETALL", keys.alert_silences), _silences, repeatable=True)


def _alerts(raw: Any) -> AlertsRead:
    revision, packed, evaluated = raw
    at = read_whole(decode_text(evaluated or b"")) / 1000
    return AlertsRead(decode_text(revision or b""), StoredAlerts.unpack(packed), at or None)


def _decode(content: bytes) -> AlertTransition | None:
    try:
        return msgspec.json.decode(content, type=AlertTransition)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _notifications(raw: Any) -> list[WaitingNotification]:
    return [WaitingNotification(decode_text(entry[0]), _decode(entry[1][1])) for entry in raw or ()]


def _name_alert(alert: AlertKey) -> str:
    """Return the field of an alert."""
    return "\n".join(alert)


def _undelivered(raw: Any) -> dict[AlertKey, UndeliveredNotification]:
    found: dict[AlertKey, UndeliveredNotification] = {}
    for content in raw or ():
        with suppress(msgspec.MsgspecError, RecursionError):
            notification = msgspec.json.decode(content, type=UndeliveredNotification)
            found[notification.name, notification.subject] = notification
    return found


def _transitions(raw: Any) -> list[AlertTransition]:
    return [transition for entry in raw or () if (transition := _decode(entry[1][1])) is not None]


def _silences(raw: Any) -> dict[str, AlertSilence]:
    silences: dict[str, AlertSilence] = {}
    # RESP3 has maps.
    words: Sequence[bytes] = [word for pair in raw.items() for word in pair] if hasattr(raw, "items") else raw
    for name, content in zip(words[::2], words[1::2], strict=True):
        try:
            silences[decode_text(name)] = msgspec.json.decode(content, type=AlertSilence)
        except (msgspec.MsgspecError, RecursionError):
            continue
    return silences
