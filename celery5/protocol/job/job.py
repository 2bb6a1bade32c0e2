"""Build jobs to publish, from their options."""

from base64 import urlsafe_b64encode
from binascii import b2a_base64
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from hashlib import sha256
from os import urandom
from typing import Annotated, Any, TypedDict, cast

import msgspec
from msgspec import UNSET, UnsetType

from celery5.errors import Corrupt, Misconfigured
from celery5.protocol.job.messages import add_sent, encode
from celery5.protocol.job.retry_policy import LONGEST, Errors, RetryPolicy
from celery5.protocol.job.states import LANES, Priority, get_lane
from celery5.protocol.names import SHARD_MARK, is_queue_name
from celery5.protocol.text_values import NAMES
from celery5.protocol.workflows.plan import OnError, check_ignore, check_on_error, check_on_failure

DEDUPLICATION_WINDOW = 7 * 86400.0
"""The `unique_for` in seconds of a job that is derived from an event or document, which may come again in that time."""
DEDUPLICATION_GRACE = 600.0
"""The rest of that time, in seconds, once its event or document cannot come again: longer than any trip takes."""


def derive_job_id(*parts: str) -> str:
    """Return the id of the job that is derived from `parts`: the same for the same parts in the same order.

    It has 22 url-safe characters and never begins with `-`, as any job's id.
    """
    text = "".join(f"{len(part)}:{part}" for part in parts)  # so that ("a", "bc") is not ("ab", "c")
    job_id = urlsafe_b64encode(sha256(text.encode()).digest()[:16])[:22].decode()
    return job_id if job_id[0] != "-" else f"_{job_id[1:]}"


