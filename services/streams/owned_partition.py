"""One partition that this worker owns: the records that are here, those that are done, and what is to be committed."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Protocol
from zlib import crc32

import msgspec
import trio
import trio.lowlevel

from celery5.broker.calls.streams import RawEntry
from celery5.protocol.streams.groups import Assignment, Commit, split_id
from celery5.protocol.streams.parking import ParkedRecord, ReleasedRecord
from celery5.streams.processor import Processor

MAX_COMMITS = 64
"""Partitions in one commit: Redis does nothing else in that time."""
TRIAL_DEATHS = 2
"""Deaths from which on a record is tried while no other suspect of its worker is: `is_suspect` of the scripts.

After the first death all partitions go on at once: mostly no record was to blame."""
MAX_SUSPECTS = 1000
"""The most records behind the cursor that are taken one by one after a death, as each of them may be to blame."""
MAX_AHEAD = 1024
"""The most records that are done while an earlier one is not: more wait for that."""
STATES_PER_READ = 500
"""Values of keyed state in one read: Redis does nothing else in that time."""
MAX_CACHED_STATE = 10_000
"""The most values of keyed state that are remembered of one partition."""


class PartitionHost(Protocol):
    """The group that partitions are owned for: in Redis, or in the memory of a test."""

    def want_records(self) -> None:
        """Read again for a partition that wants more."""
        ...

    async def read_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Read values of the keyed state."""
        ...

    async def read_parked(self, key: bytes, after: str, count: int) -> list[RawEntry]:
        """Return entries of the log of a parked key, behind `after`."""
        ...

    async def quarantine(self, partition: "OwnedPartition", why: str) -> None:
        """Stop the partition, in the whole cluster, until somebody ends that."""
        ...

    async def hand_over(self, partition: "OwnedPartition", record: str) -> float:
        """Give the partition to a member that may be able to read a record.

        Returns:
            Seconds for which to wait for that, or for such a member to come; 0.0 when there is none.
        """
        ...


class UncommittedPartitions:
    """Partitions with records that are done and not committed. They note it here, and their group commits them."""

    def __init__(self) -> None:
        self._partitions: list[OwnedPartition] = []
        self._noted = trio.Event()
        self._requested = trio.Event()

    def note(self, partition: "OwnedPartition") -> None:
        """Have a partition committed soon."""
        self._partitions.append(partition)
        self._noted.set()

    def commit_now(self) -> None:
        """Have what was noted committed now: a processor waits for it."""
        self._requested.set()

    async def wait(self, within: float) -> None:
        """Wait until something is to be committed: `within` seconds after it was noted, or as soon as requested."""
        await self._noted.wait()
        with trio.move_on_after(within):
            await self._requested.wait()

    def take(self) -> "list[Sequence[OwnedPartition]]":
        """Return what was noted by now, in portions of one commit each."""
        # Somebody may wait for one of them: an event that is replaced before it is set would never wake it.
        if self._noted.is_set():
            self._noted = trio.Event()
        if self._requested.is_set():
            self._requested = trio.Event()
        found, self._partitions = [partition for partition in self._partitions if not partition.is_lost], []
        return [found[first : first + MAX_COMMITS] for first in range(0, len(found), MAX_COMMITS)]


class _Produced(msgspec.Struct):
    """What is committed next together with the records that are done."""

    outputs: list[bytes] = msgspec.field(default_factory=list[bytes])
    state: dict[str, bytes | None] = msgspec.field(default_factory=dict[str, bytes | None])
    dead: list[Sequence[str | bytes]] = msgspec.field(default_factory=list[Sequence[str | bytes]])
    parked: list[ParkedRecord] = msgspec.field(default_factory=list[ParkedRecord])
    released: list[ReleasedRecord] = msgspec.field(default_factory=list[ReleasedRecord])


