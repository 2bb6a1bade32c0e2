"""Job: one Command message that is about to be published, and the options it was given."""

from base64 import urlsafe_b64encode
from binascii import b2a_base64
from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from os import urandom
from typing import Annotated, Any, TypedDict, cast

import msgspec

from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.names import is_queue_name
from celery5.protocol.job.retry_policy import LONGEST, Errors, RetryPolicy
from celery5.protocol.job.states import LANES, Priority, get_lane

DEDUPLICATION_WINDOW = 7 * 86400.0
"""Seconds for which it is remembered that such a job was sent (`unique_for`), while whatever it follows from may still
come again."""
DEDUPLICATION_GRACE = 600.0
"""Seconds for which it is remembered once that cannot come again: longer than any trip is under way."""


def derive_job_id(*parts: str) -> str:
    """The id of the job that follows from `parts`: always the same for the same ones, in their order. 22 url-safe
    characters, as any job's id, and it never begins with `-`."""
    text = "".join(f"{len(part)}:{part}" for part in parts)  # so that ("a", "bc") is not ("ab", "c")
    made = urlsafe_b64encode(sha256(text.encode()).digest()[:16])[:22].decode()
    return made if made[0] != "-" else f"_{made[1:]}"


class Job(msgspec.Struct, frozen=True, gc=False):
    """A job on its way: its message, where to (`queue`), and when (`at`: ms since 1970, `+ms` from now, '' for now).
    `app` is the name of the application that made it, `lane` the letter of the lane of its priority. Where jobs
    of its task take turns, `line` is the one in which it waits, until it `expires` (ms since 1970, or '').

    `Task.job` makes it and `App.send_jobs` sends it, once however often.
    """

    id: str
    task: str
    queue: str
    message: bytes
    at: str = ""
    ignore_result: bool = False
    lock: str = ""
    unique_for: float | None = None
    app: str = ""
    lane: Annotated[str, msgspec.Meta(pattern="^[hl]?$")] = ""
    line: str = ""
    expires: str = ""

    def to_bytes(self) -> bytes:
        """The job as text, to be kept somewhere until it is sent: in an outbox, say."""
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Job":
        """A job that was kept. Raises Corrupt for anything else."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except ValueError as error:
            raise Corrupt(f"not a job: {error}") from None


class Options(msgspec.Struct, frozen=True):
    """How a job is sent. Every field may be given for one call, and, but for those in `CALL_ONLY_OPTIONS`, for a task.

    `countdown` and `expires` are seconds from the call, or a timedelta; `eta` is an aware datetime. `results_ttl`,
    `time_limit`, `soft_time_limit` and `unique_for` are seconds or a timedelta, too. `key` makes the job the only live
    one of its task with that key; `unique_for` keeps others away for so long, whether it has ended or not, and without
    a `key` takes the arguments for one. `id` is the job's own, for one that may be sent twice and must run once.
    `priority` is `high`, `normal` or `low`. `broker` names the broker of its queue, and means the queue of that name if
    there is no `queue`. `autoretry_for` and `dont_autoretry_for` are classes of errors, or full
    names.
    `retry_policy` replaces the whole policy (a RetryPolicy, or a mapping: see `RetryPolicy.parse`); what else is
    said of
    retries goes over it.
    """

    queue: str | None = None
    broker: str | None = None
    countdown: float | timedelta | None = None
    eta: datetime | None = None
    expires: float | timedelta | datetime | None = None
    ignore_result: bool | None = None
    max_retries: int | None = None
    backoff: float | None = None
    cap: float | None = None
    jitter: bool | None = None
    step: float | None = None
    autoretry_for: Errors | None = None
    dont_autoretry_for: Errors | None = None
    retry_policy: RetryPolicy | Mapping[str, Any] | None = None
    results_ttl: float | timedelta | None = None
    time_limit: float | timedelta | None = None
    soft_time_limit: float | timedelta | None = None
    id: str | None = None
    key: str | None = None
    unique_for: float | timedelta | None = None
    priority: Priority | None = None

    def checked(self) -> "Options":
        """Itself. Raises Misconfigured when options contradict each other or make no sense."""
        if self.countdown is not None and self.eta is not None:
            raise Misconfigured("give countdown or eta, not both")
        _check_moment("eta", self.eta)
        _check_span("countdown", self.countdown)
        if isinstance(self.expires, datetime):
            _check_moment("expires", self.expires)
        else:
            _check_span("expires", self.expires)
        if self.queue is not None and not is_queue_name(self.queue):
            raise Misconfigured(
                f"queue {self.queue!r}: a queue's name is 1 to 200 characters without spaces, commas or braces"
            )
        if self.broker is not None and not is_queue_name(self.broker):
            raise Misconfigured(f"broker is {self.broker!r}: give the name of one")
        if self.priority is not None and not _is_priority(self.priority):
            raise Misconfigured(f"priority is {self.priority!r}: give high, normal or low")
        for name in ("results_ttl", "time_limit", "soft_time_limit", "unique_for"):
            _check_positive(name, getattr(self, name))
        _check_limits(to_seconds(self.time_limit), to_seconds(self.soft_time_limit))
        for name in ("id", "key"):
            if not _is_name(getattr(self, name)):
                raise Misconfigured(
                    f"{name} is {getattr(self, name)!r}: give a text of 1 to 200 characters that is valid Unicode"
                )
        self.get_retry_policy(RetryPolicy()).checked()
        return self

    def get_retry_policy(self, fallback: RetryPolicy) -> RetryPolicy:
        """The retry policy: what is said here, over `fallback`."""
        policy = fallback if self.retry_policy is None else RetryPolicy.parse(self.retry_policy)
        said = {name: getattr(self, name) for name in _POLICY}
        given = {name: value for name, value in said.items() if value is not None}
        return msgspec.structs.replace(policy, **given) if given else policy

    def merge(self, changes: Mapping[str, Any]) -> "Options":
        """These options with others over them. A whole `retry_policy` replaces what was said of retries before, and
        another queue or broker where both would have been."""
        cleared: dict[str, Any] = dict.fromkeys(_POLICY) if changes.get("retry_policy") is not None else {}
        if changes.get("broker") not in (None, self.broker):
            cleared["queue"] = None
        elif changes.get("queue") not in (None, self.queue):
            cleared["broker"] = None
        return msgspec.structs.replace(self, **{**cleared, **changes}).checked()

    def shared_fields(
        self, policy: RetryPolicy, *, queue: str, ignore_result: bool, results_ttl: float
    ) -> "SharedFields":
        """What these options say, over what is usual. `policy` is these options' own; it is sent along if it is said
        here, and else left to the worker's code."""
        unique_for, kept = to_seconds(self.unique_for), to_seconds(self.results_ttl)
        if kept is None and unique_for is not None and unique_for > results_ttl:
            # Whoever is given the handle of the job that is in the way is to find its result.
            kept = unique_for
        has_policy = any(getattr(self, name) is not None for name in ("retry_policy", *_POLICY))
        said = {
            "retry": policy if has_policy else None,
            "ignore_result": ignore_result if self.ignore_result is None else self.ignore_result,
            "key": self.key,
            "time_limit": to_seconds(self.time_limit),
            "soft_time_limit": to_seconds(self.soft_time_limit),
            "results_ttl": kept,
            "priority": None if self.priority == "normal" else self.priority,
        }
        return SharedFields(
            queue=self.queue or queue,
            fields={name: value for name, value in said.items() if value},
            unique_for=unique_for,
            is_delayed=self.countdown is not None or self.eta is not None,
            lane=get_lane(self.priority),
        )

    def format_start(self) -> str:
        """When the job may start, as the schedule script reads it; '' for now."""
        if self.eta is not None:
            return str(int(self.eta.timestamp() * 1000))
        if self.countdown is not None:
            return f"+{int(_seconds(self.countdown) * 1000)}"
        return ""

    def get_expiry(self, now: float) -> float | None:
        """When the job expires, in seconds since 1970."""
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            return self.expires.timestamp()
        return now + _seconds(self.expires)