class Job(msgspec.Struct, frozen=True, gc=False):
    """A job to send.

    `Task.job` makes it and `App.send_jobs` sends it. Sending it twice publishes it once.
    """

    id: str
    task: str
    queue: str
    message: bytes
    at: str = ""  # ms since 1970, `+ms` from now, '' for now
    ignore_result: bool = False
    lock: str = ""
    unique_for: float | None = None
    app: str = ""  # name of its application
    lane: Annotated[str, msgspec.Meta(pattern="^[hl]?$")] = ""  # letter of the lane
    waiting_list: str = msgspec.field(default="", name="line")  # if its task has a limit
    expires: str = ""  # from the waiting list: ms since 1970, or ''
    # When it was made, in seconds since 1970, if its message leaves that to its entry on the queue; else not in JSON.
    sent: float | UnsetType = UNSET
    # How many replicas must have it before sending returns; UNSET: as many as the setting `replicas` says.
    replicas: Annotated[int, msgspec.Meta(ge=0)] | UnsetType = UNSET
    # In a template: the number of shards of its queue. Each job chooses one by its id.
    shards: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1

    def to_bytes(self) -> bytes:
        """Return the job as JSON, to be stored until it is sent, such as in an outbox."""
        return encode(self.with_sent())

    def with_sent(self) -> "Job":
        """Return the job with the time at which it was made in its message: for a job that waits before it is sent."""
        if self.sent is UNSET:
            return self
        return msgspec.structs.replace(self, message=add_sent(self.message, self.sent), sent=UNSET)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Job":
        """Return a job that `to_bytes` encoded. Raises Corrupt."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"not a job: {error}") from None


class Options(msgspec.Struct, frozen=True):
    """The options of a job.

    A call may set every field; a task, all but `CALL_ONLY_OPTIONS`. Times are seconds or a timedelta.
    """

    queue: str | None = None
    # The broker of the queue. Without a `queue`: the queue of that name.
    broker: str | None = None
    # Start after this time, or at an aware datetime.
    countdown: float | timedelta | None = None
    eta: datetime | None = None
    # Do not start after this: a time from the call, or an aware datetime.
    expires: float | timedelta | datetime | None = None
    ignore_result: bool | None = None
    max_retries: int | None = None
    backoff: float | None = None
    cap: float | None = None
    jitter: bool | None = None
    step: float | None = None
    # Classes of errors, or full names.
    autoretry_for: Errors | None = None
    dont_autoretry_for: Errors | None = None
    # Replaces the whole policy (see `RetryPolicy.parse`); the fields above override it.
    retry_policy: RetryPolicy | Mapping[str, Any] | None = None
    results_ttl: float | timedelta | None = None
    time_limit: float | timedelta | None = None
    soft_time_limit: float | timedelta | None = None
    # Two jobs with the same id run once.
    id: str | None = None
    # At most one job of the task with this key is alive.
    key: str | None = None
    # No second job with the key is sent for this time, even after the end of this one. Without a `key`, the arguments
    # are the key.
    unique_for: float | timedelta | None = None
    priority: Priority | None = None
    # How many replicas must have the job before sending it returns; default: the setting `replicas`.
    replicas: int | None = None
    # In a workflow: what becomes of the run when the job fails, and the end states that count as success.
    on_error: OnError | None = None
    ignore: frozenset[str] | None = None
    # In a workflow: the task that undoes this one when the run fails; it gets the result.
    undo: Any = None
    # The task, or the call of one, that is called when this one has failed for good.
    on_failure: Any = None
    # In a workflow: the job may return a workflow, which takes its place.
    dynamic: bool | None = None

    def checked(self) -> "Options":
        """Return itself. Raises Misconfigured for invalid or contradictory options."""
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
                f"queue {self.queue!r}: a queue's name is 1 to 200 characters without spaces, commas, braces or #"
            )
        if self.broker is not None and not is_queue_name(self.broker):
            raise Misconfigured(f"broker is {self.broker!r}: give the name of one")
        if self.priority is not None and not _is_priority(self.priority):
            raise Misconfigured(f"priority is {self.priority!r}: give high, normal or low")
        if self.replicas is not None and not is_replica_count(self.replicas):
            raise Misconfigured(
                f"replicas is {self.replicas!r}: give a whole number from 0 to {MAX_REPLICAS}"
            )
        for name in ("results_ttl", "time_limit", "soft_time_limit", "unique_for"):
            _check_positive(name, getattr(self, name))
        _check_limits(to_seconds(self.time_limit), to_seconds(self.soft_time_limit))
        for name in ("id", "key"):
            if not _is_name(getattr(self, name)):
                raise Misconfigured(
                    f"{name} is {getattr(self, name)!r}: give a text of 1 to 200 characters that is valid Unicode"
                )
        self._check_in_workflow()
        self.get_retry_policy(RetryPolicy()).checked()
        return self

    def _check_in_workflow(self) -> None:
        check_on_error(self.on_error)
        check_ignore(self.ignore)
        if self.undo is not None and not hasattr(self.undo, "send_options"):
            raise Misconfigured(f"undo is {self.undo!r}: give the task that undoes this one")
        check_on_failure(self.on_failure)
        if not isinstance(cast("object", self.dynamic), bool | None):
            raise Misconfigured(f"dynamic is {self.dynamic!r}: give True or False")

    def get_retry_policy(self, fallback: RetryPolicy) -> RetryPolicy:
        """Return the retry policy: these options over `fallback`."""
        policy = fallback if self.retry_policy is None else RetryPolicy.parse(self.retry_policy)
        values = {name: getattr(self, name) for name in _POLICY}
        changes = {name: value for name, value in values.items() if value is not None}
        return msgspec.structs.replace(policy, **changes) if changes else policy

    def merge(self, changes: Mapping[str, Any]) -> "Options":
        """Return these options with changes.

        A `retry_policy` clears the single retry options. A changed broker clears the queue, a changed queue the broker.
        """
        cleared: dict[str, Any] = dict.fromkeys(_POLICY) if changes.get("retry_policy") is not None else {}
        if changes.get("broker") not in (None, self.broker):
            cleared["queue"] = None
        elif changes.get("queue") not in (None, self.queue):
            cleared["broker"] = None
        return msgspec.structs.replace(self, **{**cleared, **changes}).checked()

    def shared_fields(
        self, policy: RetryPolicy, *, queue: str, ignore_result: bool, results_ttl: float
    ) -> "SharedFields":
        """Return the fields that all jobs with these options share.

        The arguments are the defaults. `policy` is the retry policy of these options: it is sent only if an option sets
        it; otherwise the worker's code decides.
        """
        unique_for, results_seconds = to_seconds(self.unique_for), to_seconds(self.results_ttl)
        if results_seconds is None and unique_for is not None and unique_for > results_ttl:
            # A call that gets the handle of the earlier job must find its result.
            results_seconds = unique_for
        has_policy = any(getattr(self, name) is not None for name in ("retry_policy", *_POLICY))
        values = {
            "retry": policy if has_policy else None,
            "ignore_result": ignore_result if self.ignore_result is None else self.ignore_result,
            "key": self.key,
            "time_limit": to_seconds(self.time_limit),
            "soft_time_limit": to_seconds(self.soft_time_limit),
            "results_ttl": results_seconds,
            "priority": None if self.priority == "normal" else self.priority,
        }
        return SharedFields(
            queue=self.queue or queue,
            fields={name: value for name, value in values.items() if value},
            unique_for=unique_for,
            is_delayed=self.countdown is not None or self.eta is not None,
            lane=get_lane(self.priority),
            replicas=UNSET if self.replicas is None else self.replicas,
        )

    def format_start(self) -> str:
        """Return when the job may start, as `schedule.lua` takes it; '' for now."""
        if self.eta is not None:
            return str(int(self.eta.timestamp() * 1000))
        if self.countdown is not None:
            return f"+{int(_seconds(self.countdown) * 1000)}"
        return ""

    def get_expiry(self, now: float) -> float | None:
        """Return when the job expires, in seconds since 1970."""
        if self.expires is None:
            return None
        if isinstance(self.expires, datetime):
            return self.expires.timestamp()
        return now + _seconds(self.expires)


def parse_queue_names(text: str, what: str, *, may_be_shards: bool = False) -> list[str]:
    """Return the queues in a list with commas.

    Args:
        text: The list.
        what: What it is the value of: `--queues`.
        may_be_shards: Whether single shards of queues may be among them: `mails#3`.

    Raises:
        Misconfigured: No queue can have such a name; or the list is empty: an unset variable of a shell must not mean
            all queues.
    """
    try:
        names = NAMES.parse(text)
    except Misconfigured:
        raise Misconfigured(f"{what} {text!r} names no queue; leave it out for all") from None
    for name in names:
        Options(queue=name.partition(SHARD_MARK)[0] if may_be_shards else name).checked()
    return list(names)


class JobOptions(TypedDict, total=False):
    """The options that a declaration and a call may set, for type checkers: fields of `Options`."""

    queue: str | None
    broker: str | None
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
    unique_for: float | timedelta | None
    priority: Priority | None
    replicas: int | None
    on_error: OnError | None
    ignore: Collection[str] | None
    undo: Any
    on_failure: Any
    dynamic: bool | None


class SendOptions(JobOptions, total=False):
    """The arguments of `task.options(...)`, for type checkers: the fields of `Options`. A test compares the two."""

    expires: float | timedelta | datetime | None
    countdown: float | timedelta | None
    eta: datetime | None
    id: str | None
    key: str | None


class SharedFields(msgspec.Struct, frozen=True, gc=False):
    """The fields that all jobs with the same options and settings share, computed once."""

    queue: str
    fields: dict[str, Any]  # of the message, without those that have their default
    unique_for: float | None
    is_delayed: bool  # by `countdown` or `eta`
    lane: str
    replicas: int | UnsetType
    # The number of shards of the queue that its jobs go to, and whether their concurrency keys choose.
    shards: int = 1
    is_sharded_by_key: bool = False


def check_not_by_key(task: str, fields: SharedFields, what: str) -> None:
    """Raise Misconfigured if the limit of the jobs' task is counted by concurrency key, which `what` does not know."""
    if fields.is_sharded_by_key:
        raise Misconfigured(
            f"task {task}: its limit is counted by concurrency key on the shards of queue {fields.queue!r}, and {what} "
            "has no key when its shard is chosen: give the task a queue without shards"
        )


