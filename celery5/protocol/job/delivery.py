"""Delivery: one job that a worker holds, from the read to its settlement."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from celery5.protocol.job.envelope import (
    RESULT_IGNORED,
    VERSION,
    Document,
    Envelope,
    Failure,
    add_failure,
    encode,
    make_next_attempt,
    read_envelope,
    read_job_id,
)
from celery5.protocol.job.states import JobState
from celery5.protocol.job.verdict import (
    JOB_EXPIRED,
    START_MISSED,
    Bury,
    Complete,
    Expire,
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

MIN_DOCUMENT_TTL = 60.0
"""Seconds that a job which has ended is remembered at least, whatever is said of results: a producer whose connection
was lost publishes it again, which must not run it again."""

MAX_DOCUMENT_TTL = 1e9
"""Seconds that a message may ask for its document to be kept: Redis refuses some more, in the middle of a batch."""


class Delivery(msgspec.Struct, eq=False, gc=False):
    """A job as this worker holds it: where it stood, its message, what is known of its run. Times are since 1970.

    `entry` is its id on the stream of its `lane`, whose letter comes last in it (`protocol/job/states.py`).
    `turn` says when it begins among those that wait here, while something is preferred.
    """

    queue: str
    entry: bytes
    message: bytes
    deliveries: int = 0
    envelope: Envelope | None = None
    kind: str = ""
    read: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    lane: str = ""
    recipients: Mapping[str, str] | None = (
        None  # names of the Data Sinks that take the document of its end, by its state
    )
    document: bytes = b""  # the one for them, where it is not the one that is kept
    start_order: float = 0.0
    rule: AdmissionRule | None = None  # that of its gate, in which it has a slot
    start_before: float = 0.0  # not begun after this, when it is not 0: its turn by the rate is over

    # Services change a delivery by these methods only.

    def set_task(self, envelope: Envelope, kind: str, recipients: Mapping[str, str] | None) -> None:
        """Note what the message holds, and of its task the kind and the recipients of documents."""
        self.envelope, self.kind, self.recipients = envelope, kind, recipients

    def set_envelope(self, envelope: Envelope) -> None:
        """Note what the message holds."""
        self.envelope = envelope

    def set_kind(self, kind: str) -> None:
        """Count the job for this kind from now on."""
        self.kind = kind

    def set_document(self, document: bytes) -> None:
        """Keep the document for Data Sinks, where it is not the one that is kept for clients."""
        self.document = document

    def set_start_order(self, start_order: float) -> None:
        """Set when it begins among those that wait here."""
        self.start_order = start_order

    def start(self, at: float) -> None:
        """The job begins."""
        self.started = at

    def finish(self, at: float) -> None:
        """The job has ended."""
        self.finished = at

    def take_slot(self, rule: AdmissionRule, start_before: float = 0.0) -> None:
        """The job has a slot of a limit, and must begin before that time if it is not 0."""
        self.rule = rule
        if start_before:
            self.start_before = start_before

    def lose_slot(self) -> None:
        """The job must be admitted again."""
        self.rule, self.start_before = None, 0.0

    def begin_attempt(self, message: bytes, at: float) -> None:
        """The next attempt begins in this worker, with this message."""
        self.message, self.envelope, self.read = message, read_envelope(message), at


class Settlement(NamedTuple):
    """One outcome as `settle.lua` takes it: its fields are the words of the call, in this order.

    A NamedTuple: each is made once, chained into the arguments of a call and dropped, which needs no more than a tuple.
    """

    # `complete`, `retry`, `bury`, `release`, `hold` or `drop`.
    verb: str
    # Id on the stream, with the letter of its lane.
    entry: bytes
    # '' when the message is not readable.
    job_id: str
    # `complete`: the document of the job's end. All others: the message that is kept.
    payload: bytes
    # `complete`, `bury`: ms that the document is kept. `retry`, `hold`: ms until it is due. `release`, `drop`: how many
    # workers died with it.
    number: int
    # `complete`: what the job's key is remembered under, or b"". `bury`: the document. All others: ms that a
    # document is kept, should the job have been revoked.
    extra: bytes | int

    @property
    def size(self) -> int:
        """Bytes of what is stored."""
        return len(self.payload) + (len(self.extra) if isinstance(self.extra, bytes) else 0)


class SinkDocument(NamedTuple):
    """The document of one outcome for Data Sinks, as `settle.lua` takes it."""

    # The outcome's.
    entry: bytes
    # Names of the Data Sinks, with a space between.
    sinks: str
    # b"" for the outcome's own document.
    document: bytes


def make_settlement(verdict: Verdict, delivery: Delivery, *, worker: str, ttl: float) -> Settlement:
    """Return the settlement of `delivery`. `ttl` is how long the document is kept, in seconds; at least TOMBSTONE."""
    envelope, entry = delivery.envelope, delivery.entry
    job_id, lock, ttl = _terms(envelope, delivery.message, ttl)
    if isinstance(verdict, Complete):  # nearly all: `match` takes each apart before it looks
        assert envelope is not None
        kept = MIN_DOCUMENT_TTL if envelope.ignore_result else ttl
        content, reason = (b"null", RESULT_IGNORED) if envelope.ignore_result else (verdict.value, "")
        document = _document(delivery, worker, _SUCCESS, content, reason=reason)
        return Settlement("complete", entry, job_id, document, int(kept * 1000), lock)
    match verdict:
        case RetryVerdict(delay, failure, section):
            message = make_next_attempt(delivery.message, _signed(failure, delivery, worker), section)
            return Settlement("retry", entry, job_id, message, int(delay * 1000), int(ttl * 1000))
        case Release():
            return Settlement(
                "release", entry, job_id, delivery.message, delivery.deliveries, int(ttl * 1000)
            )
        case Postpone(delay, failure):
            message = add_failure(delivery.message, _signed(failure, delivery, worker))
            return Settlement("retry", entry, job_id, message, int(delay * 1000), int(ttl * 1000))
        case Hold(delay):
            # Rounded up: before its time it would only be held again.
            return Settlement(
                "hold", entry, job_id, delivery.message, math.ceil(delay * 1000), int(ttl * 1000)
            )
        case Expire() | RejectVerdict() | Revoke():
            state, reason = _DROPPED[type(verdict)], getattr(verdict, "reason", "")
            document = _document(delivery, worker, state, b"null", reason=reason)
            return Settlement("complete", entry, job_id, document, int(ttl * 1000), lock)
        case Bury(reason, failure):
            signed = _signed(failure, delivery, worker)
            message = add_failure(delivery.message, signed) if envelope else delivery.message
            document = _document(delivery, worker, _DEAD, b"null", signed, reason.value)
            return Settlement("bury", entry, job_id, message, int(ttl * 1000), document)


def make_sink_document(verdict: Verdict, delivery: Delivery, *, worker: str) -> bytes:
    """The document of a success whose result is not kept for clients, with its value: for Data Sinks. Nothing where
    they are given the same as everybody."""
    if type(verdict) is not Complete or delivery.envelope is None or not delivery.envelope.ignore_result:
        return b""
    return _document(delivery, worker, _SUCCESS, verdict.value)


# Plain text, which is encoded at once; a member of an enumeration is asked for it.
_SUCCESS, _DEAD = JobState.SUCCESS.value, JobState.DEAD.value
_DROPPED: Mapping[type, str] = {
    Expire: JobState.EXPIRED.value,
    RejectVerdict: JobState.REJECTED.value,
    Revoke: JobState.REVOKED.value,
}


def _terms(envelope: Envelope | None, message: bytes, ttl: float) -> tuple[str, bytes, float]:
    """Return the job's id, its deduplication key, and how long its document is kept, in seconds."""
    if envelope is None:  # this ends the job all the same, where Redis has it on this very entry
        return read_job_id(message), b"", max(ttl, MIN_DOCUMENT_TTL)
    lock = envelope.lock.encode() if envelope.key else b""
    kept = ttl if envelope.results_ttl is None else min(envelope.results_ttl, MAX_DOCUMENT_TTL)
    return envelope.id, lock, max(kept, MIN_DOCUMENT_TTL)


