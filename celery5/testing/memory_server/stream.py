"""Stream: a log of entries, with groups of consumers that each hold what they have not acknowledged."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

EntryId = tuple[int, int]
"""Milliseconds and a number."""

NODE = 100
"""Entries of a node: what is trimmed by `~` goes by whole nodes."""


@dataclass
class PendingEntry:
    """An entry that a consumer holds."""

    consumer: bytes
    # When it was delivered last, in ms since 1970.
    delivered: int
    count: int


@dataclass
class StreamConsumer:
    """When a consumer has last asked, and last received something, in ms since 1970."""

    seen: int
    active: int = -1


@dataclass
class StreamGroup:
    """A group of consumers."""

    last_id: EntryId
    entries_read: int | None = None
    pending: dict[EntryId, PendingEntry] = field(default_factory=dict)
    consumers: dict[bytes, StreamConsumer] = field(default_factory=dict)

    def see(self, name: bytes, now: int) -> StreamConsumer:
        """Return a consumer, a new one if there was none, and note that it has asked."""
        consumer = self.consumers.setdefault(name, StreamConsumer(now))
        consumer.seen = now
        return consumer

    def list_pending(
        self, first: EntryId, last: EntryId, consumer: bytes | None = None
    ) -> list[tuple[EntryId, PendingEntry]]:
        """Return what is held, by id: of one consumer, or of all."""
        return sorted(
            (entry_id, entry)
            for entry_id, entry in self.pending.items()
            if first <= entry_id <= last and (consumer is None or entry.consumer == consumer)
        )


class StreamLog:
    """Entries by their ids."""

    def __init__(self) -> None:
        self.ids: list[EntryId] = []
        self.fields: dict[EntryId, list[bytes]] = {}
        self.last_id: EntryId = (0, 0)
        self.max_deleted: EntryId = (0, 0)
        self.entries_added: int = 0
        self.groups: dict[bytes, StreamGroup] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, entry_id: EntryId, fields: list[bytes]) -> None:
        """Append an entry, whose id is greater than all before."""
        self.ids.append(entry_id)
        self.fields[entry_id] = fields
        self.last_id = entry_id
        self.entries_added += 1

    def delete(self, entry_id: EntryId) -> bool:
        """Remove an entry; return whether there was one."""
        if self.fields.pop(entry_id, None) is None:
            return False
        del self.ids[bisect_left(self.ids, entry_id)]
        self.max_deleted = max(self.max_deleted, entry_id)
        return True

    def list_ids(self, first: EntryId, last: EntryId) -> list[EntryId]:
        """Return the ids from the first to the last one."""
        return self.ids[bisect_left(self.ids, first) : bisect_right(self.ids, last)]

    def trim(self, surplus: int, *, by_nodes: bool) -> int:
        """Remove the oldest entries, at most so many, and return how many those were."""
        count = surplus // NODE * NODE if by_nodes else surplus
        for entry_id in self.ids[:count]:
            del self.fields[entry_id]
        if count > 0:
            del self.ids[:count]
        return max(count, 0)

    def count_before(self, entry_id: EntryId) -> int:
        """Return how many entries have smaller ids."""
        return bisect_left(self.ids, entry_id)
