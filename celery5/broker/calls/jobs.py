"""Build the calls that publish, read, settle, locate, inspect and revoke jobs."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, parse_int, parse_seconds, script_call, to_ms
from celery5.broker.keys import GROUP, QueueKeys
from celery5.protocol.job.delivery import MIN_DOCUMENT_TTL, Settlement, SinkDocument
from celery5.protocol.job.messages import read_deaths
from celery5.protocol.job.progress import Progress, ProgressReport, parse_progress
from celery5.protocol.job.states import ADMITTED, get_state, get_stream_id
from celery5.protocol.job.story import JobInspection

PUBLISH = Script.load("job/publish")
SCHEDULE = Script.load("job/schedule", "clock", "timing")
PUBLISH_UNIQUE = Script.load("job/publish_unique", "clock", "sending", "timing")
READ_BY_LANE = Script.load("job/read_by_lane")
READ_PENDING = Script.load("job/read_pending")
PROMOTE = Script.load("job/promote", "clock", "member", "admission", "foreign")
SETTLE = Script.load(
    "job/settle", "lease", on_demand=("clock", "ending", "timing", "member", "foreign", "causes")
)
LOCATE = Script.load("job/locate")
READ_STATES = Script.load("job/read_states")
REVOKE = Script.load("job/revoke", "clock", "ending", "time_sent", "member", "admission", "foreign")
DIRECT = Script.load("job/direct")
RECORD_PROGRESS = Script.load("job/record_progress", "clock", "lease")
INSPECT_JOB = Script.load("job/inspect_job", "clock", "ending")
FIND_CODE = Script.load("job/find_code", "clock")
TAKE_FOREIGN = Script.load("job/take_foreign", "lease", "foreign")

PING: Call[object] = Call(("PING",), lambda reply: reply, repeatable=True)
"""A call without effect, to test the connection."""
SERVER_TIME: Call[float] = Call(
    ("TIME",), lambda reply: int(reply[0]) + int(reply[1]) / 1_000_000, repeatable=True
)
"""Returns the time by Redis, in seconds since 1970."""

REVOKED_KEPT = 1000
"""Jobs of a queue that were revoked while they waited, and are kept for those who look for them."""
REVOKED_TTL = 90 * 86_400.0
"""Seconds for which they are kept."""
REVOCATION_BATCH = 200
"""Jobs in one trip: a script blocks the server while it runs."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One job as read from a stream."""

    queue: str
    id: bytes  # of the entry, with the lane's letter at the end
    message: bytes
    deliveries: int = 0  # how many workers died with it
    lane: str = ""
    is_foreign: bool = False  # it was kept for workers with other code, and has no slot of a limit
    since: int = 0  # since when it could have run, in ms since 1970; 0: since the time of the entry


class LocatedJob(msgspec.Struct, frozen=True):
    """Where a job is: a state's name or `ENDED`, the worker that has it, and its document when it has one."""

    state: str
    worker: str
    document: bytes


def publish(keys: QueueKeys, jobs: Sequence[tuple[str, bytes]]) -> Call[int]:
    """Put jobs (id, Command) on their queue; return how many were new. Safe to repeat: a known id is left alone."""
    prefix = keys.result_prefix  # as in `settle`: many jobs at once
    results = [prefix + job_id for job_id, _ in jobs]
    args: tuple[Word, ...] = tuple(chain.from_iterable(jobs))
    return script_call(PUBLISH, (keys.stream, keys.jobs, *results), args, int, repeatable=True)


def schedule(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str]]) -> Call[int]:
    """Keep jobs (id, Command, time) until their time: ms since 1970, or `+` and ms from now. Safe to repeat."""
    results = tuple([keys.result(job_id) for job_id, *_ in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.due, keys.waiting, keys.jobs, *results)
    return script_call(SCHEDULE, named, (keys.wake, *args), int, repeatable=True)


def publish_unique(
    keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str, float | None]]
) -> Call[dict[str, str]]:
    """Publish or schedule jobs (id, Command, time or '', lock or '', `unique_for` in seconds) on the lane of `keys`,
    unless another job has the lock. Return the id of that job for each job that was not sent. Safe to repeat."""
    places = tuple(
        [key for job_id, _, _, lock, _ in jobs for key in (keys.result(job_id), keys.unique_window(lock))]
    )
    args: tuple[Word, ...] = tuple(
        [
            word
            for job_id, command, at, lock, unique_for in jobs
            for word in (job_id, command, at, lock, to_ms(unique_for or 0))
        ]
    )
    named = (keys.stream, keys.jobs, keys.due, keys.waiting, keys.unique, *places)
    reply = partial(_others, [job_id for job_id, *_ in jobs])
    return script_call(PUBLISH_UNIQUE, named, (keys.wake, keys.lane, *args), reply, repeatable=True)


