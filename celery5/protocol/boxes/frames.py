"""Frames: what a worker and its boxes say to each other, one JSON object a line (C62).

The page docs/reference/box-protocol.md is written for authors of boxes. Fields and types of frames that this version
does not know are passed over, so that both ends may be newer than the other.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from celery5.protocol.job.envelope import Failure
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
"""The version of the protocol that is spoken here."""
FRAME_OVERHEAD = 64 * 1024
"""Bytes that a frame may have beyond the largest result: the rest of its fields."""
MAX_TEXT = 2_000
MAX_TRACEBACK = 8_000
"""Characters of what a box says of a failure that are kept, as of every failure."""
_STARTS = 64
"""Bytes of a line that is too long which are kept to tell what it was; and at both ends of one that is no JSON, where a
frame says what it is."""


class _Frame(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """One line."""


class BoxHome(msgspec.Struct, frozen=True):
    """Where a Python box finds its task: what to import from where, the application's name and its settings."""

    module: str
    app: str
    path: tuple[str, ...]
    settings: dict[str, Any]


class BoxHello(_Frame, frozen=True, tag="hello"):
    """To a box, first: the version, the worker's name, how many bytes a result may have."""

    version: int
    worker: str
    limit: int
    python: BoxHome | None = None


class RunJob(_Frame, frozen=True, tag="run"):
    """To a box that is idle: run a job. `arguments` by name, for a box with a command; a Python box gets `args` and
    `kwargs` as they came. With `policy` the task's `deduplicate` policy is meant."""

    id: str
    task: str
    queue: str = ""
    attempt: int = 1
    worker: str = ""
    arguments: Raw = Raw(b"{}")
    args: Raw = Raw(b"[]")
    kwargs: Raw = Raw(b"{}")
    sections: Mapping[str, int] | None = None
    time_limit: float | None = None
    soft_time_limit: float | None = None
    policy: bool = False


class SoftLimitReached(_Frame, frozen=True, tag="soft-limit"):
    """To a box that said it hears this: the job's time is nearly up."""

    id: str
    message: str


class CancelJob(_Frame, frozen=True, tag="cancel"):
    """To a box that said it hears this: stop the job, and answer. `limit` says so when it has run for too long."""

    id: str
    limit: str = ""


class BoxReady(_Frame, frozen=True, tag="ready"):
    """From a box, first: its version, and which of `soft-limit` and `cancel` it hears while it runs a job."""

    version: int
    hears: tuple[str, ...] = ()


class BoxResult(_Frame, frozen=True, tag="result"):
    """From a box: the job has returned."""

    id: str = ""
    value: Raw = Raw(b"null")


class BoxError(_Frame, frozen=True, tag="error"):
    """From a box: the job has failed. `kinds` are the full names of the error's classes, for retry policies."""

    failure: Failure
    id: str = ""
    kinds: tuple[tuple[str, ...], ...] = ()
    ruling: Ruling | None = None
    stranded: bool = False


class RetryJob(_Frame, frozen=True, tag="retry"):
    """From a box: try the job again (C22)."""

    id: str = ""
    failure: Failure = Failure(type="Retry", message="")
    countdown: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    policy: RetryPolicy | None = None
    max_retries: Annotated[float, Meta(ge=0)] | None = None


class RejectJob(_Frame, frozen=True, tag="reject"):
    """From a box: the job is not wanted (C59)."""

    id: str = ""
    why: str = ""


class RefuseJob(_Frame, frozen=True, tag="refuse"):
    """From a box: the job cannot be run, and trying again would not help."""

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


class MalformedFrame(msgspec.Struct, frozen=True):
    """A line that was meant as a frame and cannot be read, or is too long to be."""

    why: str
    too_large: bool = False


BoxReply = BoxResult | BoxError | RetryJob | RejectJob | RefuseJob
ToBox = BoxHello | RunJob | SoftLimitReached | CancelJob
FromBox = BoxReady | BoxResult | BoxError | RetryJob | RejectJob | RefuseJob | BoxLogLine


class _Typed(msgspec.Struct):
    type: str


