"""Envelope: a Command message as it travels, and the Document that tells of its end.

Floor: protocol. Reads: nothing. Writes: nothing.

The wire format is JSON, versioned and language neutral (C6); `envelope.schema.json` beside this file publishes it.
Fields that this version does not know survive every hop. Never pickle.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from celery5.errors import Corrupt
from celery5.protocol.retry import RetryPolicy

VERSION = 1
KEPT_FAILURES = 5
"""How many of a job's failed attempts its message remembers; the newest stay."""


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed attempt: the error as text, so that nobody needs the class that was raised."""

    type: str
    message: str
    args: tuple[str, ...] = ()
    traceback: str = ""
    attempt: int = 1
    worker: str = ""
    at: float = 0.0  # seconds since 1970


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Command message: run `task` with `args` and `kwargs`. Times are seconds since 1970."""

    v: int
    id: str
    task: str
    args: Raw = Raw(b"[]")
    kwargs: Raw = Raw(b"{}")
    sent: float = 0.0
    attempt: int = 1
    expires: float | None = None
    retry: RetryPolicy | None = None
    ignore_result: bool = False
    trace: str = ""
    failures: tuple[Failure, ...] = ()


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
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


_ENVELOPE = msgspec.json.Decoder(Envelope)
_DOCUMENT = msgspec.json.Decoder(Document)
_ENCODER = msgspec.json.Encoder()

encode = _ENCODER.encode


def read_envelope(raw: bytes) -> Envelope:
    """Decode a Command message. Raises Corrupt with the reason."""
    try:
        envelope = _ENVELOPE.decode(raw)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not an envelope: {error}") from None
    if envelope.v != VERSION:
        raise Corrupt(
            f"envelope of version {envelope.v}; this worker reads version {VERSION}: upgrade the workers first"
        )
    if not envelope.id or not envelope.task:
        raise Corrupt("not an envelope: id and task must not be empty")
    return envelope


def read_document(raw: bytes) -> Document:
    """Decode a Document message. Raises Corrupt with the reason."""
    try:
        return _DOCUMENT.decode(raw)
    except msgspec.DecodeError as error:
        raise Corrupt(f"not a document: {error}") from None


def next_attempt(raw: bytes, failure: Failure) -> bytes:
    """The same message for its next attempt, `failure` remembered. Fields unknown to this version survive."""
    fields: dict[str, Any] = msgspec.json.decode(raw)
    fields["attempt"] = int(fields.get("attempt", 1)) + 1
    return encode(_remembering(fields, failure))


def with_failure(raw: bytes, failure: Failure) -> bytes:
    """The same message with its last failure in it, for the dead-letter queue."""
    return encode(_remembering(msgspec.json.decode(raw), failure))


def _remembering(fields: dict[str, Any], failure: Failure) -> Mapping[str, Any]:
    fields["failures"] = [*fields.get("failures", ()), msgspec.to_builtins(failure)][-KEPT_FAILURES:]
    return fields
