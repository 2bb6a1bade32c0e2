"""Graves: reading dead-letter queues, batch by batch.

A batch is as small as its jobs are large, so that no trip is long and no answer fills the memory.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from celery5.broker.calls import dead_letters as graveyard
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.dead_letters import DeadLetterEntry
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
from celery5.sending.publisher import BYTES_PER_TRIP

if TYPE_CHECKING:
    from celery5.application import Application

BATCH_SIZE = 100
"""Jobs in one trip: longer scripts would hold the server up."""
FIRST_BATCH_SIZE = 10
"""Jobs in the first trip, when nobody knows how large they are."""


class DeadJobReader:
    """The dead jobs that are meant, batch by batch. What dies after a queue's turn has begun is not among them."""

    def __init__(self, app: "Application", redis: AsyncDriver, meant: DeadJobQuery) -> None:
        self._app = app
        self._redis = redis
        self._meant = meant
        self._left = math.inf if meant.limit is None else meant.limit
        self._sources: list[_Span | _Picked | _NewestFirst] | None = None

    async def read_batch(self) -> list[DeadJob]:
        """The next jobs, all of one queue; none when there are no more."""
        if self._sources is None:
            self._sources = await self._opened()
        while self._sources and self._left > 0:
            source = self._sources[0]
            found = await source.page(self._redis)
            if not found:
                self._sources.pop(0)
                continue
            assert source.keys is not None  # where there is something, there is a queue
            name = source.keys.queue
            dead = (_exhumed(name, each, self._app.settings.message_limit) for each in found)
            jobs = [job for job in dead if job in self._meant]
            if self._left < len(jobs):
                jobs = jobs[: int(self._left)]
            self._left -= len(jobs)
            if jobs:
                return jobs
        return []

    async def _opened(self) -> "list[_Span | _Picked | _NewestFirst]":
        first, last = await self._ages()
        queues = [self._app.queue(name) for name in await self._names()]
        if self._meant.ids:
            # In two queues two entries may have the same id: without a queue it means neither.
            alone = len(queues) == 1
            return [_Picked(keys, sorted(self._meant.ids), first, last, entries=alone) for keys in queues]
        queue, entry = self._after([keys.queue for keys in queues])
        if self._meant.newest_first:
            return [
                _NewestFirst([_SpanBack(keys, first, last, _end_of(keys, queue, entry)) for keys in queues])
            ]
        at = next((n for n, keys in enumerate(queues) if keys.queue == queue), 0)
        return [_Span(keys, first, last, after=entry if keys.queue == queue else "") for keys in queues[at:]]

    def _after(self, queues: Sequence[str]) -> tuple[str, str]:
        """The queue and the entry after which to begin; empty when that is at the beginning. Raises Misconfigured."""
        queue, _, entry = self._meant.after.rpartition(":")
        if entry and not queue and len(queues) > 1:
            raise Misconfigured(
                f"there are several queues: give the one that {entry} is in, as QUEUE:{entry}"
            )
        if queue and queue not in queues:
            raise UnknownQueue(queue, queues)
        return queue or (queues[0] if entry and queues else ""), entry

    async def _names(self) -> Sequence[str]:
        if not self._meant.queues:
            return await self._redis.perform(jobs_calls.list_queues(self._app.keys))
        with skip_unreachable():  # but for those that are meant
            known = await self._redis.perform(jobs_calls.list_queues(self._app.keys))
        for name in self._meant.queues:
            if name not in known and not await self._redis.perform(
                graveyard.queue_exists(self._app.queue(name))
            ):
                raise UnknownQueue(name, known)
        return self._meant.queues

    async def _ages(self) -> tuple[int, float]:
        """The first and the last ms in which the jobs that are meant died."""
        older, newer = self._meant.older_than, self._meant.newer_than
        if older is None and newer is None:
            return 0, math.inf
        now = await self._redis.perform(graveyard.get_server_time())
        first = 0 if newer is None else max(0, now - int(newer * 1000))
        return first, math.inf if older is None else max(0, now - int(older * 1000))