_TO_BOX: msgspec.json.Decoder[ToBox] = msgspec.json.Decoder(ToBox)
_FROM_BOX: msgspec.json.Decoder[FromBox] = msgspec.json.Decoder(FromBox)
_TYPED = msgspec.json.Decoder(_Typed)
_TAGS = ("ready", "result", "error", "retry", "reject", "refuse", "log")
_MEANT = re.compile(rb'"type"\s*:\s*"(?:%s)"' % "|".join(_TAGS).encode())
_ENCODER = msgspec.json.Encoder()


def encode_frame(message: ToBox | FromBox) -> bytes:
    """One line. Breaks that somebody's JSON has between its words become spaces: inside of texts there are none."""
    encoded = _ENCODER.encode(message)
    return encoded.translate(_ONE_LINE) + b"\n"


def decode_to_box(line: bytes) -> ToBox | None:
    """What a worker says; None for what this version does not know. Raises ValueError for what is no JSON."""
    try:
        return _TO_BOX.decode(line)
    except msgspec.ValidationError:
        return None


def decode_from_box(line: bytes) -> FromBox | MalformedFrame | None:
    """What a box says; None for a line that is no frame: whatever user code has printed."""
    if not line.startswith(b"{"):
        return None
    try:
        return _FROM_BOX.decode(line)
    except (ValueError, RecursionError) as error:
        why = str(error)
    try:
        known = _TYPED.decode(line).type in _TAGS
    except (ValueError, RecursionError):
        # No JSON: a NaN, say. Whoever meant an answer must not wait for ever.
        known = any(_MEANT.search(line, at, at + _STARTS) for at in (0, max(len(line) - _STARTS, 0)))
    return MalformedFrame(why) if known else None


def make_too_long(start: bytes, limit: int) -> MalformedFrame | None:
    """What a line was that is longer than `limit`, by its start."""
    if not start.startswith(b"{"):
        return None
    return MalformedFrame(f"the box wrote a frame of more than {limit} bytes", too_large=True)


class LineSplitter:
    """Cuts what comes through a pipe into lines of at most `limit` bytes. Of a longer one the start is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._over = False

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """The lines that have come to their end, each with whether it is all there."""
        *ended, last = chunk.split(b"\n")
        for each in ended:
            self._add(each)
            yield self._take()
        self._add(last)

    def end(self) -> Iterator[tuple[bytes, bool]]:
        """What is left when the pipe has ended."""
        if self._rest:
            yield self._take()

    def _add(self, piece: bytes) -> None:
        if self._over:
            return
        if len(self._rest) + len(piece) > self._limit:
            self._over = True
            start = bytes(self._rest[:MAX_TEXT]) + piece[:MAX_TEXT]
            self._rest = bytearray(start[: max(MAX_TEXT, _STARTS)])
        else:
            self._rest += piece

    def _take(self) -> tuple[bytes, bool]:
        line, whole = bytes(self._rest), not self._over
        self._rest, self._over = bytearray(), False
        return line, whole


def to_outcome(reply: BoxReply) -> Outcome:
    """What a box has answered, as the outcome of its job."""
    match reply:
        case BoxResult():
            return Returned(bytes(reply.value))
        case BoxError():
            failure = _bounded(reply.failure)
            raised = Raised(failure, reply.kinds or ((failure.type, "builtins.Exception"),), reply.ruling)
            return BrokerLost(failure, raised) if reply.stranded else raised
        case RetryJob():
            failure = _bounded(reply.failure)
            return RetryRequested(failure, reply.countdown, reply.policy, _whole(reply.max_retries))
        case RejectJob():
            return JobRejected(reply.why[:MAX_TEXT] or "its box rejected it")
        case RefuseJob():
            return PermanentFailure(reply.reason, _bounded(reply.failure))


def to_box_reply(outcome: Outcome, job: str) -> BoxReply:
    """What a Python box answers when its job has ended with `outcome`."""
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
        case _:  # it was told to stop, and did
            return BoxError(Failure(type="Cancelled", message="the job was told to stop"), job)


def _bounded(failure: Failure) -> Failure:
    return msgspec.structs.replace(
        failure,
        type=failure.type[:200],
        message=failure.message[:MAX_TEXT],
        args=tuple(each[:MAX_TEXT] for each in failure.args[:20]),
        traceback=failure.traceback[-MAX_TRACEBACK:],
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else int(min(number, 1e9))


_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
