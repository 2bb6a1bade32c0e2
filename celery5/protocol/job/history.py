"""Describe one job in a few hundred bytes: an attempt that has ended, for the history, or a job that lives."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw

from celery5.protocol.bounded_decoding import decode_msgpack
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.messages import Command, Failure, try_decode_value
from celery5.protocol.job.states import JobState
from celery5.protocol.job.verdict import (
    FOREIGN_REASONS,
    Complete,
    Expire,
    FailForGood,
    Postpone,
    RejectVerdict,
    RetryVerdict,
    Revoke,
    Verdict,
)
from celery5.protocol.masking import (
    MASK,
    collapse_whitespace,
    escape_json,
    escape_text,
    is_named_secret,
    mask_lines,
    mask_shown,
)
from celery5.protocol.workflows.member_ids import get_run_id

VERSION = 1
"""The version of a packed record."""
MAX_PACKED = 600
"""Bytes of a packed record, about; most have less than 300."""
MAX_NAME = 200
"""Characters of an id or a name."""
MAX_MESSAGE = 120
"""Characters of an error's message."""
MAX_VALUE = 40
"""Characters of a text in an argument."""
MAX_ARGUMENTS = 200
"""Bytes of all arguments together, as JSON."""
MAX_ITEMS = 5
"""Items of a list, or of an object, in an argument."""
MAX_NESTING = 3
"""How deep lists and objects in an argument are nested."""
MIN_PACKED_INTEGER, MAX_PACKED_INTEGER = -(2**63), 2**64 - 1
"""The integers that can be packed; any other one is shown as its text."""
MAX_DECODED = 16 * 1024
"""Bytes of a call's arguments that are decoded; of larger ones only the size is kept."""
CUT = "…"
"""Ends a text that was shortened; as a name, how many parameters are left out."""

JobOrder = Literal["time", "ran"]
"""The order of jobs that were found: by time, or those that ran longest first."""
Kept = Literal["", "failure", "slow", "sample"]
"""Why an attempt is in the history; '' for a job that lives."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job that has ended, or a job as it is now.

    Times are seconds since 1970; 0 when unknown, and when it has not come to that.
    """

    id: str
    queue: str
    state: str
    # '' when the message cannot be read.
    task: str = ""
    attempt: int = 1
    # How often the job came back from the dead-letter queue.
    replays: int = 0
    # How many workers died with it.
    deliveries: int = 0
    # Who ran it, or has it.
    worker: str = ""
    sent: float = 0.0
    # When it may start: a scheduled job, or one that waits for its next attempt.
    due: float = 0.0
    ended: float = 0.0
    # Seconds that it waited after it could have run, on its queue and at its limit, and that it ran; None when it has
    # not run. A job that a worker has runs since that took it.
    waited: float | None = None
    ran: float | None = None
    # The error of the attempt; of a job that lives that of the attempt before.
    error_type: str = ""
    error_message: str = ""
    # Why it is dead, or was rejected.
    reason: str = ""
    # By parameter, shortened and masked.
    arguments: Mapping[str, Any] = {}
    # The run of a workflow that it belongs to.
    run: str = ""
    # The task whose limit it had a slot of, or waits for; '' where it has no limit.
    limit: str = ""
    # Its traceparent.
    trace: str = ""
    kept: Kept = ""
    # The event that it is for: its name, a blank and its id; '' for none.
    event: str = ""
    # An attempt after which it was dead, and it is not in its dead-letter queue any more: it was replayed, or purged.
    # Only searches know it.
    has_left: bool = False
    # Seconds from its end until the next attempt is due; None: there is none, or it is not known.
    delay: float | None = None

    @property
    def at(self) -> float:
        """When it ended; when it was sent if it has not ended."""
        return self.ended or self.sent

    @property
    def error(self) -> str:
        """The error in one line, as Python writes it; '' for none."""
        return f"{self.error_type}: {self.error_message}" if self.error_message else self.error_type


class CallShape(msgspec.Struct, frozen=True):
    """What must be known of a task to show the arguments of its jobs."""

    # Its positional parameters, in order.
    names: Sequence[str] = ()
    # The parameters whose values are never shown.
    redacted: Collection[str] = ()


NO_SHAPE = CallShape()
"""Of a task that is not declared here."""


def read_arguments(shape: CallShape, args: Raw, kwargs: Raw) -> dict[str, Any]:
    """Return the arguments of a call by parameter, masked. A positional one without a name has its number.

    Of a large call only its size is returned, and that it cannot be read of one that cannot.
    """
    size = len(bytes(args)) + len(bytes(kwargs))
    if size > MAX_DECODED:
        return {CUT: f"{size} bytes"}
    positional, named = try_decode_value(args), try_decode_value(kwargs)
    if not isinstance(positional, list) or not isinstance(named, dict):
        return {CUT: "unreadable"}
    by_name = name_arguments(shape, positional, named)
    for name in shape.redacted:
        if name in by_name:
            by_name[name] = MASK
    shown = mask_shown(by_name)
    return cast("dict[str, Any]", shown) if isinstance(shown, dict) else {CUT: "unreadable"}


