"""Events: the trips to Redis of events and subscriptions.

Floor: broker. Reads and writes: what the Lua files of the same names say; all keys come from `keys.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, Word, scripted, text, whole
from celery5.broker.keys import EVENTS, GROUP, Keys, QueueKeys

DECLARE = Script.load("declare")
SUBSCRIBERS = Script.load("subscribers")
FINISH = Script.load("finish")
SHORTEN = Script.load("shorten")
UNSUBSCRIBE = Script.load("unsubscribe")

MOST_KEPT = 100_000
"""Events of one subject that are kept at most, if nobody wants them; the oldest go."""
COUNTED = 7 * 86400.0
"""Seconds for which it is remembered how many events nobody wanted."""


class DeclaredNow(msgspec.Struct, frozen=True):
    """What came of a declaration: how many subscriptions were new or have `changed`, how many kept events were `sent`
    again, and the names of those that were taken `back`, and so are not in force."""

    changed: int
    sent: int
    back: tuple[str, ...]


class Registry(msgspec.Struct, frozen=True):
    """The answer to who is subscribed: which `state` the registry has, the `entries` by name, or None when they are
    known, the names of those that were `retired` just now, and of those that were taken `back`."""

    state: bytes
    entries: dict[str, bytes] | None
    retired: tuple[str, ...]
    back: tuple[str, ...] = ()


class Ending(msgspec.Struct, frozen=True):
    """How an event ends: `done`, `keep` or `bury`, and `why`."""

    verb: str
    entry: bytes
    id: str
    subject: str
    message: bytes
    why: bytes = b""


def declare(
    keys: Keys,
    subscriptions: Sequence[tuple[str, bytes]],
    subjects: Sequence[str],
    *,
    lasts: float,
    catch_up: int,
) -> Call[DeclaredNow]:
    """Declare subscriptions (name, value), for so many seconds; up to `catch_up` kept events of these subjects are sent
    again."""
    events = keys.of(EVENTS)
    named = (keys.subscriptions, keys.subscribed, events.stream, events.jobs, *map(keys.kept, subjects))
    words: tuple[Word, ...] = tuple(word for each in subscriptions for word in each)
    args = (_ms(lasts), catch_up, len(subscriptions), *words)
    return scripted(DECLARE, named, args, _declared, repeatable=True)


def unsubscribe(keys: Keys, name: str, *, lasts: float, back: bool = True) -> Call[bool]:
    """Take a subscription back, or, with `back` False, allow it again. Gives whether that changed something."""
    args = (name, int(back), _ms(lasts))
    return scripted(UNSUBSCRIBE, (keys.subscriptions, keys.subscribed), args, bool, repeatable=True)


def subscribers(keys: Keys, known: bytes) -> Call[Registry]:
    """Who is subscribed, unless the registry is as `known`."""
    return scripted(SUBSCRIBERS, (keys.subscriptions, keys.subscribed), (known,), _registry, repeatable=True)


def finish(
    keys: Keys, events: QueueKeys, router: str, endings: Sequence[Ending], *, known: bytes, retention: float
) -> Call[list[int]]:
    """End events; see `finish.lua`."""
    kept = [keys.kept(each.subject) for each in endings]
    named = (events.stream, events.jobs, events.dead, keys.subscriptions, keys.unclaimed, *kept)
    words: tuple[Word, ...] = tuple(
        word
        for each in endings
        for word in (each.verb, each.entry, each.id, each.subject, each.message, each.why)
    )
    args = (GROUP, router, known, _ms(retention), MOST_KEPT, _ms(COUNTED), *words)
    return scripted(FINISH, named, args, _verdicts, repeatable=True)


def shorten(keys: QueueKeys, locks: Sequence[str], *, to: float) -> Call[int]:
    """Remember for so many seconds only that these jobs were sent."""
    return scripted(SHORTEN, tuple(map(keys.window, locks)), (_ms(to),), int, repeatable=True)


def unclaimed(keys: Keys) -> Call[dict[str, int]]:
    """How many events nobody has wanted lately, by subject."""
    return Call(("HGETALL", keys.unclaimed), _counts, repeatable=True)


def is_known(keys: Keys) -> Call[bool]:
    """Whether there is such an application: one whose events have been sent, or that has a Router."""
    return Call(("EXISTS", keys.of(EVENTS).stream), bool, repeatable=True)


def kept(keys: Keys, subject: str) -> Call[int]:
    """How many events of a subject are kept."""
    return Call(("XLEN", keys.kept(subject)), int, repeatable=True)


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    words = [word for pair in flat.items() for word in pair] if hasattr(flat, "items") else flat
    return list(zip(words[::2], words[1::2], strict=True))


def _declared(raw: Any) -> DeclaredNow:
    changed, sent, back = raw
    return DeclaredNow(int(changed), int(sent), tuple(text(each) for each in back))


def _registry(raw: Any) -> Registry:
    state, flat, gone = raw
    pairs = [(text(name), value) for name, value in _pairs(flat) if name]
    entries = {name: value for name, value in pairs if value}
    back = tuple(name for name, value in pairs if not value)
    retired = tuple(text(each) for each in gone)
    return Registry(state, entries if flat or state == b"0" else None, retired, back)


def _verdicts(raw: Any) -> list[int]:
    return msgspec.convert(raw, list[int])


def _counts(raw: Any) -> dict[str, int]:
    return {text(name): whole(count) for name, count in _pairs(raw)}


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
