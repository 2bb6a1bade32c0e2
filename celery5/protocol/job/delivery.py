"""Hold one job of a worker from its read to its settlement."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from celery5.protocol.job.error_text import make_group_id, normalise_message
from celery5.protocol.job.foreign import format_foreign_list
from celery5.protocol.job.messages import (
    RESULT_IGNORED,
    VERSION,
    Command,
    Document,
    Failure,
    add_failure,
    add_headers,
    add_sent,
    encode,
    get_sent,
    make_next_attempt,
    read_command,
    read_job_id,
    set_refusal,
)
from celery5.protocol.job.states import ADMITTED, JobState
from celery5.protocol.job.verdict import (
    JOB_EXPIRED,
    START_MISSED,
    Complete,
    Expire,
    FailForGood,
    HandOver,
    Hold,
    JobExpired,
    Postpone,
    RejectVerdict,
    Release,
    RetryVerdict,
    Revoke,
    StartMissed,
    Verdict,
)
from celery5.protocol.limits import AdmissionRule
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id

MIN_DOCUMENT_TTL = 60.0
"""Seconds that the document of an ended job is kept at least, whatever `results_ttl` is: a producer whose connection
was lost publishes the job again, and it must not run twice."""

MAX_DOCUMENT_TTL = 1e9
"""The largest `results_ttl` in seconds: Redis refuses much larger ones, in the middle of a batch."""


class AssignedResources(NamedTuple):
    """What a job has of the capacity of its worker."""

    amounts: Mapping[str, float]
    # The numbers of its devices in the worker's process, and their names for a process of its own.
    devices: tuple[int, ...] = ()
    device_names: tuple[str, ...] = ()


def assign_in_box(amounts: Mapping[str, float]) -> AssignedResources:
    """Return what a job in a box has: a box sees the devices of its job alone, and counts them from 0."""
    return AssignedResources(amounts, tuple(range(math.ceil(amounts.get("gpu", 0)))))


class Delivery(msgspec.Struct, eq=False, gc=False):
    """A job that this worker holds: its place, its message, its run. Times are seconds since 1970."""

    queue: str
    # Id on the stream of its `lane`, with the lane's letter at the end (`protocol/job/states.py`).
    entry: bytes
    message: bytes
    deliveries: int = 0
    command: Command | None = None
    kind: str = ""  # its kind of task, or its task if that has its own budget
    read: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    lane: str = ""
    recipients: Mapping[str, str] | None = (
        None  # names of the Data Sinks that take its document, by the state
    )
    document: bytes = b""  # for Data Sinks, where it differs from the stored one
    start_order: float = 0.0  # among the jobs that wait in this worker, while something is preferred
    rule: AdmissionRule | None = None  # of the limit in which it has a slot
    start_before: float = 0.0  # not begun after this time, by its rate limit; 0: no limit
    workflow: bytes = b""  # the run that the job has returned, to be started in its place
    verdict: Verdict | None = None  # decided before the job is handled as ended, where middleware sees it
    is_foreign: bool = False  # it was kept for workers with other code: on the lane `handed`, without a slot
    assigned: AssignedResources | None = None  # what it has of the worker's capacity; None: it takes nothing
    since: int = 0  # since when it could have run, in ms since 1970; 0: since the time of its entry

    @property
    def sent(self) -> float:
        """When the job was sent; 0.0 when that is not known."""
        return get_sent(self.command, self.entry) if self.command else 0.0

    @property
    def message_to_move(self) -> bytes:
        """The message for another entry: with the time at which the job was sent, which this entry tells."""
        sent = self.sent
        return add_sent(self.message, sent) if self.command and sent != self.command.sent else self.message

    @property
    def is_admitted(self) -> bool:
        """Whether it came from a waiting list of a limit, with a slot."""
        return self.lane == ADMITTED and not self.is_foreign

    # Services change a delivery by these methods only.

    def set_task(self, command: Command, kind: str, recipients: Mapping[str, str] | None) -> None:
        """Set the decoded message, and the kind and the document recipients of its task."""
        self.command, self.kind, self.recipients = command, kind, recipients

    def set_command(self, command: Command) -> None:
        """Set the decoded message."""
        self.command = command

    def set_since(self, since: int) -> None:
        """Note since when it could have run, by the clock of Redis: before the time of its entry."""
        self.since = since

    def set_foreign(self) -> None:
        """Note that it was kept for workers with other code."""
        self.is_foreign = True

    def assign(self, resources: AssignedResources) -> None:
        """Set what it has of the worker's capacity."""
        self.assigned = resources

    def set_kind(self, kind: str) -> None:
        """Set the kind, or the task with its own budget, for which the job is counted."""
        self.kind = kind

    def set_document(self, document: bytes) -> None:
        """Set the document for Data Sinks, where it differs from the one for clients."""
        self.document = document

    def set_start_order(self, start_order: float) -> None:
        """Set its position among the jobs that wait in this worker."""
        self.start_order = start_order

    def set_workflow(self, record: bytes) -> None:
        """Set the run that the job has returned, as `advance.lua` starts it."""
        self.workflow = record

    def set_verdict(self, verdict: Verdict) -> None:
        """Set what becomes of the job."""
        self.verdict = verdict

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to the message, for the case that the job comes again."""
        self.message = add_headers(self.message, headers)

    def start(self, at: float) -> None:
        """Record the start of the job."""
        self.started = at

    def finish(self, at: float) -> None:
        """Record the end of the job."""
        self.finished = at

    def take_slot(self, rule: AdmissionRule, start_before: float = 0.0) -> None:
        """Record a slot of a limit. The job must begin before `start_before` if that is not 0."""
        self.rule = rule
        if start_before:
            self.start_before = start_before

    def lose_slot(self) -> None:
        """Forget the slot: the job must be admitted again."""
        self.rule, self.start_before = None, 0.0

    def begin_attempt(self, message: bytes, at: float) -> None:
        """Begin the next attempt in this worker, with this message."""
        self.message, self.command, self.read, self.verdict = message, read_command(message), at, None
        self.since = int(at * 1000)  # the entry is as old as the first attempt


class Settlement(NamedTuple):
    """One outcome as `settle.lua` takes it: its fields are the words of the call, in this order.

    A NamedTuple: each is made once, chained into the arguments of a call and dropped, which needs no more than a tuple.
    """

    # `complete`, `member`, `ended`, `retry`, `bury`, `release`, `hold`, `foreign` or `drop`.
    verb: str
    # Id on the stream, with the letter of its lane.
    entry: bytes
    # '' when the message is not readable.
    job_id: str
    # `complete`, `ended`: the document. `member`: the result. All others: the message.
    payload: bytes
    # Ms that the job's document is kept. `member`: its number in the map, or `_IS_SINGLE` or `_IS_RUN`.
    ttl: int
    # `complete`: the job's deduplication lock, or b"". `member`: the node of its run. `retry`, `hold`: ms until it is
    # due. `release`, `drop`: how many workers died with it. `bury`, `ended`, `foreign`: what `pack_terms` returns.
    terms: bytes | int

    @property
    def delay(self) -> float:
        """Seconds until it is due, of a `retry` or `hold`."""
        return int(self.terms) / 1000

    @property
    def final_state(self) -> str:
        """The state of a job that is `ended`."""
        assert isinstance(self.terms, bytes)
        return msgspec.msgpack.decode(self.terms, type=dict[str, str])["state"]

    @property
    def size(self) -> int:
        """Bytes of what is stored."""
        return len(self.payload) + (len(self.terms) if isinstance(self.terms, bytes) else 0)


def pack_terms(**fields: str | int) -> bytes:
    """Return the terms of a settlement that has several."""
    return msgspec.msgpack.encode(fields)


class SinkDocument(NamedTuple):
    """The document of one outcome for Data Sinks, as `settle.lua` takes it."""

    # The outcome's.
    entry: bytes
    # Names of the Data Sinks, with a space between.
    sinks: str
    # b"" for the outcome's own document.
    document: bytes


def make_settlement(verdict: Verdict, delivery: Delivery, *, worker: str, ttl: float) -> Settlement:
    """Return the settlement of `delivery`. `ttl`: seconds to keep the document, at least MIN_DOCUMENT_TTL."""
    command, entry = delivery.command, delivery.entry
    job_id, lock, ttl = _get_document_fields(command, delivery.message, ttl)
    if isinstance(verdict, Complete):  # the most frequent, and `match` is slower
        assert command is not None
        if "~" in job_id and (member := parse_member_id(job_id)):
            return _make_member_settlement(delivery, member, verdict.value, lock)
        kept_seconds = MIN_DOCUMENT_TTL if command.ignore_result else ttl
        content, reason = (b"null", RESULT_IGNORED) if command.ignore_result else (verdict.value, "")
        document = _document(delivery, worker, _SUCCESS, content, reason=reason)
        return Settlement("complete", entry, job_id, document, int(kept_seconds * 1000), lock)
    ttl_ms = int(ttl * 1000)
    match verdict:
        case RetryVerdict(delay, failure, section):
            message = make_next_attempt(delivery.message_to_move, _signed(failure, delivery, worker), section)
            return Settlement("retry", entry, job_id, message, ttl_ms, int(delay * 1000))
        case Release():
            return Settlement("release", entry, job_id, delivery.message_to_move, ttl_ms, delivery.deliveries)
        case Postpone(delay, failure):
            message = add_failure(delivery.message_to_move, _signed(failure, delivery, worker))
            return Settlement("retry", entry, job_id, message, ttl_ms, int(delay * 1000))
        case Hold() | HandOver():
            return _make_held_settlement(verdict, delivery, ttl_ms)
        case Expire() | RejectVerdict() | Revoke():
            state, reason = _DROPPED[type(verdict)], getattr(verdict, "reason", "")
            document = _document(delivery, worker, state, b"null", reason=reason)
            if "~" in job_id and parse_member_id(job_id):
                terms = pack_terms(state=state, lock=lock.decode())
                return Settlement("ended", entry, job_id, document, ttl_ms, terms)
            return Settlement("complete", entry, job_id, document, ttl_ms, lock)
        case FailForGood(reason, failure):
            signed = _signed(failure, delivery, worker)
            message = add_failure(delivery.message_to_move, signed) if command else delivery.message
            document = _document(delivery, worker, _DEAD, b"null", signed, reason.value)
            # The same id as that of `DeadJob.group`, computed once for each job that dies.
            cause = (
                make_group_id(command.task, signed.type, normalise_message(signed.message)) if command else ""
            )
            terms = pack_terms(cause=cause, document=document.decode())
            return Settlement("bury", entry, job_id, message, ttl_ms, terms)


def _make_held_settlement(verdict: Hold | HandOver, delivery: Delivery, ttl_ms: int) -> Settlement:
    """Return the settlement of a job that is kept. Its delay is rounded up: one that comes too early is held again."""
    command, delay_ms = delivery.command, math.ceil(verdict.delay * 1000)
    assert command is not None
    if isinstance(verdict, Hold):
        return Settlement("hold", delivery.entry, command.id, delivery.message_to_move, ttl_ms, delay_ms)
    message = set_refusal(delivery.message_to_move, verdict.refusal)
    terms = pack_terms(delay=delay_ms, list=format_foreign_list(command.task, verdict.refusal))
    return Settlement("foreign", delivery.entry, command.id, message, ttl_ms, terms)


def _make_member_settlement(delivery: Delivery, member: MemberId, value: bytes, lock: bytes) -> Settlement:
    """Return the settlement of a member of a workflow that has succeeded: the run keeps its result."""
    assert delivery.command is not None
    home = f"@{member.home}" if member.home else ""
    frame = f"{member.frame}{home}".encode()
    if delivery.workflow and lock:
        terms = pack_terms(state="RETURNED", lock=lock.decode())
        return Settlement("ended", delivery.entry, delivery.command.id, delivery.workflow, 0, terms)
    if delivery.workflow:
        return Settlement("member", delivery.entry, delivery.command.id, delivery.workflow, _IS_RUN, frame)
    value = b"null" if delivery.command.ignore_result else value
    if lock:
        terms = pack_terms(state="SUCCESS", lock=lock.decode())
        return Settlement("ended", delivery.entry, delivery.command.id, value, 0, terms)
    number = _IS_SINGLE if member.member is None else member.member
    return Settlement("member", delivery.entry, delivery.command.id, value, number, frame)


_IS_SINGLE, _IS_RUN = -1, -2
"""In place of the number in a map: there is none; the result is a run that takes the place of the job."""


def make_sink_document(verdict: Verdict, delivery: Delivery, *, worker: str) -> bytes:
    """Return the document for Data Sinks of a success whose result is not kept for clients.

    b"" when Data Sinks get the same document as clients.
    """
    if type(verdict) is not Complete or delivery.command is None:
        return b""
    if not delivery.command.ignore_result and "~" not in delivery.command.id:
        return b""
    return _document(delivery, worker, _SUCCESS, verdict.value)


# Plain text is encoded faster than a member of an enumeration.
_SUCCESS, _DEAD = JobState.SUCCESS.value, JobState.DEAD.value
_DROPPED: Mapping[type, str] = {
    Expire: JobState.EXPIRED.value,
    RejectVerdict: JobState.REJECTED.value,
    Revoke: JobState.REVOKED.value,
}


def _get_document_fields(command: Command | None, message: bytes, ttl: float) -> tuple[str, bytes, float]:
    """Return the job's id, its deduplication key, and how long its document is kept, in seconds."""
    if command is None:  # the job still ends, if its place in Redis is this entry
        return read_job_id(message), b"", max(ttl, MIN_DOCUMENT_TTL)
    lock = command.lock.encode() if command.key else b""
    kept_seconds = ttl if command.results_ttl is None else min(command.results_ttl, MAX_DOCUMENT_TTL)
    return command.id, lock, max(kept_seconds, MIN_DOCUMENT_TTL)