def name_arguments(shape: CallShape, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return decoded arguments by parameter. A positional one without a name has its number."""
    values = cast("list[Any]", args) if isinstance(args, list) else []
    by_name: dict[str, Any] = {
        shape.names[number] if number < len(shape.names) else str(number): value
        for number, value in enumerate(values)
    }
    return by_name | (cast("dict[str, Any]", kwargs) if isinstance(kwargs, dict) else {})


def format_arguments(arguments: Mapping[str, Any], *, separator: str = ", ") -> str:
    """Return the arguments of a call as they are written in one: `order=7, "express"`.

    Args:
        arguments: By parameter, as `name_arguments` and `shorten_arguments` return them.
        separator: What stands between two of them.
    """
    shown: list[str] = []
    for number, (name, value) in enumerate(arguments.items()):
        text = escape_json(msgspec.json.encode(value).decode())
        if name == CUT:
            shown.append(f"({value})" if isinstance(value, str) else f"{CUT} and {text} more")
        else:
            shown.append(text if name == str(number) else f"{name}={text}")
    return separator.join(shown)


def redact_call(shape: CallShape, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return decoded arguments without the values of redacted parameters."""
    if not shape.redacted:
        return args, kwargs
    return _replace_arguments(
        shape, args, kwargs, lambda name, value: MASK if name in shape.redacted else value
    )


def mask_call(shape: CallShape, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return decoded arguments as people are shown them: without passwords and the values of redacted parameters."""

    def mask(name: str, value: Any) -> Any:
        is_secret = name in shape.redacted or (value and is_named_secret(name))
        return MASK if is_secret else mask_shown(value)

    return _replace_arguments(shape, args, kwargs, mask)


def _replace_arguments(
    shape: CallShape, args: Any, kwargs: Any, replace: Callable[[str, Any], Any]
) -> tuple[Any, Any]:
    """Return the arguments of a call with each value replaced, by the name of its parameter; '' where it has none."""
    if isinstance(args, list):
        values = cast("list[Any]", args)
        names = (*shape.names, *[""] * len(values))
        args = [replace(name, value) for name, value in zip(names, values, strict=False)]
    if isinstance(kwargs, dict):
        kwargs = {name: replace(name, value) for name, value in cast("dict[str, Any]", kwargs).items()}
    return args, kwargs


def shorten_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in at most MAX_ARGUMENTS bytes, about: texts are cut, and parameters left out and counted."""
    shortened: dict[str, Any] = {}
    left = MAX_ARGUMENTS
    for number, (name, value) in enumerate(arguments.items()):
        short = _shorten(value, MAX_NESTING)
        left -= len(name) + len(msgspec.json.encode(short)) + 4
        if left < 0:
            return {**shortened, CUT: len(arguments) - number}
        shortened[_cut(name, MAX_VALUE)] = short
    return shortened


def _shorten(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _cut(value, MAX_VALUE)
    if isinstance(value, dict):
        pairs = list(cast("dict[str, Any]", value).items())
        if not depth:
            return {CUT: len(pairs)} if pairs else {}
        short = {_cut(name, MAX_VALUE): _shorten(item, depth - 1) for name, item in pairs[:MAX_ITEMS]}
        return short if len(pairs) <= MAX_ITEMS else {**short, CUT: len(pairs) - MAX_ITEMS}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        shown = MAX_ITEMS if depth else 0
        short_items = [_shorten(item, depth - 1) for item in items[:shown]]
        return short_items if len(items) <= shown else [*short_items, CUT]
    if isinstance(value, int) and not MIN_PACKED_INTEGER <= value <= MAX_PACKED_INTEGER:
        return _cut(str(value), MAX_VALUE)
    return value


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}{CUT}"


def _tidy(text: str, length: int) -> str:
    """Return a text from outside on one line, without passwords and control characters, shortened."""
    return _cut(escape_text(collapse_whitespace(mask_lines(text[: 4 * length]))), length)


def make_attempt_record(
    delivery: Delivery, verdict: Verdict, shape: CallShape, *, worker: str, waited: float | None, kept: Kept
) -> JobRecord:
    """Return the record of an attempt that has ended on a worker.

    Args:
        delivery: The job.
        verdict: What became of it.
        shape: What is known of its task.
        worker: The name of the worker.
        waited: Seconds that it waited; None when it has not run. A foreign job has waited for other code.
        kept: Why it is kept.
    """
    command = delivery.command
    failure: Failure | None = getattr(verdict, "failure", None)
    reason = getattr(verdict, "reason", "")
    is_foreign = (
        reason in FOREIGN_REASONS
    )  # its function was never called, though an executor may have had it
    has_run = delivery.started > 0 and not is_foreign
    if is_foreign:
        since = command.refused.since if command is not None and command.refused is not None else 0.0
        waited = max(delivery.finished - since, 0.0) if since else None
    fields: dict[str, Any] = _read_command(command, shape, delivery.sent) if command else {"id": ""}
    return JobRecord(
        queue=delivery.queue,
        state=STATES[type(verdict)].value,
        worker=_cut(worker, MAX_NAME),
        deliveries=delivery.deliveries,
        ended=round(delivery.finished, 3),
        waited=round(waited, 6) if (has_run or is_foreign) and waited is not None else None,
        ran=round(max(delivery.finished - delivery.started, 0.0), 6) if has_run else None,
        reason=_tidy(str(reason), MAX_MESSAGE),
        # While all slots are taken, jobs without a limit wait in lists, too, and come from there with an empty rule.
        limit=delivery.rule.task if delivery.rule is not None and delivery.rule.has_limit else "",
        kept=kept,
        delay=verdict.delay if isinstance(verdict, RetryVerdict | Postpone) else None,
        **{**fields, **_read_failure(failure)},
    )


STATES: Mapping[type, JobState] = {
    Complete: JobState.SUCCESS,
    RetryVerdict: JobState.RETRY,
    Postpone: JobState.RETRY,
    FailForGood: JobState.DEAD,
    Expire: JobState.EXPIRED,
    RejectVerdict: JobState.REJECTED,
    Revoke: JobState.REVOKED,
}
"""The state after each verdict by which an attempt ends. A job that is released or held was not attempted."""


def make_live_record(
    command: Command, queue: str, state: JobState, arguments: Mapping[str, Any], *, sent: float, **fields: Any
) -> JobRecord:
    """Return the record of a job as it is now; `fields` are the other fields of the record."""
    failure = command.failures[-1] if command.failures else None
    read = _read_command(command, NO_SHAPE, sent, arguments)
    return JobRecord(queue=queue, state=state.value, **{**read, **_read_failure(failure), **fields})


def _read_command(
    command: Command, shape: CallShape, sent: float, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    if arguments is None:
        arguments = read_arguments(shape, command.args, command.kwargs)
    return {
        "id": command.id,
        "task": _cut(command.task, MAX_NAME),
        "attempt": command.attempt,
        "replays": command.replays,
        "sent": round(sent, 3),
        "arguments": shorten_arguments(arguments),
        "run": get_run_id(command.id),
        "trace": command.trace[:MAX_NAME],
        "event": _cut(command.event, MAX_NAME),
    }


def _read_failure(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {}
    return {
        "error_type": _cut(failure.type, MAX_NAME),
        "error_message": _tidy(failure.message, MAX_MESSAGE),
    }


_PACKED = tuple(name for name in JobRecord.__struct_fields__ if name not in ("due", "run", "has_left"))
"""The fields of a packed record, in order. New ones are added at the end."""


def pack_record(record: JobRecord) -> bytes:
    """Return a record as bytes. What cannot be packed is shown as its text. A large record loses its arguments."""
    try:
        packed = _pack(record)
    except (OverflowError, ValueError, TypeError, RecursionError):
        record = _show_as_text(record)
        packed = _pack(record)
    if len(packed) > MAX_PACKED:
        packed = _pack(msgspec.structs.replace(record, arguments={CUT: len(record.arguments)}))
    return packed


def _show_as_text(record: JobRecord) -> JobRecord:
    """Return a record whose arguments are texts, and whose texts have a form in UTF-8."""
    fields = {
        name: escape_text(value)
        for name in JobRecord.__struct_fields__
        if isinstance(value := getattr(record, name), str)
    }
    arguments = {
        escape_text(_cut(name, MAX_VALUE)): _cut(escape_text(str(value)), MAX_VALUE)
        for name, value in record.arguments.items()
    }
    return msgspec.structs.replace(record, **{**fields, "arguments": arguments})


def _pack(record: JobRecord) -> bytes:
    return msgspec.msgpack.encode([VERSION, *[getattr(record, name) for name in _PACKED]])


def unpack_record(packed: bytes) -> JobRecord | None:
    """Return what `pack_record` has packed; None for what cannot be read, or is of another version."""
    try:
        words = decode_msgpack(packed, list[Any])
        if not words or words[0] != VERSION:
            return None
        fields = dict(zip(_PACKED, words[1:], strict=False))
        record = msgspec.convert({**fields, "run": get_run_id(str(fields.get("id", "")))}, JobRecord)
    except (ValueError, RecursionError):
        return None
    return mask_record(record) if record.error_message or record.reason else record


def mask_record(record: JobRecord) -> JobRecord:
    """Return a record without passwords in its error: an older version has kept those that the text assigns."""
    return msgspec.structs.replace(
        record, error_message=mask_lines(record.error_message), reason=mask_lines(record.reason)
    )
