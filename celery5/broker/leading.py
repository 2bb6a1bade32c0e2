"""Leading: the trips by which Controllers agree on which of them acts, and by which others ask who that is.

Floor: broker. Reads and writes: what `lead.lua` says; all keys come from `keys.py`.
"""

from typing import Any

from celery5.broker.call import Call, Script, scripted, text, whole
from celery5.broker.keys import Keys
from celery5.protocol.leadership import Record

LEAD = Script.load("lead")
REMEMBERED = 30 * 86400.0
"""Seconds for which it is known who led last."""


def lead(keys: Keys, name: str, *, replaces: str, epoch: int) -> Call[Record]:
    """Lead, or go on to, unless another one does whose record is not the one that may be replaced; see
    `celery5.protocol.leadership`. Gives the record as it is then."""
    words = (name, replaces, epoch, 1, int(REMEMBERED * 1000))
    return scripted(LEAD, (keys.leader,), words, _record, repeatable=True)


def resign(keys: Keys, name: str, *, epoch: int) -> Call[Record]:
    """Lead no more, if `name` does in that epoch: another one may at once."""
    words = (name, "", epoch, 0, int(REMEMBERED * 1000))
    return scripted(LEAD, (keys.leader,), words, _record, repeatable=True)


def leader(keys: Keys) -> Call[Record]:
    """The record: who leads."""
    words = ("HMGET", keys.leader, "epoch", "beat", "leader", "since")
    return Call(words, _record, repeatable=True)


def _record(raw: Any) -> Record:
    epoch, beat, leader, since = raw
    return Record(_counted(epoch), _counted(beat), text(leader or b""), _counted(since) / 1000)


def _counted(raw: bytes | None) -> int:
    """Return the number of a field as `lead.lua` reads it: both must see the same record."""
    number = whole(raw)
    return number if 0 <= number < 2**53 else 0
