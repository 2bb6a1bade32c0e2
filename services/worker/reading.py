"""Reading: from which queues and lanes this worker reads, in what order, and how much of each.

Queues that share a worker alike are read in one trip. Where some come before others, by the setting `queue_order` or by
what a Scheduler prefers, they are read one after the other; so is a queue that has several lanes, in a trip of its own.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry, HeartbeatReply
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.keys import QueueKeys
from celery5.protocol.job.states import HIGH, LOW, NORMAL
from celery5.protocol.scaling.read_order import FairSplit, parse_priorities, parse_queue_order
from celery5.services.scaling.preferences import Preferences

NEW_LANE = b"lane"
"""What is said on the channel that wakes workers when a lane has its first job."""


class ReadingState:
    """Which queues a worker reads now, and the read that is under way.

    The Consumer reads by it. Others end a read that began before they had news.
    """

    def __init__(self) -> None:
        self._paused: set[str] = set()
        self._is_stopping = False
        self._read = trio.CancelScope()
        self._is_audit_requested = False

    def is_closed(self, queue: str) -> bool:
        """Return whether this worker takes no jobs of a queue now."""
        return self._is_stopping or queue in self._paused

    @property
    def paused_queues(self) -> frozenset[str]:
        """The queues that are not read now."""
        return frozenset(self._paused)

    @property
    def is_stopping(self) -> bool:
        """Whether nothing is read any more."""
        return self._is_stopping

    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is not read now."""
        return queue in self._paused

    def pause(self, *queues: str) -> None:
        """Read these queues no more, until `resume`."""
        self._paused.update(queues)
        self.interrupt()

    def resume(self, queue: str) -> None:
        """Read this queue again."""
        self._paused.discard(queue)
        self.interrupt()

    def set_stopping(self, is_stopping: bool) -> None:
        """Note whether nothing is read any more."""
        self._is_stopping = is_stopping

    def begin_read(self, scope: trio.CancelScope) -> None:
        """A read begins, which ends when `scope` is cancelled."""
        self._read = scope

    def interrupt(self) -> None:
        """End the read that is under way."""
        self._read.cancel()

    def request_audit(self) -> None:
        """Look for lost jobs before the next read: one may have been read whose answer was lost."""
        self._is_audit_requested = True

    def take_audit_request(self) -> bool:
        """Return whether an audit was requested since this was last asked."""
        requested, self._is_audit_requested = self._is_audit_requested, False
        return requested


class QueueLanes:
    """The lanes of one worker's queues, as far as they are in use. A new one ends the read that is under way."""

    def __init__(self, *, consumed: Sequence[QueueKeys], reading: ReadingState) -> None:
        self._used: dict[str, str] = {keys.queue: "" for keys in consumed}
        self._read: dict[str, tuple[QueueKeys, ...]] = {keys.queue: (keys,) for keys in consumed}
        self._reading = reading

    def get_read_lanes(self, queue: str) -> tuple[QueueKeys, ...]:
        """The lanes of a queue from which jobs are read, the most urgent first: one, unless its jobs had priorities."""
        return self._read[queue]

    def get_held_lanes(self, keys: QueueKeys) -> list[QueueKeys]:
        """The lanes on which this worker may have jobs of a queue."""
        return [keys, *(keys.on_lane(lane) for lane in self._used[keys.queue])]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """The Heartbeat's news of one queue."""
        if pulse.lanes != self._used[keys.queue]:
            self._used[keys.queue] = pulse.lanes
            self._read[keys.queue] = tuple(
                keys.on_lane(lane) for lane in (HIGH, NORMAL, LOW) if lane in pulse.lanes
            )
            self._reading.interrupt()


ReceiveFunction = Callable[[Call[list[Entry]]], Awaitable[Sequence[Entry]]]
"""Makes a read and takes what it brings."""


