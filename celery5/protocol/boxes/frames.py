"""Frames: the messages between a worker and its boxes, one JSON object a line.

The page docs/reference/box-protocol.md is written for authors of boxes. Unknown fields and types of frames are
ignored, so that either end may be newer than the other.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from celery5.protocol.job.messages import Failure
from celery5.protocol.job.retry_policy import LONGEST, RetryPolicy
from celery5.protocol.job.verdict import (
    BrokerLost,
    JobRejected,
    Outcome,
    PermanentFailure,
    Raised,
    Reason,
    RetryRequested,
    Returned,
    Ruling,
)

VERSION = 1
"""The version of the protocol."""
FRAME_OVERHEAD = 64 * 1024
"""Bytes that a frame may have beyond the largest result: the rest of its fields."""
MAX_TEXT = 2_000
MAX_TRACEBACK = 8_000
"""Characters of a failure's texts and of its traceback that are kept, as of every failure."""
_SEARCHED = 64
"""Bytes that are searched for the type of a frame: at the start of a line that is too long, and at both ends of one
that is not JSON."""


class _Frame(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """One line."""


class BoxDjango(msgspec.Struct, frozen=True):
    """The databases and mail backend of Django in the worker. A test may have changed them."""

    databases: dict[str, dict[str, str]]  # where they are, by alias
    email_backend: str
    is_test: bool  # whether Django's test runner is at work in the worker's process


class BoxHome(msgspec.Struct, frozen=True):
    """Where a Python box finds its task."""

    module: str  # to import
    app: str  # the application's name
    path: tuple[str, ...]  # sys.path
    settings: dict[str, Any]
    django: BoxDjango | None = None  # None where the worker does not use its databases


class BoxHello(_Frame, frozen=True, tag="hello"):
    """To a box: the first frame."""

    version: int
    worker: str  # its name
    limit: int  # bytes that a result may have
    python: BoxHome | None = None  # None for a box with a command


class RunJob(_Frame, frozen=True, tag="run"):
    """To an idle box: run a job."""

    id: str
    task: str
    queue: str = ""
    attempt: int = 1
    worker: str = ""
    arguments: Raw = Raw(b"{}")  # by name, for a box with a command
    args: Raw = Raw(b"[]")  # with `kwargs`, as they were sent, for a Python box
    kwargs: Raw = Raw(b"{}")
    sections: Mapping[str, int] | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    policy: bool = False  # run the task's `deduplicate` policy instead of the task
    trace: str = ""  # the job's trace context
    eliot: str = ""  # where the box may continue the job's eliot action
    resources: Mapping[str, float] | None = None  # what the job has of the worker's capacity


class SoftLimitReached(_Frame, frozen=True, tag="soft-limit"):
    """To a box that accepts it: the soft time limit of the job is reached."""

    id: str
    message: str


class CancelJob(_Frame, frozen=True, tag="cancel"):
    """To a box that accepts it: stop the job, and reply."""

    id: str
    limit: str = ""  # the message of the time limit, if that is why


class BoxReady(_Frame, frozen=True, tag="ready"):
    """From a box: the first frame."""

    version: int
    hears: tuple[str, ...] = ()  # which of `soft-limit` and `cancel` it accepts while it runs a job


class BoxResult(_Frame, frozen=True, tag="result"):
    """From a box: the job has returned."""

    id: str = ""
    value: Raw = Raw(b"null")


class BoxError(_Frame, frozen=True, tag="error"):
    """From a box: the job has failed."""

    failure: Failure
    id: str = ""
    kinds: tuple[tuple[str, ...], ...] = ()  # full names of the classes of each error, for retry policies
    ruling: Ruling | None = None
    stranded: bool = False  # a broker could not be reached


class RetryJob(_Frame, frozen=True, tag="retry"):
    """From a box: retry the job."""

    id: str = ""
    failure: Failure = Failure(type="Retry", message="")
    countdown: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    policy: RetryPolicy | None = None
    max_retries: Annotated[float, Meta(ge=0)] | None = None


class RejectJob(_Frame, frozen=True, tag="reject"):
    """From a box: the job was rejected, which is no failure."""

    id: str = ""
    why: str = ""


class RefuseJob(_Frame, frozen=True, tag="refuse"):
    """From a box: the job cannot be run, and a retry would not help."""

    reason: Reason
    failure: Failure
    id: str = ""


class BoxLogLine(_Frame, frozen=True, tag="log"):
    """From a box, at any time: a line for the log."""

    message: str = ""
    level: Literal["debug", "info", "warning", "error"] = "info"
    logger: str = "box"
    event: str = "log"
    fields: dict[str, Any] = {}


class BoxEliotMessage(_Frame, frozen=True, tag="eliot"):
    """From a box, at any time: a message of eliot."""

    message: dict[str, Any]


class BoxProgress(_Frame, frozen=True, tag="progress"):
    """From a box that runs a job: how far the job is."""

    done: int | float
    total: int | float | None = None
    note: str = ""
    id: str = ""


class MalformedFrame(msgspec.Struct, frozen=True):
    """A line that is meant as a reply and cannot be read, or is too long."""

    why: str
    too_large: bool = False
    # Whether it may be no reply at all: then the reply is still to come.
    is_doubtful: bool = False


BoxReply = BoxResult | BoxError | RetryJob | RejectJob | RefuseJob
ToBox = BoxHello | RunJob | SoftLimitReached | CancelJob
FromBox = (
    BoxReady
    | BoxResult
    | BoxError
    | RetryJob
    | RejectJob
    | RefuseJob
    | BoxLogLine
    | BoxEliotMessage
    | BoxProgress
)


class _Typed(msgspec.Struct):
    type: str


_TO_BOX: msgspec.json.Decoder[ToBox] = msgspec.json.Decoder(ToBox)
_FROM_BOX: msgspec.json.Decoder[FromBox] = msgspec.json.Decoder(FromBox)
_TYPED = msgspec.json.Decoder(_Typed)
# Not `log`, `eliot` and `progress`: one that cannot be read is no reason to fail the job.
_TAGS = ("ready", "result", "error", "retry", "reject", "refuse")
_TYPE_PATTERN = re.compile(rb'"type"\s*:\s*"(?:%s)"' % "|".join(_TAGS).encode())
_FIRST_TYPE = re.compile(rb'\{\s*"type"\s*:\s*"([a-z-]+)"')
_ENCODER = msgspec.json.Encoder()


def encode_frame(message: ToBox | FromBox) -> bytes:
    """Return a frame as one line. Line breaks between JSON tokens become spaces; strings contain none."""
    encoded = _ENCODER.encode(message)
    return encoded.translate(_ONE_LINE) + b"\n"


def decode_to_box(line: bytes) -> ToBox | None:
    """Return a worker's frame; None for an unknown one. Raises ValueError for what is not JSON."""
    try:
        return _TO_BOX.decode(line)
    except msgspec.ValidationError:
        return None


def decode_from_box(line: bytes) -> FromBox | MalformedFrame | None:
    """Return a box's frame; None for a line that is none: user code has printed it."""
    if not line.startswith(b"{"):
        return None
    try:
        return _FROM_BOX.decode(line)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    try:
        is_frame = _TYPED.decode(line).type in _TAGS
    except (ValueError, RecursionError):
        # Not JSON: it has a NaN, for example. If it is meant as a reply, the worker must not wait for it for ever.
        is_frame = any(
            _TYPE_PATTERN.search(line, at, at + _SEARCHED) for at in (0, max(len(line) - _SEARCHED, 0))
        )
    return MalformedFrame(reason) if is_frame else None


def make_too_long(start: bytes, limit: int) -> MalformedFrame | None:
    """Return what a line longer than `limit` bytes was, judged by its start; None if it was no reply."""
    if not start.startswith(b"{"):
        return None
    first_type = _FIRST_TYPE.match(start)
    if first_type is not None and first_type[1].decode() in ("log", "eliot", "progress"):
        return None
    return MalformedFrame(
        f"the box wrote a frame of more than {limit} bytes", too_large=True, is_doubtful=first_type is None
    )


class LineSplitter:
    """Splits the output of a pipe into lines of at most `limit` bytes. The start of a longer line is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """Yield each line that has ended, and whether it is complete."""
        *ended, last = chunk.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield self._take()
        self._add(last)

    def end(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the last line, when the pipe has ended."""
        if self._rest:
            yield self._take()

    def _add(self, piece: bytes) -> None:
        if self._is_too_long:
            return
        if len(self._rest) + len(piece) > self._limit:
            self._is_too_long = True
            start = bytes(self._rest[:MAX_TEXT]) + piece[:MAX_TEXT]
            self._rest = bytearray(start[: max(MAX_TEXT, _SEARCHED)])
        else:
            self._rest += piece

    def _take(self) -> tuple[bytes, bool]:
        line, is_complete = bytes(self._rest), not self._is_too_long
        self._rest, self._is_too_long = bytearray(), False
        return line, is_complete


def to_outcome(reply: BoxReply) -> Outcome:
    """Return the outcome of the job that a box has replied to."""
    match reply:
        case BoxResult():
            return Returned(bytes(reply.value))
        case BoxError():
            failure = _shorten(reply.failure)
            raised = Raised(failure, reply.kinds or ((failure.type, "builtins.Exception"),), reply.ruling)
            return BrokerLost(failure, raised) if reply.stranded else raised
        case RetryJob():
            failure = _shorten(reply.failure)
            return RetryRequested(failure, reply.countdown, reply.policy, _to_int(reply.max_retries))
        case RejectJob():
            return JobRejected(reply.why[:MAX_TEXT] or "its box rejected it")
        case RefuseJob():
            return PermanentFailure(reply.reason, _shorten(reply.failure))


def to_box_reply(outcome: Outcome, job: str) -> BoxReply:
    """Return the reply of a Python box whose job has ended with `outcome`."""
    match outcome:
        case Returned(value):
            return BoxResult(job, Raw(value))
        case Raised(failure, kinds, ruling):
            return BoxError(failure, job, kinds, ruling)
        case BrokerLost(failure, raised):
            kinds, ruling = ((), None) if raised is None else (raised.kinds, raised.ruling)
            return BoxError(failure, job, kinds, ruling, stranded=True)
        case RetryRequested(failure, countdown, policy, most):
            return RetryJob(job, failure, countdown, policy, most)
        case JobRejected(why):
            return RejectJob(job, why)
        case PermanentFailure(reason, failure):
            return RefuseJob(reason, failure, job)
        case _:  # it was cancelled
            return BoxError(Failure(type="Cancelled", message="the job was told to stop"), job)


def _shorten(failure: Failure) -> Failure:
    return msgspec.structs.replace(
        failure,
        type=failure.type[:200],
        message=failure.message[:MAX_TEXT],
        args=tuple(arg[:MAX_TEXT] for arg in failure.args[:20]),
        traceback=failure.traceback[-MAX_TRACEBACK:],
    )


def _to_int(number: float | None) -> int | None:
    return None if number is None else int(min(number, 1e9))


_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
