"""Inbox: the trips to Redis that post commands, take them, and answer them.

Floor: broker. Reads and writes: what the Lua files of the same names say; all keys come from `keys.py`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, scripted
from celery5.broker.keys import Keys

POST = Script.load("post")
LETTERS = Script.load("letters")
TAKE = Script.load("take")
ANSWER = Script.load("answer")

MOST = 1000
"""Commands that wait in one inbox at most."""
KEPT = 90.0
"""Seconds that inboxes, nonces and answers are kept: longer than any command lives."""

ELSEWHERE = -1
"""What `take` gives for a command that another process of the same inbox has."""


class Letter(msgspec.Struct, frozen=True):
    """One command as it came: its entry, its id as it says itself, its bytes (none when there are too many of them),
    and how many there are."""

    entry: bytes
    id: str
    sealed: bytes
    size: int


def post(keys: Keys, inbox: str, command_id: str, sealed: bytes) -> Call[bool]:
    """Put a command into an inbox; False when that is full. Safe to repeat."""
    words = (command_id, sealed, MOST, _ms(KEPT))
    named = (keys.inbox(inbox), keys.nonce(command_id))
    return scripted(POST, named, words, bool, repeatable=True)


def letters(keys: Keys, inbox: str, *, count: int, largest: int) -> Call[list[Letter]]:
    """The oldest commands in an inbox; the bytes of one are left out when there are more than `largest`."""
    return scripted(LETTERS, (keys.inbox(inbox),), (count, largest), _letters, repeatable=True)


def take(keys: Keys, inbox: str, command_id: str, entry: bytes, *, worker: str) -> Call[int]:
    """Take a command out of the inbox; gives 1 when it may be done, 0 when it came before, or ELSEWHERE."""
    words = (entry, worker, _ms(KEPT))
    return scripted(TAKE, (keys.inbox(inbox), keys.nonce(command_id)), words, int, repeatable=True)


def answer(
    keys: Keys, inbox: str, command_id: str, document: bytes, *, refused: bytes = b"", first: bool = False
) -> Call[bool]:
    """Answer a command; `refused` is the entry of one that was not taken. With `first` an answer that is there stays.
    False when it was refused already."""
    words = (refused, document, _ms(KEPT), int(first))
    return scripted(ANSWER, (keys.inbox(inbox), keys.answer(command_id)), words, bool, repeatable=True)


def _letters(raw: Iterable[Any]) -> list[Letter]:
    return [Letter(entry, said.decode(errors="replace"), sealed, size) for entry, said, sealed, size in raw]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