def wait_for_replicas(keys: QueueKeys, *, replicas: int, within: float) -> list[Call[int]]:
    """Wait, `within` seconds, until this many replicas have all that was written before on the same connection; the
    last call returns how many have. For `BlockingRedis.perform_replicated`."""
    # WAIT waits for the last write of its own connection, so write: publishing a duplicate job writes nothing.
    return [try_write(keys), Call(("WAIT", replicas, to_ms(within)), int, repeatable=True, blocks=within)]


def try_write(keys: QueueKeys) -> Call[int]:
    """Write something that nobody reads: it fails as every other write does while the server takes none."""
    return Call(("SET", keys.replication_mark, "", "PX", 1000), lambda _ok: 0, repeatable=True)


def read_hash(key: str) -> Call[dict[str, str]]:
    """Return a hash, as text."""
    return Call(("HGETALL", key), _texts, repeatable=True)


class PromotedJobs(NamedTuple):
    """The reply of `promote_due_jobs`."""

    # How many were moved.
    moved: int
    # Seconds until the next job, or run of a workflow, is due; None when none waits.
    due_in: float | None
    # How many records of runs wait to be applied.
    run_records: int


def promote_due_jobs(keys: QueueKeys, *, limit: int) -> Call[PromotedJobs]:
    """Move due jobs to their queue, and note the runs of workflows that are due."""
    named = (
        keys.due,
        keys.waiting,
        keys.normal,
        keys.jobs,
        keys.high,
        keys.low,
        keys.limited_counts,
        keys.waiting_list_prefix,
    )
    return script_call(PROMOTE, named, (limit, keys.wake), _moved, repeatable=True)


def read_jobs(
    queues: Sequence[QueueKeys], worker: str, *, count: int, block_seconds: float
) -> Call[list[Entry]]:
    """Take up to `count` jobs of each queue for this worker. Wait `block_seconds` for the first.

    Not repeatable: what a lost answer carried is found in the worker's own pending list (`read_pending`).
    """
    named = {queue.stream.encode(): queue for queue in queues}
    streams = tuple(queue.stream for queue in queues)
    wait = ("BLOCK", max(1, to_ms(block_seconds))) if block_seconds else ()
    words = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, *wait, "STREAMS")
    new = (">",) * len(streams)
    return Call((*words, *streams, *new), partial(_entries, named), blocks=block_seconds)


def read_by_lane(
    lanes: Sequence[QueueKeys], worker: str, *, count: int, shares: Sequence[int]
) -> Call[list[Entry]]:
    """Take up to `count` jobs of one queue for this worker, without waiting: of each of its `lanes` its share, then of
    the first ones what is left. Not repeatable, as `read_jobs`."""
    named = {lane.stream.encode(): lane for lane in lanes}
    streams = tuple(lane.stream for lane in lanes)
    return script_call(READ_BY_LANE, streams, (GROUP, worker, count, *shares), partial(_entries, named))


def read_pending(keys: QueueKeys, worker: str, *, after: bytes, count: int) -> Call[list[Entry]]:
    """Return the jobs that this worker has taken from a lane and not settled, after the entry `after` (b"0" for all).

    The times when the worker took the jobs do not change.
    """
    decode = partial(_entries, {keys.stream.encode(): keys})
    words = (GROUP, worker, get_stream_id(after), count)
    return script_call(READ_PENDING, (keys.stream,), words, decode, repeatable=True)


