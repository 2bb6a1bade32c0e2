"""Build the calls that publish, read, settle, recover, revoke and inspect jobs, and measure their queues."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, merge_names, parse_int, script_call
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.job.delivery import MIN_DOCUMENT_TTL, Settlement, SinkDocument
from celery5.protocol.job.messages import SIZE_MARGIN
from celery5.protocol.job.states import get_state, get_stream_id

PUBLISH = Script.load("job/publish")
SCHEDULE = Script.load("job/schedule", "clock", "timing")
CLAIM = Script.load("job/claim", "clock", "sending", "timing")
READ_BY_LANE = Script.load("job/read_by_lane")
PROMOTE = Script.load("job/promote", "clock", "admission")
SETTLE = Script.load("job/settle", "lease", on_demand=("clock", "ending", "timing"))
JOIN = Script.load("cluster/join")
RENEW_LEASE = Script.load("cluster/renew_lease", "clock", "lane")
RECOVER = Script.load("job/recover", "clock", "lane", "ending", "admission")
LEAVE = Script.load("cluster/leave")
LOCATE = Script.load("job/locate")
MEASURE = Script.load("scaling/measure", "clock", "lane")

PING: Call[object] = Call(("PING",), lambda reply: reply, repeatable=True)
"""A call without effect, to test the connection."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One job as read from a stream."""

    queue: str
    id: bytes  # of the entry, with the lane's letter at the end
    message: bytes
    deliveries: int = 0  # how many workers died with it
    lane: str = ""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The reply to a heartbeat."""

    # The worker still has its lease.
    alive: bool
    # How many other workers have let their lease lapse, or hold jobs without one.
    lapsed: int
    # Seconds until the next scheduled job; None when there is none.
    due_in: float | None
    # Seconds until the next lease of another worker would lapse; None when there is none.
    lapse_in: float | None = None
    # Letters of the lanes beside the normal one that ever had a job.
    lanes: str = ""
    # The tasks whose jobs wait at limits, as the scripts have their names.
    limited_tasks: tuple[str, ...] = ()
    # Time of the reply in ms, by the clock of Redis.
    at: int = 0


class HeartbeatEvidence(msgspec.Struct, frozen=True):
    """The worker that decides from its heartbeat that a worker has died."""

    name: str
    at: int
    """Time of the heartbeat in ms, by the clock of Redis (`HeartbeatReply.at`)."""
    lease: float
    """Its lease in seconds, which that heartbeat renewed."""


class RecoveryResult(msgspec.Struct, frozen=True):
    """The result of one recovery."""

    worker: str  # '' for none
    requeued: int
    dead_lettered: int
    has_more: bool  # jobs of this worker remain


class LocatedJob(msgspec.Struct, frozen=True):
    """Where a job is: a state's name or `ENDED`, the worker that has it, and its document when it has one."""

    state: str
    worker: str
    document: bytes


class QueueDepth(msgspec.Struct, frozen=True):
    """How far behind a queue is."""

    # Jobs on the streams that no worker has.
    waiting: int
    # Seconds for which the oldest of them has been there; None when there is none.
    oldest: float | None
    # Jobs in the dead-letter queue.
    dead: int
    # Jobs that wait at a limit.
    held: int = 0


class QueueSize(msgspec.Struct, frozen=True):
    """What is in a queue: jobs on the streams of its lanes, how many of those a worker has, scheduled jobs, dead jobs,
    and jobs that wait at limits."""

    stream: int
    in_workers: int
    due: int
    dead: int
    limited: int = 0

    @property
    def unfinished(self) -> int:
        """Return how many jobs have not ended."""
        return self.stream + self.due + self.limited


