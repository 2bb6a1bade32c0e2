"""Set records of failing keys aside, and process them when they are released: what `then="park-key"` does.

Only the owner of a key's partition changes what is parked of it, and only by its commits. An operator says what is to
become of a key, and the owner does it: the parked records go first, and later ones of the key wait behind them.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import trio

from celery5.broker.calls.streams import RawEntry
from celery5.protocol.counts import format_count
from celery5.protocol.streams.failure import make_dead_record
from celery5.protocol.streams.groups import Commit
from celery5.protocol.streams.parking import (
    MAX_PARKED_KEYS,
    MAX_PARKED_RECORDS,
    ParkedAction,
    ParkedCount,
    ParkedKey,
    ParkedKeysFound,
    ParkedRecord,
    ReleasedRecord,
    make_parked_words,
    read_parked_words,
)
from celery5.protocol.streams.routing import find_partition
from celery5.services.streams.owned_partition import OwnedPartition, PartitionHost, RecordSequence

PORTION = 100
"""Parked records in one read."""


class ParkedKeys:
    """The parked keys of a group, as the owner of one partition knows them.

    Args:
        partition: The number of the partition.
        found: What there was when it was taken over.
        partitions: How many partitions the stream has.
    """

    def __init__(self, partition: int, found: ParkedKeysFound, partitions: int) -> None:
        self._partition = partition
        self._partitions = partitions
        self._known = dict(found.keys)
        self._count = ParkedCount(found.records)
        # Keys with changes that are not committed yet; those that have changed since the group's were asked for.
        self._uncommitted: Counter[bytes] = Counter()
        self._changed: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    @property
    def is_full(self) -> bool:
        """Whether no more keys may be parked."""
        return len(self._known) >= MAX_PARKED_KEYS or self.is_full_with(0)

    def is_full_with(self, more: int) -> bool:
        """Whether no more records may be parked beside this many: a bound that `ParkedCount` describes."""
        return self._count.total + more >= MAX_PARKED_RECORDS

    def get(self, key: bytes) -> ParkedKey | None:
        """Return what is known of a key."""
        return self._known.get(key)

    def find_due(self) -> list[bytes]:
        """Return the keys of this partition that are to be released or discarded."""
        return [key for key in self._known if self.get_action(key)]

    def get_action(self, key: bytes) -> ParkedAction:
        """Return what is to become of a key, if it is of this partition."""
        about = self._known.get(key)
        if about is None or find_partition(key, self._partitions) != self._partition:
            return ""
        return about.action

    def begin_update(self) -> None:
        """Note that the group's keys are asked for."""
        self._count.begin_update()
        self._changed = set(self._uncommitted)

    def update(self, found: ParkedKeysFound, partitions: int) -> None:
        """Take the group's keys as they were when `begin_update` was called, or later."""
        mine = {key: about for key, about in self._known.items() if key in self._changed}
        others = {key: about for key, about in found.keys.items() if key not in self._changed}
        self._known, self._partitions = {**others, **mine}, partitions
        self._count.update(found.records)

    def park(self, key: bytes, about: ParkedKey) -> None:
        """Note that a record of a key is parked."""
        self._known[key] = about
        self._count.park()
        self._note_change(key)

    def change(self, key: bytes, about: ParkedKey) -> None:
        """Note what is said of a key from now on."""
        self._known[key] = about
        self._note_change(key)

    def note_released(self, key: bytes) -> None:
        """Note that a record of a key is done."""
        self._count.release()
        self._note_change(key)

    def _note_change(self, key: bytes) -> None:
        self._uncommitted[key] += 1
        self._changed.add(key)

    def note_commit(self, commit: Commit) -> None:
        """Note that the changes of a commit are made."""
        self._count.note_commit(commit.parked, commit.released)
        for key in [
            *(parked.key for parked in commit.parked),
            *(released.key for released in commit.released),
        ]:
            self._uncommitted[key] -= 1
            if self._uncommitted[key] <= 0:
                del self._uncommitted[key]

    def has_uncommitted(self, key: bytes) -> bool:
        """Whether changes of a key are not committed yet."""
        return key in self._uncommitted

    def drop(self, key: bytes) -> None:
        """Note that nothing of a key is parked any more."""
        self._known.pop(key, None)
        self._changed.add(key)