def settle(
    keys: QueueKeys, worker: str, settlements: Sequence[Settlement], documents: Sequence[SinkDocument] = ()
) -> Call[int]:
    """Settle outcomes of one lane, and put `documents` on the streams of Data Sinks, in one step. Safe to repeat.

    Returns:
        How many of them this worker still owned; -1 when it has lost its lease, and nothing was done.
    """
    prefix = keys.result_prefix
    results = tuple([prefix + settlement.job_id for settlement in settlements])
    named = (
        keys.stream,
        keys.jobs,
        keys.leases,
        keys.due,
        keys.waiting,
        keys.dead,
        keys.unique,
        keys.documents,
        *results,
    )
    args: tuple[Word, ...] = tuple(chain.from_iterable(settlements))
    if documents:
        args += tuple(chain.from_iterable(documents))
    return script_call(SETTLE, named, (GROUP, worker, keys.wake, keys.lane, *args), int, repeatable=True)


def locate_job(keys: QueueKeys, job_id: str) -> Call[LocatedJob]:
    """Return where a job is."""
    return script_call(
        LOCATE,
        (keys.normal, keys.jobs, keys.result(job_id), *keys.other_streams),
        (GROUP, job_id),
        _place,
        repeatable=True,
    )


STATES_BATCH = 100
"""Jobs in one call of `read_states`: a script blocks the server while it runs."""


class WatchedState(NamedTuple):
    """The state of a job, with its progress."""

    # A state's name, or `ENDED` when it has a document and no place.
    state: str
    # What it has reported of its progress; None when it does not run, or has reported nothing.
    progress: Progress | None


def read_states(keys: QueueKeys, job_ids: Sequence[str]) -> Call[list[WatchedState]]:
    """Return the states of jobs of one queue, in order; STATES_BATCH at most."""
    documents = [key for job_id in job_ids for key in (keys.result(job_id), keys.progress(job_id))]
    named = (keys.normal, keys.jobs, keys.high, keys.low, keys.handed, *documents)
    return script_call(READ_STATES, named, (GROUP, *job_ids), _watched_states, repeatable=True)


def delete_results(keys: QueueKeys, job_ids: Sequence[str]) -> Call[int]:
    """Delete the results of jobs."""
    return Call(("DEL", *[keys.result(job_id) for job_id in job_ids]), int, repeatable=True)


def store_result(keys: QueueKeys, job_id: str, document: bytes, ttl: float) -> Call[bool]:
    """Store how a job ended elsewhere, for `ttl` seconds; False when it has a result already."""
    words = ("SET", keys.result(job_id), document, "NX", "PX", max(to_ms(ttl), 1))
    return Call(words, bool, repeatable=True)


def list_dead_jobs(keys: QueueKeys, *, count: int) -> Call[list[tuple[str, bytes, bytes]]]:
    """Return the oldest dead jobs: entry, Command and document of each."""
    return Call(("XRANGE", keys.dead, "-", "+", "COUNT", count), _dead_entries, repeatable=True)


def parse_entry(keys: QueueKeys, entry: bytes, flat: list[bytes] | None) -> Entry:
    """Return one entry of the lane of `keys`, from a reply to XREADGROUP."""
    lane = keys.lane
    if lane:
        entry += lane.encode()
    if not flat:  # deleted while it was pending
        return Entry(keys.queue, entry, b"", 0, lane)
    if len(flat) == 2 and flat[0] == b"job":
        return Entry(keys.queue, entry, flat[1], 0, lane)
    fields = _fields(flat)
    return Entry(
        keys.queue,
        entry,
        fields.get(b"job", b""),
        max(0, parse_int(fields.get(b"deliveries"))),
        lane,
        b"foreign" in fields,
        max(0, parse_int(fields.get(b"since"))),
    )


def revoke(keys: QueueKeys, job_ids: Sequence[str], *, ttl: float) -> Call[list[str]]:
    """Revoke jobs, REVOCATION_BATCH at most. Return what was found of each, as `revoke.lua` says. Safe to repeat.

    `ttl` is how long it is remembered that a job was revoked, in seconds, unless the job says otherwise.
    """
    named = (
        keys.normal,
        keys.jobs,
        keys.due,
        keys.waiting,
        keys.unique,
        keys.high,
        keys.low,
        keys.handed,
        keys.documents,
        keys.limited_counts,
        keys.waiting_list_prefix,
        keys.revoked_jobs,
        keys.revoked_documents,
        *map(keys.result, job_ids),
    )
    ids: tuple[Word, ...] = tuple(job_ids)
    least = to_ms(MIN_DOCUMENT_TTL)
    kept_for = to_ms(REVOKED_TTL)
    return script_call(
        REVOKE,
        named,
        (GROUP, keys.revoke, to_ms(ttl), least, REVOKED_KEPT, kept_for, keys.wake, *ids),
        _texts_of,
        repeatable=True,
    )


