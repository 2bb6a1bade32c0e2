"""Build the calls of events and subscriptions, of documents for Data Sinks, and of the lease of a Data Source."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, parse_int, script_call, to_ms
from celery5.broker.keys import EVENTS, GROUP, Keys, QueueKeys

DECLARE_SUBSCRIPTIONS = Script.load("events/declare_subscriptions")
GET_SUBSCRIBERS = Script.load("events/get_subscribers")
FINISH_EVENTS = Script.load("events/finish_events", "clock")
SHORTEN_WINDOWS = Script.load("events/shorten_windows")
UNSUBSCRIBE = Script.load("events/unsubscribe")

MAX_KEPT_EVENTS = 100_000
"""The most events of one subject that are kept without a subscriber; the oldest are deleted."""
UNCLAIMED_TTL = 7 * 86400.0
"""Seconds for which the counts of events without a subscriber are kept."""


class DeclarationResult(msgspec.Struct, frozen=True):
    """What came of a declaration: how many subscriptions were new or have `changed`, how many kept events were `sent`
    again, and the names of those that were taken `back`, and so are not in force."""

    changed: int
    sent: int
    unsubscribed: tuple[str, ...]


class SubscriptionRegistry(msgspec.Struct, frozen=True):
    """The subscriptions of an application, or what changed since the caller read them."""

    # The version of the registry.
    state: bytes
    # Subscriptions by name; None if the caller has this version.
    entries: dict[str, bytes] | None
    # Names of subscriptions that lapsed just now, since no process declares them any more.
    retired: tuple[str, ...]
    # Names of subscriptions that were taken back.
    unsubscribed: tuple[str, ...] = ()


class EventOutcome(msgspec.Struct, frozen=True):
    """How an event ends: `verb` is `done`, `keep` or `bury`; `detail` says why."""

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
    """Declare subscriptions (name, value), for this many seconds; up to `catch_up` kept events of these subjects are
    sent again."""
    events = keys.for_queue(EVENTS)
    named = (
        keys.subscriptions,
        keys.subscription_deadlines,
        events.stream,
        events.jobs,
        *map(keys.kept_events, subjects),
    )
    words: tuple[Word, ...] = tuple(word for subscription in subscriptions for word in subscription)
    args = (to_ms(ttl), catch_up, len(subscriptions), *words)
    return script_call(DECLARE_SUBSCRIPTIONS, named, args, _declared, repeatable=True)


def set_unsubscribed(keys: Keys, name: str, *, ttl: float, unsubscribed: bool = True) -> Call[bool]:
    """Take a subscription back, or allow it again. Return whether that changed something."""
    args = (name, int(unsubscribed), to_ms(ttl))
    return script_call(
        UNSUBSCRIBE, (keys.subscriptions, keys.subscription_deadlines), args, bool, repeatable=True
    )


def get_subscribers(keys: Keys, known_state: bytes) -> Call[SubscriptionRegistry]:
    """Return the subscriptions, unless the registry still is in `known_state`."""
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
    kept = [keys.kept_events(outcome.subject) for outcome in outcomes]
    named = (events.stream, events.jobs, events.dead, keys.subscriptions, keys.unclaimed_events, *kept)
    words: tuple[Word, ...] = tuple(
        word
        for outcome in outcomes
        for word in (
            outcome.verb,
            outcome.entry,
            outcome.id,
            outcome.subject,
            outcome.message,
            outcome.detail,
        )
    )
    args = (GROUP, router, known_state, to_ms(retention), MAX_KEPT_EVENTS, to_ms(UNCLAIMED_TTL), *words)
    return script_call(FINISH_EVENTS, named, args, _verdicts, repeatable=True)


def shorten_windows(keys: QueueKeys, locks: Sequence[str], *, ttl: float) -> Call[int]:
    """Remember for this many seconds only that these jobs were sent."""
    return script_call(
        SHORTEN_WINDOWS, tuple(map(keys.unique_window, locks)), (to_ms(ttl),), int, repeatable=True
    )


def count_unclaimed(keys: Keys) -> Call[dict[str, int]]:
    """Return how many recent events had no subscriber, by subject."""
    return Call(("HGETALL", keys.unclaimed_events), _counts, repeatable=True)


def is_app_known(keys: Keys) -> Call[bool]:
    """Return whether the application has sent events, or has a Router."""
    return Call(("EXISTS", keys.for_queue(EVENTS).stream), bool, repeatable=True)


def count_kept_events(keys: Keys, subject: str) -> Call[int]:
    """Return how many events of a subject are kept."""
    return Call(("XLEN", keys.kept_events(subject)), int, repeatable=True)


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    words = [word for pair in flat.items() for word in pair] if hasattr(flat, "items") else flat
    return list(zip(words[::2], words[1::2], strict=True))


def _declared(raw: Any) -> DeclarationResult:
    changed, sent, back = raw
    return DeclarationResult(int(changed), int(sent), tuple(decode_text(word) for word in back))


def _registry(raw: Any) -> SubscriptionRegistry:
    state, flat, gone = raw
    pairs = [(decode_text(name), value) for name, value in _pairs(flat) if name]
    entries = {name: value for name, value in pairs if value}
    back = tuple(name for name, value in pairs if not value)
    retired = tuple(decode_text(word) for word in gone)
    return SubscriptionRegistry(
        msgspec.convert(state, bytes), entries if flat or state == b"0" else None, retired, back
    )


def _counts(raw: Any) -> dict[str, int]:
    return {decode_text(name): parse_int(count) for name, count in _pairs(raw)}


CLAIM_DOCUMENTS = Script.load("events/claim_documents", "clock")
ACKNOWLEDGE_DOCUMENTS = Script.load("events/acknowledge_documents")
DEFER_DOCUMENTS = Script.load("events/defer_documents", "clock")
DEAD_LETTER_DOCUMENT = Script.load("events/dead_letter_document")
REDELIVER_DOCUMENTS = Script.load("events/redeliver_documents")
DECLARE_RECIPIENTS = Script.load("events/declare_recipients")

RECIPIENTS_TTL = 30 * 86400.0
"""Seconds for which the recipients of documents are kept after their last declaration."""


class ClaimedDocument(msgspec.Struct, frozen=True):
    """A document that this Router has for a sink: its entry, its bytes, and how often it was tried in vain."""

    entry: str
    document: bytes
    tries: int


class ClaimedDocuments(msgspec.Struct, frozen=True):
    """What was taken, and in how many seconds there may be more that nobody can take now; None when there is none."""

    documents: Sequence[ClaimedDocument]
    retry_in: float | None


def claim_documents(
    keys: QueueKeys, sink: str, *, max_documents: int, max_bytes: int, lease: float
) -> Call[ClaimedDocuments]:
    """Take documents for a sink, of `max_bytes` together, for `lease` seconds; then others may take them, and what a
    lost answer carried."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(CLAIM_DOCUMENTS, named, (max_documents, max_bytes, to_ms(lease)), _claimed_documents)


