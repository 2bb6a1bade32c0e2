"""Read and write Commands and Documents, which record how jobs ended.

The wire format is JSON, versioned and language neutral; `celery5/protocol/command.schema.json` publishes it.
Fields that this version does not know survive every hop. Never pickle.
"""

import re
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, json

from celery5.errors import Corrupt
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.job.json_values import to_json
from celery5.protocol.job.retry_policy import RetryPolicy

VERSION = 1
RESULT_IGNORED = "ignored"
"""The reason in the document of a job that succeeded with `ignore_result`."""
TRACEPARENT = "traceparent"
"""The header that is the field `trace` of a message."""
MAX_FAILURES = 5
"""The most failed attempts in a message; the newest stay."""
NO_ARGS = Raw(b"[]")
"""No positional arguments. A message leaves out this object, by identity."""
NO_KWARGS = Raw(b"{}")
"""No keyword arguments. A message leaves out this object, by identity."""
SIZE_MARGIN = 2 * 1024 * 1024
"""Bytes that a message in Redis may have beyond the setting `message_limit`: failures, a document's other fields."""
MAX_DEPTH = 900
"""How deep a call's arguments may be nested. The scripts read no message that is nested deeper than 1000."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One failed attempt: the error as text, so that readers do not need its class."""

    type: str
    message: str
    args: tuple[str, ...] = ()
    traceback: str = ""
    attempt: int = 1
    worker: str = ""
    at: float = 0.0  # seconds since 1970