class SendOptions(TypedDict, total=False):
    """What `task.options(...)` takes: the fields of `Options`, for type checkers. A test compares the two."""

    queue: str | None
    broker: str | None
    countdown: float | timedelta | None
    eta: datetime | None
    expires: float | timedelta | datetime | None
    ignore_result: bool | None
    max_retries: int | None
    backoff: float | None
    cap: float | None
    jitter: bool | None
    step: float | None
    autoretry_for: Errors | None
    dont_autoretry_for: Errors | None
    retry_policy: RetryPolicy | Mapping[str, Any] | None
    results_ttl: float | timedelta | None
    time_limit: float | timedelta | None
    soft_time_limit: float | timedelta | None
    id: str | None
    key: str | None
    unique_for: float | timedelta | None
    priority: Priority | None


class SharedFields(msgspec.Struct, frozen=True, gc=False):
    """What all jobs have in common that are sent with the same options under the same settings: worked out once.

    `said` are the fields of their messages that are not left to their defaults: what is not named costs nothing.
    `dated`: they have a time to wait for.
    """

    queue: str
    fields: dict[str, Any]
    unique_for: float | None
    is_delayed: bool
    lane: str


def new_id() -> str:
    """Return a new job id: 22 url-safe characters. It never begins with `-`, which is for options."""
    made = b2a_base64(urandom(16)).translate(_URL_SAFE)[:22].decode()
    return made if made[0] != "-" else new_id()


