"""Remains: what can still be read of a job's message, document and values, whatever bytes they are.

Floor: protocol. Reads: nothing. Writes: nothing.

For those who look at jobs and must not stumble: what cannot be read is None here, where `envelope` raises Corrupt.
"""

from typing import Any

from msgspec import Raw, json

from celery5.errors import Corrupt
from celery5.protocol.envelope import Document, Envelope, Failure, read_document, read_envelope


def try_read_envelope(message: bytes, limit: int | None = None) -> tuple[Envelope | None, str]:
    """The envelope in a message; or None, and why there is none to be read. `limit` is the setting `message_limit`."""
    try:
        return read_envelope(message, limit), ""
    except Corrupt as error:
        return None, str(error)


def try_read_document(document: bytes, limit: int | None = None) -> Document | None:
    """What a document says. `limit` is the setting `message_limit`."""
    try:
        return read_document(document, limit)
    except Corrupt:
        return None


def try_read_failure(raw: bytes) -> Failure | None:
    """A failure that was written as JSON."""
    try:
        return json.decode(raw, type=Failure)
    except (ValueError, RecursionError):
        return None


def try_decode_value(raw: Raw) -> Any:
    """The value that JSON stands for. It may be None itself."""
    try:
        return json.decode(raw)
    except (ValueError, RecursionError):
        return None
