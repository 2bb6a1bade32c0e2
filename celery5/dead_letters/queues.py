"""Read, count, replay and purge the dead-letter queues of an application.

Jobs are handled in batches, so memory use does not depend on how many there are. Each job is handled atomically:
after an interruption some jobs are done and the rest are unchanged.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import msgspec

from celery5.audit.recording import AuditedAction
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls.dead_letters import ALIVE, DONE, GONE, KEY_TAKEN
from celery5.broker.calls.events import redeliver_documents
from celery5.broker.colour import blocking, sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.connections.batches import Batches, ReadBatch
from celery5.connections.long_operations import persist
from celery5.dead_letters.reading import BATCH_SIZE, DeadJobReader, make_dead
from celery5.dead_letters.run_members import find_unwanted_jobs
from celery5.errors import Corrupt
from celery5.protocol.bulk import check_rate
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
from celery5.protocol.job.failure_groups import DeadJobGrouping, DeadJobGroups, apply_causes
from celery5.protocol.job.messages import make_replay, read_command
from celery5.protocol.job.states import get_lane
from celery5.sending.publisher import split_into_trips
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.application import Application

_LEFT = {GONE: "gone", KEY_TAKEN: "key-taken", ALIVE: "alive"}


class DeadLetterTally(msgspec.Struct):
    """The counts of a replay or a purge; in a `progress` callback, those up to the last batch."""

    # Jobs that were selected.
    matched: int = 0
    # Jobs that were replayed or purged.
    done: int = 0
    # The same, by task, reason and error.
    causes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    # Jobs that were left alone, by reason: `gone` (already replayed or purged), `key-taken` (a live job has the key),
    # `alive` (a job with this id is alive again), `corrupt` (there is no message to replay), `run-ended` (it belongs to
    # a run of a workflow that has ended: `run.retry()` runs it again, with what depends on it), `run-succeeded` (its
    # run has succeeded, after a retry or without it: a purge removes it), `run-retried` (a retry of its run has sent
    # another job for its step, and a worker removes this one).
    left: dict[str, int] = msgspec.field(default_factory=dict[str, int])

    def leave(self, reason: str) -> None:
        """Count a job that was left alone."""
        self.left[reason] = self.left.get(reason, 0) + 1


MAX_CAUSES_READ = 100
"""Causes, those with most dead jobs, whose last one is read when none was among the jobs that were looked at."""
MAX_LOOKED_AT = 100_000
"""Dead jobs that are put into groups in one call."""

Progress = Callable[[DeadLetterTally], object]


class DeadLetters:
    """The dead-letter queues of an application: `app.dlq`.

    All methods take the options of `DeadJobFilter`, which select jobs.

    Raises:
        Misconfigured: The options make no sense.
        UnknownQueue: No job was ever sent to a queue of this name.
        BrokerError: The broker cannot be reached, or refuses.
    """

    REACHED_AS: ClassVar[str] = "app.dlq."

    def __init__(self, app: "Application") -> None:
        self._app = app

    def read(self, **choice: Unpack[DeadJobFilter]) -> Iterator[DeadJob]:
        """Return the selected dead jobs, queue by queue, the oldest first. For plain Python.

        Jobs that die while a queue is read are left out.
        """
        return self._read(parse_filter(choice)).iterate("app.dlq.aread")

    def aread(self, **choice: Unpack[DeadJobFilter]) -> AsyncIterator[DeadJob]:
        """`read`, from Trio or asyncio: `async for job in app.dlq.aread(...)`."""
        return self._read(parse_filter(choice))

    def _read(self, query: DeadJobQuery) -> Batches[DeadJob]:
        async def open_reader() -> ReadBatch[DeadJob]:
            redis = await self._app.connections.get_async_driver()
            return DeadJobReader(self._app, redis, query).read_batch

        return Batches(open_reader)

    async def acount(self, by: GroupBy = "reason", **choice: Unpack[DeadJobFilter]) -> dict[str, int]:
        """Return how many dead jobs there are by `reason`, `task`, `error`, `queue` or `cause`, the largest first."""
        query = parse_filter(choice)
        grouping = check_group_by(by)
        redis = await self._app.connections.get_async_driver()
        return await _counted(self._app, redis, query, grouping)

    @blocking(acount)
    def count(self) -> None: ...

    async def agroups(self, **choice: Unpack[DeadJobFilter]) -> DeadJobGroups:
        """Return dead jobs grouped by what made them fail, the largest group first.

        A group is a task, a class of error, and a message in which numbers, ids, paths and the like do not count. Its
        `id` is what the filter `group` takes. With `limit` at most so many dead jobs are looked at, default 100,000;
        `next` of the reply is then the `after` of the next call.
        """
        query = parse_filter(choice)
        redis = await self._app.connections.get_async_driver()
        return await _group(self._app, redis, query)

    @blocking(agroups)
    def groups(self) -> None: ...

    async def areplay(
        self,
        *,
        rate: float | str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        **choice: Unpack[DeadJobFilter],
    ) -> DeadLetterTally:
        """Send dead jobs to their queues again, and documents to their sinks.

        A replayed job has a new retry budget and no failure. A job that dies again during the call is not replayed
        again.

        Args:
            rate: The maximal number of jobs per second, or a text such as `50/s` or `100/m`; None for no limit.
            dry_run: Count the jobs and do nothing else.
            progress: Called with the tally after each batch.
        """
        query, jobs_per_second = parse_filter(choice), check_rate(rate)
        redis = await self._app.connections.get_async_driver()
        return await _change(self._app, redis, "dlq:replay", query, jobs_per_second, dry_run, progress)

    @blocking(areplay)
    def replay(self) -> None: ...

    async def apurge(
        self, *, dry_run: bool = False, progress: Progress | None = None, **choice: Unpack[DeadJobFilter]
    ) -> DeadLetterTally:
        """Delete dead jobs. `dry_run` and `progress` are those of `replay`."""
        query = parse_filter(choice)
        redis = await self._app.connections.get_async_driver()
        return await _change(self._app, redis, "dlq:purge", query, None, dry_run, progress)

    @blocking(apurge)
    def purge(self) -> None: ...


async def _counted(
    app: "Application", redis: AsyncDriver, query: DeadJobQuery, by: GroupBy
) -> dict[str, int]:
    counts: dict[str, int] = {}
    reader = DeadJobReader(app, redis, query, in_order=False)
    while jobs := await reader.read_batch():
        add_counts(counts, jobs, by)
    return sort_counts(counts)


async def _group(app: "Application", redis: AsyncDriver, query: DeadJobQuery) -> DeadJobGroups:
    limit = query.limit or MAX_LOOKED_AT
    reader = DeadJobReader(app, redis, query)
    grouping, looked_at, total = DeadJobGrouping(), 0, await reader.count_all()
    last: DeadJob | None = None
    while page := await reader.read_page():
        if looked_at >= limit:
            break
        last = page[min(len(page), limit - looked_at) - 1]
        for job in page[: limit - looked_at]:
            looked_at += 1
            if job in query:
                grouping.add(job)
        if last is not page[-1]:
            break
    else:
        last = None
    found = grouping.finish(looked_at=looked_at, total=total, last=last)
    return await count_causes(app, redis, query, found, await reader.list_queues())


async def count_causes(
    app: "Application", redis: AsyncDriver, query: DeadJobQuery, found: DeadJobGroups, queues: Sequence[str]
) -> DeadJobGroups:
    """Return groups with what was counted where their jobs died, on these queues.

    Conditions that select some jobs of a cause are met only by the jobs that were looked at: then nothing changes. Dead
    events are not counted where they die, so of those only what was looked at counts.
    """
    if not query.selects_whole_causes:
        return found
    keys = [app.queue(name) for name in queues]
    causes = await redis.perform_all([dead_letter_calls.read_causes(queue_keys) for queue_keys in keys])
    listed = {group.id for group in found.groups}
    missing = [
        (queue_keys, cause)
        for queue_keys, by_group in zip(keys, causes, strict=True)
        for group, cause in by_group.items()
        if group not in listed and (not query.groups or group in query.groups)
    ]
    missing = sorted(missing, key=lambda item: -item[1].dead)[:MAX_CAUSES_READ]
    # The last job of a cause may have left: then the first one is a sample of it, if it is there.
    samples = [(queue_keys, entry) for queue_keys, cause in missing for entry in dict.fromkeys(cause.samples)]
    reads = [
        dead_letter_calls.list_entries(queue_keys, first=entry, last=entry, count=1)
        for queue_keys, entry in samples
    ]
    replies = await redis.perform_all(reads) if reads else []
    others = DeadJobGrouping()
    for (sampled_keys, _), entries in zip(samples, replies, strict=True):
        for job in (make_dead(app, sampled_keys.queue, entry) for entry in entries):
            if query.selects(job):
                others.add(job)
    more = others.finish(looked_at=0, total=0, last=None).groups
    return apply_causes(msgspec.structs.replace(found, groups=(*found.groups, *more)), causes)


async def _change(
    app: "Application",
    redis: AsyncDriver,
    name: str,
    query: DeadJobQuery,
    rate: float | None,
    dry_run: bool,
    progress: Progress | None,
) -> DeadLetterTally:
    """Replay or purge the selected jobs, batch by batch, by the function that bulk actions call, too."""
    redis = persist(redis, name)
    tally, reader, pace = DeadLetterTally(), DeadJobReader(app, redis, query, in_order=False), Pace(rate)
    perform = replay_batch if name == "dlq:replay" else purge_batch
    async with _audited(app, redis, name, query, dry_run, rate) as action:
        while jobs := await reader.read_batch():
            for batch in split_into_trips(jobs, _size, pace.portion):
                if not dry_run:
                    await pace.wait(len(batch))
                await perform(app, redis, batch, tally, dry_run=dry_run)
                action.set_count(tally.done)
                if progress is not None:
                    progress(tally)
    return tally


async def replay_batch(
    app: "Application",
    redis: AsyncDriver,
    jobs: Sequence[DeadJob],
    tally: DeadLetterTally,
    *,
    dry_run: bool = False,
) -> None:
    """Send dead jobs of one queue to it again, and documents to their sinks. Whoever calls it records it."""
    replays = await _make_replays(app, redis, jobs, tally)
    if not dry_run:
        await _put_back(redis, app.queue(jobs[0].queue), replays, [job for job in jobs if job.sink], tally)
    tally.matched += len(jobs)


async def purge_batch(
    app: "Application",
    redis: AsyncDriver,
    jobs: Sequence[DeadJob],
    tally: DeadLetterTally,
    *,
    dry_run: bool = False,
) -> None:
    """Delete dead jobs of one queue. Whoever calls it records it."""
    if not dry_run:
        entries = [(job.entry, job.id) for job in jobs]
        purge = dead_letter_calls.purge_jobs(app.queue(jobs[0].queue), entries)
        _note(tally, jobs, await redis.perform(purge))
    tally.matched += len(jobs)


async def _put_back(
    redis: AsyncDriver,
    keys: QueueKeys,
    replays: Sequence[tuple[DeadJob, bytes]],
    documents: Sequence[DeadJob],
    tally: DeadLetterTally,
) -> None:
    """Send jobs to their queue again, each on its lane, and documents to their sinks."""
    for lane, group in _group_by_lane(replays).items():
        entries = [(job.entry, job.id, message, job.lock) for job, message in group]
        codes = await redis.perform(dead_letter_calls.replay_jobs(keys.on_lane(lane), entries))
        _note(tally, [job for job, _ in group], codes)
    if documents:
        codes = await redis.perform(redeliver_documents(keys, [job.entry for job in documents]))
        _note(tally, documents, codes)


def _audited(
    app: "Application",
    redis: AsyncDriver,
    name: str,
    query: DeadJobQuery,
    dry_run: bool,
    rate: float | None = None,
) -> AuditedAction:
    selection: dict[str, Any] = {
        **msgspec.structs.asdict(query),
        "where": getattr(query.where, "__qualname__", query.where and "a function"),
        "rate": rate,
    }
    target = join_names(selection.pop("queues")) or "all queues"
    action = AuditedAction(app, redis, name, target, selection, dry_run=dry_run)
    action.set_count(0)
    return action


def _group_by_lane(replays: Sequence[tuple[DeadJob, bytes]]) -> dict[str, list[tuple[DeadJob, bytes]]]:
    """Return jobs with their messages, by the lane of their priority."""
    groups: dict[str, list[tuple[DeadJob, bytes]]] = {}
    for job, message in replays:
        groups.setdefault(get_lane(read_command(message).priority), []).append((job, message))
    return groups


async def _make_replays(
    app: "Application", redis: AsyncDriver, jobs: Sequence[DeadJob], tally: DeadLetterTally
) -> list[tuple[DeadJob, bytes]]:
    """Return the jobs that can be replayed with their messages, and count the others."""
    unwanted = await find_unwanted_jobs(app, redis, jobs)
    replays: list[tuple[DeadJob, bytes]] = []
    for job in jobs:
        if job.sink:
            continue
        if reason := unwanted.get(job.id):
            tally.leave(reason)
            continue
        try:
            replays.append((job, make_replay(job.raw, app.settings.message_limit)))
        except Corrupt:
            tally.leave("corrupt")
    return replays


def _note(tally: DeadLetterTally, jobs: Sequence[DeadJob], codes: Sequence[int]) -> None:
    done = [job for job, code in zip(jobs, codes, strict=True) if code == DONE]
    tally.done += len(done)
    add_counts(tally.causes, done, "cause")
    for code in codes:
        if code != DONE:
            tally.leave(_LEFT[code])


def _size(job: DeadJob) -> int:
    return len(job.raw)


class Pace:
    """Limits the rate of jobs, in portions of a tenth of a second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = time.monotonic()
        self.portion: int = BATCH_SIZE if rate is None else max(1, min(BATCH_SIZE, int(rate / 10)))

    async def wait(self, jobs: int) -> None:
        """Wait until this many more jobs may be sent."""
        if self._rate is None:
            return
        now = time.monotonic()
        if self._due > now:
            await sleep(self._due - now)
        self._due = max(self._due, now) + jobs / self._rate