_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def hash_call(call: bytes) -> str:
    """A key for a `call` that was given none: the same for the same arguments."""
    return sha256(call).hexdigest()[:32]


def to_seconds(span: float | timedelta | None) -> float | None:
    """A span in seconds, if there is one."""
    return None if span is None else _seconds(span)


def _seconds(span: float | timedelta) -> float:
    return span.total_seconds() if isinstance(span, timedelta) else float(span)


def _check_moment(name: str, moment: object) -> None:
    if moment is None:
        return
    if not isinstance(moment, datetime):
        raise Misconfigured(f"{name} is {moment!r}: give an aware datetime")
    if moment.utcoffset() is None:
        raise Misconfigured(f"{name} {moment} has no time zone: use datetime.now(UTC) or another aware time")


def _check_span(name: str, span: object) -> None:
    if span is None:
        return
    number = isinstance(span, int | float | timedelta) and not isinstance(span, bool)
    if not number or not abs(_seconds(cast("float | timedelta", span))) <= LONGEST:
        raise Misconfigured(f"{name} is {span!r}: give seconds or a timedelta, at most a hundred years")
    if _seconds(cast("float | timedelta", span)) < 0:
        raise Misconfigured(f"{name} is {span!r}: give 0 seconds or more")


def _check_positive(name: str, span: object) -> None:
    _check_span(name, span)
    if span is not None and _seconds(cast("float | timedelta", span)) <= 0:
        raise Misconfigured(f"{name} is {span!r}: give more than 0 seconds")


def _check_limits(hard: float | None, soft: float | None) -> None:
    if hard is not None and soft is not None and hard <= soft:
        raise Misconfigured(
            f"time_limit is {hard:g} s and soft_time_limit {soft:g} s: the soft limit comes first, so give it less"
        )


def _is_priority(said: object) -> bool:
    return isinstance(said, str) and said in LANES


def _is_name(text: object) -> bool:
    if not isinstance(text, str):
        return text is None
    # Half of a surrogate pair, as in the name of a file, has no place in JSON.
    return 0 < len(text) <= 200 and not any("\ud800" <= each <= "\udfff" for each in text)


CALL_ONLY_OPTIONS = ("id", "key", "countdown", "eta")
"""Options that no declaration takes: an id or a key would make all jobs of the task one."""
_POLICY = ("max_retries", "backoff", "cap", "jitter", "step", "autoretry_for", "dont_autoretry_for")