def publish(keys: QueueKeys, jobs: Sequence[tuple[str, bytes]]) -> Call[int]:
    """Put jobs (id, Command) on their queue; return how many were new. Safe to repeat: a known id is left alone."""
    results = tuple([keys.result(job_id) for job_id, _ in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    return script_call(PUBLISH, (keys.stream, keys.jobs, *results), args, int, repeatable=True)


def schedule(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str]]) -> Call[int]:
    """Keep jobs (id, Command, time) until their time: ms since 1970, or `+` and ms from now. Safe to repeat."""
    results = tuple([keys.result(job[0]) for job in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.due, keys.waiting, keys.jobs, *results)
    return script_call(SCHEDULE, named, (keys.wake, *args), int, repeatable=True)


def claim(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str, float | None]]) -> Call[dict[str, str]]:
    """Publish or schedule jobs (id, Command, time or '', lock or '', `unique_for` in seconds) on the lane of `keys`,
    unless another job has the lock. Return the id of that job for each job that was not sent. Safe to repeat."""
    places = tuple([key for job in jobs for key in (keys.result(job[0]), keys.unique_window(job[3]))])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in (*job[:4], _ms(job[4] or 0))])
    named = (keys.stream, keys.jobs, keys.due, keys.waiting, keys.unique, *places)
    reply = partial(_others, [job[0] for job in jobs])
    return script_call(CLAIM, named, (keys.wake, keys.lane, *args), reply, repeatable=True)


def wait_for_replicas(keys: QueueKeys, *, replicas: int, within: float) -> list[Call[int]]:
    """Wait, `within` seconds, until so many replicas have all that was written before; the last call returns how many
    have. In a trip of their own: a script that the server does not know runs after the rest of its trip."""
    # WAIT waits for the last write of its own connection, so write: publishing a duplicate job writes nothing.
    mark = Call(("SET", keys.replication_mark, "", "PX", 1000), lambda _ok: 0, repeatable=True)
    return [mark, Call(("WAIT", replicas, _ms(within)), int, repeatable=True, blocks=within)]


def register_queue(keys: Keys, queue: str) -> Call[int]:
    """Add the queue to the application's queues."""
    return Call(("SADD", keys.queues, queue), int, repeatable=True)


def list_queues(keys: Keys) -> Call[list[str]]:
    """Return the names of the application's queues, sorted."""
    return Call(("SMEMBERS", keys.queues), _names, repeatable=True, merge=merge_names)


def read_hash(key: str) -> Call[dict[str, str]]:
    """Return a hash, as text."""
    return Call(("HGETALL", key), _texts, repeatable=True)


def promote_due_jobs(keys: QueueKeys, *, limit: int) -> Call[tuple[int, float | None]]:
    """Move due jobs to their queue. Return how many, and the seconds until the next one."""
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
    wait = ("BLOCK", max(1, int(block_seconds * 1000))) if block_seconds else ()
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
    """Return what this worker was given on a lane and has not settled, from the entry `after` on (b"0" for all)."""
    named = {keys.stream.encode(): keys}
    words = (
        "XREADGROUP",
        "GROUP",
        GROUP,
        worker,
        "COUNT",
        count,
        "STREAMS",
        keys.stream,
        get_stream_id(after),
    )
    return Call(words, partial(_entries, named), repeatable=True)