def _signed(failure: Failure, delivery: Delivery, worker: str) -> Failure:
    attempt = delivery.envelope.attempt if delivery.envelope else 1
    return msgspec.structs.replace(failure, attempt=attempt, worker=worker, at=round(delivery.finished, 3))


def _document(
    delivery: Delivery,
    worker: str,
    state: str,
    value: bytes,
    failure: Failure | None = None,
    reason: str = "",
) -> bytes:
    envelope = delivery.envelope
    return encode(
        Document(
            v=VERSION,
            id=envelope.id if envelope else read_job_id(delivery.message),
            task=envelope.task if envelope else "",
            state=state,
            value=Raw(value),
            failure=failure,
            reason=reason,
            attempt=envelope.attempt if envelope else 1,
            worker=worker,
            sent=envelope.sent if envelope else 0.0,
            started=delivery.started,
            finished=delivery.finished,
            replays=envelope.replays if envelope else 0,
        )
    )


def check_start_deadline(delivery: Delivery, envelope: Envelope) -> JobExpired | StartMissed | None:
    """Return why a job may not begin any more: it has expired, or its start by the rate limit was missed. Else None."""
    if envelope.expires is not None and envelope.expires <= delivery.started:
        return JOB_EXPIRED
    return START_MISSED if delivery.start_before and delivery.started > delivery.start_before else None


def make_drop(delivery: Delivery) -> Settlement:
    """Return the settlement that only removes an entry from the stream: the same message came before.

    If Redis has the job at this very entry, its first run is not known there (Redis has lost it, or its id was
    published again long after). Then the job goes back, with one delivery more.
    """
    job_id = delivery.envelope.id if delivery.envelope else ""
    return Settlement(
        "drop",
        delivery.entry,
        job_id,
        delivery.message,
        delivery.deliveries + 1,
        int(MIN_DOCUMENT_TTL * 1000),
    )


def is_requeue(settlement: Settlement, delivery: Delivery) -> bool:
    """Return whether `settlement` puts the same attempt back: released, held, or postponed with a changed message."""
    if settlement.verb == "retry":
        return not is_next_attempt(settlement, delivery)
    return settlement.verb in ("release", "hold")


def is_next_attempt(settlement: Settlement, delivery: Delivery) -> bool:
    """Return whether `settlement` is a retry that counts. A postponed job repeats the same attempt."""
    before = delivery.envelope
    return (
        settlement.verb == "retry"
        and before is not None
        and read_envelope(settlement.payload).attempt > before.attempt
    )
