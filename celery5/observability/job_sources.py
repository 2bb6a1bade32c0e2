"""Read the places where jobs are, page by page: with workers, dead, in the history, revoked, or waiting.

Each read is one or two short trips to Redis. No key is scanned for, and no place is read further than DEPTH jobs but
for the history, which has its own end.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import dead_letters as dead_calls
from celery5.broker.calls import job_history as calls
from celery5.broker.calls import jobs as job_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerReplied
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.counts import format_count
from celery5.protocol.job.history import (
    NO_SHAPE,
    CallShape,
    JobRecord,
    make_live_record,
    read_arguments,
    unpack_record,
)
from celery5.protocol.job.messages import get_sent, read_job_id, try_read_command, try_read_document
from celery5.protocol.job.search import JobQuery, SearchPosition
from celery5.protocol.job.states import JobState, Place, get_entry, get_state
from celery5.protocol.job.story import format_limit
from celery5.protocol.workflows.member_ids import get_run_id
from celery5.sending.publisher import BYTES_PER_TRIP

DEPTH = 5000
"""Jobs that are looked at in one place of a queue."""
FIRST_PAGE = 10
"""Jobs in the first trip, when their size is unknown."""
PAGE = 200
"""Jobs in one trip: a longer one would hold the server up."""
HISTORY_PAGE = 250
"""Entries of the history in one trip."""
EMPTY_SCANS = 20
"""Parts of a hash in which none is found, in one read."""
LATE = 3600.0
"""Seconds by which an attempt may come later into the history than it has ended: Redis was unreachable."""

RUNNING, DEAD, HISTORY, REVOKED, DUE, LIMITED, WAITING = range(7)
"""The stages of a search, in this order: kinds of places."""
STAGES: Mapping[int, frozenset[JobState]] = {
    RUNNING: frozenset({JobState.EXECUTING}),
    DEAD: frozenset({JobState.DEAD}),
    HISTORY: frozenset(
        {
            JobState.SUCCESS,
            JobState.RETRY,
            JobState.DEAD,
            JobState.REJECTED,
            JobState.REVOKED,
            JobState.EXPIRED,
        }
    ),
    REVOKED: frozenset({JobState.REVOKED}),
    DUE: frozenset({JobState.SCHEDULED, JobState.RETRY, JobState.HELD}),
    LIMITED: frozenset({JobState.HELD}),
    WAITING: frozenset({JobState.SENT}),
}
"""The states of the jobs that each stage finds."""
WITHOUT_WORKER = frozenset({REVOKED, DUE, LIMITED, WAITING})
"""The stages that find no job which a worker has."""


class FoundJob(NamedTuple):
    """A job that was looked at."""

    # Where it is, for a cursor.
    place: str
    # None for an entry that is no job, or one of another stage.
    record: JobRecord | None
    # Its arguments as a whole, masked; None when only those of the record are known.
    arguments: Mapping[str, Any] | None
    size: int


class SearchScope(NamedTuple):
    """What is searched."""

    app: Application
    redis: AsyncDriver
    query: JobQuery
    queues: Sequence[str]
    skips_live: bool


class SearchSource:
    """One place where jobs are. Reading goes on after `place`."""

    stage = -1

    def __init__(self, scope: SearchScope, queue: str, start: SearchPosition | None) -> None:
        self.queue = queue
        self.place: str = start.place if start else ""
        self.looked_at: int = start.looked_at if start else 0
        self._app, self._redis, self._query = scope.app, scope.redis, scope.query
        self._keys = scope.app.queue(queue)
        self._page = FIRST_PAGE

    @property
    def is_at_depth(self) -> bool:
        """Whether it is not read any further."""
        return self.looked_at >= DEPTH

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        raise NotImplementedError

    def measure(self) -> Call[Any] | None:
        """Return the call whose reply tells whether jobs are here; None where there is no such call."""
        return None

    def has_jobs(self, reply: Any) -> bool:
        """Return whether jobs are here, by the reply of that call."""
        return bool(reply)

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        return ()

    def note(self, found: FoundJob) -> None:
        """Go on after this job."""
        self.place = found.place
        self.looked_at += 1

    def _make_live(
        self, place: str, message: bytes, state: JobState, *, entry: str = "", **fields: Any
    ) -> FoundJob:
        """Return a job that has not ended, or is dead. `entry`: its entry on a stream, if it is there."""
        command, _ = try_read_command(message, self._app.settings.message_limit)
        if command is None:
            job_id = read_job_id(message)
            record = JobRecord(id=job_id, queue=self.queue, state=state.value, **fields)
            return FoundJob(place, record if job_id else None, None, len(message))
        arguments = read_arguments(get_shape(self._app, command.task), command.args, command.kwargs)
        sent = get_sent(command, entry)
        record = make_live_record(command, self.queue, state, arguments, sent=sent, **fields)
        return FoundJob(place, record, arguments, len(message))

    def _make_dead(self, entry: str, message: bytes, document: bytes) -> FoundJob:
        end = try_read_document(document, self._app.settings.message_limit)
        fields: dict[str, Any] = {"ended": int(entry.partition("-")[0]) / 1000}
        if end is not None:
            fields = {
                "ended": end.finished or fields["ended"],
                "worker": end.worker,
                "reason": end.reason,
                "ran": max(end.finished - end.started, 0.0) if end.started else None,
            }
        return self._make_live(entry, message, JobState.DEAD, **fields)

    def _fit_page(self, sizes: Sequence[int]) -> None:
        """Set how many jobs the next trip reads, by the size of the last ones."""
        mean = sum(sizes) / len(sizes) if sizes else 0
        self._page = max(1, min(PAGE, int(BYTES_PER_TRIP / max(mean, 1))))

    async def _describe_deep(self, words: str, total: int) -> Sequence[str]:
        beyond = total - self.looked_at
        if self.looked_at < DEPTH or beyond <= 0:
            return ()
        return (f"{beyond:,} {words} beyond the first {DEPTH:,} of queue {self.queue}",)


class RunningJobSource(SearchSource):
    """The jobs that workers have."""

    stage = RUNNING

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return queue_calls.get_queue_depth(self._keys)

    def has_jobs(self, reply: Any) -> bool:
        """Return whether jobs are here, by the reply of that call."""
        return bool(reply.running)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        lane, _, entry = self.place.partition(" ")
        for number in range(int(lane or 0), len(self._keys.streams)):
            first = f"({entry}" if entry and number == int(lane) else "-"
            stream = self._keys.streams[number]
            held = await read_held(self._redis, stream, first=first, last="+", count=self._page)
            if not held:
                continue
            entries = await self._redis.perform_all(
                [calls.read_entry(stream, pending.id) for pending in held]
            )
            self._fit_page([len(stream_entry.message) for found in entries for stream_entry in found])
            return [
                self._make_live(
                    f"{number} {pending.id}",
                    found[0].message,
                    JobState.EXECUTING,
                    entry=pending.id,
                    worker=pending.worker,
                    deliveries=found[0].deliveries,
                    ran=pending.held_for,
                )
                if found
                else FoundJob(f"{number} {pending.id}", None, None, 0)
                for pending, found in zip(held, entries, strict=True)
            ]
        return ()

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if self.looked_at < DEPTH or not is_at_end:
            return ()
        return (f"jobs that workers have beyond the first {DEPTH:,} of queue {self.queue}",)


class DeadJobSource(SearchSource):
    """The dead jobs of a queue, the newest first."""

    stage = DEAD

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return calls.count_stream(self._keys.dead)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        last = f"({self.place}" if self.place else "+"
        entries = await self._redis.perform(
            dead_calls.list_entries_backwards(self._keys, first="-", last=last, count=self._page)
        )
        self._fit_page([len(entry.message) + len(entry.document) for entry in entries])
        return [
            FoundJob(entry.entry, None, None, len(entry.document))
            if entry.sink
            else self._make_dead(entry.entry, entry.message, entry.document)
            for entry in entries
        ]

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if not is_at_end or self.looked_at < DEPTH:
            return ()
        total = await self._redis.perform(calls.count_stream(self._keys.dead))
        return await self._describe_deep("dead jobs", total)


class RevokedJobSource(SearchSource):
    """The jobs of a queue that were revoked while they waited, the newest first. No worker has seen their end."""

    stage = REVOKED

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return calls.count_revoked(self._keys)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        if self._query.id:
            return () if self.place else await self._read_documents([self._query.id], ["end"])
        score, _, skipped = self.place.partition(" ")
        revoked = await self._redis.perform(
            calls.read_revoked(self._keys, score or "+inf", skip=int(skipped or 0), count=PAGE)
        )
        places, last, count = list[str](), score, int(skipped or 0)
        for _, at in revoked:
            text = f"{at:.0f}"
            last, count = (text, count + 1) if text == last else (text, 1)
            places.append(f"{last} {count}")
        return await self._read_documents([job_id for job_id, _ in revoked], places) if revoked else ()

    async def _read_documents(self, ids: Sequence[str], places: Sequence[str]) -> Sequence[FoundJob]:
        documents = await self._redis.perform(calls.read_revoked_documents(self._keys, ids))
        return [self._make_revoked(*pair) for pair in zip(places, documents, strict=True)]

    def _make_revoked(self, place: str, document: bytes) -> FoundJob:
        end = try_read_document(document, self._app.settings.message_limit)
        if end is None:
            return FoundJob(place, None, None, len(document))
        record = JobRecord(
            id=end.id,
            queue=self.queue,
            state=JobState.REVOKED.value,
            task=end.task,
            attempt=end.attempt,
            replays=end.replays,
            sent=end.sent,
            ended=end.finished,
            run=get_run_id(end.id),
        )
        return FoundJob(place, record, None, len(document))

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if not is_at_end or self.looked_at < job_calls.REVOKED_KEPT:
            return ()
        return (f"jobs of queue {self.queue} that may have been revoked before the last {self.looked_at:,}",)


class DueJobSource(SearchSource):
    """The jobs that wait for a time, the earliest first: scheduled ones, retries, and those held by a breaker."""

    stage = DUE

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return calls.count_due(self._keys)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        score, _, skipped = self.place.partition(" ")
        due = await self._redis.perform(
            calls.read_due(self._keys, score or "-inf", skip=int(skipped or 0), count=self._page)
        )
        if not due:
            return ()
        ids = [job_id for job_id, _ in due]
        messages = await self._redis.perform(calls.read_messages(self._keys, ids))
        places = await self._redis.perform(job_calls.get_places(self._keys, ids))
        self._fit_page([len(message) for message in messages])
        found: list[FoundJob] = []
        last, count = score, int(skipped or 0)
        for (_, at), message, place in zip(due, messages, places, strict=True):
            text = f"{at:.0f}"
            last, count = (text, count + 1) if text == last else (text, 1)
            state = get_state(place.decode(errors="replace"))
            if message and state in STAGES[DUE]:
                found.append(self._make_live(f"{last} {count}", message, state, due=at / 1000))
            else:
                found.append(FoundJob(f"{last} {count}", None, None, 0))
        return found

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if not is_at_end or self.looked_at < DEPTH:
            return ()
        total = await self._redis.perform(calls.count_due(self._keys))
        return await self._describe_deep("jobs that wait for their time", total)


class LimitedJobSource(SearchSource):
    """The jobs that wait at limits, in no order."""

    stage = LIMITED

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return calls.count_limited(self._keys)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        cursor, _, skipped = self.place.partition(" ")
        if cursor == "end" or (not cursor and not await self._redis.perform(calls.count_limited(self._keys))):
            return ()
        for _ in range(EMPTY_SCANS):
            following, part = await self._redis.perform(
                calls.scan_limited(self._keys, cursor or "0", self._page)
            )
            ids = [job_id for job_id, _ in part]
            places = await self._redis.perform(job_calls.get_places(self._keys, ids)) if ids else []
            unlimited = await self._redis.perform(calls.list_unlimited(self._keys)) if ids else set[str]()
            after = following if following != "0" else "end"
            found = [
                self._make_limited(f"{cursor or '0'} {number}", message, place, unlimited)
                for number, ((_, message), place) in enumerate(zip(part, places, strict=True), 1)
                if place.startswith(_LIMITED) and number > int(skipped or 0)
            ]
            self._fit_page([len(message) for _, message in part])
            if found:
                return [*found[:-1], found[-1]._replace(place=after)]
            cursor, skipped = after, ""
            if after == "end":
                return ()
        return (FoundJob(cursor, None, None, 0),)

    def _make_limited(self, place: str, message: bytes, where: bytes, unlimited: Collection[str]) -> FoundJob:
        text = where.decode(errors="replace")
        # A job of a task without a limit waits there for a worker with a slot.
        limit = "" if text.split(" ", 2)[1] in unlimited else format_limit(text)
        return self._make_live(place, message, JobState.HELD, limit=limit)

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if self.looked_at < DEPTH or not is_at_end:
            return ()
        return (f"jobs that wait at limits beyond the first {DEPTH:,} of queue {self.queue}",)


class WaitingJobSource(SearchSource):
    """The jobs on the streams of a queue that no worker has, the newest of each lane first."""

    stage = WAITING

    def measure(self) -> Call[Any]:
        """Return the call whose reply tells whether jobs are here."""
        return queue_calls.get_queue_depth(self._keys)

    def has_jobs(self, reply: Any) -> bool:
        """Return whether jobs are here, by the reply of that call."""
        return bool(reply.waiting + reply.running)

    async def read(self) -> Sequence[FoundJob]:
        """Return the next jobs; none at the end."""
        lane, _, entry = self.place.partition(" ")
        for number in range(int(lane or 0), len(self._keys.streams)):
            before = f"({entry}" if entry and number == int(lane) else "+"
            stream = self._keys.streams[number]
            entries = await self._redis.perform(calls.read_stream(stream, before=before, count=self._page))
            if not entries:
                continue
            self._fit_page([len(stream_entry.message) for stream_entry in entries])
            held = await read_held(
                self._redis, stream, first=entries[-1].id, last=entries[0].id, count=len(entries)
            )
            in_workers = {pending.id for pending in held}
            return [
                FoundJob(f"{number} {stream_entry.id}", None, None, 0)
                if stream_entry.id in in_workers
                else self._make_live(
                    f"{number} {stream_entry.id}",
                    stream_entry.message,
                    JobState.SENT,
                    entry=stream_entry.id,
                    deliveries=stream_entry.deliveries,
                )
                for stream_entry in entries
            ]
        return ()

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        if not is_at_end or self.looked_at < DEPTH:
            return ()
        counts = await self._redis.perform_all([calls.count_stream(stream) for stream in self._keys.streams])
        return await self._describe_deep("waiting jobs", sum(counts))


class OneJobSource(SearchSource):
    """The job with an id, wherever it is in a queue."""

    stage = RUNNING

    async def read(self) -> Sequence[FoundJob]:
        """Return the job; nothing at the end."""
        if self.place:
            return ()
        inspection = await self._redis.perform(job_calls.inspect_job(self._keys, self._query.id))
        if not inspection.place:
            return (FoundJob("end", None, None, 0),)
        state = get_state(inspection.place, has_worker=bool(inspection.worker))
        if state is JobState.DEAD:
            found = self._make_dead(inspection.place[1:], inspection.message, inspection.document)
            return (found._replace(place="end"),)
        return (
            self._make_live(
                "end",
                inspection.message,
                state,
                entry=get_entry(inspection.place),
                worker=inspection.worker,
                due=inspection.due or 0.0,
                deliveries=inspection.deliveries,
                limit=inspection.limit,
                ran=inspection.held_for if state is JobState.EXECUTING else None,
            ),
        )


class HistorySource(SearchSource):
    """The attempts that have ended, the newest entry of both streams first."""

    stage = HISTORY

    def __init__(self, scope: SearchScope, start: SearchPosition | None) -> None:
        super().__init__(scope, "", start)
        keys, state = scope.app.keys, scope.query.state
        self._streams = {"f": keys.failed_jobs, "o": keys.other_jobs}
        if state is not None:
            del self._streams["f" if state is JobState.SUCCESS else "o"]
        self._ends = dict(word.split("=", 1) for word in self.place.split())
        self._waiting: dict[str, list[calls.HistoryEntry]] = {}
        self._needles = scope.query.needles
        self._lost = 0

    @property
    def is_at_depth(self) -> bool:
        """Never: it has its own end."""
        return False

    @property
    def _since_ms(self) -> int:
        return int(self._query.since * 1000)

    def _get_newest(self) -> str:
        latest = (self._query.until + LATE) * 1000
        return f"{latest:.0f}" if latest < 1e15 else "+"

    async def read(self) -> Sequence[FoundJob]:
        """Return the next attempts; none at the end."""
        for name, stream in self._streams.items():
            if not self._waiting.get(name) and self._ends.get(name) != "end":
                end = self._ends.get(name)
                self._waiting[name] = await self._redis.perform(
                    calls.read_history(
                        stream,
                        before=f"({end}" if end else self._get_newest(),
                        since_ms=self._since_ms,
                        count=HISTORY_PAGE,
                    )
                )
                if not self._waiting[name]:
                    self._ends[name] = "end"
        found: list[FoundJob] = []
        while open_names := [name for name in self._streams if self._waiting.get(name)]:
            newest = max(open_names, key=lambda name: parse_entry(self._waiting[name][0].id))
            entry = self._waiting[newest].pop(0)
            self._ends[newest] = entry.id
            place = " ".join(f"{name}={end}" for name, end in self._ends.items())
            found.append(self._make(place, entry))
            if not self._waiting[newest]:
                break
        return found

    def _make(self, place: str, entry: calls.HistoryEntry) -> FoundJob:
        if entry.lost:
            self._lost += entry.lost
            return FoundJob(place, None, None, 0)
        if not all(needle in entry.packed for needle in self._needles):
            return FoundJob(place, None, None, len(entry.packed))
        return FoundJob(place, unpack_record(entry.packed), None, len(entry.packed))

    async def describe_rest(self, *, is_at_end: bool) -> Sequence[str]:
        """Return what was not looked at here, in words."""
        settings = self._app.settings
        if not settings.job_history or not settings.metrics_interval:
            name = "metrics_interval" if settings.job_history else "job_history"
            return (f"jobs that have ended while {name} is 0",)
        notes: list[str] = []
        if self._query.state in (None, JobState.SUCCESS):
            notes.append("successes that were neither among the slowest nor sampled")
        if self._lost:
            notes.append(
                f"{format_count(self._lost, 'failure that was', 'failures that were')} too many for the history"
            )
        for name, stream in self._streams.items():
            what = "failures" if name == "f" else "successes"
            oldest = await self._redis.perform(calls.read_oldest(stream))
            count = await self._redis.perform(calls.count_stream(stream))
            if oldest and count >= settings.job_history and oldest[0].at > self._query.since:
                notes.append(f"{what} before {_format(oldest[0].at)}, which the history has given up")
        return notes


_LIMITED = Place.LIMITED.encode()


def get_shape(app: Application, task: str) -> CallShape:
    """Return what is known of the arguments of a task here."""
    declared = app.tasks.get(task)
    return declared.call_shape if declared is not None else NO_SHAPE


def get_dead_entry(place: bytes) -> tuple[int, int] | None:
    """Return the entry in the dead-letter queue of a job that is dead; None for any other."""
    text = place.decode(errors="replace")
    return parse_entry(text[1:]) if text.startswith(Place.DEAD) else None


def _format(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}Z"


def parse_entry(entry: str) -> tuple[int, int]:
    """Return the id of an entry as numbers, which can be compared; zeros for what is none."""
    ms, _, number = entry.partition("-")
    return (read_whole(ms), read_whole(number))


async def read_held(
    redis: AsyncDriver, stream: str, *, first: str, last: str, count: int
) -> Sequence[calls.HeldEntry]:
    """Return which jobs of a stream workers have; none of a stream that no worker has read yet."""
    try:
        return await redis.perform(calls.read_held(stream, first=first, last=last, count=count))
    except BrokerReplied as error:
        if "NOGROUP" not in str(error):
            raise
        return ()


_SOURCES: Sequence[type[SearchSource]] = (
    RunningJobSource,
    DeadJobSource,
    RevokedJobSource,
    DueJobSource,
    LimitedJobSource,
    WaitingJobSource,
)


def make_sources(scope: SearchScope, start: SearchPosition | None) -> Sequence[SearchSource]:
    """Return the places to look at, in order, from the position `start` on."""
    query = scope.query
    stages = [
        stage
        for stage, states in STAGES.items()
        if (query.state is None or query.state in states)
        and not ((query.worker or query.needs_run) and stage in WITHOUT_WORKER)
    ]
    if query.id:
        stages = [RUNNING, *(stage for stage in (HISTORY, REVOKED) if stage in stages)]
    kinds: dict[int, type[SearchSource]] = {kind.stage: kind for kind in _SOURCES}
    sources: list[SearchSource] = []
    for stage in stages:
        for queue in [""] if stage == HISTORY else sorted(scope.queues):
            here = (stage, queue)
            begin = start if start is not None and here == (start.stage, start.queue) else None
            if start is not None and here < (start.stage, start.queue):
                continue
            if stage == HISTORY:
                sources.append(HistorySource(scope, begin))
            elif stage == REVOKED or not scope.skips_live:
                kind = OneJobSource if query.id and stage == RUNNING else kinds[stage]
                sources.append(kind(scope, queue, begin))
    return sources