class ParkingSequence:
    """A sequence whose records are parked when their keys are, and that has released records, too: a `FeedTransport`.

    Args:
        sequence: Where records come from.
        partition: Its partition.
        parked: The parked keys that the partition knows.
        host: The group.
        max_tries: How many owners may begin to release a key without getting a record done.
        log: Where it is logged what becomes of keys.
        now: Returns the seconds since 1970.
    """

    def __init__(
        self,
        *,
        sequence: RecordSequence,
        partition: OwnedPartition,
        parked: ParkedKeys,
        host: PartitionHost,
        max_tries: int,
        log: Callable[..., None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._sequence = sequence
        self._partition = partition
        self._parked = parked
        self._host = host
        self._max_tries = max_tries
        self._log = log
        self._now = now
        # Released records that are here: key, id in the log of the key, and the entry.
        self._released: deque[tuple[bytes, str, RawEntry]] = deque()
        self._in_hand: tuple[bytes, str, RawEntry] | None = None
        # The last released record of each key that was handed out, and the keys that were begun here.
        self._positions: dict[bytes, str] = {}
        self._begun: set[bytes] = set()
        # Records that were taken and whose keys are parked: so they are when they are acknowledged.
        self._to_park: list[tuple[bytes, ParkedKey, RawEntry]] = []
        # Whether a record was to be parked, and too many are.
        self._is_over_full = False
        # How many records are to be taken one by one, since a batch of them has failed.
        self._singles = 0
        self.stop_requested = sequence.stop_requested

    @property
    def is_stopping(self) -> bool:
        """Whether the processor is to end."""
        return self._sequence.is_stopping

    @property
    def taken(self) -> Sequence[RawEntry]:
        """The records that the function has taken last."""
        return self._sequence.taken if self._in_hand is None else (self._in_hand[2],)

    # taking records

    async def fetch(self, into: deque[RawEntry], _most: int, seconds: float | None) -> None:
        """Wait for the next record: alone, so that what is parked is known before the one behind it is taken."""
        with trio.move_on_after(math.inf if seconds is None else seconds):
            while not into and not self.is_stopping:
                raw = self._take_next()
                if raw is None:
                    await self._wait_more()
                else:
                    into.append(raw)

    def _take_next(self) -> RawEntry | None:
        """Return the next record if it is here and may be taken."""
        if self._is_over_full:
            return None
        if self._released:
            key, entry, _ = released = self._released.popleft()
            if self._parked.get_action(key) == "release":
                self._in_hand = released
                self._positions[key] = entry
                return released[2]
            self._released.clear()  # it is to be discarded now, or is of another partition
            return None
        if self._parked and self._find_due() is not None:
            return None
        while True:
            taken = self._sequence.take(1)
            if not taken:
                return None
            self._singles = max(0, self._singles - 1)
            if not self._is_to_park(taken[0]):
                return taken[0]
            if self._is_over_full:
                return None
            self.settle_taken()

    async def _wait_more(self) -> None:
        """Get released records, or wait for something new."""
        if self._is_over_full:
            await self._host.quarantine(self._partition, _FULL)
            self._is_over_full = False
        elif not await self._fetch_released():
            await self._sequence.wait()

    async def fetch_batch(self, into: deque[RawEntry], count: int, within: float) -> None:
        """Wait for the next batch, without what is parked."""
        if into:
            self.give_back()
            into.clear()
        while not into and not self.is_stopping:
            self.settle_taken()
            if self._released or (self._parked and self._find_due() is not None):
                raw = self._take_next()
                if raw is not None:
                    into.append(raw)
                else:
                    await self._wait_more()
                continue
            batch: deque[RawEntry] = deque()
            most = 1 if self._singles else count
            await self._sequence.fetch_batch(
                batch, most, within, is_over=lambda: self._find_due() is not None
            )
            self._singles = max(0, self._singles - len(batch))
            passed = [raw for raw in batch if not self._is_to_park(raw)]
            if self._is_over_full:
                await self._wait_more()
            else:
                into.extend(passed)

    def _is_to_park(self, raw: RawEntry) -> bool:
        """Return whether the key of a record that was taken is parked, and note that it is to be."""
        if not self._parked:
            return False
        if self._is_over_full:
            return True
        key = self._partition.find_key(raw)
        about = self._parked.get(key)
        if about is None or not key:
            return False
        if self._parked.is_full_with(len(self._to_park)):
            self.give_back()
            self._is_over_full = True
        else:
            self._to_park.append((key, about, raw))
        return True

    # released records

    def _find_due(self) -> bytes | None:
        """Return a key of this sequence that is to be released or discarded."""
        if self._partition.deaths:
            return None  # a record that may have killed a worker is tried alone
        mine = (
            key for key in self._parked.find_due() if self._partition.find_sequence(key) is self._sequence
        )
        return next(mine, None)

    async def _fetch_released(self) -> bool:
        """Get the next released records, if there are any. Return whether something has changed."""
        key = self._find_due()
        about = None if key is None else self._parked.get(key)
        if key is None or about is None:
            return False
        if about.tries >= self._max_tries:
            self._keep(
                key, f"{format_count(about.tries, 'owner has', 'owners have')} not got its first record done"
            )
            return True
        if key not in self._begun:
            self._begun.add(key)
            self._parked.change(key, about)
            self._sequence.add_parked(ParkedRecord(key, None))
            self._sequence.settle_released(None)
        if self._parked.has_uncommitted(key):
            self._sequence.commit_now()
            return False
        entries = await self._host.read_parked(key, self._positions.get(key, ""), PORTION)
        if not entries:
            return self._end_release(key)
        for entry, words in entries:
            try:
                raw = read_parked_words(words)
            except (ValueError, KeyError, msgspec.MsgspecError, RecursionError) as error:
                raw = (b"0-0", list[bytes]())  # another program has written it
                self._discard(key, entry.decode(), raw, f"it cannot be read: {error!r}")
                continue
            if about.action == "discard":
                self._discard(key, entry.decode(), raw, about.why)
            else:
                self._released.append((key, entry.decode(), raw))
        return True

    def _end_release(self, key: bytes) -> bool:
        """Note that all records of a key are done, once that is committed."""
        if self._parked.has_uncommitted(key):
            self._sequence.commit_now()
            return False
        self._forget(key)
        self._parked.drop(key)
        self._log("key:released", "info", key=key.decode(errors="replace"), partition=self._partition.number)
        return True

    def _discard(self, key: bytes, entry: str, raw: RawEntry, why: str) -> None:
        dead = make_dead_record(*raw, partition=self._partition.number, error=why, traceback="", attempts=0)
        self._positions[key] = entry
        self._parked.note_released(key)
        self._sequence.discard_parked(ReleasedRecord(key, entry), dead)

    def _keep(self, key: bytes, why: str) -> None:
        """Leave a key parked that was to be released."""
        about = self._parked.get(key) or ParkedKey(why, self._now_ms())
        about = msgspec.structs.replace(about, action="", tries=0, why=why)
        self._parked.change(key, about)
        self._sequence.add_parked(ParkedRecord(key, about))
        self._sequence.settle_released(None)
        self._forget(key)
        self._log(
            "key:parked",
            "warning",
            key=key.decode(errors="replace"),
            partition=self._partition.number,
            why=why,
        )

    def _forget(self, key: bytes) -> None:
        self._begun.discard(key)
        self._positions.pop(key, None)
        self._released = deque(released for released in self._released if released[0] != key)

    def _now_ms(self) -> int:
        return int(self._now() * 1000)

    # what becomes of what was taken

    def settle(self, count: int, outputs: list[bytes], state: dict[str, bytes | None]) -> None:
        """Acknowledge what was taken, with what it has produced."""
        if not count:
            self._sequence.settle(0, outputs, state)
            return
        self.take_over(count, outputs, state)
        self.settle_taken()

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state, as they are with all that was settled."""
        return await self._sequence.get_states(names)

    async def flush(self) -> None:
        """Wait until the commit of what was settled is under way."""
        await self._sequence.flush()

    def settle_taken(self) -> None:
        """Acknowledge what was taken. What has come without records is committed, too."""
        if self._in_hand is None:
            for key, about, raw in self._to_park:
                self._parked.park(key, about)
                words = make_parked_words(*raw, partition=self._partition.number)
                self._sequence.add_parked(ParkedRecord(key, about, words))
            self._to_park.clear()
            self._sequence.settle_taken()
            return
        key, entry, _ = self._in_hand
        self._in_hand = None
        self._parked.note_released(key)
        self._sequence.settle_released(ReleasedRecord(key, entry))

    def take_over(self, count: int, outputs: list[bytes], state: dict[str, bytes | None]) -> None:
        """Continue where a function has ended: with `count` records in hand, and what it has produced for them."""
        if not count:
            self.give_back()
        self._sequence.take_over(len(self._sequence.taken), outputs, state)

    def give_back(self) -> None:
        """Put what was taken in front again, and forget what it has produced."""
        if self._in_hand is not None:
            self._released.appendleft(self._in_hand)
            self._in_hand = None
        self._to_park.clear()
        self._sequence.give_back()

    def take_singly(self) -> bool:
        """Have the records of a batch that has failed taken one by one. Return whether there is more than one."""
        count = len(self.taken)
        if count > 1:
            self._singles = count
            self.give_back()
        return count > 1

    def park(self, why: str) -> Literal["parked", "no key", "full"]:
        """Park the key of the record that was taken. Return why not: it has none, or too much is parked already."""
        if self._in_hand is not None:
            key = self._in_hand[0]
            self._in_hand = None
            self._sequence.give_back()  # what it has produced
            self._keep(key, why)
            return "parked"
        (raw,) = self._sequence.taken
        key = self._partition.find_key(raw)
        if not key or self._parked.is_full:
            return "full" if key else "no key"
        self._sequence.forget_outputs()
        self._to_park.append((key, ParkedKey(why, self._now_ms()), raw))
        self.settle_taken()
        self._log(
            "key:parked",
            "warning",
            key=key.decode(errors="replace"),
            partition=self._partition.number,
            why=why,
        )
        return "parked"

    def add_dead_records(self, dead: Sequence[Sequence[str | bytes]]) -> None:
        """Give up what was taken."""
        self._sequence.add_dead_records(dead)


_FULL = f"{MAX_PARKED_RECORDS:,} records are parked: release or discard them, then end the quarantine"