def new_id() -> str:
    """Return a new job id: 22 url-safe characters. It never begins with `-`, which is for options."""
    job_id = b2a_base64(urandom(16)).translate(_URL_SAFE)[:22].decode()
    return job_id if job_id[0] != "-" else new_id()


_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def hash_call(call: bytes) -> str:
    """Return the key for a `call` without one: the same for the same arguments."""
    return sha256(call).hexdigest()[:32]


def to_seconds(span: float | timedelta | None) -> float | None:
    """Return a duration in seconds; None for None."""
    return None if span is None else _seconds(span)


def _seconds(span: float | timedelta) -> float:
    return span.total_seconds() if isinstance(span, timedelta) else float(span)


def _check_moment(name: str, time: object) -> None:
    if time is None:
        return
    if not isinstance(time, datetime):
        raise Misconfigured(f"{name} is {time!r}: give an aware datetime")
    if time.utcoffset() is None:
        raise Misconfigured(f"{name} {time} has no time zone: use datetime.now(UTC) or another aware time")


MAX_REPLICAS = 100
"""The most replicas that sending may wait for."""


def is_replica_count(number: object) -> bool:
    """Return whether so many replicas may be waited for."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_REPLICAS


def is_span(span: object) -> bool:
    """Return whether a value is a duration: seconds or a timedelta, negative or not, of at most a hundred years."""
    if isinstance(span, bool) or not isinstance(span, int | float | timedelta):
        return False
    # Python compares an integer of any size; to make a float of it may fail.
    return abs(span.total_seconds() if isinstance(span, timedelta) else span) <= LONGEST


def _check_span(name: str, span: object) -> None:
    if span is None:
        return
    if not is_span(span):
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


def _is_priority(value: object) -> bool:
    return isinstance(value, str) and value in LANES


def _is_name(text: object) -> bool:
    if not isinstance(text, str):
        return text is None
    # Half of a surrogate pair, as in the name of a file, is not valid in JSON.
    return 0 < len(text) <= 200 and not any("\ud800" <= character <= "\udfff" for character in text)


CALL_ONLY_OPTIONS = ("id", "key", "countdown", "eta")
"""Options that no declaration takes: an id or a key would make all jobs of the task one."""
_POLICY = ("max_retries", "backoff", "cap", "jitter", "step", "autoretry_for", "dont_autoretry_for")