def acknowledge_documents(keys: QueueKeys, sink: str, entries: Sequence[str]) -> Call[int]:
    """Delete documents that the sink has stored."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(ACKNOWLEDGE_DOCUMENTS, named, (*entries,), int, repeatable=True)


def defer_documents(
    keys: QueueKeys, sink: str, entries: Sequence[str], *, delay: float, tried: bool
) -> Call[int]:
    """Let others have them after `delay` seconds. That they were `tried` in vain is counted, so it is not repeated."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(
        DEFER_DOCUMENTS, named, (to_ms(delay), int(tried), *entries), int, repeatable=not tried
    )


def dead_letter_document(keys: QueueKeys, sink: str, entry: str, failure: bytes) -> Call[int]:
    """Move a document that the sink refused to the dead-letter queue."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink), keys.dead)
    return script_call(DEAD_LETTER_DOCUMENT, named, (entry, sink, failure), int, repeatable=True)


def redeliver_documents(keys: QueueKeys, entries: Sequence[str]) -> Call[list[int]]:
    """Deliver dead documents to their sinks again. Return DONE or GONE for each, as `dead_letters` has them."""
    return script_call(
        REDELIVER_DOCUMENTS, (keys.dead, keys.documents), (*entries,), _verdicts, repeatable=True
    )


def declare_recipients(keys: QueueKeys, sinks: Mapping[str, str]) -> Call[int]:
    """Record which sinks take which documents (`names`, by final state and task)."""
    args: tuple[Word, ...] = tuple([word for sink in sinks.items() for word in sink])
    return script_call(
        DECLARE_RECIPIENTS, (keys.documents,), (to_ms(RECIPIENTS_TTL), *args), int, repeatable=True
    )


def count_documents(keys: QueueKeys, sink: str) -> Call[int]:
    """Return how many documents wait for the sink."""
    return Call(("XLEN", keys.documents_for(sink)), int, repeatable=True)


def _claimed_documents(raw: Any) -> ClaimedDocuments:
    found, next_in = raw
    taken = [ClaimedDocument(decode_text(entry), document, tries) for entry, document, tries in found]
    return ClaimedDocuments(taken, None if next_in < 0 else next_in / 1000)


def _verdicts(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])