class ReadOrder:
    """The order of one worker's reads."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        lanes: QueueLanes,
        preferences: Preferences,
        worker: str,
        priorities: str,
        queue_order: str,
    ) -> None:
        self._in_turn = list(consumed)
        self._lanes = lanes
        self._preferences = preferences
        self._worker = worker
        self._levels = parse_priorities(priorities)
        self._order = parse_queue_order(queue_order)
        self._split = FairSplit()
        self._splits = {keys.queue: FairSplit() for keys in consumed}

    @property
    def queues(self) -> Sequence[QueueKeys]:
        """The queues, in the order in which those take turns of which there is less room than queues."""
        return self._in_turn

    def get_lanes(self, queues: Sequence[QueueKeys]) -> list[QueueKeys]:
        """All lanes of these queues."""
        return [lane for keys in queues for lane in self._lanes.get_read_lanes(keys.queue)]

    def get_held_lanes(self) -> list[QueueKeys]:
        """All lanes that this worker may have jobs of."""
        return [lane for keys in self._in_turn for lane in self._lanes.get_held_lanes(keys)]

    async def read_nonblocking(
        self, queues: Sequence[QueueKeys], room: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        """Read what can be read without waiting, where one read of all would not do. Gives how many jobs there were."""
        if len(queues) > 1:
            if self._order.names:
                return await self._strictly(queues, room, receive)
            if self._order.weights or self._preferences.queues:
                return await self._by_weight(queues, room, receive)
        shares = room.group_by_share(queues)
        if len(shares) > 1 or 0 in shares or len(self.get_lanes(queues)) > len(queues):
            return await self._by_share(shares, receive)
        return 0

    async def _strictly(
        self, open_: Sequence[QueueKeys], room: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        """The next queue is looked at when there is nothing more on this one, or no room for its jobs."""
        found = 0
        for keys in sorted(open_, key=lambda each: self._order.get_rank(each.queue)):
            count = room.get_remaining(keys.queue)
            if count and keys.queue not in self._order.names:
                self._last(keys)
            got = await self._read(keys, count, receive) if count else 0
            found += got
            if count and got == count:
                break
            room.use(keys.queue, got)
        return found

    async def _by_weight(
        self, open_: Sequence[QueueKeys], room: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        preferred, said = self._preferences.queues, self._order.weights
        weights = {keys.queue: said.get(keys.queue, 1.0) * preferred.get(keys.queue, 1.0) for keys in open_}
        total, found = max(room.get_remaining(keys.queue) for keys in open_), 0
        dealt = self._split.divide(total, weights)
        more: list[QueueKeys] = []
        for keys in sorted(open_, key=lambda each: dealt[each.queue], reverse=True):
            count = min(dealt[keys.queue], room.get_remaining(keys.queue))
            got = await self._read(keys, count, receive) if count else 0
            found += got
            room.use(keys.queue, got)
            if got == count:
                more.append(keys)
        if found < total and more:  # what the others have left
            left = self._split.divide(total - found, {keys.queue: weights[keys.queue] for keys in more})
            for keys in more:
                if count := min(left[keys.queue], room.get_remaining(keys.queue)):
                    got = await self._read(keys, count, receive)
                    found += got
                    room.use(keys.queue, got)
        return found

    async def _by_share(self, shares: Mapping[int, Sequence[QueueKeys]], receive: ReceiveFunction) -> int:
        found = 0
        for share, queues in shares.items():
            plain = (
                [keys for keys in queues if len(self._lanes.get_read_lanes(keys.queue)) == 1] if share else []
            )
            if plain:
                found += len(await receive(jobs.read_jobs(plain, self._worker, count=share, block_seconds=0)))
            for keys in queues if share else ():
                if keys not in plain:
                    found += await self._read(keys, share, receive)
        for keys in shares.get(0, ()):
            self._last(keys)
            if await self._read(keys, 1, receive):
                return found + 1
        return found

    async def _read(self, keys: QueueKeys, count: int, receive: ReceiveFunction) -> int:
        """Read one queue, without waiting: of each lane its share."""
        lanes, weights = self._lanes.get_read_lanes(keys.queue), self._levels.get_weights(keys.queue)
        if len(lanes) == 1:
            return len(await receive(jobs.read_jobs(lanes, self._worker, count=count, block_seconds=0)))
        if weights is None:
            shares = [count] + [0] * (len(lanes) - 1)
            return len(await receive(jobs.read_by_lane(lanes, self._worker, count=count, shares=shares)))
        dealt = self._splits[keys.queue].divide(count, {each.lane: weights[each.lane] for each in lanes})
        shares = [dealt[each.lane] for each in lanes]
        return len(await receive(jobs.read_by_lane(lanes, self._worker, count=count, shares=shares)))

    def _last(self, keys: QueueKeys) -> None:
        self._in_turn.remove(keys)
        self._in_turn.append(keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReads:
    """How a worker reads its queues."""

    # The connection on which reads wait.
    reader: ParkedRedis
    read_order: ReadOrder
    reading: ReadingState
    # Seconds that a read waits for jobs.
    read_block: float


class PassCapacity:
    """How many jobs of each queue there is room for during one pass. Queues whose jobs are of the same `kinds` are
    rivals: they share the room that the one with the most has."""

    def __init__(self, capacity: Mapping[str, int], kinds: Mapping[str, AbstractSet[str]]) -> None:
        self._rooms = capacity
        self._kinds = kinds
        self._came: dict[str, int] = {}

    def get_remaining(self, queue: str) -> int:
        """For how many jobs of a queue there is room now."""
        if not self._came:
            return self._rooms[queue]
        rivals = self._rivals(queue)
        most = max(self._rooms[each] for each in rivals) - sum(self._came.get(each, 0) for each in rivals)
        return max(0, min(most, self._rooms[queue] - self._came.get(queue, 0)))

    def use(self, queue: str, count: int) -> None:
        """So many of its jobs have come."""
        if count:
            self._came[queue] = self._came.get(queue, 0) + count

    def _rivals(self, queue: str) -> list[str]:
        own = self._kinds[queue]
        return [other for other, kinds in self._kinds.items() if not own.isdisjoint(kinds)]

    def group_by_share(self, open_: Sequence[QueueKeys]) -> dict[int, list[QueueKeys]]:
        """The queues by how much of each to read, when all share alike. With less room than queues it is 0: they take
        turns."""
        found: dict[int, list[QueueKeys]] = {}
        for keys in open_:
            found.setdefault(self._rooms[keys.queue] // len(self._rivals(keys.queue)), []).append(keys)
        return found
