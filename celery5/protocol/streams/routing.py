"""Choose the partition of a record by its key, alike in every producer and every language.

`docs/reference/streams.md` has the rules and test vectors.
"""

from enum import Enum
from zlib import crc32

import msgspec

from celery5.protocol.job.json_values import to_json


def canonical_key(value: object) -> bytes:
    """Return the bytes by which a key is routed.

    Text is UTF-8, bytes are themselves, a whole number is its digits, and a boolean is `true` or `false`. Anything
    else is its JSON: of text in JSON without the quotes, such as that of a UUID or a date, and of objects with
    sorted names. So 1 and "1" have the same key, and a producer need not know which of them a field is.

    Raises:
        TypeError: The value has no JSON form.
    """
    if type(value) is int:  # the usual cases first: this is on the path of each record
        return b"%d" % value
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    text = msgspec.json.encode(value, enc_hook=to_json, order="deterministic")
    if text[:1] == b'"':
        return msgspec.json.decode(text, type=str).encode()
    return text


def find_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a canonical key, from 0 to `partitions` - 1."""
    return crc32(key) % partitions