def settle(
    keys: QueueKeys,
    worker: str,
    settlements: Sequence[Settlement],
    documents: Sequence[SinkDocument] = (),
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


def join_queue(keys: QueueKeys, worker: str, *, lease: float) -> Call[int]:
    """Join a queue with a lease of so many seconds."""
    named = (keys.leases, *keys.streams)
    return script_call(JOIN, named, (GROUP, worker, _ms(lease)), int, repeatable=True)


def renew_lease(keys: QueueKeys, worker: str, *, lease: float) -> Call[HeartbeatReply]:
    """Renew the lease for so many seconds."""
    return script_call(
        RENEW_LEASE,
        (keys.leases, keys.due, keys.limited_counts, *keys.streams),
        (worker, _ms(lease), GROUP),
        _heartbeat_reply,
        repeatable=True,
    )


def recover(
    keys: QueueKeys,
    *,
    worker: str,
    max_deliveries: int,
    limit: int,
    ttl: float,
    message_limit: int,
    begun_entries: Sequence[bytes] | None = None,
    evidence: HeartbeatEvidence | None = None,
) -> Call[RecoveryResult]:
    """Put back what a dead worker held; `worker` '' takes the first whose lease has lapsed, or who has none.

    Args:
        begun_entries: The entries, lanes included, that it is known to have begun: only these count as having taken it
            down. None: all do.
        evidence: The worker that decided this from its heartbeat. When that is too old as the script runs, nobody is
            recovered. None: the caller knows that the process has ended.
        message_limit: A message of more bytes than this and a margin is not decoded: only its id is read.
    """
    return script_call(
        RECOVER,
        (
            keys.normal,
            keys.jobs,
            keys.leases,
            keys.dead,
            keys.result_prefix,
            keys.unique,
            keys.documents,
            keys.slots,
            keys.slot_counts,
            keys.waiting_list_prefix,
            *keys.other_streams,
        ),
        (
            GROUP,
            worker,
            max_deliveries,
            limit,
            _ms(ttl),
            "*" if begun_entries is None else "-",
            keys.slots_freed,
            "" if evidence is None else evidence.name,
            0 if evidence is None else evidence.at,
            0 if evidence is None else _ms(evidence.lease),
            message_limit + SIZE_MARGIN + 1,
            *(begun_entries or ()),
        ),
        _recovered,
        repeatable=True,
    )


def leave_queue(keys: QueueKeys, worker: str) -> Call[int]:
    """Leave a queue. Return on how many lanes jobs were still held."""
    return script_call(LEAVE, (keys.leases, *keys.streams), (GROUP, worker), int, repeatable=True)


def locate_job(keys: QueueKeys, job_id: str) -> Call[LocatedJob]:
    """Return where a job is."""
    return script_call(
        LOCATE,
        (keys.normal, keys.jobs, keys.result(job_id), *keys.other_streams),
        (GROUP, job_id),
        _place,
        repeatable=True,
    )


def delete_results(keys: QueueKeys, job_ids: Sequence[str]) -> Call[int]:
    """Delete the results of jobs."""
    return Call(("DEL", *[keys.result(job_id) for job_id in job_ids]), int, repeatable=True)


def measure_queue(keys: QueueKeys) -> Call[QueueSize]:
    """Count what is in a queue."""
    return script_call(
        MEASURE, (keys.due, keys.dead, keys.limited_counts, *keys.streams), (GROUP,), _size, repeatable=True
    )


def get_queue_depth(keys: QueueKeys) -> Call[QueueDepth]:
    """Return how far behind a queue is: one script, whose cost does not grow with the queue."""
    named = (keys.due, keys.dead, keys.limited_counts, *keys.streams)
    return script_call(MEASURE, named, (GROUP,), _depth, repeatable=True)


def list_dead_jobs(keys: QueueKeys, *, count: int) -> Call[list[tuple[str, bytes, bytes]]]:
    """Return the oldest dead jobs: entry, Command and document of each."""
    return Call(("XRANGE", keys.dead, "-", "+", "COUNT", count), _dead_entries, repeatable=True)


def _texts(reply: Any) -> dict[str, str]:
    words = [decode_text(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _names(raw: Iterable[bytes]) -> list[str]:
    """Return the names of queues. Invalid text is left out: celery5 did not write it."""
    found = [decode_text(word) for word in raw]
    return sorted(name for name in found if "\ufffd" not in name)


def _others(ids: Iterable[str], raw: Iterable[bytes]) -> dict[str, str]:
    holders = zip(ids, (decode_text(word) for word in raw), strict=True)
    return {job_id: holder for job_id, holder in holders if holder != job_id}


def _moved(raw: Any) -> tuple[int, float | None]:
    moved, due_in = msgspec.convert(raw, tuple[int, int])
    return moved, _seconds(due_in)


def _heartbeat_reply(raw: Any) -> HeartbeatReply:
    return HeartbeatReply(
        raw[0] == 1,
        raw[1],
        _seconds(raw[2]),
        _seconds(raw[3]),
        decode_text(raw[4]),
        tuple(map(decode_text, raw[5])),
        raw[6],
    )


def _recovered(raw: Any) -> RecoveryResult:
    return RecoveryResult(decode_text(raw[0]), int(raw[1]), int(raw[2]), raw[3] == 1)


def _place(raw: Any) -> LocatedJob:
    place, worker, document = decode_text(raw[0]), decode_text(raw[1]), msgspec.convert(raw[2], bytes)
    if not place and document:
        return LocatedJob("ENDED", worker, document)
    return LocatedJob(get_state(place, has_worker=bool(worker)).value, worker, document)


def _depth(raw: Any) -> QueueDepth:
    total, in_workers, _due, dead, held, oldest = map(int, raw)
    return QueueDepth(max(0, total - in_workers), None if oldest < 0 else oldest / 1000, dead, held)


def _size(raw: Any) -> QueueSize:
    *counts, _oldest = raw
    return QueueSize(*map(int, counts))


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
        keys.queue, entry, fields.get(b"job", b""), max(0, parse_int(fields.get(b"deliveries"))), lane
    )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


REVOKE = Script.load("job/revoke", "clock", "ending", "admission")

REVOCATION_BATCH = 200
"""Jobs in one trip: a script blocks the server while it runs."""


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
        *map(keys.result, job_ids),
    )
    ids: tuple[Word, ...] = tuple(job_ids)
    least = int(MIN_DOCUMENT_TTL * 1000)
    return script_call(
        REVOKE, named, (GROUP, keys.revoke, int(ttl * 1000), least, *ids), _texts_of, repeatable=True
    )


def get_places(keys: QueueKeys, job_ids: Sequence[str]) -> Call[list[bytes]]:
    """Return where jobs are, as the queue's hash says it: `b""` for one that has no place there."""
    return Call(("HMGET", keys.jobs, *job_ids), _places, repeatable=True)


def scan_jobs(keys: QueueKeys, cursor: str) -> Call[tuple[str, list[str]]]:
    """Return some of the jobs that have a place in a queue, and the cursor for the next ones; "0" at the end."""
    return Call(("HSCAN", keys.jobs, cursor, "COUNT", REVOCATION_BATCH), _scanned, repeatable=True)


def _scanned(raw: Sequence[Any]) -> tuple[str, list[str]]:
    cursor, flat = raw
    names: list[bytes] = list(cast("Any", flat)) if isinstance(flat, dict) else flat[::2]  # RESP3 has maps
    return cursor.decode(), [name.decode(errors="replace") for name in names]


def _texts_of(raw: Iterable[bytes]) -> list[str]:
    return [decode_text(item) for item in raw]


def _places(raw: Any) -> list[bytes]:
    return [item or b"" for item in msgspec.convert(raw, list[bytes | None])]


DIRECT = Script.load("job/direct")


def deliver_to_worker(
    keys: QueueKeys, job_id: str, message: bytes, *, worker: str, max_before: int
) -> Call[list[Entry] | None]:
    """Put a job on its queue, on the lane of `keys`, and give it to `worker`, with all that waited before it. None,
    and nothing done, when that is more than `max_before`. Not repeatable: what a lost answer carried is found in the
    worker's pending list."""
    named = (keys.stream, keys.jobs, keys.result(job_id))
    words = (GROUP, worker, job_id, message, max_before, keys.lane, keys.wake)
    return script_call(DIRECT, named, words, partial(_delivered, keys))


def _delivered(keys: QueueKeys, raw: Any) -> list[Entry] | None:
    return None if raw is None else [parse_entry(keys, entry, flat) for entry, flat in raw]


INSPECT_JOB = Script.load("job/inspect_job", "clock", "ending")
GET_QUEUE_STATE = Script.load("scaling/get_queue_state", "clock", "lane")


class JobInspection(msgspec.Struct, frozen=True):
    """All that the server has of a job."""

    place: str
    document: bytes
    message: bytes
    worker: str
    # Seconds that a worker has had it; None when none has.
    held_for: float | None
    # Seconds since 1970; None when it waits for no time.
    due: float | None
    deliveries: int
    # Seconds since 1970, by Redis.
    now: float
    # How many jobs stand before it in its waiting list; None when it is in none.
    jobs_ahead: int | None = None


class WorkerState(msgspec.Struct, frozen=True):
    """A worker of a queue: for how many seconds its lease goes on (0: it has lapsed), and how many jobs it has."""

    name: str
    lease: float
    running: int

    @property
    def alive(self) -> bool:
        """Return whether its lease is valid."""
        return self.lease > 0


class QueueState(msgspec.Struct, frozen=True):
    """The counts of a queue, in jobs, and its workers. Seconds are from now or until now; None: there is none."""

    queue: str
    # On the streams, and no worker has them.
    waiting: int
    # Workers have them.
    running: int
    # Wait for their time, retries included.
    scheduled: int
    next_due: float | None
    dead: int
    oldest_dead: float | None
    # Keys that live jobs have.
    keys: int
    workers: tuple[WorkerState, ...]
    # No worker is to read the queue, until it is resumed.
    paused: bool = False
    # Of those that wait.
    high: int = 0
    low: int = 0
    # Wait at limits.
    held: int = 0
    # Documents that each Data Sink has not got yet, by its name.
    documents: dict[str, int] = {}
    oldest_waiting: float | None = None

    @property
    def unread(self) -> int:
        """Return how many jobs wait, now or for their time, if no live worker reads this queue; else 0."""
        if any(worker.alive for worker in self.workers):
            return 0
        return self.waiting + self.held + self.scheduled


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
        *keys.other_streams,
    )
    return script_call(INSPECT_JOB, named, (GROUP, job_id), _inspection, repeatable=True)


