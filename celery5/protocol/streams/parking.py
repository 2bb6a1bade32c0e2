"""Parked keys: keys of a stream whose records a group has set aside, since one of them has failed.

The records of a parked key wait in their own log, in their order, until an operator releases or discards them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from celery5.protocol.bounded_decoding import decode_msgpack, read_whole

MAX_PARKED_KEYS = 1_000
"""The most keys that a group may have parked: beyond that a failure quarantines its partition."""
MAX_PARKED_RECORDS = 10_000
"""The most records that a group may have parked."""

ParkedAction = Literal["", "release", "discard"]


class ParkedKey(msgspec.Struct, frozen=True):
    """Why a key is parked, and what is to become of it."""

    # What failed.
    why: str
    # When the first record was parked, in ms since 1970.
    since: int
    # What an operator wants: that its records are processed, or become dead records.
    action: ParkedAction = ""
    # How many owners have begun with the record that is its first one now.
    tries: int = 0

    def to_text(self) -> str:
        """Return it as Redis keeps it, without the tries."""
        return f"{self.action or '-'} {self.since} {self.why}"

    @staticmethod
    def from_text(text: str, tries: int) -> "ParkedKey":
        """Return what a text says; other programs write, too."""
        action, since, why = [*text.split(" ", 2), "", ""][:3]
        known: dict[str, ParkedAction] = {"release": "release", "discard": "discard"}
        return ParkedKey(why, read_whole(since), known.get(action, ""), tries)


class ParkedKeysFound(msgspec.Struct, frozen=True):
    """The parked keys of a group, and how many records they have together."""

    keys: Mapping[bytes, ParkedKey]
    records: int


class ParkedRecord(msgspec.Struct, frozen=True):
    """A change of a parked key in a commit: one more record of it. Without words: what is said of it from now on; and
    with None for that: its release begins."""

    key: bytes
    about: ParkedKey | None
    # Fields and values, in turns, of its entry.
    words: Sequence[str | bytes] = ()


class ReleasedRecord(msgspec.Struct, frozen=True):
    """A parked record that is done in a commit."""

    key: bytes
    # The id of its entry in the log of the key.
    entry: str


class ParkedCount:
    """How many records a group has parked, as the owner of one partition knows it.

    It is what the others had at the last answer of Redis, and what this owner has parked and released itself, committed
    or not. When commits of this owner are made between the question and the answer, the answer may contain them or not:
    then what the others have changes no more than is certain. So the count is exact while only one owner parks. While
    several do, each learns what the others have parked only when it asks again, a few times in a lease: together they
    may exceed a bound by what they park in that time.

    Args:
        found: What Redis has when the partition is taken over.
    """

    def __init__(self, found: int) -> None:
        self._of_others = found
        self._parked = self._released = 0
        self._parked_committed = self._released_committed = 0
        # What was surely committed when the group was asked for its count.
        self._parked_before = self._released_before = 0

    @property
    def total(self) -> int:
        """How many records are parked once all changes of this owner are committed."""
        return self._of_others + self._parked - self._released

    def park(self) -> None:
        """Count a record that this owner parks."""
        self._parked += 1

    def release(self) -> None:
        """Count a parked record that this owner is done with."""
        self._released += 1

    def note_commit(self, parked: Sequence[ParkedRecord], released: Sequence[ReleasedRecord]) -> None:
        """Note that the changes of a commit are made."""
        self._parked_committed += sum(1 for change in parked if change.words)
        self._released_committed += len(released)

    def begin_update(self) -> None:
        """Note that the group is asked for its count."""
        self._parked_before, self._released_before = self._parked_committed, self._released_committed

    def update(self, found: int) -> None:
        """Take the count of the group as it was when `begin_update` was called, or later."""
        least = self._parked_before - self._released
        most = self._parked - self._released_before
        self._of_others = min(max(self._of_others, found - most), found - least)


def make_parked_words(
    record_id: bytes, fields: Sequence[bytes], *, partition: int
) -> tuple[str | bytes, ...]:
    """Return the fields and values, in turns, of a record that is parked."""
    return ("id", record_id, "partition", str(partition), "fields", msgspec.msgpack.encode(list(fields)))


def read_parked_words(words: Sequence[bytes]) -> tuple[bytes, Sequence[bytes]]:
    """Return the id and the fields of a record that was parked. Raises msgspec.DecodeError, KeyError, ValueError."""
    found = dict(zip(words[::2], words[1::2], strict=True))
    return found[b"id"], decode_msgpack(found[b"fields"], list[bytes])
