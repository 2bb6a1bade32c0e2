"""One record with what surrounds it: as a processor gets it, and as it is stored."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from celery5.broker.calls.streams import RawEntry
from celery5.errors import BadRecord
from celery5.hints import make_attribute_error
from celery5.protocol.streams.groups import split_id
from celery5.streams.codec import RecordCodec, make_codec, read_record_headers

R = TypeVar("R")
_DOCUMENTS = make_codec(None)


class StreamEntry(Generic[R]):
    """One record with what surrounds it.

    Attributes:
        partition: Its partition.
        group: The processor that reads it.
        id: Its id in the partition.
        fields: What is stored: fields and values in turns.
    """

    __slots__ = ("_codec", "fields", "group", "id", "partition")

    def __init__(self, partition: int, group: str, raw: RawEntry, codec: RecordCodec[R]) -> None:
        self.partition = partition
        self.group = group
        self.id: str = raw[0].decode()
        self.fields: Sequence[bytes] = raw[1]
        self._codec = codec

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> Any:
            raise make_attribute_error("events", self, name)

    def __repr__(self) -> str:
        return f"<StreamEntry {self.id} of partition {self.partition}>"

    @property
    def record(self) -> R:
        """The record. Raises BadRecord."""
        return self._codec.decode(self.fields)

    @property
    def headers(self) -> Mapping[str, str]:
        """What the sender's middleware has added: texts by name, such as `traceparent`."""
        return read_record_headers(self.fields)

    @property
    def time(self) -> float:
        """When it was sent, in seconds since 1970, or what the sender gave as its time."""
        return split_id(self.id)[0] / 1000


class StoredRecord(msgspec.Struct, frozen=True):
    """A record as it is stored: a Document, whatever the class of the stream's records is."""

    partition: int
    id: str
    # Its JSON value; without its class the text of each field of a record with native fields.
    record: Any

    @property
    def time(self) -> float:
        """When it was sent, in seconds since 1970."""
        return split_id(self.id)[0] / 1000


def decode_document(fields: Sequence[bytes], codec: RecordCodec[Any] = _DOCUMENTS) -> Any:
    """Return the Document of an entry, without the class of its records.

    Args:
        fields: The fields and values of the entry, in turns.
        codec: That of its stream, without a class.

    Returns:
        Its JSON value; its fields as text if it has native ones, or an encoding that the stream has never declared.
    """
    if fields and fields[0].startswith(b"="):
        try:
            return codec.decode(fields)
        except Exception:  # whatever another program has written is shown
            pass
    words = [word.decode(errors="backslashreplace") for word in fields]
    return dict(zip(words[::2], words[1::2], strict=False))


def decode_as_class(fields: Sequence[bytes], codec: RecordCodec[Any]) -> Any:
    """Return the Document of an entry as its class has it: of the current version, with typed native fields.

    An entry that does not fit the class is returned as `decode_document` does.
    """
    try:
        return codec.to_document(fields)
    except BadRecord:
        return decode_document(fields, codec.without_class())
