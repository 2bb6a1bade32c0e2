"""Jobs: the calls that publish, read, settle and recover jobs, one function for each."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, merge_names, parse_int, script_call
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.job.delivery import Settlement, SinkDocument
from celery5.protocol.job.envelope import SIZE_MARGIN
from celery5.protocol.job.lanes import get_stream_id
from celery5.protocol.job.states import get_state

PUBLISH = Script.load("job/publish")
SCHEDULE = Script.load("job/schedule")
CLAIM = Script.load("job/claim", "clock", "sending")
READ_BY_LANE = Script.load("job/read_by_lane")
PROMOTE = Script.load("job/promote", "clock", "admission")
SETTLE = Script.load("job/settle", "clock", "ending")
JOIN = Script.load("cluster/join")
RENEW_LEASE = Script.load("cluster/renew_lease")
RECOVER = Script.load("job/recover", "clock", "ending", "admission")
LEAVE = Script.load("cluster/leave")
LOCATE = Script.load("job/locate")
MEASURE = Script.load("scaling/measure", "lane")

PING: Call[object] = Call(("PING",), lambda reply: reply, repeatable=True)
"""Nothing but an answer."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One job as read from a stream: its queue, its entry id, the message, how many workers died with it, and its lane,
    whose letter is at the end of the id, too."""

    queue: str
    id: bytes
    message: bytes
    deliveries: int = 0
    lane: str = ""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The answer to a beat. `due_in` is seconds until the next scheduled job, `lapse_in` until the next lease of
    another worker would lapse; None when there is none. `lanes` are the letters of those beside the normal one that
    ever had a job; `gated` the tasks whose jobs wait at gates, as the scripts have their names. `at` is the time of the
    answer in ms, by the clock of Redis."""

    alive: bool
    lapsed: int
    due_in: float | None
    lapse_in: float | None = None
    lanes: str = ""
    limited_tasks: tuple[str, ...] = ()
    at: int = 0


class HeartbeatEvidence(msgspec.Struct, frozen=True):
    """The worker that decides from its heartbeat that another one has died."""

    name: str
    at: int
    """Time of the heartbeat in ms, by the clock of Redis (`Pulse.at`)."""
    lease: float
    """Its lease in seconds, which that heartbeat renewed."""


class RecoveryResult(msgspec.Struct, frozen=True):
    """What one recovery did: for which worker ('' for none), jobs put back, jobs buried, and whether there is more."""

    worker: str
    requeued: int
    dead_lettered: int
    has_more: bool


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
    and jobs that wait at gates."""

    stream: int
    in_workers: int
    due: int
    dead: int
    limited: int = 0

    @property
    def unfinished(self) -> int:
        """Jobs that have not ended."""
        return self.stream + self.due + self.limited


def publish(keys: QueueKeys, jobs: Sequence[tuple[str, bytes]]) -> Call[int]:
    """Put jobs (id, envelope) on their queue; gives how many were new. Safe to repeat: a known id is left alone."""
    results = tuple([keys.result(job_id) for job_id, _ in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    return script_call(PUBLISH, (keys.stream, keys.jobs, *results), args, int, repeatable=True)


def schedule(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str]]) -> Call[int]:
    """Keep jobs (id, envelope, time) until their time: ms since 1970, or `+` and ms from now. Safe to repeat."""
    results = tuple([keys.result(job[0]) for job in jobs])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.due, keys.waiting, keys.jobs, *results)
    return script_call(SCHEDULE, named, (keys.wake, *args), int, repeatable=True)


def claim(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str, float | None]]) -> Call[dict[str, str]]:
    """Publish or schedule jobs (id, envelope, time or '', lock or '', `unique_for` in seconds) on the lane of `keys`,
    unless another job has the lock; gives the id of that other one for each job that was not sent. Safe to repeat."""
    places = tuple([key for job in jobs for key in (keys.result(job[0]), keys.unique_window(job[3]))])
    args: tuple[Word, ...] = tuple([word for job in jobs for word in (*job[:4], _ms(job[4] or 0))])
    named = (keys.stream, keys.jobs, keys.due, keys.waiting, keys.unique, *places)
    reply = partial(_others, [job[0] for job in jobs])
    return script_call(CLAIM, named, (keys.wake, keys.lane, *args), reply, repeatable=True)


def wait_for_replicas(keys: QueueKeys, *, replicas: int, within: float) -> list[Call[int]]:
    """Wait, `within` seconds, until so many replicas have all that was written before; the last call gives how many
    have. In a trip of their own: a script that the server does not know runs after the rest of its trip."""
    # WAIT waits for the last write of its own connection, so there must be one; a job that is known already is none.
    mark = Call(("SET", keys.replication_mark, "", "PX", 1000), lambda _ok: 0, repeatable=True)
    return [mark, Call(("WAIT", replicas, _ms(within)), int, repeatable=True, blocks=within)]


def register_queue(keys: Keys, queue: str) -> Call[int]:
    """Remember that the application has this queue."""
    return Call(("SADD", keys.queues, queue), int, repeatable=True)


def list_queues(keys: Keys) -> Call[list[str]]:
    """The names of the application's queues, sorted."""
    return Call(("SMEMBERS", keys.queues), _names, repeatable=True, merge=merge_names)


