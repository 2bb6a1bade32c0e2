"""Find jobs that live or have ended, and tell the story of one: `app.jobs`."""

import time
from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import msgspec

from celery5.application import Application
from celery5.broker.calls import jobs as job_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.dead_letters import queue_exists
from celery5.broker.colour import blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import UNREACHABLE, retry_without_unreachable, skip_unreachable
from celery5.errors import BrokerError, UnknownQueue
from celery5.observability.job_sources import (
    DEAD,
    HISTORY,
    STAGES,
    SearchScope,
    SearchSource,
    get_dead_entry,
    make_sources,
    parse_entry,
)
from celery5.protocol.job.history import JobOrder, JobRecord
from celery5.protocol.job.search import (
    MAX_LIMIT,
    ArgumentFilter,
    JobQuery,
    Moment,
    SearchPosition,
    check_limit,
    make_job_query,
    read_cursor,
)
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails, add_attempts, make_record
from celery5.results.job_details import find_job
from celery5.sending.sender import check_job_id

MAX_LOOKED_AT = 10_000
"""Jobs that one call looks at."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of messages that one call reads, about."""
CLOCK_ERROR = 600.0
"""Seconds by which the clock of a producer may be ahead of that of Redis."""
SETTLED_WITHIN = 60.0
"""Seconds from the end of an attempt until its job is in the dead-letter queue, at most."""