def get_places(keys: QueueKeys, job_ids: Sequence[str]) -> Call[list[bytes]]:
    """Return where jobs are, as the queue's hash says it: `b""` for one that has no place there."""
    return Call(("HMGET", keys.jobs, *job_ids), _places, repeatable=True)


def scan_jobs(keys: QueueKeys, cursor: str) -> Call[tuple[str, list[str]]]:
    """Return some of the jobs that have a place in a queue, and the cursor for the next ones; "0" at the end."""
    return Call(("HSCAN", keys.jobs, cursor, "COUNT", REVOCATION_BATCH), _scanned, repeatable=True)


def deliver_to_worker(
    keys: QueueKeys, job_id: str, message: bytes, *, worker: str, max_before: int
) -> Call[list[Entry] | None]:
    """Put a job on its queue, on the lane of `keys`, and give it to `worker`, with all that waited before it. None,
    and nothing done, when that is more than `max_before`. Not repeatable: what a lost answer carried is found in the
    worker's pending list."""
    named = (keys.stream, keys.jobs, keys.result(job_id))
    words = (GROUP, worker, job_id, message, max_before, keys.lane, keys.wake)
    return script_call(DIRECT, named, words, partial(_delivered, keys))


FIND_CODE_BATCH = 50
"""Jobs in one call of `find_code`: a script blocks the server while it runs."""


class CodeSearch(NamedTuple):
    """The reply of `find_code`."""

    # The time by the clock of Redis, in seconds since 1970.
    now: float
    # For each job whether a live worker has other code for its task.
    known: Sequence[bool]


def find_code(keys: QueueKeys, jobs: Sequence[tuple[str, Sequence[str]]]) -> Call[CodeSearch]:
    """Return of which jobs live workers know the task by another signature than these; FIND_CODE_BATCH at most."""
    words: tuple[Word, ...] = tuple([word for task, by in jobs for word in (task, ",".join(by))])
    return script_call(FIND_CODE, (keys.jobs,), words, _code_search, repeatable=True)


def take_foreign_jobs(keys: QueueKeys, worker: str, *, version: str, count: int) -> Call[list[Entry]]:
    """Give a worker up to `count` foreign jobs whose tasks the version of its code knows.

    Not repeatable: what a lost answer carried is found in the worker's pending list.
    """
    handed = keys.on_lane(ADMITTED)
    return script_call(
        TAKE_FOREIGN,
        (keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due),
        (GROUP, worker, version, count),
        partial(_entries, {handed.stream.encode(): handed}),
    )


def inspect_job(keys: QueueKeys, job_id: str) -> Call[JobInspection]:
    """Return all that the server has of a job."""
    named = (
        keys.normal,
        keys.jobs,
        keys.result(job_id),
        keys.due,
        keys.waiting,
        keys.dead,
        keys.waiting_list_prefix,
        keys.progress(job_id),
        keys.job_deaths(job_id),
        *keys.other_streams,
    )
    return script_call(INSPECT_JOB, named, (GROUP, job_id), _inspection, repeatable=True)


def record_progress(
    keys: QueueKeys,
    worker: str,
    *,
    ttl: float,
    reports: Sequence[tuple[str, int, ProgressReport]],
    kept: Sequence[str],
    ended: Sequence[str],
) -> Call[bool]:
    """Store the progress of running jobs; return False when the worker has lost its lease, and nothing was done.

    Args:
        ttl: Seconds after which what is not stored again is deleted.
        reports: Ids, attempts and reports.
        kept: The ids of jobs whose earlier report stays.
        ended: The ids of jobs that have ended here: theirs is deleted.
    """
    ids = [job_id for job_id, _, _ in reports]
    words = list[Word]()
    for _, attempt, (done, total, note) in reports:
        words += (repr(done), "" if total is None else repr(total), note.encode(errors="replace"), attempt)
    named = tuple(keys.progress(job_id) for job_id in (*ids, *kept, *ended))
    return script_call(
        RECORD_PROGRESS,
        (keys.leases, *named),
        (worker, to_ms(ttl), len(ids), len(kept), *words),
        bool,
        repeatable=True,
    )


