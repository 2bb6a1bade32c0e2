"""One record as a processor gets it, with what surrounds it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from celery5.broker.calls.streams import RawEntry
from celery5.hints import make_attribute_error
from celery5.protocol.streams.groups import split_id
from celery5.streams.codec import RecordCodec, read_record_headers

R = TypeVar("R")


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
