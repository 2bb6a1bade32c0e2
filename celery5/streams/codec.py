"""Encode and decode the records of a stream."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from celery5.protocol.streams.routing import canonical_key

R = TypeVar("R")


class RecordCodec(Generic[R]):
    """Encodes and decodes the records of one stream.

    Args:
        kind: The class of the records; None for any JSON value.
        by: The field, or a function of a record, that is its key; None for records without keys.
    """

    def __init__(self, kind: type[R] | None, by: str | Callable[[R], object] | None) -> None:
        self._by = by
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind or Any)

    def encode(self, record: R) -> tuple[str | bytes, ...]:
        """Return the fields and values of an entry, in turns."""
        return ("=json", msgspec.json.encode(record))

    def decode(self, fields: Sequence[bytes]) -> R:
        """Return the record of an entry."""
        record: R = self._decoder.decode(fields[1])
        return record

    def key(self, record: R) -> bytes | None:
        """Return the canonical key of a record."""
        if self._by is None:
            return None
        return canonical_key(getattr(record, self._by) if isinstance(self._by, str) else self._by(record))


def make_codec(kind: Any, *, codec: Any = "json", by: Any = None) -> RecordCodec[Any]:
    """Return the codec of a stream."""
    return RecordCodec(kind, by)