class WorkerDeath(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A worker that a job took down."""

    worker: str
    at: float = 0.0  # seconds since 1970
    why: str = ""  # why it ended, for people; '' when nobody knows
    taken: float = 0.0  # when it had taken the job, in seconds since 1970; 0.0 when that is not known


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What is known of a job that some workers could not run because of their code."""

    # The digests of the signatures of its task that could not read its arguments.
    by: tuple[str, ...] = ()
    # Since when no live worker has had other code for it, in seconds since 1970; 0.0 while one has.
    since: float = 0.0


class FailureCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The job that is sent when another one is dead: the `on_failure` of a job that is in no workflow."""

    queue: str
    # Its Command, which gets its id then.
    command: Raw
    # Its first argument is a list of what has failed, which comes before those in the Command.
    takes_failures: bool = False
    # When it may start: `+ms` from the failure, or ms since 1970.
    at: str = ""
    # Seconds from the failure after which it is not started.
    expires_in: float | None = None
    unique_for: float | None = None


class Command(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A Command message: run `task` with `args` and `kwargs`. Times are seconds since 1970.

    The bounds are those of the published schema.
    """

    v: int
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    task: Annotated[str, Meta(min_length=1)]
    args: Raw = NO_ARGS
    kwargs: Raw = NO_KWARGS
    sent: float = 0.0
    attempt: Annotated[int, Meta(ge=1)] = 1
    expires: float | None = None
    retry: RetryPolicy | None = None
    ignore_result: bool = False
    trace: str = ""
    failures: tuple[Failure, ...] = ()
    sections: dict[str, Annotated[int, Meta(ge=0)]] | None = None  # retries made, by section
    key: str = ""  # at most one job of this task and key is alive on the queue
    time_limit: Annotated[float, Meta(gt=0)] | None = None
    soft_time_limit: Annotated[float, Meta(gt=0)] | None = None
    results_ttl: Annotated[float, Meta(gt=0)] | None = None
    concurrency_key: Annotated[str, Meta(max_length=200)] = ""  # the key by which the task's limit counts
    fair_key: Annotated[str, Meta(max_length=200)] = ""  # the tenant, where the task is fair
    replays: Annotated[int, Meta(ge=0)] = 0  # how often it came back from the dead-letter queue
    priority: str = ""  # high or low; anything else is normal
    flow: str = ""  # how a member of a workflow gets its arguments: `arguments`, `map` or `chunk`
    headers: dict[str, str] | None = None  # what middleware of the producer has added
    event: Annotated[str, Meta(max_length=800)] = ""  # the event that it is for: its name, a blank, its id
    refused: Refusal | None = None  # which code could not run it, while it waits for other code
    on_failure: FailureCall | None = None  # what is sent when it is dead

    @property
    def lock(self) -> str:
        """Return the name of the deduplication lock; '' without a key."""
        return format_lock(self.task, self.key) if self.key else ""


class Document(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A Document message: how a job ended. Stored under the job's result key and published on it."""

    v: int
    id: str
    task: str
    state: str
    value: Raw = Raw(b"null")
    failure: Failure | None = None
    reason: str = ""
    attempt: int = 1
    worker: str = ""
    sent: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    replays: int = 0  # how often the job came back from the dead-letter queue before it ended so
    deliveries: int = 0  # how many workers died with it, when it is dead for that
    deaths: tuple[WorkerDeath, ...] = ()  # the last of these


def format_lock(task: str, key: str) -> str:
    """Return the name of the deduplication lock of `task` and `key`. The scripts build it, too."""
    return f"{task} {key}"


class _Version(msgspec.Struct, frozen=True):
    v: int


class _Id(msgspec.Struct, frozen=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]


_ENVELOPE = msgspec.json.Decoder(Command)
_ID = msgspec.json.Decoder(_Id)
_VERSION = msgspec.json.Decoder(_Version)
_DOCUMENT = msgspec.json.Decoder(Document)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_HEADERS: msgspec.json.Decoder[dict[str, str] | None] = msgspec.json.Decoder(dict[str, str] | None)
_COUNTS: msgspec.json.Decoder[dict[str, int] | None] = msgspec.json.Decoder(dict[str, int] | None)
_LIST = msgspec.json.Decoder(list[Raw])
_FAILURE = msgspec.json.Decoder(Failure)
_ENCODER = msgspec.json.Encoder(enc_hook=to_json)
_FAULTS = (ValueError, RecursionError)
"""What msgspec raises: its own errors and bad UTF-8 are ValueErrors; nesting without end is a RecursionError."""

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")
"""One level deeper, one level less deep, as signed bytes."""
_ID_FIRST = re.compile(rb'\s*+\{\s*+(?:"v"\s*+:\s*+[0-9]{1,9}\s*+,\s*+)?"id"\s*+:\s*+("[^"\\]{1,800}")')
_BLOCK = 512
"""Brackets in one block."""
_SEGMENT = 8192
"""Bytes that are counted where a search has found one that counts."""

encode = _ENCODER.encode


def read_command(raw: bytes, limit: int | None = None) -> Command:
    """Decode a Command message. `limit` is the setting `message_limit`, for a message that comes from Redis.

    Raises Corrupt with the reason, and nothing else, whatever the bytes are.
    """
    if len(raw) > SIZE_MARGIN:  # for most messages this comparison is the only cost
        refuse_oversized(raw, limit, "a Command")
    try:
        command = _ENVELOPE.decode(raw)
    except _FAULTS as error:
        _refuse_version(_version_of(raw))
        raise Corrupt(f"not a Command: {error}") from None
    _refuse_version(command.v)
    if len(raw) > 2 * MAX_DEPTH and is_nested_deeper(raw, MAX_DEPTH + 50):
        raise Corrupt(f"not a Command: nested deeper than {MAX_DEPTH + 50}")
    return command


def is_nested_deeper(raw: bytes, max_depth: int) -> bool:
    """Return whether valid JSON has more than `max_depth` lists and objects inside each other.

    The work is linear in the size of `raw`, whatever its depth. Each step is one call of C over all of it. Blocks
    of brackets that cannot reach the limit are counted as a whole, and only the rest bracket by bracket. Most messages
    have too few brackets to be nested so deeply, and return at the first line.
    """
    if _count(raw, b"[") + _count(raw, b"{") <= max_depth:
        return False
    if (
        b"\\" in raw
    ):  # escapes are in texts only; pairs of backslashes go first, so that the rest escape what follows
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Adjacent quotes can go: the rest stays inside or outside of texts as before.
    brackets = raw.translate(_SQUARE, _NO_BRACKETS).replace(b'""', b"")
    if b'"' in brackets:
        brackets = b"".join(brackets.split(b'"')[::2])  # every second part is inside of a text
    return _is_reached(brackets, max_depth)


def _count(raw: bytes, mark: bytes) -> int:
    """Return how often a byte occurs. To search for it is ten times as fast as to count it: long texts have few."""
    count, at = 0, -_SEGMENT
    while (at := raw.find(mark, at + _SEGMENT)) >= 0:
        count += raw.count(mark, at, at + _SEGMENT)
    return count


def _is_reached(brackets: bytes, max_depth: int) -> bool:
    """Return whether a sequence of square brackets is anywhere nested deeper than `max_depth`."""
    depth = 0
    for start in range(0, len(brackets), _BLOCK):
        block = brackets[start : start + _BLOCK]
        opened = block.count(b"[")
        if depth + opened > max_depth:
            steps = array("b", block.translate(_STEPS))
            if max(accumulate(steps, initial=depth)) > max_depth:
                return True
        depth += 2 * opened - len(block)
    return False


def refuse_oversized(raw: bytes, limit: int | None, what: str) -> None:
    """Raise Corrupt when a message from Redis is larger than the setting `message_limit` and its margin allow.

    Call it before decoding. `limit` is that setting; None takes any size.
    """
    if limit is not None and len(raw) > limit + SIZE_MARGIN:
        raise Corrupt(
            f"not {what}: {len(raw)} bytes, and message_limit is {limit} here: raise it where the message is read, too"
        )


def read_job_id(raw: bytes) -> str:
    """Return the job's id in a message that cannot be read, such as one of a newer version; '' without one.

    A very large message is not decoded: its id is read where producers write it, at the beginning.
    """
    if len(raw) > SIZE_MARGIN:
        match = _ID_FIRST.match(raw, 0, 1000)
        raw = b'{"id":' + match[1] + b"}" if match else b""
    try:
        return _ID.decode(raw).id
    except _FAULTS:
        return ""


def _version_of(raw: bytes) -> int:
    try:
        return _VERSION.decode(raw).v
    except _FAULTS:
        return VERSION


def _refuse_version(version: int) -> None:
    if version != VERSION:
        raise Corrupt(
            f"Command of version {version}; this worker reads version {VERSION}: upgrade the workers first"
        )


def read_document(raw: bytes, limit: int | None = None) -> Document:
    """Decode a Document message. `limit` as for `read_command`. Raises Corrupt with the reason."""
    refuse_oversized(raw, limit, "a document")
    try:
        return _DOCUMENT.decode(raw)
    except _FAULTS as error:
        raise Corrupt(f"not a document: {error}") from None


def add_sent(raw: bytes, sent: float) -> bytes:
    """Return a Command message that has no time at which it was sent, with that time."""
    return b'%s,"sent":%.3f}' % (raw.rstrip()[:-1], sent)


def get_sent(command: Command, entry: bytes | str) -> float:
    """Return when a job was sent, in seconds since 1970; 0.0 when that is not known.

    A message that goes straight on its queue leaves that to its entry on the stream. It is added when the message moves
    from there: here by `add_sent`, in the scripts by `with_sent`.
    """
    if command.sent or command.attempt > 1 or command.replays:
        return command.sent
    return get_entry_time(entry)


def get_entry_time(entry: bytes | str) -> float:
    """Return when an entry was added to its stream, in seconds since 1970; 0.0 where its id was made by hand."""
    moment = entry[:13]  # ms: it has 13 digits until the year 2286
    return read_whole(moment) / 1000


def add_headers(raw: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the message with these headers; they replace those of the same names.

    The header `traceparent` is the field `trace`. All other fields are passed on byte for byte.
    """
    fields: dict[str, Any] = _FIELDS.decode(raw)
    merged = (_HEADERS.decode(fields.get("headers", b"null")) or {}) | dict(headers)
    trace = merged.pop(TRACEPARENT, None)
    if trace is not None:
        fields["trace"] = trace
    if merged:
        fields["headers"] = merged
    return encode(fields)


def read_headers(raw: bytes) -> dict[str, str]:
    """Return the headers of a message, with `traceparent` when it has a trace context."""
    fields = _FIELDS.decode(raw)
    headers = _HEADERS.decode(fields.get("headers", b"null")) or {}
    trace = msgspec.json.decode(fields.get("trace", b'""'), type=str)
    return {TRACEPARENT: trace, **headers} if trace else headers


def make_next_attempt(raw: bytes, failure: Failure, section: str = "") -> bytes:
    """Return the message of the next attempt, with `failure` added, counted for `section` if it is set.

    All other fields are passed on byte for byte: the arguments, numbers that Python would round, and unknown fields.
    """
    fields: dict[str, Any] = _FIELDS.decode(raw)
    fields["attempt"] = msgspec.json.decode(fields.get("attempt", b"1"), type=int) + 1
    fields.pop("refused", None)
    if section:
        counts = _COUNTS.decode(fields.get("sections", b"null")) or {}
        fields["sections"] = counts | {section: counts.get(section, 0) + 1}
    return encode(_add_failure(fields, failure))


def set_refusal(raw: bytes, refusal: Refusal) -> bytes:
    """Return the message with what is known of the code that could not run it. The rest is passed on byte for byte."""
    fields: dict[str, Any] = _FIELDS.decode(raw)
    return encode({**fields, "refused": refusal})


def add_failure(raw: bytes, failure: Failure) -> bytes:
    """Return the message with `failure` added: for the dead-letter queue, or to repeat the same attempt."""
    return encode(_add_failure(_FIELDS.decode(raw), failure))


def make_replay(raw: bytes, limit: int | None = None) -> bytes:
    """Return the message as if it had just been sent, with one more replay, all retries left and no failures.

    All other fields are passed on byte for byte. `limit` as for `read_command`. Raises Corrupt.
    """
    read_command(raw, limit)
    fields: dict[str, Any] = _FIELDS.decode(raw)
    for name in ("attempt", "failures", "sections", "expires", "refused"):
        fields.pop(name, None)
    fields["replays"] = msgspec.json.decode(fields.get("replays", b"0"), type=int) + 1
    return encode(fields)


def _add_failure(fields: dict[str, Any], failure: Failure) -> Mapping[str, Any]:
    """Add `failure` to the fields of a message.

    It replaces the last one if attempt and error type are the same: an attempt that is postponed throughout an outage
    must not push out earlier failures.
    """
    failures = _LIST.decode(fields.get("failures", b"[]"))
    if failures and _is_like(failures[-1], failure):
        failures.pop()
    fields["failures"] = [*failures, failure][-MAX_FAILURES:]
    return fields


def _is_like(raw: Raw, failure: Failure) -> bool:
    try:
        other_failure = _FAILURE.decode(raw)
    except _FAULTS:
        return False
    return (other_failure.attempt, other_failure.type) == (failure.attempt, failure.type)


def try_read_command(message: bytes, limit: int | None = None) -> tuple[Command | None, str]:
    """Return the Command in a message, or None and the error. `limit` is the setting `message_limit`."""
    try:
        return read_command(message, limit), ""
    except Corrupt as error:
        return None, str(error)


def try_read_document(document: bytes, limit: int | None = None) -> Document | None:
    """Return a document; None when it cannot be read. `limit` is the setting `message_limit`."""
    try:
        return read_document(document, limit)
    except Corrupt:
        return None


def try_read_failure(raw: bytes) -> Failure | None:
    """Return a failure from JSON; None when it cannot be read."""
    try:
        return json.decode(raw, type=Failure)
    except (ValueError, RecursionError):
        return None


def read_deaths(entries: Iterable[bytes]) -> tuple[WorkerDeath, ...]:
    """Return the workers that a job took down, as `recover.lua` has noted them; what cannot be read is left out."""
    found: list[WorkerDeath] = []
    for entry in entries:
        with suppress(ValueError, RecursionError):
            found.append(json.decode(entry, type=WorkerDeath))
    return tuple(found)


def try_decode_value(raw: Raw) -> Any:
    """Return the decoded value; None, which may be the value itself, when it cannot be decoded."""
    try:
        return json.decode(raw)
    except (ValueError, RecursionError):
        return None
