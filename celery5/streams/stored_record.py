"""A record as it is stored, whatever the class of the stream's records is now."""

from collections.abc import Sequence
from typing import Any

import msgspec

from celery5.errors import BadRecord
from celery5.protocol.streams.groups import split_id
from celery5.streams.codec import RecordCodec, make_codec

_DOCUMENTS = make_codec(None)


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
