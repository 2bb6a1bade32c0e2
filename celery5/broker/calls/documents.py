"""Documents: the trips by which documents come to Data Sinks, and by which a Data Source is held."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, script_call
from celery5.broker.keys import QueueKeys

CLAIM_DOCUMENTS = Script.load("events/claim_documents")
ACKNOWLEDGE_DOCUMENTS = Script.load("events/acknowledge_documents")
DEFER_DOCUMENTS = Script.load("events/defer_documents")
BURY_DOCUMENT = Script.load("events/bury_document")
REDELIVER_DOCUMENTS = Script.load("events/redeliver_documents")
DECLARE_RECIPIENTS = Script.load("events/declare_recipients")
ACQUIRE_LEASE = Script.load("events/acquire_lease")
RELEASE_LEASE = Script.load("events/release_lease")

RECIPIENTS_TTL = 30 * 86400.0
"""Seconds for which it is remembered which sinks take what, after the last process that said so."""


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
    """Take documents for a sink, of `room` bytes together, for `lease` seconds; then others may take them, and what a
    lost answer carried."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(CLAIM_DOCUMENTS, named, (max_documents, max_bytes, _ms(lease)), _collected)


def acknowledge_documents(keys: QueueKeys, sink: str, entries: Sequence[str]) -> Call[int]:
    """The sink has them."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(ACKNOWLEDGE_DOCUMENTS, named, (*entries,), int, repeatable=True)


def defer_documents(
    keys: QueueKeys, sink: str, entries: Sequence[str], *, delay: float, tried: bool
) -> Call[int]:
    """Let others have them after `delay` seconds. That they were `tried` in vain is counted, so it is not repeated."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink))
    return script_call(DEFER_DOCUMENTS, named, (_ms(delay), int(tried), *entries), int, repeatable=not tried)


def bury_document(keys: QueueKeys, sink: str, entry: str, failure: bytes) -> Call[int]:
    """Bury a document that the sink would not take."""
    named = (keys.documents_for(sink), keys.claimed_documents(sink), keys.document_progress(sink), keys.dead)
    return script_call(BURY_DOCUMENT, named, (entry, sink, failure), int, repeatable=True)


def redeliver_documents(keys: QueueKeys, entries: Sequence[str]) -> Call[list[int]]:
    """Give buried documents to their sinks again; gives DONE or GONE for each, as `dead_letters` has them."""
    return script_call(
        REDELIVER_DOCUMENTS, (keys.dead, keys.documents), (*entries,), _as_it_is, repeatable=True
    )


def declare_recipients(keys: QueueKeys, sinks: Mapping[str, str]) -> Call[int]:
    """Say which sinks take which documents (`names`, by end and task)."""
    args: tuple[Word, ...] = tuple([word for each in sinks.items() for word in each])
    return script_call(
        DECLARE_RECIPIENTS, (keys.documents,), (_ms(RECIPIENTS_TTL), *args), int, repeatable=True
    )


def count_documents(keys: QueueKeys, sink: str) -> Call[int]:
    """How many documents the sink has not got yet."""
    return Call(("XLEN", keys.documents_for(sink)), int, repeatable=True)


def acquire_lease(key: str, holder: str, *, lease: float) -> Call[float]:
    """Hold what is one's at a time for `lease` seconds; gives 0, or in how many seconds it may be free."""
    return script_call(ACQUIRE_LEASE, (key,), (holder, _ms(lease)), _seconds, repeatable=True)


def release_lease(key: str, holder: str) -> Call[int]:
    """Hold it no more."""
    return script_call(RELEASE_LEASE, (key,), (holder,), int, repeatable=True)


def _collected(raw: Any) -> ClaimedDocuments:
    found, next_in = raw
    taken = [ClaimedDocument(decode_text(entry), document, tries) for entry, document, tries in found]
    return ClaimedDocuments(taken, None if next_in < 0 else next_in / 1000)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _seconds(raw: int) -> float:
    return raw / 1000


def _as_it_is(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])
