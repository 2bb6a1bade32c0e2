"""The records of a partition that are processed one after the other, for one processor function."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import trio
import trio.lowlevel

from celery5.broker.calls.streams import RawEntry
from celery5.protocol.streams.parking import ParkedRecord, ReleasedRecord
from celery5.services.streams.partition_options import PartitionOptions


class LaneOwner(Protocol):
    """What a lane needs of its partition."""

    number: int
    # How many owners have died at its first record.
    deaths: int
    # How many more records may be taken before a commit.
    room: int
    options: PartitionOptions

    @property
    def is_dirty(self) -> bool:
        """Whether something is done whose commit is not under way."""
        ...

    def take_one(self) -> None:
        """Note that a record is in hand."""
        ...

    def take(self, count: int) -> None:
        """Note that records are in hand."""
        ...

    def give_back(self, count: int) -> None:
        """Note that records are not in hand any more, and not done."""
        ...

    def prefetch_batches(self, count: int) -> None:
        """Read enough ahead for batches of so many records."""
        ...

    def settle_one(self, entry: RawEntry) -> bool:
        """Note that a record without outputs is done, if records are done in their order; else return False."""
        ...

    def settle(
        self, taken: Sequence[RawEntry], outputs: list[bytes], state: Mapping[str, bytes | None]
    ) -> None:
        """Note that records are done, with their outputs."""
        ...

    def bury(self, taken: Sequence[RawEntry], dead: Sequence[Sequence[str | bytes]]) -> None:
        """Note that records were given up."""
        ...

    def add_parked(self, parked: ParkedRecord) -> None:
        """Add a change of a parked key to what is settled next."""
        ...

    def add_released(self, released: ReleasedRecord) -> None:
        """Add a parked record that is done to what is settled next."""
        ...

    def commit_now(self) -> None:
        """Commit now what is done."""
        ...

    async def get_state(self, name: str) -> bytes | None:
        """Return a value of the keyed state, as it is with all that is done."""
        ...

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state, as they are with all that is done."""
        ...


