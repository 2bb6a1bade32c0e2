"""From which queues and lanes a worker reads, in what order, and how much of each.

Queues with equal shares are read in one call. Queues with an order or weights, by the setting `queue_order` or by the
preferences of a Scheduler, are read one after the other; so is a queue that has several lanes.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import Entry
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import QueueKeys
from celery5.protocol.job.states import HIGH, LOW, NORMAL
from celery5.protocol.scaling.read_order import FairSplit, parse_priorities, parse_queue_order
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.job.reading_state import ReadingState
from celery5.services.scaling.preferences import Preferences

NEW_LANE = b"lane"
"""The message on the channel that wakes workers when a lane has its first job."""


class QueueLanes:
    """The lanes of one worker's queues, as far as they are in use. A new one ends the read that is under way."""

    def __init__(self, *, consumed: Sequence[QueueKeys], reading: ReadingState) -> None:
        self._lanes_in_use: dict[str, str] = {keys.queue: "" for keys in consumed}
        self._read: dict[str, tuple[QueueKeys, ...]] = {keys.queue: (keys,) for keys in consumed}
        self._reading = reading

    def get_read_lanes(self, queue: str) -> tuple[QueueKeys, ...]:
        """Return the lanes of a queue to read, the most urgent first: one, unless its jobs had priorities."""
        return self._read[queue]

    def get_held_lanes(self, keys: QueueKeys) -> list[QueueKeys]:
        """Return the lanes on which this worker may hold jobs of a queue."""
        return [keys, *(keys.on_lane(lane) for lane in self._lanes_in_use[keys.queue])]

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> None:
        """Take the heartbeat reply of one queue: its lanes."""
        if pulse.lanes != self._lanes_in_use[keys.queue]:
            self._lanes_in_use[keys.queue] = pulse.lanes
            self._read[keys.queue] = tuple(
                keys.on_lane(lane) for lane in (HIGH, NORMAL, LOW) if lane in pulse.lanes
            )
            # A job may have been given on a lane that no audit has looked at, in a reply that was lost.
            self._reading.request_audit()
            self._reading.interrupt()


