"""Reading: from which queues and lanes this worker reads, in what order, and how much of each.

Floor: services. Reads: nothing itself; the Consumer makes its calls. Writes: nothing.

Queues that share a worker alike are read in one trip. Where some come before others, by the setting `queue_order` or by
what a Scheduler prefers, they are read one after the other; so is a queue that has several lanes, in a trip of its own.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from celery5.broker import calls
from celery5.broker.call import Call
from celery5.broker.calls import Entry
from celery5.broker.keys import QueueKeys
from celery5.protocol.sharing import Split, levels_in, order_in
from celery5.services.lanes import Lanes
from celery5.services.preferences import Preferences

Receives = Callable[[Call[list[Entry]]], Awaitable[Sequence[Entry]]]
"""Makes a read and takes what it brings."""


class Reading:
    """The order of one worker's reads."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        lanes: Lanes,
        preferences: Preferences,
        worker: str,
        priorities: str,
        queue_order: str,
    ) -> None:
        self._in_turn = list(consumed)
        self._lanes = lanes
        self._preferences = preferences
        self._worker = worker
        self._levels = levels_in(priorities)
        self._order = order_in(queue_order)
        self._split = Split()
        self._splits = {keys.queue: Split() for keys in consumed}

    @property
    def queues(self) -> Sequence[QueueKeys]:
        """The queues, in the order in which those take turns of which there is less room than queues."""
        return self._in_turn

    def lanes(self, queues: Sequence[QueueKeys]) -> list[QueueKeys]:
        """All lanes of these queues."""
        return [lane for keys in queues for lane in self._lanes.read(keys.queue)]

    def held(self) -> list[QueueKeys]:
        """All lanes that this worker may have jobs of."""
        return [lane for keys in self._in_turn for lane in self._lanes.held(keys)]

    def follow(self, follower: Callable[[], None]) -> None:
        """Have `follower` called when there is something new to read from."""
        self._lanes.follow(follower)

    async def at_once(self, open_: Sequence[QueueKeys], room: "Room", receive: Receives) -> int:
        """Read what can be read without waiting, where one read of all would not do. Gives how many jobs there were."""
        if len(open_) > 1:
            if self._order.names:
                return await self._strictly(open_, room, receive)
            if self._order.weights or self._preferences.queues:
                return await self._by_weight(open_, room, receive)
        shares = room.shares(open_)
        if len(shares) > 1 or 0 in shares or len(self.lanes(open_)) > len(open_):
            return await self._by_share(shares, receive)
        return 0

    async def _strictly(self, open_: Sequence[QueueKeys], room: "Room", receive: Receives) -> int:
        """The next queue is looked at when there is nothing more on this one, or no room for its jobs."""
        found = 0
        for keys in sorted(open_, key=lambda each: self._order.rank(each.queue)):
            count = room.left(keys.queue)
            if count and keys.queue not in self._order.names:
                self._last(keys)
            got = await self._read(keys, count, receive) if count else 0
            found += got
            if count and got == count:
                break
            room.take(keys.queue, got)
        return found

    async def _by_weight(self, open_: Sequence[QueueKeys], room: "Room", receive: Receives) -> int:
        preferred, said = self._preferences.queues, self._order.weights
        weights = {keys.queue: said.get(keys.queue, 1.0) * preferred.get(keys.queue, 1.0) for keys in open_}
        total, found = max(room.left(keys.queue) for keys in open_), 0
        dealt = self._split.deal(total, weights)
        more: list[QueueKeys] = []
        for keys in sorted(open_, key=lambda each: dealt[each.queue], reverse=True):
            count = min(dealt[keys.queue], room.left(keys.queue))
            got = await self._read(keys, count, receive) if count else 0
            found += got
            room.take(keys.queue, got)
            if got == count:
                more.append(keys)
        if found < total and more:  # what the others have left
            left = self._split.deal(total - found, {keys.queue: weights[keys.queue] for keys in more})
            for keys in more:
                if count := min(left[keys.queue], room.left(keys.queue)):
                    got = await self._read(keys, count, receive)
                    found += got
                    room.take(keys.queue, got)
        return found

    async def _by_share(self, shares: Mapping[int, Sequence[QueueKeys]], receive: Receives) -> int:
        found = 0
        for share, queues in shares.items():
            plain = [keys for keys in queues if len(self._lanes.read(keys.queue)) == 1] if share else []
            if plain:
                found += len(await receive(calls.read(plain, self._worker, count=share, block=0)))
            for keys in queues if share else ():
                if keys not in plain:
                    found += await self._read(keys, share, receive)
        for keys in shares.get(0, ()):
            self._last(keys)
            if await self._read(keys, 1, receive):
                return found + 1
        return found

    async def _read(self, keys: QueueKeys, count: int, receive: Receives) -> int:
        """Read one queue, without waiting: of each lane its share."""
        lanes, weights = self._lanes.read(keys.queue), self._levels.of(keys.queue)
        if len(lanes) == 1:
            return len(await receive(calls.read(lanes, self._worker, count=count, block=0)))
        if weights is None:
            shares = [count] + [0] * (len(lanes) - 1)
            return len(await receive(calls.pick(lanes, self._worker, count=count, shares=shares)))
        dealt = self._splits[keys.queue].deal(count, {each.lane: weights[each.lane] for each in lanes})
        shares = [dealt[each.lane] for each in lanes]
        return len(await receive(calls.pick(lanes, self._worker, count=count, shares=shares)))

    def _last(self, keys: QueueKeys) -> None:
        self._in_turn.remove(keys)
        self._in_turn.append(keys)


class Room:
    """How many jobs of each queue there is room for during one pass. Queues whose jobs are of the same `kinds` are
    rivals: they share the room that the one with the most has."""

    def __init__(self, rooms: Mapping[str, int], kinds: Mapping[str, AbstractSet[str]]) -> None:
        self._rooms = rooms
        self._kinds = kinds
        self._came: dict[str, int] = {}

    def left(self, queue: str) -> int:
        """For how many jobs of a queue there is room now."""
        if not self._came:
            return self._rooms[queue]
        rivals = self._rivals(queue)
        most = max(self._rooms[each] for each in rivals) - sum(self._came.get(each, 0) for each in rivals)
        return max(0, min(most, self._rooms[queue] - self._came.get(queue, 0)))

    def take(self, queue: str, count: int) -> None:
        """So many of its jobs have come."""
        if count:
            self._came[queue] = self._came.get(queue, 0) + count

    def _rivals(self, queue: str) -> list[str]:
        own = self._kinds[queue]
        return [other for other, kinds in self._kinds.items() if not own.isdisjoint(kinds)]

    def shares(self, open_: Sequence[QueueKeys]) -> dict[int, list[QueueKeys]]:
        """The queues by how much of each to read, when all share alike. With less room than queues it is 0: they take
        turns."""
        found: dict[int, list[QueueKeys]] = {}
        for keys in open_:
            found.setdefault(self._rooms[keys.queue] // len(self._rivals(keys.queue)), []).append(keys)
        return found