class Lane:
    """The records of a partition that are processed one after the other: a `LaneFeed` for one processor function."""

    def __init__(self, partition: LaneOwner) -> None:
        self._owner = partition
        self._buffer: deque[RawEntry] = deque()
        self._taken: Sequence[RawEntry] = ()
        self._outputs: list[bytes] = []
        self._state: dict[str, bytes | None] = {}
        self._waiter: trio.lowlevel.Task | None = None
        self.is_stopping = False
        self.scope = trio.CancelScope()
        self.stop_requested = trio.Event()
        self.ended = trio.Event()

    @property
    def group(self) -> str:
        """The name of the processor."""
        return self._owner.options.group

    @property
    def partition(self) -> int:
        """The partition."""
        return self._owner.number

    @property
    def grace_period(self) -> float:
        """Seconds that a record has to end."""
        return self._owner.options.grace_period

    @property
    def concurrency(self) -> int:
        """How many lanes the partition has."""
        return self._owner.options.concurrency

    def now(self) -> float:
        """Return the time of the Trio clock."""
        return trio.current_time()

    @property
    def taken(self) -> Sequence[RawEntry]:
        """The records that the function has taken last."""
        return self._taken

    def feed(self, entries: Sequence[RawEntry]) -> None:
        """Take entries to process."""
        self._buffer.extend(entries)
        self.wake()

    def take_next(self) -> RawEntry | None:
        """Acknowledge what was taken before, and return the next record if it is here and may be taken."""
        owner, taken = self._owner, self._taken
        if taken:
            if self._outputs or self._state or len(taken) > 1 or not owner.settle_one(taken[0]):
                self.settle()
            else:
                self._taken = ()
        if not self._buffer or owner.room <= 0 or self.is_stopping:
            return None
        raw = self._buffer.popleft()
        self._taken = (raw,)
        owner.take_one()
        return raw

    def settle(self) -> None:
        """Acknowledge what was taken. What has come without records is committed, too."""
        taken, outputs, state = self._taken, self._outputs, self._state
        if not (taken or outputs or state):
            return
        self._taken = ()
        if outputs:
            self._outputs = []
        if state:
            self._state = {}
        self._owner.settle(taken, outputs, state)

    async def flush(self) -> None:
        """Acknowledge what was taken, and wait until the commit of that is under way."""
        self.settle()
        while self._owner.is_dirty:
            self._owner.commit_now()
            await self.wait()

    def give_back(self) -> None:
        """Put what was taken in front again, and forget what it has produced."""
        self._buffer.extendleft(reversed(self._taken))
        self._owner.give_back(len(self._taken))
        self._taken = ()
        self._outputs, self._state = [], {}

    def bury(self, dead: Sequence[Sequence[str | bytes]]) -> None:
        """Give up what was taken."""
        taken, self._taken = self._taken, ()
        self._outputs, self._state = [], {}
        self._owner.bury(taken, dead)

    def forget_outputs(self) -> None:
        """Forget what the records that were taken have produced."""
        self._outputs, self._state = [], {}

    def add_parked(self, parked: ParkedRecord) -> None:
        """Add a change of a parked key to what is settled next."""
        self._owner.add_parked(parked)

    def settle_released(self, released: ReleasedRecord | None) -> None:
        """Settle what was added, and a parked record with what it has produced; commit that now."""
        outputs, state = self._outputs, self._state
        self._outputs, self._state = [], {}
        if released is not None:
            self._owner.add_released(released)
        self._owner.settle((), outputs, state)
        self._owner.commit_now()

    def discard_parked(self, released: ReleasedRecord, dead: Sequence[str | bytes]) -> None:
        """Make a parked record a dead one."""
        self._owner.add_released(released)
        self._owner.bury((), [dead])

    def commit_now(self) -> None:
        """Commit now what is done."""
        self._owner.commit_now()

    async def wait_next(self) -> RawEntry | None:
        """Return the next record when it is here; None when the function is to end."""
        while not self.is_stopping:
            raw = self.take_next()
            if raw is not None:
                return raw
            await self.wait()
        return None

    async def wait_next_within(self, seconds: float) -> RawEntry | None:
        """Return the next record; None when none has come in this time, or the function is to end."""
        while not self.is_stopping:
            with trio.move_on_after(seconds):
                return await self.wait_next()
            if not self._buffer:  # else it is here, and waits for a commit
                return None
        return None

    async def wait(self) -> None:
        """Wait until there is something new: a record, a commit, or the end.

        Trio's own means, since a lane waits after every few records, and an Event costs twice as much.
        """
        if self._buffer:
            self._owner.commit_now()
        if self._waiter is not None:
            raise RuntimeError(
                f"processor {self.group}: two tasks ask for the records of partition {self.partition}"
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

    async def wait_batch(
        self, count: int, within: float, *, is_over: Callable[[], bool] = lambda: False
    ) -> Sequence[RawEntry]:
        """Acknowledge what was taken before, and return the next batch; an empty one when the function is to end.

        It is empty as well when `is_over` returns True while there is nothing to take.
        """
        if self._taken:
            self.settle()
        self._owner.prefetch_batches(count)
        while not (self._buffer and self._owner.room > 0):
            if self.is_stopping or is_over():
                return ()
            await self.wait()
        count = 1 if self._owner.deaths else count
        with trio.move_on_after(within):
            while len(self._buffer) < count and not self.is_stopping:
                await self.wait()
        if self.is_stopping:
            return ()
        buffer = self._buffer
        self._taken = [buffer.popleft() for _ in range(min(count, len(buffer)))]
        self._owner.take(len(self._taken))
        return self._taken

    # for a function in another thread: it takes records in portions, and is done with one after the other

    async def wait_portion(self, most: int, seconds: float | None) -> Sequence[RawEntry]:
        """Return the next records when some are here, beside those that were taken; none when the function is to end.

        Args:
            most: At most so many.
            seconds: At most for so long; None for no limit.
        """
        with trio.move_on_after(math.inf if seconds is None else seconds):
            while not (self._buffer and self._owner.room > 0) and not self.is_stopping:
                await self.wait()
        if self.is_stopping:
            return ()
        portion = [
            self._buffer.popleft() for _ in range(min(most, max(0, self._owner.room), len(self._buffer)))
        ]
        self._taken = (*self._taken, *portion)
        self._owner.take(len(portion))
        return portion

    def settle_first(self, count: int, outputs: list[bytes], state: Mapping[str, bytes | None]) -> None:
        """Acknowledge the first of what was taken."""
        done, self._taken = self._taken[:count], self._taken[count:]
        self._owner.settle(done, outputs, state)

    def return_behind(self, count: int) -> None:
        """Put what was taken in front again, but for the first `count`."""
        behind, self._taken = self._taken[count:], self._taken[:count]
        self._buffer.extendleft(reversed(behind))
        self._owner.give_back(len(behind))

    def take_over(self, count: int, outputs: list[bytes], state: dict[str, bytes | None]) -> None:
        """Continue where a function has ended: with so many records in hand, and what it has produced for them."""
        self.return_behind(count)
        self._outputs, self._state = outputs, state

    # what is produced

    def add_output(self, output: bytes) -> None:
        """Add an output of what was taken last."""
        self._outputs.append(output)

    async def get_state(self, name: str) -> bytes | None:
        """Return a value of the keyed state."""
        if name in self._state:
            return self._state[name]
        return await self._owner.get_state(name)

    async def get_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Return values of the keyed state."""
        stored = await self._owner.get_states([name for name in names if name not in self._state])
        values = iter(stored)
        return [self._state[name] if name in self._state else next(values) for name in names]

    def set_state(self, name: str, value: bytes | None) -> None:
        """Set a value of the keyed state."""
        self._state[name] = value

    def stop(self) -> None:
        """End after what was taken."""
        self.is_stopping = True
        self.stop_requested.set()
        self.wake()