ReceiveFunction = Callable[[Call[list[Entry]]], Awaitable[Sequence[Entry]]]
"""Performs a read, takes the jobs, and returns them."""


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
        self._queues = list(consumed)
        self._lanes = lanes
        self._preferences = preferences
        self._worker = worker
        self._levels = parse_priorities(priorities)
        self._order = parse_queue_order(queue_order)
        self._shard_counts = Counter(get_queue_of_shard(keys.queue) for keys in consumed)
        # Without weights, reads of several queues are divided only where one of them has more parts than another.
        self._divides_shards = len(self._shard_counts) > 1 and max(self._shard_counts.values()) > 1
        self._split = FairSplit()
        self._splits = {keys.queue: FairSplit() for keys in consumed}

    @property
    def queues(self) -> Sequence[QueueKeys]:
        """The queues, in the order in which they take turns when there is less capacity than queues."""
        return self._queues

    def get_lanes(self, queues: Sequence[QueueKeys]) -> list[QueueKeys]:
        """Return all lanes of these queues."""
        return [lane for keys in queues for lane in self._lanes.get_read_lanes(keys.queue)]

    def get_held_lanes(self) -> list[QueueKeys]:
        """Return all lanes that this worker may hold jobs of."""
        return [lane for keys in self._queues for lane in self._lanes.get_held_lanes(keys)]

    async def read_nonblocking(
        self, queues: Sequence[QueueKeys], capacity: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        """Read without blocking, where one read of all queues would not do. Return how many jobs were read."""
        if len(queues) > 1:
            if self._order.names:
                return await self._read_by_order(queues, capacity, receive)
            if self._order.weights or self._preferences.queues or self._divides_shards:
                return await self._read_by_weight(queues, capacity, receive)
        shares = capacity.group_by_share(queues)
        if len(shares) > 1 or 0 in shares or len(self.get_lanes(queues)) > len(queues):
            return await self._read_by_share(shares, receive)
        return 0

    async def _read_by_order(
        self, queues: Sequence[QueueKeys], capacity: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        """Read a queue only when those before it are empty, or there is no capacity for their jobs."""
        total = 0
        for keys in sorted(queues, key=lambda keys: self._order.get_rank(keys.queue)):
            count = capacity.get_remaining(keys.queue)
            if count:  # queues without a name here take turns, and so do the shards of one
                self._move_to_end(keys)
            read_count = await self._read(keys, count, receive) if count else 0
            total += read_count
            if count and read_count == count:
                break
            capacity.use(keys.queue, read_count)
        return total

    async def _read_by_weight(
        self, queues: Sequence[QueueKeys], capacity: "PassCapacity", receive: ReceiveFunction
    ) -> int:
        preferred, configured = self._preferences.queues, self._order.weights
        weights: dict[str, float] = {}
        for keys in queues:
            name = get_queue_of_shard(keys.queue)
            weight = configured.get(name, 1.0) * preferred.get(name, 1.0)
            weights[keys.queue] = weight / self._shard_counts[name]
        total, read_total = max(capacity.get_remaining(keys.queue) for keys in queues), 0
        shares_by_queue = self._split.divide(total, weights)
        full_queues: list[QueueKeys] = []
        for keys in sorted(queues, key=lambda keys: shares_by_queue[keys.queue], reverse=True):
            count = min(shares_by_queue[keys.queue], capacity.get_remaining(keys.queue))
            read_count = await self._read(keys, count, receive) if count else 0
            read_total += read_count
            capacity.use(keys.queue, read_count)
            if read_count == count:
                full_queues.append(keys)
        if read_total < total and full_queues:  # the capacity that other queues have left
            leftover_shares = self._split.divide(
                total - read_total, {keys.queue: weights[keys.queue] for keys in full_queues}
            )
            for keys in full_queues:
                if count := min(leftover_shares[keys.queue], capacity.get_remaining(keys.queue)):
                    read_count = await self._read(keys, count, receive)
                    read_total += read_count
                    capacity.use(keys.queue, read_count)
        return read_total

    async def _read_by_share(
        self, shares: Mapping[int, Sequence[QueueKeys]], receive: ReceiveFunction
    ) -> int:
        read_total = 0
        for share, queues in shares.items():
            single_lane_queues = (
                [keys for keys in queues if len(self._lanes.get_read_lanes(keys.queue)) == 1] if share else []
            )
            if single_lane_queues:
                read_total += len(
                    await receive(
                        jobs.read_jobs(single_lane_queues, self._worker, count=share, block_seconds=0)
                    )
                )
            for keys in queues if share else ():
                if keys not in single_lane_queues:
                    read_total += await self._read(keys, share, receive)
        for keys in shares.get(0, ()):
            self._move_to_end(keys)
            if await self._read(keys, 1, receive):
                return read_total + 1
        return read_total

    async def _read(self, keys: QueueKeys, count: int, receive: ReceiveFunction) -> int:
        """Read one queue without blocking: of each lane its share."""
        lanes, weights = self._lanes.get_read_lanes(keys.queue), self._levels.get_weights(keys.queue)
        if len(lanes) == 1:
            return len(await receive(jobs.read_jobs(lanes, self._worker, count=count, block_seconds=0)))
        if weights is None:
            shares = [count] + [0] * (len(lanes) - 1)
            return len(await receive(jobs.read_by_lane(lanes, self._worker, count=count, shares=shares)))
        shares_by_lane = self._splits[keys.queue].divide(
            count, {lane_keys.lane: weights[lane_keys.lane] for lane_keys in lanes}
        )
        shares = [shares_by_lane[lane_keys.lane] for lane_keys in lanes]
        return len(await receive(jobs.read_by_lane(lanes, self._worker, count=count, shares=shares)))

    def _move_to_end(self, keys: QueueKeys) -> None:
        self._queues.remove(keys)
        self._queues.append(keys)


class PassCapacity:
    """The capacity for jobs of each queue during one pass.

    Queues with jobs of the same kinds are rivals: they share the capacity of the one that has the most.
    """

    def __init__(self, capacity: Mapping[str, int], kinds: Mapping[str, AbstractSet[str]]) -> None:
        self._capacity = capacity
        self._kinds = kinds
        self._used_by_queue: dict[str, int] = {}

    def get_remaining(self, queue: str) -> int:
        """Return the remaining capacity for jobs of a queue."""
        if not self._used_by_queue:
            return self._capacity[queue]
        rivals = self._find_rivals(queue)
        remaining = max(self._capacity[rival] for rival in rivals) - sum(
            self._used_by_queue.get(rival, 0) for rival in rivals
        )
        return max(0, min(remaining, self._capacity[queue] - self._used_by_queue.get(queue, 0)))

    def use(self, queue: str, count: int) -> None:
        """Use capacity for `count` jobs of a queue that were read."""
        if count:
            self._used_by_queue[queue] = self._used_by_queue.get(queue, 0) + count

    def _find_rivals(self, queue: str) -> list[str]:
        """Return the queues with jobs of the same kinds, and this one."""
        own_kinds = self._kinds[queue]
        return [name for name, kinds in self._kinds.items() if not own_kinds.isdisjoint(kinds)]

    def group_by_share(self, queues: Sequence[QueueKeys]) -> dict[int, list[QueueKeys]]:
        """Return the queues by how many jobs of each to read, with equal shares.

        The share is 0 where there is less capacity than queues: these take turns.
        """
        queues_by_share: dict[int, list[QueueKeys]] = {}
        for keys in queues:
            share = self._capacity[keys.queue] // len(self._find_rivals(keys.queue))
            queues_by_share.setdefault(share, []).append(keys)
        return queues_by_share
