"""Keep what made each dead job fail, so that a look at the groups reads only what is new."""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any
from weakref import WeakValueDictionary

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from celery5.app import App
from celery5.broker.call import Call
from celery5.broker.calls import dead_letters as calls
from celery5.broker.calls.dead_letters import DeadLetterEntry
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.dead_letters.queues import count_causes
from celery5.dead_letters.reading import FIRST_BATCH_SIZE, DeadJobReader, fit_count, make_dead
from celery5.observability.shown_values import mask_groups
from celery5.operations.dead_letters import MAX_GROUPED, DeadGrouping, group_dead
from celery5.protocol.job.dead_letters import DeadJobQuery, parse_filter
from celery5.protocol.job.error_text import normalise_message
from celery5.protocol.job.failure_groups import MAX_GROUPS, SAMPLES, DeadJobGroup, DeadJobGroups
from celery5.protocol.shards import get_queue_of_shard

MAX_LETTERS = 100_000
"""Dead jobs that are kept, the newest ones: about 200 bytes each."""
MAX_KINDS = 20_000
"""Kinds of failures that are kept: about 500 bytes each. With more of them, fewer dead jobs are kept."""
MAX_NEW = 5000
"""New dead jobs that one look reads. After more of them all is read again, the newest first, look by look."""
PLACES_PER_TRIP = 200
"""Dead jobs whose places are read in one trip."""
ENTRIES_PER_TRIP = 50
"""Dead jobs whose entries are read in one trip."""
PIECE = 2000
"""Dead jobs that are counted before other tasks have a turn: about 1 ms."""
READ_AHEAD_STEP = 0.05
"""Seconds that one step of reading ahead takes."""
READ_AHEAD_FOR = 300.0
"""Seconds after a look for which reading ahead goes on."""

Order = tuple[int, int, str]


class _Kind(msgspec.Struct, frozen=True, weakref=True):
    """What the failures of many dead jobs have in common."""

    queue: str
    task: str
    type: str
    reason: str
    sink: str
    group: str


class _Letter(msgspec.Struct, frozen=True, gc=False):
    """One dead job."""

    entry: str
    id: str
    kind: _Kind


class _QueueLetters:
    """The dead jobs of one queue.

    `letters`, the oldest first, and `unread`, the number of older ones, are together as many as Redis has.
    """

    def __init__(self, keys: QueueKeys, newest: str, unread: int) -> None:
        self.keys = keys
        self.letters: deque[_Letter] = deque()
        # All entries up to this one are in `letters` or unread; '' when there was none.
        self.newest = newest
        self.unread = unread

    def count(self) -> int:
        return len(self.letters) + self.unread

    def drop_before(self, first: str) -> None:
        """Forget what is older than the first entry that Redis has: it was trimmed, or removed as the oldest."""
        if not first:
            self.letters.clear()
            self.unread = 0
            return
        oldest = _parse(first)
        while self.letters and _parse(self.letters[0].entry) < oldest:
            self.letters.popleft()
            self.unread = 0

    def drop(self, entries: set[str]) -> None:
        if entries:
            self.letters = deque(letter for letter in self.letters if letter.entry not in entries)


class _Mark(msgspec.Struct, frozen=True):
    """What Redis has of one queue."""

    newest: str
    count: int
    first: str


class _CountedKind:
    """The selected dead jobs of one kind, which come the newest first."""

    __slots__ = ("count", "is_open", "kind", "newest", "oldest", "samples", "top")

    def __init__(self, letter: _Letter) -> None:
        self.kind = letter.kind
        self.count = 0
        self.top = self.newest = self.oldest = letter
        self.samples: list[tuple[int, str]] = []
        # Whether it may need more samples.
        self.is_open = True

    def add(self, letter: _Letter) -> None:
        self.count += 1
        self.oldest = letter
        if self.is_open:
            ms = _parse(letter.entry)[0]
            if len(self.samples) >= SAMPLES and ms < self.samples[-1][0]:
                self.is_open = False
                return
            self.samples.append((ms, letter.id or letter.entry))
            # Of those that died in one ms, the library shows the last that it reads.
            if ms == self.samples[0][0]:
                self.newest = letter