class _Span:
    """The graves of one queue, from one ms to another."""

    def __init__(self, keys: QueueKeys, first: int, last: float, *, after: str = "") -> None:
        self.keys = keys
        self._first = f"({after}" if after and _ms_of(after) >= first else str(first)
        self._last_ms = last
        self._last = ""
        self._count = FIRST_BATCH_SIZE

    async def page(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        if not self._last:
            newest = await redis.perform(graveyard.get_newest_entry(self.keys))
            if not newest:
                return []
            self._last = newest if _ms_of(newest) <= self._last_ms else str(int(self._last_ms))
        found = await redis.perform(
            graveyard.list_entries(self.keys, first=self._first, last=self._last, count=self._count)
        )
        if found:
            self._first = f"({found[-1].entry}"
            self._count = _fitting(found)
        return found


class _SpanBack:
    """The graves of one queue, the newest first, from below `end` (or from the ms `last`) to the ms `first`."""

    def __init__(self, keys: QueueKeys, first: int, last: float, end: str) -> None:
        self.keys = keys
        self._first = str(first)
        self._last = end if end and (last == math.inf or _ms_of(end.lstrip("(")) <= last) else _text_of(last)
        self._count = FIRST_BATCH_SIZE
        self.waiting: list[DeadLetterEntry] = []

    async def fill(self, redis: AsyncDriver) -> bool:
        """Read the next graves into `waiting`; return whether there are any."""
        if not self.waiting:
            self.waiting = await redis.perform(
                graveyard.list_entries_backwards(
                    self.keys, first=self._first, last=self._last, count=self._count
                )
            )
            if self.waiting:
                self._last = f"({self.waiting[-1].entry}"
                self._count = _fitting(self.waiting)
        return bool(self.waiting)

    @property
    def order(self) -> tuple[int, int, str]:
        """Where its next grave stands among those of other queues: the smallest comes first."""
        return _order_of(self.waiting[0], self.keys)


class _NewestFirst:
    """The graves of several queues as one, the newest first; those of the same moment by the names of the queues."""

    def __init__(self, spans: Sequence[_SpanBack]) -> None:
        self._spans = list(spans)
        self.keys = spans[0].keys if spans else None

    async def page(self, redis: AsyncDriver) -> list[DeadLetterEntry]:
        self._spans = [span for span in self._spans if await span.fill(redis)]
        if not self._spans:
            return []
        first, *others = sorted(self._spans, key=lambda span: span.order)
        self.keys = first.keys
        bound = others[0].order if others else None
        found = [each for each in first.waiting if bound is None or _order_of(each, first.keys) < bound]
        first.waiting = first.waiting[len(found) :]
        return found


class _Picked:
    """The graves of one queue whose jobs, or entries, were named."""

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
            places = await redis.perform(graveyard.find_entries(self.keys, ids))
            named = filter(is_entry_id, ids) if self._entries else ()
            entries = dict.fromkeys([*filter(None, places), *named])
            asked = [
                graveyard.list_entries(self.keys, first=entry, last=entry, count=1)
                for entry in entries
                if self._first <= _ms_of(entry) <= self._last
            ]
            found = [grave for graves in await redis.perform_all(asked) for grave in graves] if asked else []
            if found:
                return found
        return []


async def find_dead_documents(
    app: "Application", redis: AsyncDriver, results: Sequence[str]
) -> dict[str, bytes]:
    """The documents of those jobs that are dead, by their result keys, whether they have expired or not."""
    found: dict[str, bytes] = {}
    queues: dict[str, list[str]] = {}
    for queue, job_id in map(app.keys.parse_result_key, results):
        queues.setdefault(queue, []).append(job_id)
    for queue, ids in queues.items():
        keys = app.queue(queue)
        for at in range(0, len(ids), BATCH_SIZE):
            part = ids[at : at + BATCH_SIZE]
            places = zip(part, await redis.perform(graveyard.find_entries(keys, part)), strict=True)
            dead = [(job_id, entry) for job_id, entry in places if entry]
            asked = [graveyard.list_entries(keys, first=entry, last=entry, count=1) for _, entry in dead]
            told = await redis.perform_all(asked) if asked else []
            for (job_id, _), graves in zip(dead, told, strict=True):
                if graves and graves[0].document:
                    found[keys.result(job_id)] = graves[0].document
    return found


def _exhumed(queue: str, grave: DeadLetterEntry, limit: int) -> DeadJob:
    if grave.sink:
        return make_dead_document(queue, grave.entry, grave.sink, grave.document, grave.failure, limit)
    return make_dead_job(queue, grave.entry, grave.message, grave.document, limit)


def _fitting(found: Sequence[DeadLetterEntry]) -> int:
    """Return how many graves to read next, by the size of the last ones."""
    size = sum(len(each.message) + len(each.document) for each in found) / len(found)
    return max(1, min(BATCH_SIZE, int(BYTES_PER_TRIP / max(size, 1))))


def _end_of(keys: QueueKeys, queue: str, entry: str) -> str:
    """Where a queue is read from backwards, after `entry` of another one or of itself."""
    return entry if not entry or keys.queue > queue else f"({entry}"


def _order_of(grave: DeadLetterEntry, keys: QueueKeys) -> tuple[int, int, str]:
    ms, _, number = grave.entry.partition("-")
    return -int(ms), -int(number), keys.queue


def _text_of(ms: float) -> str:
    return "+" if ms == math.inf else str(int(ms))


def _ms_of(entry: str) -> int:
    return int(entry.partition("-")[0])
