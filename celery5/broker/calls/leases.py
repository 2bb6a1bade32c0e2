"""Build the calls by which workers join and leave queues, renew their leases, and recover the jobs of dead workers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from celery5.broker.call import Call, Script, decode_text, parse_seconds, script_call, to_ms
from celery5.broker.keys import GROUP, QueueKeys
from celery5.protocol.job.error_text import make_death_pattern
from celery5.protocol.job.foreign import CodeVersion
from celery5.protocol.job.messages import SIZE_MARGIN
from celery5.protocol.process.standing import pack_silence

JOIN = Script.load("cluster/join", "clock", "successor")
RENEW_LEASE = Script.load("cluster/renew_lease", "clock", "lane")
RECOVER = Script.load(
    "job/recover", "clock", "successor", "lane", "ending", "time_sent", "member", "admission", "causes"
)
LEAVE = Script.load("cluster/leave", "lane")
ANNOUNCE_CODE = Script.load("cluster/announce_code", "clock", "foreign")
MAX_CAUSE = 1000
"""Characters of the cause of a death that a dead letter keeps."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """The reply to a heartbeat."""

    # The worker still has its lease.
    alive: bool
    # How many other workers have let their lease lapse.
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
    # Records of runs of workflows that wait to be applied, and entries in the outbox of runs.
    run_records: int = 0
    run_outbox: int = 0
    # How many workers hold jobs without a lease, as far as this heartbeat has looked for them.
    strays: int = 0
    # How many workers the queue has.
    workers: int = 1
    # Seconds since the heartbeats of its workers last had a gap.
    steady_for: float = 0.0


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


def join_queue(keys: QueueKeys, worker: str, *, lease: float) -> Call[int]:
    """Join a queue with a lease of this many seconds."""
    named = (keys.leases, keys.lost_work, *keys.streams)
    return script_call(JOIN, named, (GROUP, worker, to_ms(lease)), int, repeatable=True)


def renew_lease(
    keys: QueueKeys,
    worker: str,
    *,
    lease: float,
    silent_for: float | None = None,
    idle_lease: float | None = None,
) -> Call[HeartbeatReply]:
    """Renew the lease for this many seconds.

    `idle_lease`: the length in seconds instead of `lease`, for a worker that holds no job. The worker must renew the
    lease again before it begins a job. If Redis gives it a job and it does not renew, half of `lease` remains.
    `silent_for`: seconds for which the event loop has not renewed it, where its sidecar does; it is a part of a
    millisecond in the lease, which `read_silence` reads.
    """
    return script_call(
        RENEW_LEASE,
        (keys.leases, keys.due, keys.limited_counts, keys.jobs, *keys.streams),
        (
            worker,
            to_ms(lease) + pack_silence(silent_for),
            GROUP,
            0 if idle_lease is None else to_ms(idle_lease),
        ),
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
    cause: str = "",
    has_left: bool = False,
    with_strays: bool = False,
) -> Call[RecoveryResult]:
    """Put back what a dead worker held; `worker` '' takes the first whose lease has lapsed.

    Args:
        begun_entries: The entries, lanes included, that it is known to have begun: only these count as having taken it
            down. None: all do.
        evidence: The worker that decided this from its heartbeat. When that is too old as the script runs, nobody is
            recovered. None: the caller knows that the process has ended.
        cause: Why the worker ended, for the dead letters of what it had begun; "" when nobody knows.
        has_left: It ended in order, though it could not leave the queue: nothing has taken it down, and it is not lost.
        with_strays: With `worker` '', take one that holds jobs without a lease when none has lapsed.
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
            to_ms(ttl),
            "." if has_left else "*" if begun_entries is None else "-",
            keys.slots_freed,
            "" if evidence is None else evidence.name,
            0 if evidence is None else evidence.at,
            0 if evidence is None else to_ms(evidence.lease),
            message_limit + SIZE_MARGIN + 1,
            cause[:MAX_CAUSE],
            make_death_pattern(cause[:MAX_CAUSE]),
            int(with_strays),
            *(begun_entries or ()),
        ),
        _recovered,
        repeatable=True,
    )


class CodeAnnouncement(NamedTuple):
    """The reply of `announce_code`."""

    # False: the tasks of this version are not known. The call is to be repeated with them.
    is_known: bool
    # Of how many tasks there are foreign jobs on the queue.
    foreign_tasks: int


def announce_code(
    keys: QueueKeys, code: CodeVersion, *, lease: float, with_tasks: bool = False
) -> Call[CodeAnnouncement]:
    """Announce the version of a worker's code for this many seconds; its tasks as well where they are not known."""
    tasks = tuple([word for pair in code.signatures.items() for word in pair]) if with_tasks else ()
    # An application without tasks has a version, too.
    words = ("", "", *tasks) if with_tasks else ()
    return script_call(
        ANNOUNCE_CODE, (keys.jobs,), (code.version, to_ms(lease), *words), _code_announcement, repeatable=True
    )


def leave_queue(keys: QueueKeys, worker: str) -> Call[int]:
    """Leave a queue. Return on how many lanes jobs were still held."""
    named = (keys.leases, keys.run_outbox, *keys.streams)
    return script_call(LEAVE, named, (GROUP, worker), int, repeatable=True)


def _heartbeat_reply(raw: Any) -> HeartbeatReply:
    return HeartbeatReply(
        raw[0] == 1,
        raw[1],
        parse_seconds(raw[2]),
        parse_seconds(raw[3]),
        decode_text(raw[4]),
        tuple(map(decode_text, raw[5])),
        raw[6],
        raw[7],
        raw[8],
        raw[9],
        raw[10],
        raw[11] / 1000,
    )


def _code_announcement(raw: Any) -> CodeAnnouncement:
    return CodeAnnouncement(raw[0] == 1, int(raw[1]))


def _recovered(raw: Any) -> RecoveryResult:
    return RecoveryResult(decode_text(raw[0]), int(raw[1]), int(raw[2]), raw[3] == 1)