def read_hash(key: str) -> Call[dict[str, str]]:
    """All of a hash, as text."""
    return Call(("HGETALL", key), _texts, repeatable=True)


def promote_due_jobs(keys: QueueKeys, *, limit: int) -> Call[tuple[int, float | None]]:
    """Move due jobs to their queue; gives how many, and seconds until the next one."""
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
    """Take up to `count` jobs of each queue for this worker. `block`: seconds to wait for the first, 0 for not at all.

    Not repeatable: what a lost answer carried is found in the worker's own pending list (`mine`).
    """
    named = {each.stream.encode(): each for each in queues}
    streams = tuple(each.stream for each in queues)
    wait = ("BLOCK", max(1, int(block_seconds * 1000))) if block_seconds else ()
    words = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, *wait, "STREAMS")
    new = (">",) * len(streams)
    return Call((*words, *streams, *new), partial(_entries, named), blocks=block_seconds)


def read_by_lane(
    lanes: Sequence[QueueKeys], worker: str, *, count: int, shares: Sequence[int]
) -> Call[list[Entry]]:
    """Take up to `count` jobs of one queue for this worker, without waiting: of each of its `lanes` its share, then of
    the first ones what is left. Not repeatable, as `read`."""
    named = {each.stream.encode(): each for each in lanes}
    streams = tuple(each.stream for each in lanes)
    return script_call(READ_BY_LANE, streams, (GROUP, worker, count, *shares), partial(_entries, named))


def read_pending(keys: QueueKeys, worker: str, *, after: bytes, count: int) -> Call[list[Entry]]:
    """What this worker was given on a lane and has not settled, from the entry `after` on (b"0" for all)."""
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
        _pulse,
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

    `begun` are the entries, lanes included, that it is known to have begun: only these count as having taken it
    down. Without it all do. The `judge` is the worker that decided this from its heartbeat; when that is too old as
    the script runs, nobody is recovered. Without a judge the caller knows that the process has ended. A
    message of more bytes than `message_limit` and a margin is not decoded: it is put back, or buried, by its id alone.
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
    """Leave a queue; gives on how many lanes jobs were still held."""
    return script_call(LEAVE, (keys.leases, *keys.streams), (GROUP, worker), int, repeatable=True)


def locate_job(keys: QueueKeys, job_id: str) -> Call[LocatedJob]:
    """Where a job is."""
    return script_call(
        LOCATE,
        (keys.normal, keys.jobs, keys.result(job_id), *keys.other_streams),
        (GROUP, job_id),
        _place,
        repeatable=True,
    )


def delete_results(keys: QueueKeys, job_ids: Sequence[str]) -> Call[int]:
    """Delete the results of jobs."""
    return Call(("DEL", *[keys.result(each) for each in job_ids]), int, repeatable=True)


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
    """The oldest dead jobs: entry, envelope and document of each."""
    return Call(("XRANGE", keys.dead, "-", "+", "COUNT", count), _graves, repeatable=True)


def _texts(reply: Any) -> dict[str, str]:
    words = [decode_text(each) for each in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _names(raw: Iterable[bytes]) -> list[str]:
    """Return the names of queues. One that is no text was not written by celery5, and no queue can have it."""
    found = [decode_text(each) for each in raw]
    return sorted(name for name in found if "\ufffd" not in name)


def _others(ids: Iterable[str], raw: Iterable[bytes]) -> dict[str, str]:
    holders = zip(ids, (decode_text(each) for each in raw), strict=True)
    return {job_id: holder for job_id, holder in holders if holder != job_id}


def _moved(raw: Any) -> tuple[int, float | None]:
    moved, due_in = msgspec.convert(raw, tuple[int, int])
    return moved, _seconds(due_in)


def _pulse(raw: Any) -> HeartbeatReply:
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
    there, in_workers, _due, dead, held, oldest = map(int, raw)
    return QueueDepth(max(0, there - in_workers), None if oldest < 0 else oldest / 1000, dead, held)


def _size(raw: Any) -> QueueSize:
    *counts, _oldest = raw
    return QueueSize(*map(int, counts))


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _graves(raw: Iterable[tuple[bytes, list[bytes]]]) -> list[tuple[str, bytes, bytes]]:
    found = [(decode_text(entry), _fields(flat)) for entry, flat in raw]
    return [(entry, fields.get(b"job", b""), fields.get(b"document", b"")) for entry, fields in found]


_Streams = Iterable[tuple[bytes, Iterable[tuple[bytes, list[bytes] | None]]]]


def _entries(named: dict[bytes, QueueKeys], raw: Any) -> list[Entry]:
    """Entries of an XREADGROUP reply, which is a map in RESP3 and a list of pairs in RESP2, or nothing."""
    streams = cast("_Streams", raw.items() if hasattr(raw, "items") else raw or ())
    return [parse_entry(named[stream], entry, flat) for stream, entries in streams for entry, flat in entries]


def parse_entry(keys: QueueKeys, entry: bytes, flat: list[bytes] | None) -> Entry:
    """One entry of the lane of `keys`, as XREADGROUP gives it."""
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


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000