AttemptKey = tuple[str, str, float]
"""The queue and the id of a job, and when an attempt has ended."""


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of what a search has found."""

    # The newest first, and below them jobs that wait for a time, the soonest first; or those that ran longest first.
    jobs: tuple[JobRecord, ...]
    # Where the next page begins; None when there is none.
    cursor: str | None
    # How many jobs were looked at.
    looked_at: int
    # In words; '' for nothing.
    not_looked_at: str
    # Seconds by which the history may be behind: what has ended since may be missing. 0: there is none, or it was not
    # looked at.
    behind: float = 0.0


class Jobs:
    """Finds jobs of an application, those that live and those that have ended: `app.jobs`.

    All failed attempts are in the history, the slowest successes of each task, and samples of the others. It is on the
    default broker, and keeps about the last `job_history` failures and as many others, for at most 90 days.
    """

    REACHED_AS: ClassVar[str] = "app.jobs."

    def __init__(self, app: Application) -> None:
        self._app = app

    async def asearch(
        self,
        *,
        id: str = "",  # noqa: A002  the job's own word
        task: str = "",
        queue: str = "",
        state: str = "",
        error: str = "",
        worker: str = "",
        argument: ArgumentFilter = "",
        since: Moment | None = None,
        until: Moment | None = None,
        longer_than: float | None = None,
        sort: JobOrder = "time",
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """Return a page of jobs.

        Pages come in this order: jobs that workers have, dead jobs, what has ended, jobs that were revoked while they
        waited, jobs that wait for a time, at a limit, and on their queue. A page may be empty while more follow.

        Args:
            id: The id.
            task: The name of the task, with wildcards: `shop.*`.
            queue: The queue.
            state: A state, such as `RETRY`: jobs that are in it, or attempts that have ended so.
            error: The class of the error, with wildcards, or a part of its message.
            worker: The worker that had it, with wildcards.
            argument: Values of arguments, by path: `{"order.id": 7}` or `"order.id=7"`.
            since: Jobs that have ended, or were sent if they live, at this time or later: a datetime with a zone, or
                seconds since 1970.
            until: The latest such time.
            longer_than: Seconds that it ran at least. A job that a worker has runs since that took it. Jobs that have
                not run are not found.
            sort: `time`: as `JobPage.jobs` says. `ran`: those that ran longest first, of all that this call looks at;
                jobs that have not run are not found.
            limit: Jobs on the page, 1000 at most.
            cursor: That of the page before, with the same filters.

        Raises:
            Misconfigured: An argument makes no sense.
            UnknownQueue: There is no such queue, and the history has none of its jobs.
            BrokerError: The broker cannot be reached, or refuses.
        """
        query = make_job_query(
            id=id, task=task, queue=queue, state=state, error=error, worker=worker, argument=argument,
            since=since, until=until, longer_than=longer_than, sort=sort,
        )  # fmt: skip
        page_size = check_limit(limit)
        redis = await self._app.connections.get_async_driver()
        return await _search(self._app, redis, query, page_size, cursor)

    @blocking(asearch)
    def search(self) -> None: ...

    async def astory(self, job_id: str, *, queue: str | None = None) -> JobDetails | None:
        """Return all that is known of a job, with its attempts in the history; None when nothing is.

        It reads all of the history that is not older than the job: `app.find` does less.

        Args:
            job_id: The id.
            queue: Its queue. Default: it is looked for on all.

        Raises:
            UnknownQueue: There is no such queue.
            BrokerError: The broker cannot be reached, or refuses.
        """
        checked_id = check_job_id(job_id)
        redis = await self._app.connections.get_async_driver()
        return await _tell_story(self._app, redis, checked_id, queue)

    @blocking(astory)
    def story(self) -> None: ...


async def _tell_story(
    app: Application, redis: AsyncDriver, job_id: str, queue: str | None
) -> JobDetails | None:
    details = await find_job(app, redis, job_id, queue)
    since = max(0.0, details.sent - CLOCK_ERROR) if details else 0.0
    query = make_job_query(id=job_id, queue=queue or "", since=since)
    queues: Sequence[str] = ()
    if details is None:  # it may have been revoked while it waited
        known = await redis.perform(queue_calls.list_queues(app.keys))
        queues = app.brokers.list_shards(queue, known) if queue else known
    elif details.state is JobState.REVOKED:
        queues = [details.queue]
    records: list[JobRecord] = []
    cursor: str | None = None
    for _ in range(2 * app.settings.job_history // MAX_LOOKED_AT + 2):  # it has about this many entries
        position = read_cursor(cursor, query) if cursor else None
        search = _Search(app, redis, query, MAX_LIMIT, position, skips_live=True)
        page = await search.run(queues, [])
        records += page.jobs
        cursor = page.cursor
        if cursor is None:
            break
    return add_attempts(details, records)


async def _search(
    app: Application, redis: AsyncDriver, query: JobQuery, limit: int, cursor: str | None
) -> JobPage:
    position = read_cursor(cursor, query) if cursor else None
    with skip_unreachable() as unreachable:
        queues = await retry_without_unreachable(lambda: redis.perform(queue_calls.list_queues(app.keys)))
        shards = app.brokers.list_shards(query.queue, queues) if query.queue else queues
        is_known = not query.queue or not set(shards).isdisjoint(queues)
        if not is_known:  # a raw producer may have sent to a queue that is not listed
            try:
                is_known = await redis.perform(queue_exists(app.queue(query.queue)))
            except UNREACHABLE:
                is_known = True  # it may be there
        search = _Search(app, redis, query, limit, position, skips_live=not is_known)
        page = await search.run(shards, sorted(unreachable))
        if query.id and is_known and cursor is None and page.cursor is None:
            page = await _add_last_attempt(app, redis, query, page)
    if not is_known and not page.jobs and page.cursor is None:
        raise UnknownQueue(query.queue, queues)
    return page


async def _add_last_attempt(app: Application, redis: AsyncDriver, query: JobQuery, page: JobPage) -> JobPage:
    """Add the last attempt of the job to a page, if it is missing: most successes are not in the history."""
    details = await find_job(app, redis, query.id, query.queue or None)
    known = {(job.replays, job.attempt) for job in page.jobs}
    if details is None or (details.replays, details.attempt) in known:
        return page
    record = make_record(details)
    return msgspec.structs.replace(page, jobs=(record, *page.jobs)) if query.matches(record) else page


class _Search:
    """One call of a search."""

    def __init__(
        self,
        app: Application,
        redis: AsyncDriver,
        query: JobQuery,
        limit: int,
        position: SearchPosition | None,
        *,
        skips_live: bool = False,
    ) -> None:
        self._app = app
        self._redis = redis
        self._query = query
        self._limit = limit
        self._start = position
        self._dead_ends = dict(position.dead_ends) if position else {}
        self._jobs: list[JobRecord] = []
        self._looked_at = 0
        self._bytes = 0
        self._notes: list[str] = []
        self._skips_live = skips_live

    async def run(self, queues: Sequence[str], unreachable: Sequence[str]) -> JobPage:
        """Look at one place after another, until the page is full or all is looked at."""
        self._notes += [f"queues on the broker {name}, which is unreachable" for name in unreachable]
        scope = SearchScope(self._app, self._redis, self._query, queues, self._skips_live)
        cursor: str | None = None
        for _, sources in groupby(make_sources(scope, self._start), key=lambda source: source.stage):
            for source in await self._find_places(list(sources)):
                cursor = await self._try_to_look_at(source)
                if cursor is not None:
                    break
            if cursor is not None:
                break
        return JobPage(
            jobs=self._query.arrange(self._jobs, self._limit),
            cursor=cursor,
            looked_at=self._looked_at,
            not_looked_at="; ".join(dict.fromkeys(self._notes)),
            behind=self._get_delay(),
        )

    def _get_delay(self) -> float:
        """Return by how many seconds the history may be behind for this query; 0 if it has no influence."""
        settings, state = self._app.settings, self._query.state
        is_asked = bool(settings.job_history) and (state is None or state in STAGES[HISTORY])
        reaches_now = self._query.until >= time.time() - settings.metrics_interval
        return settings.metrics_interval if is_asked and reaches_now else 0.0

    async def _try_to_look_at(self, source: SearchSource) -> str | None:
        """Look at the jobs of one place, unless its broker is unreachable. Return the cursor, as `_look_at` does."""
        try:
            cursor = await self._look_at(source)
        except UNREACHABLE:
            if len(self._app.brokers.names) == 1:
                raise
            what = "the history" if source.stage == HISTORY else f"queue {source.queue}"
            self._notes.append(f"{what}, whose broker is unreachable")
            return None
        self._notes += await source.describe_rest(is_at_end=cursor is None)
        return cursor

    async def _find_places(self, sources: Sequence[SearchSource]) -> Sequence[SearchSource]:
        """Return those of the places of one stage that have jobs: with many queues most have none.

        They are counted when the stage begins, not before: a job may come there from the stage before.
        """
        measures = [call for source in sources if (call := source.measure()) is not None]
        if len(sources) < 2 or self._query.id or len(measures) < len(sources):
            return sources
        try:
            replies = await self._redis.perform_all(measures)
        except BrokerError:  # of one queue or broker: each place is looked at, and says so
            return sources
        return [source for source, reply in zip(sources, replies, strict=True) if source.has_jobs(reply)]

    async def _look_at(self, source: SearchSource) -> str | None:
        """Look at the jobs of one place. Return the cursor when the page is full; None at the end of the place."""
        while not source.is_at_depth:
            found_jobs = await source.read()
            if not found_jobs:
                return None
            candidates = [
                job.record is not None and self._query.matches(job.record, job.arguments)
                for job in found_jobs
            ]
            if source.stage == HISTORY:
                found = [job.record for job, fits in zip(found_jobs, candidates, strict=True) if fits]
                dead, gone = set[AttemptKey](), set[AttemptKey]()
                if not self._skips_live:
                    dead, gone = await self._find_dead([record for record in found if record is not None])
                found_jobs = [
                    job._replace(record=msgspec.structs.replace(job.record, has_left=True))
                    if job.record is not None and _get_key(job.record) in gone
                    else job
                    for job in found_jobs
                ]
                candidates = [
                    fits and job.record is not None and _get_key(job.record) not in dead
                    for job, fits in zip(found_jobs, candidates, strict=True)
                ]
            for found_job, fits in zip(found_jobs, candidates, strict=True):
                self._looked_at += 1
                self._bytes += found_job.size
                source.note(found_job)
                if fits and found_job.record is not None:
                    self._jobs.append(found_job.record)
                # Which jobs ran longest is known when all are looked at.
                is_full = len(self._jobs) == self._limit and self._query.sort != "ran"
                if is_full or self._looked_at == MAX_LOOKED_AT or self._bytes >= MAX_BYTES:
                    return self._make_cursor(source)
        if source.stage == DEAD:
            self._dead_ends[source.queue] = source.place
        return None

    def _make_cursor(self, source: SearchSource) -> str:
        return SearchPosition(
            self._query.digest, source.stage, source.queue, source.place, source.looked_at, self._dead_ends
        ).encode()

    async def _find_dead(self, records: Sequence[JobRecord]) -> tuple[set[AttemptKey], set[AttemptKey]]:
        """Return the attempts whose job is in its dead-letter queue, and those whose job is in none any more."""
        by_queue: dict[str, list[JobRecord]] = {}
        for record in records:
            if record.state == JobState.DEAD.value and record.id:
                by_queue.setdefault(record.queue, []).append(record)
        dead: set[AttemptKey] = set()
        gone: set[AttemptKey] = set()
        for queue, of_queue in by_queue.items():
            call = job_calls.get_places(self._app.queue(queue), [record.id for record in of_queue])
            try:
                places = await self._redis.perform(call)
            except UNREACHABLE:
                continue  # its dead-letter queue was not read
            end = parse_entry(self._dead_ends.get(queue, ""))
            for record, place in zip(of_queue, places, strict=True):
                entry = get_dead_entry(place)
                if entry is None:
                    gone.add(_get_key(record))
                # One that has been replayed since and is dead again is another attempt.
                if entry and entry >= end and record.ended > entry[0] / 1000 - SETTLED_WITHIN:
                    dead.add(_get_key(record))
        return dead, gone


def _get_key(record: JobRecord) -> AttemptKey:
    return (record.queue, record.id, record.ended)