def get_progress(keys: QueueKeys, job_id: str) -> Call[Progress | None]:
    """Return what a running job has reported of its progress; None when nothing is stored."""
    return Call(("HGETALL", keys.progress(job_id)), _progress, repeatable=True)


def _progress(raw: Any) -> Progress | None:
    fields: dict[bytes, bytes] = cast("Any", raw) if isinstance(raw, dict) else _fields(raw)  # RESP3 has maps
    return parse_progress(fields)


def _texts(reply: Any) -> dict[str, str]:
    words = [decode_text(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _others(ids: Iterable[str], raw: Iterable[bytes]) -> dict[str, str]:
    holders = zip(ids, (decode_text(word) for word in raw), strict=True)
    return {job_id: holder for job_id, holder in holders if holder != job_id}


def _moved(raw: Any) -> PromotedJobs:
    moved, due_in, run_records = msgspec.convert(raw, tuple[int, int, int])
    return PromotedJobs(moved, parse_seconds(due_in), run_records)


def _place(raw: Any) -> LocatedJob:
    place, worker, document = decode_text(raw[0]), decode_text(raw[1]), msgspec.convert(raw[2], bytes)
    if not place and document:
        return LocatedJob("ENDED", worker, document)
    return LocatedJob(get_state(place, has_worker=bool(worker)).value, worker, document)


def _watched_states(raw: Any) -> list[WatchedState]:
    states: list[WatchedState] = []
    for place, worker, documents, progress in raw:
        state = (
            get_state(decode_text(place), has_worker=bool(worker)).value
            if place or not documents
            else "ENDED"
        )
        states.append(WatchedState(state, _progress(progress) if progress else None))
    return states


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _dead_entries(raw: Iterable[tuple[bytes, list[bytes]]]) -> list[tuple[str, bytes, bytes]]:
    entries = [(decode_text(entry), _fields(flat)) for entry, flat in raw]
    return [(entry, fields.get(b"job", b""), fields.get(b"document", b"")) for entry, fields in entries]


_Streams = Iterable[tuple[bytes, Iterable[tuple[bytes, list[bytes] | None]]]]


def _entries(named: dict[bytes, QueueKeys], raw: Any) -> list[Entry]:
    """Return the entries of an XREADGROUP reply: a map in RESP3, a list of pairs in RESP2, or None."""
    streams = cast("_Streams", raw.items() if hasattr(raw, "items") else raw or ())
    return [parse_entry(named[stream], entry, flat) for stream, entries in streams for entry, flat in entries]


def _code_search(raw: Any) -> CodeSearch:
    now, *known = msgspec.convert(raw, list[int])
    return CodeSearch(now / 1000, [flag == 1 for flag in known])


def _scanned(raw: Sequence[Any]) -> tuple[str, list[str]]:
    cursor, flat = raw
    names: list[bytes] = list(cast("Any", flat)) if isinstance(flat, dict) else flat[::2]  # RESP3 has maps
    return cursor.decode(), [name.decode(errors="replace") for name in names]


def _texts_of(raw: Iterable[bytes]) -> list[str]:
    return [decode_text(item) for item in raw]


def _places(raw: Any) -> list[bytes]:
    return [item or b"" for item in msgspec.convert(raw, list[bytes | None])]


def _delivered(keys: QueueKeys, raw: Any) -> list[Entry] | None:
    return None if raw is None else [parse_entry(keys, entry, flat) for entry, flat in raw]


def _inspection(raw: Any) -> JobInspection:
    place, document, message, worker, held, due, deliveries, now, before, progress, deaths, unlimited = raw
    held_for = parse_seconds(held)
    return JobInspection(
        place=place.decode(errors="replace"),
        document=document,
        message=message,
        worker=worker.decode(errors="replace"),
        taken=0.0 if held_for is None else now / 1000 - held_for,
        held_for=held_for,
        due=parse_seconds(due) or 0.0,
        deliveries=deliveries,
        jobs_ahead=None if before < 0 else before,
        progress=_progress(progress) if progress else None,
        deaths=read_deaths(deaths),
        is_unlimited=unlimited == 1,
    )
