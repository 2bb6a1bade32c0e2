"""Events: the trips to Redis of events and subscriptions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, parse_int, script_call
from celery5.broker.keys import EVENTS, GROUP, Keys, QueueKeys

DECLARE_SUBSCRIPTIONS = Script.load("events/declare_subscriptions")
GET_SUBSCRIBERS = Script.load("events/get_subscribers")
FINISH_EVENTS = Script.load("events/finish_events")
SHORTEN_WINDOWS = Script.load("events/shorten_windows")
UNSUBSCRIBE = Script.load("events/unsubscribe")

MAX_KEPT_EVENTS = 100_000
"""Events of one subject that are kept at most, if nobody wants them; the oldest go."""
UNCLAIMED_TTL = 7 * 86400.0
"""Seconds for which it is remembered how many events nobody wanted."""


class DeclarationResult(msgspec.Struct, frozen=True):
    """What came of a declaration: how many subscriptions were new or have `changed`, how many kept events were `sent`
    again, and the names of those that were taken `back`, and so are not in force."""

    changed: int
    sent: int
    unsubscribed: tuple[str, ...]


class SubscriptionRegistry(msgspec.Struct, frozen=True):
    """The answer to who is subscribed: which `state` the registry has, the `entries` by name, or None when they are
    known, the names of those that were `retired` just now, and of those that were taken `back`."""

    state: bytes
    entries: dict[str, bytes] | None
    retired: tuple[str, ...]
    unsubscribed: tuple[str, ...] = ()


class EventOutcome(msgspec.Struct, frozen=True):
    """How an event ends: `done`, `keep` or `bury`, and `why`."""

    verb: str
    entry: bytes
    id: str
    subject: str
    message: bytes
    detail: bytes = b""


def declare_subscriptions(
    keys: Keys,
    subscriptions: Sequence[tuple[str, bytes]],
    subjects: Sequence[str],
    *,
    ttl: float,
    catch_up: int,
) -> Call[DeclarationResult]:
    """Declare subscriptions (name, value), for so many seconds; up to `catch_up` kept events of these subjects are sent
    again."""
    events = keys.for_queue(EVENTS)
    named = (
        keys.subscriptions,
        keys.subscription_deadlines,
        events.stream,
        events.jobs,
        *map(keys.kept_events, subjects),
    )
    words: tuple[Word, ...] = tuple(word for each in subscriptions for word in each)
    args = (_ms(ttl), catch_up, len(subscriptions), *words)
    return script_call(DECLARE_SUBSCRIPTIONS, named, args, _declared, repeatable=True)


def set_unsubscribed(keys: Keys, name: str, *, ttl: float, unsubscribed: bool = True) -> Call[bool]:
    """Take a subscription back, or, with `back` False, allow it again. Gives whether that changed something."""
    args = (name, int(unsubscribed), _ms(ttl))
    return script_call(
        UNSUBSCRIBE, (keys.subscriptions, keys.subscription_deadlines), args, bool, repeatable=True
    )


def get_subscribers(keys: Keys, known_state: bytes) -> Call[SubscriptionRegistry]:
    """Who is subscribed, unless the registry is as `known`."""
    return script_call(
        GET_SUBSCRIBERS,
        (keys.subscriptions, keys.subscription_deadlines),
        (known_state,),
        _registry,
        repeatable=True,
    )


def finish_events(
    keys: Keys,
    events: QueueKeys,
    router: str,
    outcomes: Sequence[EventOutcome],
    *,
    known_state: bytes,
    retention: float,
) -> Call[list[int]]:
    """End events; see `finish_events.lua`."""
    kept = [keys.kept_events(each.subject) for each in outcomes]
    named = (events.stream, events.jobs, events.dead, keys.subscriptions, keys.unclaimed_events, *kept)
    words: tuple[Word, ...] = tuple(
        word
        for each in outcomes
        for word in (each.verb, each.entry, each.id, each.subject, each.message, each.detail)
    )
    args = (GROUP, router, known_state, _ms(retention), MAX_KEPT_EVENTS, _ms(UNCLAIMED_TTL), *words)
    return script_call(FINISH_EVENTS, named, args, _verdicts, repeatable=True)


def shorten_windows(keys: QueueKeys, locks: Sequence[str], *, ttl: float) -> Call[int]:
    """Remember for so many seconds only that these jobs were sent."""
    return script_call(
        SHORTEN_WINDOWS, tuple(map(keys.unique_window, locks)), (_ms(ttl),), int, repeatable=True
    )


def count_unclaimed(keys: Keys) -> Call[dict[str, int]]:
    """How many events nobody has wanted lately, by subject."""
    return Call(("HGETALL", keys.unclaimed_events), _counts, repeatable=True)


def is_app_known(keys: Keys) -> Call[bool]:
    """Whether there is such an application: one whose events have been sent, or that has a Router."""
    return Call(("EXISTS", keys.for_queue(EVENTS).stream), bool, repeatable=True)


def count_kept_events(keys: Keys, subject: str) -> Call[int]:
    """How many events of a subject are kept."""
    return Call(("XLEN", keys.kept_events(subject)), int, repeatable=True)


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    words = [word for pair in flat.items() for word in pair] if hasattr(flat, "items") else flat
    return list(zip(words[::2], words[1::2], strict=True))


def _declared(raw: Any) -> DeclarationResult:
    changed, sent, back = raw
    return DeclarationResult(int(changed), int(sent), tuple(decode_text(each) for each in back))


def _registry(raw: Any) -> SubscriptionRegistry:
    state, flat, gone = raw
    pairs = [(decode_text(name), value) for name, value in _pairs(flat) if name]
    entries = {name: value for name, value in pairs if value}
    back = tuple(name for name, value in pairs if not value)
    retired = tuple(decode_text(each) for each in gone)
    return SubscriptionRegistry(
        msgspec.convert(state, bytes), entries if flat or state == b"0" else None, retired, back
    )


def _verdicts(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])


def _counts(raw: Any) -> dict[str, int]:
    return {decode_text(name): parse_int(count) for name, count in _pairs(raw)}


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
