"""Read dead-letter queues, batch by batch.

A batch is as small as its jobs are large, so that no trip is long and no reply fills the memory.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.dead_letters import DeadLetterEntry
from celery5.broker.calls.jobs import SERVER_TIME
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.broker.routing.unreachable import skip_unreachable
from celery5.errors import Misconfigured, UnknownQueue
from celery5.protocol.job.dead_letters import (
    DeadJob,
    DeadJobQuery,
    is_entry_id,
    make_dead_document,
    make_dead_job,
)
from celery5.protocol.job.history import redact_call
from celery5.protocol.shards import group_shards
from celery5.sending.publisher import BYTES_PER_TRIP

if TYPE_CHECKING:
    from celery5.application import Application

BATCH_SIZE = 100
"""Jobs in one trip: longer scripts would hold the server up."""
FIRST_BATCH_SIZE = 10
"""Jobs in the first trip, when their size is unknown."""


class DeadJobReader:
    """Reads the dead jobs that fit a query, in batches.

    The end of each queue is fixed when its first batch is read: jobs that die later are left out.

    Args:
        in_order: Whether the shards of a queue are read as one queue, the oldest first, as they always are where the
            query has a limit. Else one is read after the other: so batches for one script are larger.
    """

    def __init__(
        self, app: "Application", redis: AsyncDriver, query: DeadJobQuery, *, in_order: bool = True
    ) -> None:
        self._app = app
        self._redis = redis
        self._query = query
        self._left = math.inf if query.limit is None else query.limit
        self._in_order = in_order or query.limit is not None
        self._sources: list[_Merged | _Picked] | None = None

    async def read_batch(self) -> list[DeadJob]:
        """Return the next jobs, all of one queue; an empty list at the end."""
        while self._left > 0 and (page := await self.read_page()):
            jobs = [job for job in page if job in self._query]
            if self._left < len(jobs):
                jobs = jobs[: int(self._left)]
            self._left -= len(jobs)
            if jobs:
                return jobs
        return []

    async def read_page(self) -> list[DeadJob]:
        """Return the dead jobs of the next page, whether they are selected or not; an empty list at the end."""
        queue, entries = await self.read_entries()
        return [make_dead(self._app, queue, entry) for entry in entries]

    async def read_entries(self) -> tuple[str, list[DeadLetterEntry]]:
        """Return the entries of the next page and their queue; no entries at the end."""
        if self._sources is None:
            self._sources = await self._opened()
        while self._sources:
            source = self._sources[0]
            entries = await source.page(self._redis)
            if entries:
                assert source.keys is not None  # entries come from a queue
                return source.keys.queue, entries
            self._sources.pop(0)
        return "", []

    async def count_all(self) -> int:
        """Return how many dead jobs there are in the queues of the query."""
        queues = [self._app.queue(name) for name in await self.list_queues()]
        return sum(await self._redis.perform_all([dead_letter_calls.count_entries(keys) for keys in queues]))

    async def _opened(self) -> "list[_Merged | _Picked]":
        first, last = await self.get_ms_range()
        queues = [self._app.queue(name) for name in await self.list_queues()]
        if self._query.ids:
            # Entries in two queues may have the same id: an entry id alone is ambiguous.
            is_only_queue = len(queues) == 1
            return [
                _Picked(keys, sorted(self._query.ids), first, last, entries=is_only_queue) for keys in queues
            ]
        queue, entry = self._after([keys.queue for keys in queues])
        if self._query.newest_first:
            return [_Merged([_NewestFirst(keys, first, last, _bound(keys, queue, entry)) for keys in queues])]
        named = {keys.queue: keys for keys in queues}
        groups = list(group_shards(named).values()) if self._in_order else [[keys] for keys in queues]
        start = next((index for index, group in enumerate(groups) if named.get(queue) in group), 0)
        return [
            _Merged(
                [
                    _OldestFirst(keys, first, last, _bound(keys, queue, entry) if index == start else "")
                    for keys in group
                ]
            )
            for index, group in enumerate(groups)
            if index >= start
        ]

    def _after(self, queues: Sequence[str]) -> tuple[str, str]:
        """Return the queue and the entry after which to begin; empty strings for the beginning.

        Raises:
            Misconfigured: There are several queues and the position names none of them.
            UnknownQueue: The queue is not one of `queues`.
        """
        queue, _, entry = self._query.after.rpartition(":")
        if entry and not queue and len(queues) > 1:
            raise Misconfigured(
                f"there are several queues: give the one that {entry} is in, as QUEUE:{entry}"
            )
        if queue and queue not in queues:
            raise UnknownQueue(queue, queues)
        return queue or (queues[0] if entry and queues else ""), entry

    async def list_queues(self) -> Sequence[str]:
        """Return the queues of the query. Raises UnknownQueue."""
        if not self._query.queues:
            return await self._redis.perform(queue_calls.list_queues(self._app.keys))
        with skip_unreachable():  # an unreachable broker matters only when it has a queue that was named
            queues = await self._redis.perform(queue_calls.list_queues(self._app.keys))
        shards: dict[str, None] = {}
        for name in self._query.queues:
            of_queue = self._app.brokers.list_shards(name, queues)
            if not set(of_queue).intersection(queues) and not await self._redis.perform(
                dead_letter_calls.queue_exists(self._app.queue(name))
            ):
                raise UnknownQueue(name, queues)
            shards |= dict.fromkeys(of_queue)
        return tuple(shards)

    async def get_ms_range(self) -> tuple[int, float]:
        """Return the first and the last ms in which the jobs of the query died."""
        older, newer = self._query.older_than, self._query.newer_than
        if older is None and newer is None:
            return 0, math.inf
        now = int(await self._redis.perform(SERVER_TIME) * 1000)
        first = 0 if newer is None else max(0, now - int(newer * 1000))
        return first, math.inf if older is None else max(0, now - int(older * 1000))


class _EntryRange:
    """The entries of one queue in a range of ms, in an order that the subclass has."""

    def __init__(self, keys: QueueKeys) -> None:
        self.keys = keys
        self.waiting: list[DeadLetterEntry] = []
        self._count = FIRST_BATCH_SIZE

    async def fill(self, redis: AsyncDriver) -> bool:
        """Read the next entries into `waiting` where none waits; return whether there are any."""
        if not self.waiting:
            self.waiting = await self._read(redis)
            if self.waiting:
                self._continue_after(self.waiting[-1].entry)
                self._count = fit_count(self.waiting)
        return bool(self.waiting)

    async def _read(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        raise NotImplementedError

    def _continue_after(self, entry: str) -> None:
        raise NotImplementedError

    def get_order(self, entry: DeadLetterEntry) -> tuple[int, int, str]:
        """Return the sort key of an entry among those of all queues: the smallest comes first."""
        raise NotImplementedError


class _OldestFirst(_EntryRange):
    """The entries of one queue, the oldest first, from `begin` (or from the ms `first`) to the ms `last`."""

    def __init__(self, keys: QueueKeys, first: int, last: float, begin: str) -> None:
        super().__init__(keys)
        self._first = begin if begin and _parse_ms(begin.lstrip("(")) >= first else str(first)
        self._last_ms = last
        self._last = ""

    async def _read(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        if not self._last:
            newest = await redis.perform(dead_letter_calls.get_newest_entry(self.keys))
            if not newest:
                return []
            self._last = newest if _parse_ms(newest) <= self._last_ms else str(int(self._last_ms))
        return await redis.perform(
            dead_letter_calls.list_entries(self.keys, first=self._first, last=self._last, count=self._count)
        )

    def _continue_after(self, entry: str) -> None:
        self._first = f"({entry}"

    def get_order(self, entry: DeadLetterEntry) -> tuple[int, int, str]:
        """Return the time of an entry; ties are sorted by the names of the queues."""
        ms, _, number = entry.entry.partition("-")
        return int(ms), int(number), self.keys.queue


class _NewestFirst(_EntryRange):
    """The entries of one queue, the newest first, from below `end` (or from the ms `last`) to the ms `first`."""

    def __init__(self, keys: QueueKeys, first: int, last: float, end: str) -> None:
        super().__init__(keys)
        self._first = str(first)
        self._last = (
            end if end and (last == math.inf or _parse_ms(end.lstrip("(")) <= last) else _format_ms(last)
        )

    async def _read(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        return await redis.perform(
            dead_letter_calls.list_entries_backwards(
                self.keys, first=self._first, last=self._last, count=self._count
            )
        )

    def _continue_after(self, entry: str) -> None:
        self._last = f"({entry}"

    def get_order(self, entry: DeadLetterEntry) -> tuple[int, int, str]:
        """Return the time of an entry, the last one first; ties are sorted by the names of the queues."""
        ms, _, number = entry.entry.partition("-")
        return -int(ms), -int(number), self.keys.queue


class _Merged:
    """The entries of several queues, merged in the order of their ranges."""

    def __init__(self, ranges: Sequence[_EntryRange]) -> None:
        self._ranges = list(ranges)
        self.keys = ranges[0].keys if ranges else None

    async def page(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        """Return the next entries, all of the queue that is then in `keys`; an empty list at the end."""
        self._ranges = [part for part in self._ranges if await part.fill(redis)]
        if not self._ranges:
            return []
        first, *others = sorted(self._ranges, key=lambda part: part.get_order(part.waiting[0]))
        self.keys = first.keys
        bound = others[0].get_order(others[0].waiting[0]) if others else None
        entries = [entry for entry in first.waiting if bound is None or first.get_order(entry) < bound]
        first.waiting = first.waiting[len(entries) :]
        return entries


class _Picked:
    """The entries of one queue with the given job ids or entry ids."""

    def __init__(
        self, keys: QueueKeys, ids: Sequence[str], first: int, last: float, *, entries: bool
    ) -> None:
        self.keys = keys
        self._ids = ids
        self._entries = entries
        self._first, self._last = first, last
        self._at = 0

    async def page(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        while self._at < len(self._ids):
            ids = self._ids[self._at : self._at + FIRST_BATCH_SIZE]
            self._at += len(ids)
            places = await redis.perform(dead_letter_calls.find_entries(self.keys, ids))
            named_entry_ids = filter(is_entry_id, ids) if self._entries else ()
            entry_ids = dict.fromkeys([*filter(None, places), *named_entry_ids])
            calls = [
                dead_letter_calls.list_entries(self.keys, first=entry_id, last=entry_id, count=1)
                for entry_id in entry_ids
                if self._first <= _parse_ms(entry_id) <= self._last
            ]
            dead_letters = (
                [
                    dead_letter
                    for dead_letters in await redis.perform_all(calls)
                    for dead_letter in dead_letters
                ]
                if calls
                else []
            )
            if dead_letters:
                return dead_letters
        return []


def make_dead(app: "Application", queue: str, entry: DeadLetterEntry) -> DeadJob:
    """Return the dead job in an entry, with its arguments redacted where its task says so."""
    limit = app.settings.message_limit
    if entry.sink:
        return make_dead_document(queue, entry.entry, entry.sink, entry.document, entry.failure, limit)
    job = make_dead_job(queue, entry.entry, entry.message, entry.document, limit)
    task = app.tasks.get(job.task)
    if task is None or not task.call_shape.redacted:
        return job
    args, kwargs = redact_call(task.call_shape, job.args, job.kwargs)
    return msgspec.structs.replace(job, args=args, kwargs=kwargs)


def fit_count(entries: Sequence[DeadLetterEntry]) -> int:
    """Return how many entries to read next, by the size of the last ones."""
    size = sum(len(entry.message) + len(entry.document) for entry in entries) / len(entries)
    return max(1, min(BATCH_SIZE, int(BYTES_PER_TRIP / max(size, 1))))


def _bound(keys: QueueKeys, queue: str, entry: str) -> str:
    """Return the bound for reading a queue from after `entry`, which is in that queue or in a different one."""
    return entry if not entry or keys.queue > queue else f"({entry}"


def _format_ms(ms: float) -> str:
    return "+" if ms == math.inf else str(int(ms))


def _parse_ms(entry: str) -> int:
    return int(entry.partition("-")[0])
