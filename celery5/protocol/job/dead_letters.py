"""Read, filter and count dead jobs.

Any bytes in a dead-letter queue can be shown: an entry that cannot be read has the reason `corrupt`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from inspect import iscoroutinefunction
from typing import Any, Literal, Protocol, TypedDict, cast, get_args

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.job.error_text import is_group_id, make_group_id, normalise_message
from celery5.protocol.job.job import to_seconds
from celery5.protocol.job.messages import (
    Failure,
    try_decode_value,
    try_read_command,
    try_read_document,
    try_read_failure,
)
from celery5.protocol.job.verdict import Reason
from celery5.protocol.shards import get_queue_of_shard
from celery5.similar_names import did_you_mean

GroupBy = Literal["reason", "task", "error", "queue", "cause"]
"""What dead jobs are counted by. A `cause` is the task, the reason and the class of the error together."""

UNKNOWN_REASON = "untold"
"""The reason of a job whose document is missing or cannot be read."""


class DeadJobDetails(msgspec.Struct, frozen=True):
    """A dead job without its message: what surfaces show."""

    queue: str
    entry: str  # its id in the dead-letter queue
    id: str  # '' when the message cannot be read
    task: str  # '' when the message cannot be read
    args: Any  # decoded JSON; None when it cannot be decoded
    kwargs: Any  # likewise
    attempt: int
    replays: int
    key: str
    reason: str
    # The last error.
    type: str
    message: str
    error_args: tuple[str, ...]
    traceback: str
    worker: str
    died: float  # seconds since 1970, by the clock of Redis
    sent: float  # seconds since 1970
    failures: tuple[Failure, ...]  # the last attempts, oldest first
    sink: str = ""  # of a document: the Data Sink that refused it

    @property
    def error(self) -> str:
        """Return the error in one line, as Python writes it."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def group(self) -> str:
        """Return the id of its group: of the task, the class of the error and the normalised message."""
        return make_group_id(self.task, self.type, normalise_message(self.message))

    @property
    def lock(self) -> str:
        """Return the name of its deduplication lock on the queue; '' without a key."""
        return f"{self.task} {self.key}" if self.key else ""


class DeadJob(DeadJobDetails, frozen=True, kw_only=True):
    """A job in a dead-letter queue, or a document that a Data Sink refused."""

    raw: bytes  # the stored message, or with a `sink` the document that this Data Sink refused

    def without_message(self) -> DeadJobDetails:
        """Return what surfaces show of it."""
        return DeadJobDetails(*(getattr(self, name) for name in DeadJobDetails.__struct_fields__))


class DeadJobFilter(TypedDict, total=False):
    """Conditions that select dead jobs. Without any, all are selected.

    Of several texts, any may match.
    """

    queue: str | Sequence[str] | None
    task: str | Sequence[str] | None  # with wildcards: `shop.*`
    error: str | Sequence[str] | None  # class of the last error, with wildcards
    reason: str | Sequence[str] | None
    sink: str | Sequence[str] | None
    ids: str | Sequence[str] | None  # of jobs, or of entries when one queue is read
    message: str | None  # a part of the error's text
    group: str | Sequence[str] | None  # the id of a group, from `app.dlq.groups`
    older_than: float | timedelta | None  # time since the death, in seconds or as a timedelta
    newer_than: float | timedelta | None  # likewise
    limit: int | None  # the most jobs, the oldest of each queue first
    where: Callable[[DeadJob], bool] | None  # called last
    newest_first: bool | None  # of all queues together
    after: str | None  # start behind this job: `QUEUE:ENTRY`, or its `entry` when one queue is read


POSITION_WORDS = frozenset({"limit", "where", "newest_first", "after"})
"""The words of `DeadJobFilter` that say how jobs are read, in Python alone. The others are conditions."""
CONDITION_WORDS = tuple(name for name in DeadJobFilter.__annotations__ if name not in POSITION_WORDS)
"""The conditions on dead jobs, which every surface takes."""


