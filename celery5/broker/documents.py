"""Documents: the trips by which documents come to Data Sinks, and by which a Data Source is held.

Floor: broker. Reads and writes: what the Lua files of the same names say; all keys come from `keys.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, scripted, text
from celery5.broker.keys import QueueKeys

COLLECT = Script.load("collect")
DELIVERED = Script.load("delivered")
DEFER = Script.load("defer")
INTER = Script.load("inter")
REDELIVER = Script.load("redeliver")
TAKERS = Script.load("takers")
HOLD = Script.load("hold")
LET_GO = Script.load("let_go")

KEPT = 30 * 86400.0
"""Seconds for which it is remembered which sinks take what, after the last process that said so."""


class Taken(msgspec.Struct, frozen=True):
    """A document that this Router has for a sink: its entry, its bytes, and how often it was tried in vain."""

    entry: str
    document: bytes
    tries: int


class Collected(msgspec.Struct, frozen=True):
    """What was taken, and in how many seconds there may be more that nobody can take now; None when there is none."""

    taken: Sequence[Taken]
    next_in: float | None


def collect(keys: QueueKeys, sink: str, *, most: int, room: int, lease: float) -> Call[Collected]:
    """Take documents for a sink, of `room` bytes together, for `lease` seconds; then others may take them, and what a
    lost answer carried."""
    named = (keys.documents_for(sink), keys.taken(sink), keys.progress(sink))
    return scripted(COLLECT, named, (most, room, _ms(lease)), _collected)


def delivered(keys: QueueKeys, sink: str, entries: Sequence[str]) -> Call[int]:
    """The sink has them."""
    named = (keys.documents_for(sink), keys.taken(sink), keys.progress(sink))
    return scripted(DELIVERED, named, (*entries,), int, repeatable=True)


def defer(keys: QueueKeys, sink: str, entries: Sequence[str], *, delay: float, tried: bool) -> Call[int]:
    """Let others have them after `delay` seconds. That they were `tried` in vain is counted, so it is not repeated."""
    named = (keys.documents_for(sink), keys.taken(sink), keys.progress(sink))
    return scripted(DEFER, named, (_ms(delay), int(tried), *entries), int, repeatable=not tried)


def inter(keys: QueueKeys, sink: str, entry: str, failure: bytes) -> Call[int]:
    """Bury a document that the sink would not take."""
    named = (keys.documents_for(sink), keys.taken(sink), keys.progress(sink), keys.dead)
    return scripted(INTER, named, (entry, sink, failure), int, repeatable=True)


def redeliver(keys: QueueKeys, entries: Sequence[str]) -> Call[list[int]]:
    """Give buried documents to their sinks again; gives DONE or GONE for each, as `dead_letters` has them."""
    return scripted(REDELIVER, (keys.dead, keys.documents), (*entries,), _as_it_is, repeatable=True)


def say_takers(keys: QueueKeys, names: Mapping[str, str]) -> Call[int]:
    """Say which sinks take which documents (`names`, by end and task)."""
    args: tuple[Word, ...] = tuple([word for each in names.items() for word in each])
    return scripted(TAKERS, (keys.documents,), (_ms(KEPT), *args), int, repeatable=True)


def count(keys: QueueKeys, sink: str) -> Call[int]:
    """How many documents the sink has not got yet."""
    return Call(("XLEN", keys.documents_for(sink)), int, repeatable=True)


def hold(key: str, who: str, *, lease: float) -> Call[float]:
    """Hold what is one's at a time for `lease` seconds; gives 0, or in how many seconds it may be free."""
    return scripted(HOLD, (key,), (who, _ms(lease)), _seconds, repeatable=True)


def let_go(key: str, who: str) -> Call[int]:
    """Hold it no more."""
    return scripted(LET_GO, (key,), (who,), int, repeatable=True)


def _collected(raw: Any) -> Collected:
    found, next_in = raw
    taken = [Taken(text(entry), document, tries) for entry, document, tries in found]
    return Collected(taken, None if next_in < 0 else next_in / 1000)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _seconds(raw: int) -> float:
    return raw / 1000


def _as_it_is(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])
