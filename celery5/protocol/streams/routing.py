"""Choose the partition of a record by its key, alike in every producer."""

from zlib import crc32


def canonical_key(value: object) -> bytes:
    """Return the bytes by which a key is routed."""
    return value if isinstance(value, bytes) else str(value).encode()


def find_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key."""
    return crc32(key) % partitions
