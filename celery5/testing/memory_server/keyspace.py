"""Keyspace: keys with a value of one type each, and a time to live."""

import time
from typing import Any, TypeVar

from celery5.testing.memory_server.replies import CommandError
from celery5.testing.memory_server.sorted_set import SortedSet
from celery5.testing.memory_server.stream import EntryId, StreamLog

T = TypeVar("T")

TYPE_NAMES: dict[type, str] = {
    bytes: "string", dict: "hash", set: "set", list: "list", SortedSet: "zset", StreamLog: "stream",
}  # fmt: skip
WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"


def now_ms() -> int:
    """Return the time in ms since 1970."""
    return time.time_ns() // 1_000_000


class Keyspace:
    """All keys of one database.

    Attributes:
        is_held: Whether groups of consumers get no new entries of streams, but in the script that adds them.
        added: The entries that the running script has added, by key; None outside of a script.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self.is_held = is_held
        self.added: set[tuple[bytes, EntryId]] | None = None
        self._values: dict[bytes, Any] = {}
        self._ends: dict[bytes, int] = {}

    def get(self, key: bytes, kind: type[T]) -> T | None:
        """Return the value of a key, None without one. Raises CommandError if it has another type."""
        value = self._values.get(key)
        if value is None:
            return None
        if self._has_ended(key):
            return None
        if type(value) is not kind:
            raise CommandError(WRONG_TYPE)
        return value

    def get_or_create(self, key: bytes, kind: type[T]) -> T:
        """Return the value of a key, a new one if there was none."""
        value = self.get(key, kind)
        if value is None:
            value = self._values[key] = kind()
        return value

    def exists(self, key: bytes) -> bool:
        """Whether there is such a key."""
        return key in self._values and not self._has_ended(key)

    def get_type(self, key: bytes) -> str:
        """Return the name of the type of a key, `none` without one."""
        return TYPE_NAMES[type(self._values[key])] if self.exists(key) else "none"

    def put(self, key: bytes, value: Any, *, keep_ttl: bool = False) -> None:
        """Set the value of a key, of any type."""
        self._values[key] = value
        if not keep_ttl:
            self._ends.pop(key, None)

    def delete(self, key: bytes) -> bool:
        """Remove a key; return whether there was one."""
        found = self.exists(key)
        self._values.pop(key, None)
        self._ends.pop(key, None)
        return found

    def delete_if_empty(self, key: bytes) -> None:
        """Remove a key whose value has no items left. Streams stay."""
        value = self._values.get(key)
        if not value and not isinstance(value, StreamLog | bytes):
            self.delete(key)

    def list_keys(self) -> list[bytes]:
        """Return all keys."""
        return [key for key in list(self._values) if not self._has_ended(key)]

    def get_end(self, key: bytes) -> int | None:
        """Return when a key ends, in ms since 1970; None if it stays."""
        return self._ends.get(key)

    def set_end(self, key: bytes, end: int | None) -> None:
        """Set when a key ends, in ms since 1970; None: it stays."""
        if end is None:
            self._ends.pop(key, None)
        elif end <= now_ms():
            self.delete(key)
        else:
            self._ends[key] = end

    def clear(self) -> None:
        """Remove all keys."""
        self._values.clear()
        self._ends.clear()

    def _has_ended(self, key: bytes) -> bool:
        end = self._ends.get(key)
        if end is None or end > now_ms():
            return False
        del self._values[key], self._ends[key]
        return True
