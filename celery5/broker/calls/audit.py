"""Build the calls that write and read the audit trail of an application."""

from collections.abc import Sequence
from typing import Any

from celery5.broker.call import Call, Script, decode_text, script_call, to_ms
from celery5.broker.keys import Keys
from celery5.protocol.audit import MAX_WHO, AuditEntry, encode_entry, parse_entry

RECORD_ACTION = Script.load("audit/record_action")

MAX_ENTRIES = 10_000
"""Entries that stay."""
MAX_ENTRIES_OF_ONE = 2500
"""Entries of one person in a full trail."""
AUDIT_TTL = 90 * 86_400.0
"""Seconds that the trail stays after the last action."""


def record_action(keys: Keys, entry: AuditEntry) -> Call[str]:
    """Append an entry, whose id is not looked at; return its id."""
    words = encode_entry(entry)
    who = entry.who[:MAX_WHO]
    return script_call(
        RECORD_ACTION,
        (keys.audit, keys.audit_entries),
        (MAX_ENTRIES, MAX_ENTRIES_OF_ONE, to_ms(AUDIT_TTL), who, *words),
        decode_text,
    )


def read_actions(keys: Keys, *, before: str, since_ms: int, count: int) -> Call[list[AuditEntry]]:
    """Return entries, the newest first.

    Args:
        before: The id after the newest one; '' for the newest of all.
        since_ms: The time of the oldest one, in ms since 1970.
        count: How many at most.
    """
    words = ("XREVRANGE", keys.audit, f"({before}" if before else "+", since_ms, "COUNT", count)
    return Call(words, _entries, repeatable=True)


def _entries(raw: Sequence[Any]) -> list[AuditEntry]:
    entries: list[AuditEntry] = []
    for entry_id, flat in raw:
        words = [decode_text(word) for word in flat]
        entries.append(parse_entry(decode_text(entry_id), dict(zip(words[::2], words[1::2], strict=True))))
    return entries