class FailureKind(Protocol):
    """What the failures of many dead jobs have in common."""

    @property
    def reason(self) -> str: ...
    @property
    def sink(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def group(self) -> str: ...


class DeadJobQuery(msgspec.Struct, frozen=True):
    """A `DeadJobFilter` that was checked. Ages are in seconds."""

    queues: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    sinks: tuple[str, ...] = ()
    ids: frozenset[str] = frozenset()
    message: str = ""
    groups: tuple[str, ...] = ()
    older_than: float | None = None
    newer_than: float | None = None
    limit: int | None = None
    where: Callable[[DeadJob], bool] | None = None
    newest_first: bool = False
    after: str = ""

    def __contains__(self, job: DeadJob) -> bool:
        """Return whether `job` is selected. Queue and age are not compared: readers do that."""
        return (
            (not self.ids or job.id in self.ids or job.entry in self.ids)
            and self.selects(job)
            and self.message in job.message
            and (self.where is None or bool(self.where(job)))
        )

    @property
    def selects_whole_causes(self) -> bool:
        """Return whether no condition selects some dead jobs of a cause and not the others."""
        by_job = (self.reasons, self.sinks, self.ids, self.message, self.where, self.after)
        return not any(by_job) and self.older_than is None and self.newer_than is None

    def selects(self, kind: FailureKind) -> bool:
        """Return whether jobs that failed so are selected, as far as the kind of the failure says."""
        return (
            (not self.reasons or kind.reason in self.reasons)
            and (not self.sinks or kind.sink in self.sinks)
            and _like(kind.task, self.tasks)
            and _like(kind.type, self.errors)
            and (not self.groups or kind.group in self.groups)
        )


def parse_filter(conditions: Mapping[str, Any]) -> DeadJobQuery:
    """Return the query that these conditions describe. Raises Misconfigured for conditions that make no sense."""
    unknown = sorted(set(conditions) - set(DeadJobFilter.__annotations__))
    if unknown:
        raise Misconfigured(
            f"dead jobs are not chosen by {unknown[0]!r}, but by {', '.join(DeadJobFilter.__annotations__)}"
        )
    limit, message = conditions.get("limit"), conditions.get("message")
    where: Any = conditions.get("where")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise Misconfigured(f"limit is {limit!r}: give a number of jobs, 1 or more")
    if where is not None and (not callable(where) or iscoroutinefunction(where)):
        raise Misconfigured(f"where is {where!r}: give a plain function that takes a DeadJob")
    if message is not None and not isinstance(message, str):
        raise Misconfigured(f"message is {message!r}: give a part of the error's text")
    after = _after(conditions)
    return DeadJobQuery(
        queues=_texts(conditions, "queue"),
        tasks=_texts(conditions, "task"),
        errors=_texts(conditions, "error"),
        reasons=_reasons(_texts(conditions, "reason")),
        sinks=_texts(conditions, "sink"),
        ids=frozenset(_texts(conditions, "ids")),
        message=message or "",
        groups=_group_ids(_texts(conditions, "group")),
        older_than=_age(conditions, "older_than"),
        newer_than=_age(conditions, "newer_than"),
        limit=limit,
        where=conditions.get("where"),
        newest_first=bool(conditions.get("newest_first")),
        after=after,
    )


def make_dead_job(
    queue: str, entry: str, message: bytes, document: bytes, limit: int | None = None
) -> DeadJob:
    """Return the dead job in the entry `entry`, whatever its bytes are.

    `limit` is the setting `message_limit`: a larger message is not decoded.
    """
    command, why = try_read_command(message, limit)
    record = try_read_document(document, limit)
    failure = (record.failure if record else None) or Failure("Corrupt" if why else "", why)
    history = command.failures if command else ()
    if record and record.failure and record.failure not in history:
        history = (*history, record.failure)  # only the document records a worker's death
    return DeadJob(
        queue=queue,
        entry=entry,
        id=command.id if command else record.id if record else "",
        task=command.task if command else record.task if record else "",
        args=try_decode_value(command.args) if command else None,
        kwargs=try_decode_value(command.kwargs) if command else None,
        attempt=record.attempt if record else command.attempt if command else 1,
        replays=command.replays if command else 0,
        key=command.key if command else "",
        reason=record.reason if record and record.reason else Reason.CORRUPT.value if why else UNKNOWN_REASON,
        type=failure.type,
        message=failure.message,
        error_args=failure.args,
        traceback=failure.traceback,
        worker=(record.worker if record else "") or failure.worker,
        died=get_death_time(entry),
        sent=command.sent if command else record.sent if record else 0.0,
        failures=history,
        raw=message,
    )


def make_dead_document(
    queue: str, entry: str, sink: str, document: bytes, failure: bytes, limit: int | None = None
) -> DeadJob:
    """Return the document that the Data Sink of that name refused, whatever its bytes are.

    `limit` is the setting `message_limit`.
    """
    record = try_read_document(document, limit)
    why = try_read_failure(failure) or Failure("Corrupt", "nobody knows why any more")
    return DeadJob(
        queue=queue,
        entry=entry,
        id=record.id if record else "",
        task=record.task if record else "",
        args=None,
        kwargs=None,
        attempt=why.attempt,
        replays=record.replays if record else 0,
        key="",
        reason=Reason.UNDELIVERED.value,
        type=why.type,
        message=why.message,
        error_args=why.args,
        traceback=why.traceback,
        worker=record.worker if record else "",
        died=get_death_time(entry),
        sent=record.sent if record else 0.0,
        failures=(why,),
        raw=document,
        sink=sink,
    )


def get_death_time(entry: str) -> float:
    """Return when the job in that entry died, in seconds since 1970."""
    return read_whole(entry.partition("-")[0]) / 1000


def is_entry_id(text: str) -> bool:
    """Return whether `text` is the id of an entry, `1763713000000-0`."""
    ms, dash, number = text.partition("-")
    return bool(dash) and text.isascii() and ms.isdigit() and number.isdigit() and len(text) <= 40


def add_counts(counts: dict[str, int], jobs: Iterable[DeadJob], by: GroupBy) -> None:
    """Add `jobs` to `counts`."""
    for job in jobs:
        group = _GROUPS[by](job)
        counts[group] = counts.get(group, 0) + 1


def sort_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts, largest first."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def check_group_by(by: str) -> GroupBy:
    """Return `by`. Raises Misconfigured when dead jobs cannot be counted by it."""
    if by not in _GROUPS:
        raise Misconfigured(f"dead jobs are not counted by {by!r}, but by {', '.join(get_args(GroupBy))}")
    return cast("GroupBy", by)


_GROUPS: Mapping[GroupBy, Callable[[DeadJob], str]] = {
    "reason": lambda job: job.reason,
    "task": lambda job: job.task,
    "error": lambda job: job.type,
    "queue": lambda job: get_queue_of_shard(job.queue),
    "cause": lambda job: " ".join(filter(None, (job.task, job.reason, job.sink, job.type))),
}


def _after(choice: Mapping[str, Any]) -> str:
    """Return the place after which to begin, '' for none. Raises Misconfigured."""
    after: Any = choice.get("after")
    if after is None:
        return ""
    if not isinstance(after, str) or not is_entry_id(after.rpartition(":")[2]):
        raise Misconfigured(f"after is {after!r}: give the entry of a dead job, or queue:entry")
    if choice.get("ids") is not None:
        raise Misconfigured("after is for the next page; with ids it has no use")
    return after


def format_position(job: DeadJob) -> str:
    """Return where a job is, in the form that `after` takes."""
    return f"{job.queue}:{job.entry}"


def _like(text: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(text, pattern) for pattern in patterns)


def _texts(conditions: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value: Any = conditions.get(name)
    texts: list[Any] = [] if value is None else [value] if isinstance(value, str) else _listed(value, name)
    if not all(isinstance(text, str) and text for text in texts) or (value is not None and not texts):
        raise Misconfigured(f"{name} is {value!r}: give a text, or several")
    return tuple(dict.fromkeys(texts))


def _listed(value: Any, name: str) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise Misconfigured(f"{name} is {value!r}: give a text, or several") from None


def _reasons(reasons: tuple[str, ...]) -> tuple[str, ...]:
    known_reasons = [*(reason.value for reason in Reason), UNKNOWN_REASON]
    for reason in reasons:
        if reason not in known_reasons:
            hint = did_you_mean(reason, known_reasons, otherwise=f"use one of {', '.join(known_reasons)}")
            raise Misconfigured(f"reason {reason!r} is not known: {hint}")
    return reasons


def _group_ids(groups: tuple[str, ...]) -> tuple[str, ...]:
    for group in groups:
        if not is_group_id(group):
            raise Misconfigured(f"group is {group!r}: give the id of a group, 12 hexadecimal digits")
    return groups


def _age(conditions: Mapping[str, Any], name: str) -> float | None:
    value: Any = conditions.get(name)
    is_number = isinstance(value, int | float | timedelta) and not isinstance(value, bool)
    age = to_seconds(value) if is_number else None
    if value is not None and (age is None or not 0 <= age < float("inf")):
        raise Misconfigured(f"{name} is {value!r}: give seconds or a timedelta, 0 or more")
    return age