class DeadLetterIndex:
    """The newest dead jobs of an application, as far as grouping them needs.

    Groups are those of `app.dlq.groups`. Texts of errors are not kept: those that are shown are read again.

    Removed jobs are noticed by counting: when Redis has fewer entries than it should have, the places of the kept
    jobs (`HMGET`, 200 a trip) tell which are gone. Rejected: reading the entries again, since a stream cannot be asked
    for ids alone, and a message with its traceback has a kilobyte or more.

    The first look reads for a tenth of a second. Further looks go on, and so does `read_ahead`, where the server runs
    the dashboard's lifespan: 100,000 dead jobs are known after about half a minute.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = anyio.Lock()
        self._queues: dict[str, _QueueLetters] = {}
        self._kinds: WeakValueDictionary[tuple[str, ...], _Kind] = WeakValueDictionary()
        # The last one that was read backwards, as `QUEUE:ENTRY`: all newer ones are kept. '' when none was read.
        self._horizon = ""
        # Whether there is none beyond.
        self._is_complete = False
        self._updated = -1e9

    async def answer(self, asked: DeadGrouping) -> DeadJobGroups:
        """Answer `dlq:groups`, without reading what is kept here."""
        # The index has neither messages nor positions, and a small limit needs none.
        if (
            asked.limit == MAX_GROUPED
            and asked.newest_first
            and not (asked.after or asked.message or asked.ids)
        ):
            groups = await self.group(parse_filter(asked.to_filter()), within=asked.within)
            if groups is not None:
                return mask_groups(self._app, groups)
        return await group_dead(self._app, asked)

    async def group(self, query: DeadJobQuery, *, within: float | None = None) -> DeadJobGroups | None:
        """Return the groups of the selected dead jobs; None when a queue of the query is not known here.

        Args:
            query: Its conditions on ids, messages, positions and order are not looked at.
            within: Seconds to read old dead jobs for, at most; None to read all.

        Raises:
            BrokerError: The broker cannot be reached, or refuses.
        """
        asked = anyio.current_time()
        redis = await self._app.connections.get_async_driver()
        async with self._lock:
            # Otherwise whoever had the lock has seen all that was there when this call began.
            if self._updated < asked:
                began = anyio.current_time()
                await self._update(redis)
                self._updated = began
            await self._fill(redis, float("inf") if within is None else asked + within)
            if not set(query.queues) <= {*self._queues, *map(get_queue_of_shard, self._queues)}:
                return None
            return await self._collect(redis, query)

    async def read_ahead(self) -> None:
        """Read some older dead jobs, if there are more, and someone has looked at the groups lately."""
        now = anyio.current_time()
        if not self._queues or self._is_complete or self._is_full() or now > self._updated + READ_AHEAD_FOR:
            return
        redis = await self._app.connections.get_async_driver()
        async with self._lock:
            await self._fill(redis, now + READ_AHEAD_STEP)

    def count(self) -> int:
        """Return how many dead jobs are kept."""
        return sum(len(held.letters) for held in self._queues.values())

    def _forget(self) -> None:
        self._queues.clear()
        self._horizon, self._is_complete = "", False

    def _is_full(self) -> bool:
        return self.count() >= MAX_LETTERS or len(self._kinds) >= MAX_KINDS

    async def _update(self, redis: AsyncDriver) -> None:
        """Read what is new, and drop what was removed."""
        marks = await self._read_marks(redis)
        if self._must_start_again(marks):
            self._forget()
        for name in self._queues.keys() - marks.keys():
            del self._queues[name]
        for name, mark in marks.items():
            held = self._queues.get(name)
            if held is None:
                held = self._queues[name] = self._open(name, mark)
            await self._read_new(redis, held, mark.newest)
            held.drop_before(mark.first)
            missing = held.count() - mark.count
            if missing > 0:
                removed = await self._find_removed(redis, held, missing)
                held.drop(removed)
                missing -= len(removed)
            held.unread -= missing
            if held.unread < 0:  # entries were removed by hand, and their jobs' places were not
                self._forget()
                await self._update(redis)
                return
        self._drop_oldest()

    def _must_start_again(self, marks: dict[str, _Mark]) -> bool:
        """Return whether there is too much that is new, or the queue of the horizon is gone."""
        if self._horizon and self._horizon.rpartition(":")[0] not in marks:
            return True
        if not (self._horizon or self._is_complete):
            return False
        counts = {name: held.count() for name, held in self._queues.items()}
        return any(mark.count - counts.get(name, 0) > MAX_NEW for name, mark in marks.items())

    async def _read_marks(self, redis: AsyncDriver) -> dict[str, _Mark]:
        # One trip for all of it, the newest entry before the count: what is added between them counts as unread at
        # worst, until the next look.
        names = await DeadJobReader(self._app, redis, DeadJobQuery()).list_queues()
        queues = [self._app.queue(name) for name in names]
        trip: list[Call[Any]] = []
        for keys in queues:
            trip += calls.get_newest_entry(keys), calls.count_entries(keys), calls.get_oldest_entry(keys)
        replies = await redis.perform_all(trip) if trip else []
        return {name: _Mark(*replies[3 * at : 3 * at + 3]) for at, name in enumerate(names)}

    def _open(self, name: str, mark: _Mark) -> _QueueLetters:
        """Return a queue of which nothing is kept so far."""
        keys = self._app.queue(name)
        if self._is_complete:
            return _QueueLetters(keys, "", 0)
        if self._horizon:
            return _QueueLetters(keys, self._horizon.rpartition(":")[2], 0)
        return _QueueLetters(keys, mark.newest, mark.count)

    async def _read_new(self, redis: AsyncDriver, held: _QueueLetters, newest: str) -> None:
        size = FIRST_BATCH_SIZE
        while newest and (not held.newest or _parse(held.newest) < _parse(newest)):
            first = f"({held.newest}" if held.newest else "-"
            entries = await redis.perform(calls.list_entries(held.keys, first=first, last=newest, count=size))
            if not entries:
                return
            held.letters.extend(self._make_letter(held.keys.queue, entry) for entry in entries)
            held.newest = entries[-1].entry
            size = fit_count(entries)

    async def _fill(self, redis: AsyncDriver, deadline: float) -> None:
        """Read older dead jobs, the newest first, until there is none, the index is full or time is up.

        One page at least is read, so that looks without time go on, too.
        """
        if self._is_complete or self._is_full():
            return
        query = DeadJobQuery(queues=tuple(self._queues), newest_first=True, after=self._horizon)
        reader = DeadJobReader(self._app, redis, query)
        while self._queues:
            queue, entries = await reader.read_entries()
            if not entries:
                break
            held = self._queues[queue]
            newest = _parse(held.newest)
            for entry in entries:
                self._horizon = f"{queue}:{entry.entry}"
                if _parse(entry.entry) <= newest:  # newer ones are read by the next look
                    held.letters.appendleft(self._make_letter(queue, entry))
                    held.unread -= 1
            if self._is_full():
                self._drop_oldest()
                return
            if anyio.current_time() >= deadline:
                return
        self._is_complete = True

    def _make_letter(self, queue: str, entry: DeadLetterEntry) -> _Letter:
        job = make_dead(self._app, queue, entry)
        key = (queue, job.task, job.type, job.reason, job.sink, job.group)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(*key)
        return _Letter(job.entry, job.id, kind)

    def _drop_oldest(self) -> None:
        """Drop the oldest dead jobs of all queues until the index is in its bound."""
        # Of equal entries, that of the last queue counts as the oldest, as for the library.
        held = [self._queues[name] for name in sorted(self._queues, reverse=True)]
        oldest = [
            (*_parse(queue_letters.letters[0].entry), at)
            for at, queue_letters in enumerate(held)
            if queue_letters.letters
        ]
        heapify(oldest)
        count = self.count()
        while count > MAX_LETTERS or len(self._kinds) > MAX_KINDS:
            *_, at = heappop(oldest)
            held[at].letters.popleft()
            held[at].unread += 1
            count -= 1
            self._is_complete = False
            if held[at].letters:
                heappush(oldest, (*_parse(held[at].letters[0].entry), at))
            ms, number, at = oldest[0]
            self._horizon = f"{held[at].keys.queue}:{ms}-{number}"

    async def _find_removed(self, redis: AsyncDriver, held: _QueueLetters, missing: int) -> set[str]:
        """Return up to `missing` entries that Redis has not any more, the oldest first."""
        removed: set[str] = set()
        letters = list(held.letters)
        for start in range(0, len(letters), PLACES_PER_TRIP):
            part = letters[start : start + PLACES_PER_TRIP]
            ids = [letter.id or "-" for letter in part]
            places = await redis.perform(calls.find_entries(held.keys, ids))
            # A document that a sink refused has no place, and neither has what cannot be read: their entries tell.
            suspects = [
                letter.entry for letter, place in zip(part, places, strict=True) if place != letter.entry
            ]
            for at in range(0, len(suspects), ENTRIES_PER_TRIP):
                asked = suspects[at : at + ENTRIES_PER_TRIP]
                found = await self._read_entries(redis, [(held.keys, entry) for entry in asked])
                removed.update(
                    entry for entry, found_entry in zip(asked, found, strict=True) if found_entry is None
                )
            if len(removed) >= missing:
                break
        return removed

    async def _read_entries(
        self, redis: AsyncDriver, asked: Sequence[tuple[QueueKeys, str]]
    ) -> list[DeadLetterEntry | None]:
        """Return entries; None for those that Redis has not."""
        trip = [calls.list_entries(keys, first=entry, last=entry, count=1) for keys, entry in asked]
        return [entries[0] if entries else None for entries in await redis.perform_all(trip)]

    # groups

    async def _collect(self, redis: AsyncDriver, query: DeadJobQuery) -> DeadJobGroups:
        first, last = await DeadJobReader(self._app, redis, query).get_ms_range()
        queues = [
            self._queues[name]
            for name in sorted(self._queues)
            if not query.queues or name in query.queues or get_queue_of_shard(name) in query.queues
        ]
        kinds: list[_CountedKind] = []
        looked_at = 0
        for held in queues:
            looked_at += await _count_kinds(held.letters, query, first, last, kinds)
        matched = sum(kind.count for kind in kinds)
        groups: dict[str, list[_CountedKind]] = {}
        for kind in kinds:
            groups.setdefault(kind.kind.group, []).append(kind)
        if len(groups) > MAX_GROUPS:  # the library keeps those that it comes to first
            groups = dict(sorted(groups.items(), key=lambda item: _get_top(item[1]))[:MAX_GROUPS])
        listed = await self._describe(redis, groups)
        found = DeadJobGroups(
            groups=tuple(sorted(listed, key=lambda group: (-group.count, -group.last_died, group.id))),
            looked_at=looked_at,
            matched=matched,
            ungrouped=matched - sum(group.count for group in listed),
            total=max(looked_at, sum(held.count() for held in queues)),
            next=self._get_next(queues, first),
        )
        return await count_causes(self._app, redis, query, found, [held.keys.queue for held in queues])

    def _get_next(self, queues: Sequence[_QueueLetters], first: int) -> str:
        """Return the position of the oldest one that was looked at; '' when all were that may be selected."""
        entry = self._horizon.rpartition(":")[2]
        is_all = self._is_complete or not any(held.unread for held in queues)
        if is_all or (entry and _parse(entry)[0] < first):
            return ""
        oldest = [(held.letters[0].entry, held.keys.queue) for held in queues if held.letters]
        if not oldest:
            return f"{queues[0].keys.queue}:{entry or queues[0].newest}"
        entry, queue = max(oldest, key=lambda position: _get_order(*position))
        return f"{queue}:{entry}"

    async def _describe(
        self, redis: AsyncDriver, groups: dict[str, list[_CountedKind]]
    ) -> list[DeadJobGroup]:
        """Return groups with the texts of their newest dead jobs, which are read again."""
        described: list[DeadJobGroup] = []
        items = list(groups.items())
        newest = [max(kinds, key=_get_newest_order) for _, kinds in items]
        for start in range(0, len(items), FIRST_BATCH_SIZE):
            part = newest[start : start + FIRST_BATCH_SIZE]
            asked = [(self._queues[kind.kind.queue].keys, kind.newest.entry) for kind in part]
            entries = await self._read_entries(redis, asked)
            for (group, kinds), kind, entry in zip(items[start:], part, entries, strict=False):
                described.append(self._describe_group(group, kinds, kind, entry))
        return described

    def _describe_group(
        self, group: str, kinds: Sequence[_CountedKind], newest: _CountedKind, entry: DeadLetterEntry | None
    ) -> DeadJobGroup:
        # Without the entry it was removed a moment ago: the next look shows the group as it is then.
        job = None if entry is None else make_dead(self._app, newest.kind.queue, entry)
        samples = sorted((sample for kind in kinds for sample in kind.samples), reverse=True)
        return DeadJobGroup(
            id=group,
            task=newest.kind.task,
            type=newest.kind.type,
            pattern="" if job is None else normalise_message(job.message),
            count=sum(kind.count for kind in kinds),
            first_died=min(_parse(kind.oldest.entry)[0] for kind in kinds) / 1000,
            last_died=_parse(newest.newest.entry)[0] / 1000,
            queues=tuple(sorted({get_queue_of_shard(kind.kind.queue) for kind in kinds})),
            reasons=tuple(sorted({kind.kind.reason for kind in kinds})),
            message="" if job is None else job.message,
            traceback="" if job is None else job.traceback,
            ids=tuple(job_id for _, job_id in samples[:SAMPLES]),
        )


async def _count_kinds(
    letters: deque[_Letter], query: DeadJobQuery, first: int, last: float, kinds: list[_CountedKind]
) -> int:
    """Add the kinds of the selected dead jobs of one queue to `kinds`. Return how many died from `first` to `last`."""
    found: dict[int, _CountedKind | None] = {}
    has_range = first > 0 or last != float("inf")
    looked_at = 0
    for number, letter in enumerate(reversed(letters), start=1):
        if number % PIECE == 0:
            await checkpoint()
        if has_range and not first <= _parse(letter.entry)[0] <= last:
            continue
        looked_at += 1
        key = id(letter.kind)
        if key not in found:
            found[key] = _CountedKind(letter) if query.selects(letter.kind) else None
        counted = found[key]
        if counted is not None:
            counted.add(letter)
    kinds.extend(counted for counted in found.values() if counted is not None)
    return looked_at


def _parse(entry: str) -> tuple[int, int]:
    """Return the ms and the number of an entry."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)


def _get_order(entry: str, queue: str) -> Order:
    """Return the sort key of an entry among those of all queues, the newest first."""
    ms, number = _parse(entry)
    return -ms, -number, queue


def _get_top(kinds: Sequence[_CountedKind]) -> Order:
    return min(_get_order(kind.top.entry, kind.kind.queue) for kind in kinds)


def _get_newest_order(kind: _CountedKind) -> Order:
    ms, number = _parse(kind.newest.entry)
    return ms, -number, kind.kind.queue