def get_queue_state(keys: QueueKeys) -> Call[QueueState]:
    """Return the counts of a queue, and its workers."""

    def state(raw: Any) -> QueueState:
        return _queue_state(keys.queue, raw)

    named = (keys.due, keys.dead, keys.leases, keys.unique, keys.limited_counts, *keys.streams)
    return script_call(GET_QUEUE_STATE, named, (GROUP,), state, repeatable=True)


def _inspection(raw: Any) -> JobInspection:
    place, document, message, worker, held, due, deliveries, now, before = raw
    return JobInspection(
        place.decode(errors="replace"),
        document,
        message,
        worker.decode(errors="replace"),
        _seconds(held),
        _seconds(due),
        deliveries,
        now / 1000,
        None if before < 0 else before,
    )


def _queue_state(queue: str, raw: Any) -> QueueState:
    (
        (normal, high, low, handed),
        running,
        scheduled,
        next_due,
        dead,
        oldest_dead,
        keys,
        workers,
        limited,
        age,
    ) = raw
    states = [WorkerState(name.decode(errors="replace"), lease / 1000, jobs) for name, lease, jobs in workers]
    return QueueState(
        queue=queue,
        waiting=max(0, normal + high + low + handed),
        high=max(0, high),
        low=max(0, low),
        running=running,
        scheduled=scheduled,
        held=sum(count for _, count in limited),
        next_due=_seconds(next_due),
        dead=dead,
        oldest_dead=_seconds(oldest_dead),
        keys=keys,
        workers=tuple(sorted(states, key=lambda each: each.name)),
        oldest_waiting=_seconds(age),
    )


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000
