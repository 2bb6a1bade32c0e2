"""Dead letters: read, count, replay and purge what is in an application's dead-letter queues.

Everything goes in batches, so a million dead jobs need no more memory than a hundred; and each job by itself, so that
whoever is interrupted has done some jobs and left the others as they were. Fennel read and wrote all at once (F12).
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Unpack, cast

import msgspec

from celery5.broker.calls import dead_letters as graveyard
from celery5.broker.calls.dead_letters import ALIVE, DONE, GONE, KEY_TAKEN
from celery5.broker.calls.events import redeliver_documents
from celery5.broker.coroutines import BlockingDriverAdapter, run_blocking, sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.dead_letters.reading import BATCH_SIZE, DeadJobReader
from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.dead_letters import (
    DeadJob,
    DeadJobFilter,
    DeadJobQuery,
    GroupBy,
    add_counts,
    check_group_by,
    parse_filter,
    sort_counts,
)
from celery5.protocol.job.envelope import make_replay, read_envelope
from celery5.protocol.job.states import get_lane
from celery5.protocol.text_values import RATE
from celery5.sending.publisher import split_into_trips

if TYPE_CHECKING:
    from celery5.application import Application

_LEFT = {GONE: "gone", KEY_TAKEN: "key-taken", ALIVE: "alive"}


class DeadLetterTally(msgspec.Struct):
    """What a replay or a purge came to, or has come to so far.

    `matched` is how many jobs were meant, `done` how many of them were replayed or purged, in `causes` by task, reason
    and error. `left` says how many were left alone, and why: `gone` (somebody else was first), `key-taken` (another
    live job has its key), `alive` (a job of its id is alive again), `corrupt` (there is no message to replay).
    """

    matched: int = 0
    done: int = 0
    causes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    left: dict[str, int] = msgspec.field(default_factory=dict[str, int])


Progress = Callable[[DeadLetterTally], object]


class DeadLetters:
    """The dead-letter queues of an application: `app.dlq`.

    What all methods share are the words of `Choice`: they say which jobs are meant. Raises Misconfigured for a choice
    that makes no sense, UnknownQueue for a queue that nobody ever used, BrokerError.
    """

    REACHED_AS: ClassVar[str] = "app.dlq."

    def __init__(self, app: "Application") -> None:
        self._app = app

    def read(self, **choice: Unpack[DeadJobFilter]) -> Iterator[DeadJob]:
        """The dead jobs that are meant, as of now, queue by queue and the oldest first. For plain Python."""
        reading = DeadJobReader(self._app, self._plain(), parse_filter(choice))
        return _each(reading)

    def aread(self, **choice: Unpack[DeadJobFilter]) -> AsyncIterator[DeadJob]:
        """`read`, from Trio or asyncio: `async for job in app.dlq.aread(...)`."""
        return _EachAwaited(self._app, parse_filter(choice))

    def count(self, by: GroupBy = "reason", **choice: Unpack[DeadJobFilter]) -> dict[str, int]:
        """How many dead jobs there are by `reason`, `task`, `error`, `queue` or `cause`, most first."""
        return run_blocking(_counted(self._app, self._plain(), parse_filter(choice), check_group_by(by)))

    async def acount(self, by: GroupBy = "reason", **choice: Unpack[DeadJobFilter]) -> dict[str, int]:
        """`count`, from Trio or asyncio."""
        meant, by = parse_filter(choice), check_group_by(by)
        return await _counted(self._app, await self._app.connections.get_async_driver(), meant, by)

    def replay(
        self,
        *,
        rate: float | str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        **choice: Unpack[DeadJobFilter],
    ) -> DeadLetterTally:
        """Put dead jobs back on their queues, with a fresh retry budget and without their old failure; give documents
        to their sinks again.

        `rate` is the most jobs in a second, or a text such as `50/s` or `100/m`. With `dry_run` nothing is done but
        counted. `progress` is called with the tally so far after each batch. A job that dies again meanwhile is not
        replayed again. For plain Python.
        """
        redis, meant = self._plain(), parse_filter(choice)
        return run_blocking(_replayed(self._app, redis, meant, _checked_rate(rate), dry_run, progress))

    async def areplay(
        self,
        *,
        rate: float | str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        **choice: Unpack[DeadJobFilter],
    ) -> DeadLetterTally:
        """`replay`, from Trio or asyncio."""
        meant, most = parse_filter(choice), _checked_rate(rate)
        redis = await self._app.connections.get_async_driver()
        return await _replayed(self._app, redis, meant, most, dry_run, progress)

    def purge(
        self, *, dry_run: bool = False, progress: Progress | None = None, **choice: Unpack[DeadJobFilter]
    ) -> DeadLetterTally:
        """Remove dead jobs for good. `dry_run` and `progress` as for `replay`. For plain Python."""
        return run_blocking(_purged(self._app, self._plain(), parse_filter(choice), dry_run, progress))

    async def apurge(
        self, *, dry_run: bool = False, progress: Progress | None = None, **choice: Unpack[DeadJobFilter]
    ) -> DeadLetterTally:
        """`purge`, from Trio or asyncio."""
        meant = parse_filter(choice)
        return await _purged(
            self._app, await self._app.connections.get_async_driver(), meant, dry_run, progress
        )

    def _plain(self) -> AsyncDriver:
        return BlockingDriverAdapter(self._app.connections.get_blocking_driver())


def _each(reading: "DeadJobReader") -> Iterator[DeadJob]:
    while jobs := run_blocking(reading.read_batch()):
        yield from jobs


class _EachAwaited:
    """The jobs of a reading, one by one. No generator: those must be closed, and nobody would."""

    def __init__(self, app: "Application", meant: DeadJobQuery) -> None:
        self._app = app
        self._meant = meant
        self._reading: DeadJobReader | None = None
        self._jobs: Iterator[DeadJob] = iter(())

    def __aiter__(self) -> "_EachAwaited":
        return self

    async def __anext__(self) -> DeadJob:
        if self._reading is None:
            self._reading = DeadJobReader(
                self._app, await self._app.connections.get_async_driver(), self._meant
            )
        for job in self._jobs:
            return job
        jobs = await self._reading.read_batch()
        if not jobs:
            raise StopAsyncIteration
        self._jobs = iter(jobs)
        return next(self._jobs)


async def _counted(
    app: "Application", redis: AsyncDriver, meant: DeadJobQuery, by: GroupBy
) -> dict[str, int]:
    counts: dict[str, int] = {}
    reading = DeadJobReader(app, redis, meant)
    while jobs := await reading.read_batch():
        add_counts(counts, jobs, by)
    return sort_counts(counts)


async def _replayed(
    app: "Application",
    redis: AsyncDriver,
    meant: DeadJobQuery,
    rate: float | None,
    dry_run: bool,
    progress: Progress | None,
) -> DeadLetterTally:
    tally, reading, pace = DeadLetterTally(), DeadJobReader(app, redis, meant), _Pace(rate)
    limit = app.settings.message_limit
    while jobs := await reading.read_batch():
        for part in split_into_trips(jobs, _size, pace.portion):
            fresh = [
                (job, message)
                for job in part
                if not job.sink and (message := _fresh(job, limit, tally)) is not None
            ]
            again = [job for job in part if job.sink]
            if not dry_run:
                await pace.wait(len(fresh) + len(again))
                await _put_back(redis, app.queue(part[0].queue), fresh, again, tally)
            tally.matched += len(part)
            if progress is not None:
                progress(tally)
    return tally


async def _put_back(
    redis: AsyncDriver,
    keys: QueueKeys,
    fresh: Sequence[tuple[DeadJob, bytes]],
    documents: Sequence[DeadJob],
    tally: DeadLetterTally,
) -> None:
    """Jobs go back to their queue, each on its lane, and documents to their sinks."""
    for lane, group in _by_lane(fresh).items():
        words = [(job.entry, job.id, message, job.lock) for job, message in group]
        told = await redis.perform(graveyard.replay_jobs(keys.on_lane(lane), words))
        _note(tally, [job for job, _ in group], told)
    if documents:
        told = await redis.perform(redeliver_documents(keys, [job.entry for job in documents]))
        _note(tally, documents, told)


async def _purged(
    app: "Application", redis: AsyncDriver, meant: DeadJobQuery, dry_run: bool, progress: Progress | None
) -> DeadLetterTally:
    tally, reading = DeadLetterTally(), DeadJobReader(app, redis, meant)
    while jobs := await reading.read_batch():
        if not dry_run:
            words = [(job.entry, job.id) for job in jobs]
            _note(tally, jobs, await redis.perform(graveyard.purge_jobs(app.queue(jobs[0].queue), words)))
        tally.matched += len(jobs)
        if progress is not None:
            progress(tally)
    return tally


def _by_lane(fresh: Sequence[tuple[DeadJob, bytes]]) -> dict[str, list[tuple[DeadJob, bytes]]]:
    """Jobs with their messages, by the lane of their priority."""
    found: dict[str, list[tuple[DeadJob, bytes]]] = {}
    for job, message in fresh:
        found.setdefault(get_lane(read_envelope(message).priority), []).append((job, message))
    return found


def _fresh(job: DeadJob, limit: int, tally: DeadLetterTally) -> bytes | None:
    try:
        return make_replay(job.raw, limit)
    except Corrupt:
        tally.left["corrupt"] = tally.left.get("corrupt", 0) + 1
        return None


def _note(tally: DeadLetterTally, jobs: Sequence[DeadJob], told: Sequence[int]) -> None:
    done = [job for job, said in zip(jobs, told, strict=True) if said == DONE]
    tally.done += len(done)
    add_counts(tally.causes, done, "cause")
    for said in told:
        if said != DONE:
            tally.left[_LEFT[said]] = tally.left.get(_LEFT[said], 0) + 1


def _size(job: DeadJob) -> int:
    return len(job.raw)


class _Pace:
    """Keeps to so many jobs a second, in portions of a tenth of a second's."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()
        self.portion = BATCH_SIZE if rate is None else max(1, min(BATCH_SIZE, int(rate / 10)))

    async def wait(self, jobs: int) -> None:
        """Wait until so many more jobs may go."""
        if self._rate is None:
            return
        now = time.monotonic()
        if self._due > now:
            await sleep(self._due - now)
        self._due = max(self._due, now) + jobs / self._rate


def _checked_rate(rate: float | str | None) -> float | None:
    if isinstance(rate, str):
        return RATE.parse(rate).per_second
    number = isinstance(cast("object", rate), int | float) and not isinstance(rate, bool)
    if rate is not None and (not number or not 0 < rate < math.inf):
        raise Misconfigured(
            f"rate is {rate!r}: give a number of jobs per second, more than 0, or a text such as 50/s"
        )
    return rate