class RecordSequence:
    """Records of a partition that are processed one after the other: all of them, or those of some of its keys.

    For a feed in Trio it is the `FeedTransport`. When a function has ended, it has what that had in hand.
    """

    def __init__(self, partition: "OwnedPartition") -> None:
        self._partition = partition
        self._buffer: deque[RawEntry] = deque()
        self._taken: deque[RawEntry] = deque()
        # What the records that were taken have produced, when their function has ended.
        self._outputs: list[bytes] = []
        self._state: dict[str, bytes | None] = {}
        self._waiter: trio.lowlevel.Task | None = None
        self.is_stopping = False
        self.scope = trio.CancelScope()
        self.stop_requested = trio.Event()
        self.ended = trio.Event()

    def feed(self, entries: Sequence[RawEntry]) -> None:
        """Take entries to process."""
        self._buffer.extend(entries)
        self.wake()

    # for the feed of a function

    def take(self, most: int) -> Sequence[RawEntry]:
        """Return the next records that are here and may be taken."""
        if self.is_stopping:
            return ()
        return self._take(min(most, max(0, self._partition.capacity), len(self._buffer)))

    def _take(self, count: int) -> Sequence[RawEntry]:
        taken = [self._buffer.popleft() for _ in range(count)]
        self._taken += taken
        self._partition.take(count)
        return taken

    async def fetch(self, into: deque[RawEntry], most: int, seconds: float | None = None) -> None:
        """Wait for the next records, unless some have come already, or the processor is to end."""
        if seconds is not None:
            with trio.move_on_after(seconds):
                await self.fetch(into, most)
            if not self._buffer:  # else the next record is here, and waits for a commit
                return
        while not into and not self.is_stopping:
            into.extend(self.take(most))
            if not into:
                await self.wait()

    async def fetch_batch(
        self,
        into: deque[RawEntry],
        count: int,
        within: float,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the next batch, unless the processor is to end, or `is_over` while there is nothing to take."""
        if into:
            self.unread_after(0)
            into.clear()
        self._partition.prefetch_batches(count)
        while not (self._buffer and self._partition.capacity > 0):
            if self.is_stopping or is_over():
                return
            await self.wait()
        count = 1 if self._partition.deaths else count
        with trio.move_on_after(within):
            while len(self._buffer) < count and not self.is_stopping:
                await self.wait()
        if not self.is_stopping:
            into.extend(self._take(min(count, len(self._buffer))))

    def settle(self, count: int, outputs: list[bytes], state: Mapping[str, bytes | None]) -> None:
        """Acknowledge the first records of those that were taken, with what they have produced."""
        taken = self._taken
        if count == 1 and not (outputs or state) and self._partition.settle_one(taken[0]):
            taken.popleft()
            return
        self._partition.settle([taken.popleft() for _ in range(count)], outputs, state)

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state, as they are with all that was settled."""
        return await self._partition.get_states(names)

    async def flush(self) -> None:
        """Wait until the commit of what was settled is under way."""
        while self._partition.is_dirty:
            self._partition.commit_now()
            await self.wait()

    async def wait(self) -> None:
        """Wait until there is something new: a record, a commit, or the end.

        Trio's own means, since a processor waits after every few records, and an Event costs twice as much.
        """
        if self._buffer:
            self._partition.commit_now()
        if self._waiter is not None:
            raise RuntimeError(
                f"processor {self._partition.processor.name}: two tasks ask for the records of partition "
                f"{self._partition.number}"
            )
        self._waiter = trio.lowlevel.current_task()

        def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)

    def wake(self) -> None:
        """End the wait of the function, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)

    def stop(self) -> None:
        """End after what was taken."""
        self.is_stopping = True
        self.stop_requested.set()
        self.wake()

    # when the function has ended

    @property
    def taken(self) -> Sequence[RawEntry]:
        """The records that the function has taken last."""
        return self._taken

    def take_over(self, count: int, outputs: list[bytes], state: dict[str, bytes | None]) -> None:
        """Continue where a function has ended: with `count` records in hand, and what it has produced for them."""
        self.unread_after(count)
        self._outputs, self._state = outputs, state

    def unread_after(self, count: int) -> None:
        """Put what was taken in front again, but for the first `count`."""
        unread = [self._taken.pop() for _ in range(len(self._taken) - count)]
        self._buffer.extendleft(unread)
        self._partition.give_back(len(unread))

    def settle_taken(self) -> None:
        """Acknowledge what was taken. What has come without records is committed, too."""
        taken, outputs, state = self._taken, self._outputs, self._state
        if taken or outputs or state:
            self._taken, self._outputs, self._state = deque(), [], {}
            self._partition.settle(taken, outputs, state)

    def give_back(self) -> None:
        """Put what was taken in front again, and forget what it has produced."""
        self.unread_after(0)
        self.forget_outputs()

    def add_dead_records(self, dead: Sequence[Sequence[str | bytes]]) -> None:
        """Give up what was taken."""
        taken, self._taken = self._taken, deque()
        self.forget_outputs()
        self._partition.add_dead_records(taken, dead)

    def forget_outputs(self) -> None:
        """Forget what the records that were taken have produced."""
        self._outputs, self._state = [], {}

    # parked keys

    def add_parked(self, parked: ParkedRecord) -> None:
        """Add a change of a parked key to what is settled next."""
        self._partition.add_parked(parked)

    def settle_released(self, released: ReleasedRecord | None) -> None:
        """Settle what was added, and a parked record with what it has produced; commit that now."""
        outputs, state = self._outputs, self._state
        self.forget_outputs()
        if released is not None:
            self._partition.add_released(released)
        self._partition.settle((), outputs, state)
        self._partition.commit_now()

    def discard_parked(self, released: ReleasedRecord, dead: Sequence[str | bytes]) -> None:
        """Make a parked record a dead one."""
        self._partition.add_released(released)
        self._partition.add_dead_records((), [dead])

    def commit_now(self) -> None:
        """Commit now what is done."""
        self._partition.commit_now()


class OwnedPartition:
    """The state of one partition while this worker owns it. A new ownership is a new object.

    Args:
        assignment: Where it begins.
        processor: Its processor.
        host: The group that it is owned for.
        uncommitted: Where it notes that records are done.
        grace_period: Seconds that a record has to end.
        on_commit: Is told of each commit that was made.
    """

    def __init__(
        self,
        assignment: Assignment,
        processor: Processor[Any],
        host: PartitionHost,
        uncommitted: UncommittedPartitions,
        *,
        grace_period: float,
        on_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self.number = assignment.partition
        self.epoch = assignment.epoch
        self.deaths = assignment.deaths
        self.condition = assignment.condition
        self.processor, self.grace_period = processor, grace_period
        self._commit_every = processor.commit_every
        self.cursor = self.position = assignment.cursor
        self.is_lost = False
        self.prefetch = processor.prefetch
        self._refill_at = (processor.prefetch + 1) // 2
        self._limit, self._awaited = assignment.limit, assignment.awaited
        self._is_at_limit = False
        self._host = host
        self._is_serial = processor.concurrency == 1 and not assignment.ahead
        # Ids that were handed to sequences, in order, and those of them that are done while an earlier one is not.
        self._order: deque[bytes] = deque()
        self._ahead = {record_id.encode() for record_id in assignment.ahead}
        self._done_id = assignment.cursor.encode()
        self._uncommitted_partitions = uncommitted
        self._produced = _Produced()
        self._on_commit = on_commit
        self._committing_state: Mapping[str, bytes | None] = {}
        self._state_cache: dict[str, bytes | None] = {}
        self._in_hand = self._uncommitted = self._buffered = 0
        # The commits of this ownership are numbered under its name: each is made once, though it may be repeated.
        self._name = token_hex(8)
        self._commits = self._committing = 0
        self._is_dirty = False
        # How many more records may be taken before a commit. One that may have killed a worker is taken alone, and one
        # that may have killed several waits for its trial.
        self.capacity = 0 if self.needs_trial else 1 if self.deaths else self._commit_every
        # The last owner had at most this many records in hand when it died, and none behind the last one of that time.
        self._suspects = min(self._commit_every, MAX_SUSPECTS)
        self._suspect_end = assignment.suspect
        self._is_held = False
        self._fed = trio.Event()
        self._trial_ended = trio.Event()
        self.sequences = tuple(RecordSequence(self) for _ in range(processor.concurrency))

    # reading

    @property
    def wants_records(self) -> bool:
        """Whether more records are to be read."""
        return (
            self._buffered < self._refill_at
            and not (self._is_at_limit or self.condition or self.is_lost)
            and not (self.deaths and (self._buffered or self._uncommitted))
            and not self.sequences[0].is_stopping
        )

    def feed(self, entries: Sequence[RawEntry]) -> int:
        """Take entries that were read from `position` on. Return how many records in front of them were dropped."""
        if not entries:
            return 0
        entries = self._cut_at_limit(entries)
        if not entries:
            return 0
        if self.deaths:
            entries = entries[:1]  # it is tried alone, whichever sequence it is of
            self._fed.set()
        gap = max(0, split_id(entries[0][0].decode())[1] - split_id(self.position)[1] - 1)
        self.position = entries[-1][0].decode()
        if self._is_serial:
            self._buffered += len(entries)
            self.sequences[0].feed(entries)
        else:
            self._feed_sequences(entries)
        return gap

    def _feed_sequences(self, entries: Sequence[RawEntry]) -> None:
        """Give each entry to the sequence of its key. Those that were done by an earlier owner are done."""
        for entry in entries:
            self._order.append(entry[0])
            if entry[0] not in self._ahead:
                self._buffered += 1
                self._choose_sequence(entry).feed((entry,))
        if self._order[0] in self._ahead:
            self._advance(())
            self._note_done()

    def _choose_sequence(self, entry: RawEntry) -> RecordSequence:
        """Return the sequence of the key of an entry. One that may have killed its owner is alone, so that any will do.

        It is not decoded for its key: that may be what kills, and before its trial it would not be found to blame.
        """
        if self.deaths and self._on_commit is None:
            return self.sequences[0]
        return self.find_sequence(self.find_key(entry))

    def _cut_at_limit(self, entries: Sequence[RawEntry]) -> Sequence[RawEntry]:
        """Return the entries up to the border, behind which other partitions must be read first."""
        if not self._limit:
            return entries
        limit = split_id(self._limit)
        allowed = [entry for entry in entries if split_id(entry[0].decode()) <= limit]
        self._is_at_limit = len(allowed) < len(entries)
        return allowed

    def update(self, assignment: Assignment) -> None:
        """Take what a later renewal says of it."""
        self._limit, self._awaited = assignment.limit, assignment.awaited
        if self._is_at_limit:
            self._is_at_limit = False
            self._host.want_records()

    @property
    def is_past_border(self) -> bool:
        """Whether other partitions have waited for what is committed here by now. True once."""
        if self._awaited and split_id(self.cursor) >= split_id(self._awaited):
            self._awaited = ""
            return True
        return False

    # processing

    def settle_one(self, entry: RawEntry) -> bool:
        """Note that a record is done that has no outputs, if records are done in their order here; else return False.

        The usual case, on the hot path.
        """
        if not self._is_serial:
            return False
        self._done_id = entry[0]
        self._in_hand -= 1
        self._count_done(1)
        return True

    def settle(
        self, taken: Sequence[RawEntry], outputs: list[bytes], state: Mapping[str, bytes | None]
    ) -> None:
        """Note that records are done, with their outputs. Outputs may come without records, as time goes by."""
        if not self._is_serial:
            self._advance(taken)
        elif taken:
            self._done_id = taken[-1][0]
        if outputs:
            self._produced.outputs.extend(outputs)
        if state:
            self._produced.state.update(state)
        self._in_hand -= len(taken)
        self._count_done(len(taken))

    def _count_done(self, count: int) -> None:
        self._uncommitted += count
        before = self._buffered
        self._buffered = after = before - count
        if before >= self._refill_at > after and self.wants_records:
            self._host.want_records()
        if not self._is_dirty:
            self._is_dirty = True
            self._uncommitted_partitions.note(self)
        if self._uncommitted >= self._commit_every or self.deaths:
            self._uncommitted_partitions.commit_now()

    def prefetch_batches(self, count: int) -> None:
        """Read enough ahead for batches of this many records."""
        self.prefetch = max(self.prefetch, 2 * count)
        self._refill_at = (self.prefetch + 1) // 2

    def take(self, count: int) -> None:
        """Note that records are in hand."""
        self.capacity -= count
        self._in_hand += count

    def give_back(self, count: int) -> None:
        """Note that records are not in hand any more, and not done."""
        self.capacity += count
        self._in_hand -= count

    def _note_done(self) -> None:
        if not self._is_dirty:
            self._is_dirty = True
            self._uncommitted_partitions.note(self)

    def _advance(self, taken: Sequence[RawEntry]) -> None:
        self._ahead.update(entry[0] for entry in taken)
        order = self._order
        while order and order[0] in self._ahead:
            self._done_id = order.popleft()
            self._ahead.discard(self._done_id)
        if len(self._ahead) >= MAX_AHEAD:
            self.capacity = min(self.capacity, 0)

    def add_dead_records(self, taken: Sequence[RawEntry], dead: Sequence[Sequence[str | bytes]]) -> None:
        """Note that records were given up."""
        self._produced.dead.extend(dead)
        self.settle(taken, [], {})

    def add_parked(self, parked: ParkedRecord) -> None:
        """Add a change of a parked key to what is settled next."""
        self._produced.parked.append(parked)

    def add_released(self, released: ReleasedRecord) -> None:
        """Add a parked record that is done to what is settled next."""
        self._produced.released.append(released)

    def find_key(self, entry: RawEntry) -> bytes:
        """Return the key of an entry; nothing for one without a key, or that cannot be decoded."""
        codec = self.processor.stream.codec
        try:
            return codec.key(codec.decode(entry[1])) or b""
        except BaseException:  # the processor gets the error
            return b""

    def find_sequence(self, key: bytes) -> RecordSequence:
        """Return the sequence of a key."""
        return self.sequences[crc32(key) % len(self.sequences)]

    def wake(self) -> None:
        """Have the sequences look again for something to do."""
        for sequence in self.sequences:
            sequence.wake()

    def commit_now(self) -> None:
        """Commit now what is done: a processor waits for it."""
        self._uncommitted_partitions.commit_now()

    @property
    def is_dirty(self) -> bool:
        """Whether something is done whose commit is not under way."""
        return self._is_dirty

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state, as they are with all that is done."""
        states = (self._produced.state, self._committing_state, self._state_cache)
        missing = [name for name in names if not any(name in state for state in states)]
        found: dict[str, bytes | None] = {}
        for first in range(0, len(missing), STATES_PER_READ):
            portion = missing[first : first + STATES_PER_READ]
            found.update(zip(portion, await self._host.read_states(portion), strict=True))
        current = (self._produced.state, self._committing_state, self._state_cache, found)
        values = [next((state[name] for state in current if name in state), None) for name in names]
        for name, value in found.items():
            if name not in self._state_cache:  # it may have been set and committed meanwhile
                self._remember_state(name, value)
        return values

    def _remember_state(self, name: str, value: bytes | None) -> None:
        """Remember a value as it is in Redis."""
        self._state_cache[name] = value
        while len(self._state_cache) > MAX_CACHED_STATE:
            del self._state_cache[next(iter(self._state_cache))]

    # the trial of a record that may have killed a worker

    @property
    def needs_trial(self) -> bool:
        """Whether the first record waits for `begin_trial`."""
        return self.deaths >= TRIAL_DEATHS

    async def wait_fed(self) -> None:
        """Wait until that record is here, or the partition ends."""
        await self._fed.wait()

    def begin_trial(self) -> None:
        """Let that record be taken."""
        self.capacity = 1
        for sequence in self.sequences:
            sequence.wake()

    async def wait_trial_ended(self) -> None:
        """Wait until that record is committed, or the partition ends."""
        await self._trial_ended.wait()

    # committing

    def begin_commit(self) -> Commit:
        """Return what is to be committed. `end_commit` follows."""
        self._is_dirty = False
        self._commits += 1
        produced, self._produced = self._produced, _Produced()
        self._committing, self._committing_state = self._uncommitted, produced.state
        if self._done_id.decode() != self.cursor:
            self._suspects -= 1
        commit = Commit(
            self.number,
            self.epoch,
            self.cursor,
            self._done_id.decode(),
            tuple(produced.outputs),
            produced.state,
            tuple(produced.dead),
            sorted((done.decode() for done in self._ahead), key=split_id),
            self._name,
            self._commits,
            tuple(produced.parked),
            tuple(produced.released),
            self._is_suspect(self._done_id.decode()),
        )
        return commit

    def _is_suspect(self, cursor: str) -> bool:
        """Return whether records behind a cursor may have been in hand, too, when the last owner died.

        After one death these are taken one by one, and the death counts for each of them. After two the first record
        alone was in hand.
        """
        return self.deaths == 1 and self._suspects > 0 and split_id(cursor) < split_id(self._suspect_end)

    def end_commit(self, commit: Commit) -> None:
        """Take note that it is committed."""
        if self._on_commit is not None:
            self._on_commit(commit)
        moved = commit.new_cursor != self.cursor
        self.cursor = commit.new_cursor
        self._uncommitted -= self._committing
        self._committing = 0
        for name, value in self._committing_state.items():
            self._remember_state(name, value)
        self._committing_state = {}
        if moved and self.deaths:
            if not commit.keeps_deaths:
                self.deaths = 0
                self._trial_ended.set()
            self._host.want_records()
        self._update_capacity()
        if self._is_at_limit and split_id(self.cursor) >= split_id(self._limit):
            self._host.want_records()

    @property
    def is_held(self) -> bool:
        """Whether nothing more is taken for now."""
        return self._is_held

    def hold(self) -> None:
        """Take nothing more until `release`."""
        self._is_held = True
        self.capacity = min(self.capacity, 0)

    def release(self) -> None:
        """Take records again."""
        self._is_held = False
        self._update_capacity()

    def _update_capacity(self) -> None:
        is_full = self._is_held or len(self._ahead) >= MAX_AHEAD
        allowed = 1 if self.deaths else self._commit_every
        self.capacity = 0 if is_full else allowed - self._uncommitted - self._in_hand
        for sequence in self.sequences:
            sequence.wake()

    # ending

    def stop(self) -> None:
        """Have the sequences end after what they have taken."""
        self._fed.set()
        self._trial_ended.set()
        for sequence in self.sequences:
            sequence.stop()

    def lose(self) -> None:
        """End at once: another worker owns the partition."""
        self.is_lost = True
        self.stop()
        self.cancel()

    def cancel(self) -> None:
        """Cancel what is in hand: it is not acknowledged."""
        for sequence in self.sequences:
            sequence.scope.cancel()


async def end_partitions(partitions: Sequence[OwnedPartition], grace_period: float) -> None:
    """Finish what is in hand within the grace period; cancel what is not done then."""
    for partition in partitions:
        partition.stop()
    with trio.move_on_after(grace_period):
        await _wait_ended(partitions)
    for partition in partitions:
        partition.cancel()
    await _wait_ended(partitions)


async def _wait_ended(partitions: Sequence[OwnedPartition]) -> None:
    for partition in partitions:
        for sequence in partition.sequences:
            await sequence.ended.wait()
