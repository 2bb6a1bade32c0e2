"""Decode what lies in Redis within a bound of bytes and of values: both are known before anything is made of them.

A byte of a compressed text may become a thousand bytes, and each of those an empty map of 64 bytes in memory. So what
is decompressed has at most `limit` bytes, 1 MiB by default, and what is decoded at most 200,000 values, some 20 MB.
"""

import re
import zlib
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

MAX_DECODED = 1024 * 1024
"""Bytes of a value when it is decompressed, where nobody says more."""
MAX_VALUES = 200_000
"""Values in one that is decoded: lists and maps, their items and keys."""

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*\\?(?:"|\Z)', re.DOTALL)
"""The strings of a JSON text. One that does not end matches, too: else each of its quotes would be tried to the end."""
_BZ2_MAGIC = b"BZh"


_MOST_DIGITS = 18
"""The most digits of a whole number: no count and no time has more."""


def read_whole(text: bytes | str, default: int = 0) -> int:
    """Return the whole number in a text, from 0 to 10**18 - 1; `default` for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else default


class TooCostly(ValueError):
    """A value would take too much memory."""


def inflate(packed: bytes, *, limit: int = MAX_DECODED) -> bytes:
    """Return what zlib, gzip or bzip2 has compressed.

    Args:
        packed: The compressed bytes; their first ones tell how.
        limit: The most bytes that are returned.

    Raises:
        TooCostly: There are more.
        ValueError: It cannot be read, or is cut off.
    """
    if packed[:3] == _BZ2_MAGIC:
        return _inflate_bz2(packed, limit)
    reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # of zlib or of gzip
    try:
        content = reader.decompress(packed, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    check_bytes(content, limit)
    if not reader.eof:
        raise ValueError("it cannot be decompressed: it is cut off")
    return content


def _inflate_bz2(packed: bytes, limit: int) -> bytes:
    try:
        bz2: Any = import_module("bz2")
    except ImportError:  # as a Python may have been built
        raise ValueError("it cannot be decompressed: this Python has no bzip2") from None
    reader = bz2.BZ2Decompressor()
    try:
        content = bytes(reader.decompress(packed, limit + 1))
    except OSError as error:
        raise ValueError(f"it cannot be decompressed: {error}") from None
    check_bytes(content, limit)
    if not reader.eof:
        raise ValueError("it cannot be decompressed: it is cut off")
    return content


def check_bytes(content: bytes, limit: int) -> None:
    """Raise TooCostly for more than `limit` bytes."""
    if len(content) > limit:
        raise TooCostly(f"more than {limit:,} bytes when decompressed")


@overload
def decode_msgpack(raw: bytes, kind: type[T], *, most: int = ...) -> T: ...
@overload
def decode_msgpack(raw: bytes, kind: Any = ..., *, most: int = ...) -> Any: ...
def decode_msgpack(raw: bytes, kind: Any = Any, *, most: int = MAX_VALUES) -> Any:
    """Return the value of a msgpack text.

    Args:
        raw: The text.
        kind: What it is: it is decoded straight to it.
        most: The most values in it.

    Raises:
        TooCostly: It has too many values, or they are too deeply nested.
        ValueError: It is no msgpack, or no `kind`.
    """
    check_msgpack(raw, most)
    try:
        return _get_msgpack_decoder(kind).decode(raw)
    except RecursionError:
        raise TooCostly("too deeply nested") from None


def decode_json(raw: bytes) -> Any:
    """Return the value of a JSON text. Raises as `decode_msgpack`."""
    check_json(raw)
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise TooCostly("too deeply nested") from None


@cache
def _get_msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def check_json(raw: bytes) -> None:
    """Raise TooCostly for a JSON text with too many values. It need not be valid JSON."""
    if len(raw) <= MAX_VALUES or _count_json(raw) <= MAX_VALUES:
        return
    # What is in strings does not count.
    if _count_json(_STRINGS.sub(b"", raw)) > MAX_VALUES:
        raise TooCostly(f"more than {MAX_VALUES:,} values")


def _count_json(raw: bytes) -> int:
    """Return how many values a JSON text has at most."""
    return 1 + sum(raw.count(mark) for mark in (b",", b":", b"[", b"{"))


def check_msgpack(raw: bytes, most: int = MAX_VALUES) -> None:
    """Raise TooCostly for a msgpack text with too many values. It need not be valid msgpack."""
    if len(raw) <= most:
        return  # a value has a byte at least
    at, count, end = 0, 0, len(raw)
    while at < end:  # bound: the values that are allowed
        count += 1
        if count > most:
            raise TooCostly(f"more than {most:,} values")
        code = raw[at]
        at += _SIZES[code]
        if width := _LENGTHS.get(code):
            at += int.from_bytes(raw[at - width - _EXTRA.get(code, 0) : at - _EXTRA.get(code, 0)], "big")


def _make_sizes() -> list[int]:
    """Return by its first byte how many bytes a value has, without what follows a length, and without items."""
    sizes = [1] * 256
    for length in range(32):
        sizes[0xA0 + length] = 1 + length  # short strings
    for code, size in {
        0xC4: 2,
        0xC5: 3,
        0xC6: 5,
        0xC7: 3,
        0xC8: 4,
        0xC9: 6,  # bytes, extensions
        0xCA: 5,
        0xCB: 9,
        0xCC: 2,
        0xCD: 3,
        0xCE: 5,
        0xCF: 9,  # floats, unsigned integers
        0xD0: 2,
        0xD1: 3,
        0xD2: 5,
        0xD3: 9,  # integers
        0xD4: 3,
        0xD5: 4,
        0xD6: 6,
        0xD7: 10,
        0xD8: 18,  # extensions of a fixed length
        0xD9: 2,
        0xDA: 3,
        0xDB: 5,  # strings
        0xDC: 3,
        0xDD: 5,
        0xDE: 3,
        0xDF: 5,  # lists and maps: their items are counted by themselves
    }.items():
        sizes[code] = size
    return sizes


_SIZES = _make_sizes()
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""How many bytes the length of bytes, strings and extensions has."""
_EXTRA = {0xC7: 1, 0xC8: 1, 0xC9: 1}
"""Bytes between the length and the content: the kind of an extension."""