def _signed(failure: Failure, delivery: Delivery, worker: str) -> Failure:
    attempt = delivery.command.attempt if delivery.command else 1
    return msgspec.structs.replace(failure, attempt=attempt, worker=worker, at=round(delivery.finished, 3))


def _document(
    delivery: Delivery,
    worker: str,
    state: str,
    value: bytes,
    failure: Failure | None = None,
    reason: str = "",
) -> bytes:
    command = delivery.command
    return encode(
        Document(
            v=VERSION,
            id=command.id if command else read_job_id(delivery.message),
            task=command.task if command else "",
            state=state,
            value=Raw(value),
            failure=failure,
            reason=reason,
            attempt=command.attempt if command else 1,
            worker=worker,
            sent=delivery.sent,
            started=delivery.started,
            finished=delivery.finished,
            replays=command.replays if command else 0,
        )
    )


def check_start_deadline(delivery: Delivery, command: Command, at: float) -> JobExpired | StartMissed | None:
    """Return why a job may not begin now: it has expired, or its start by the rate limit was missed. Else None."""
    if command.expires is not None and command.expires <= at:
        return JOB_EXPIRED
    return START_MISSED if delivery.start_before and at > delivery.start_before else None


def make_drop(delivery: Delivery) -> Settlement:
    """Return the settlement that only removes a duplicate entry from the stream.

    If the job's place in Redis is this entry, Redis has no record of its first run (the data was lost, or the id was
    published again much later). Then the job goes back, with one more delivery.
    """
    job_id = delivery.command.id if delivery.command else ""
    return Settlement(
        "drop",
        delivery.entry,
        job_id,
        delivery.message_to_move,
        int(MIN_DOCUMENT_TTL * 1000),
        delivery.deliveries + 1,
    )


def is_requeue(settlement: Settlement, delivery: Delivery) -> bool:
    """Return whether `settlement` puts the same attempt back: released, held, or postponed with a changed message."""
    if settlement.verb == "retry":
        return not is_next_attempt(settlement, delivery)
    return settlement.verb in ("release", "hold", "foreign")


def is_next_attempt(settlement: Settlement, delivery: Delivery) -> bool:
    """Return whether `settlement` is a retry that counts. A postponed job repeats the same attempt."""
    command = delivery.command
    return (
        settlement.verb == "retry"
        and command is not None
        and read_command(settlement.payload).attempt > command.attempt
    )
