"""JSON and MessagePack for Lua scripts, as the libraries cjson and cmsgpack of Redis write and read them."""

import json
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from lupa.lua51 import lua_type

ToTable = Callable[[Any], Any]
"""Makes a Lua table of a list or dict."""

_SPECIAL = re.compile(rb'["\\/\x00-\x1f\x7f]')
_ESCAPES = {b'"': b'\\"', b"\\": b"\\\\", b"/": b"\\/", b"\b": b"\\b", b"\f": b"\\f", b"\n": b"\\n", b"\r": b"\\r",
            b"\t": b"\\t"}  # fmt: skip
_EXACT = 2**53


class LuaJson:
    """cjson.

    Args:
        to_table: Makes a Lua table of a list or dict.
        null: What stands for null in Lua.
    """

    def __init__(self, to_table: ToTable, null: Any) -> None:
        self._to_table = to_table
        self._null = null

    def encode(self, value: Any) -> bytes:
        """Return a value of Lua as JSON. Raises ValueError."""
        if isinstance(value, bytes):
            return b'"%s"' % _SPECIAL.sub(_escape, value)
        if value is None:
            return b"null"
        if isinstance(value, bool):
            return b"true" if value else b"false"
        if isinstance(value, int | float):
            return _format(value)
        if lua_type(value) == "userdata":  # there is no other one than that which stands for null
            return b"null"
        if lua_type(value) != "table":
            raise ValueError(f"Cannot serialise {lua_type(value)}: type not supported")
        items = cast("list[tuple[Any, Any]]", list(value.items()))
        if items and all(type(key) is int and key > 0 for key, _ in items):
            return b"[%s]" % b",".join(map(self.encode, _list_items(items)))
        return b"{%s}" % b",".join(b"%s:%s" % (_encode_key(key), self.encode(item)) for key, item in items)

    def decode(self, text: bytes) -> Any:
        """Return JSON as a value of Lua. Raises ValueError."""
        if isinstance(text, int | float):
            return text
        return self._convert(json.loads(text.decode("utf-8", "surrogateescape"), strict=False))

    def _convert(self, value: Any) -> Any:
        """Return what JSON is as a value of Lua."""
        if isinstance(value, str):
            return value.encode("utf-8", "surrogateescape")
        if isinstance(value, list):
            return self._to_table([self._convert(item) for item in cast("list[Any]", value)])
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return self._to_table({self._convert(key): self._convert(item) for key, item in items})
        if type(value) is int and abs(value) > _EXACT:
            return float(value)
        return self._null if value is None else value


def _escape(match: re.Match[bytes]) -> bytes:
    return _ESCAPES.get(match[0]) or b"\\u%04x" % match[0][0]


def _encode_key(key: Any) -> bytes:
    return b'"%s"' % (_SPECIAL.sub(_escape, key) if isinstance(key, bytes) else _format(key))


def _format(number: float) -> bytes:
    """Return a number as Lua writes it in JSON: with 14 digits."""
    if number != number or number in {float("inf"), float("-inf")}:
        raise ValueError("Cannot serialise number: must not be NaN or Inf")
    return b"%.14g" % number


def _list_items(items: Sequence[tuple[int, Any]]) -> list[Any]:
    """Return the items of a table by their numbers, None between them. Raises ValueError where most are None."""
    size = max(key for key, _ in items)
    if size > 10 and size > 2 * len(items):
        raise ValueError("Cannot serialise table: excessively sparse array")
    listed: list[Any] = [None] * size
    for key, item in items:
        listed[key - 1] = item
    return listed


def pack_message(values: Sequence[Any]) -> bytes:
    """Return values of Lua as MessagePack: one behind the other, with no type but those of Lua."""
    parts: list[bytes] = []
    for value in values:
        _pack(value, parts.append)
    return b"".join(parts)


def _pack(value: Any, write: Callable[[bytes], object]) -> None:
    if isinstance(value, bytes):
        write(_pack_head(len(value), 0xA0, 32, b"\xd9", b"\xda", b"\xdb"))
        write(value)
    elif value is None:
        write(b"\xc0")
    elif isinstance(value, bool):
        write(b"\xc3" if value else b"\xc2")
    elif isinstance(value, int | float):
        write(_pack_number(value))
    elif lua_type(value) == "table":
        items = cast("list[tuple[Any, Any]]", list(value.items()))
        if all(type(key) is int and 0 < key <= len(items) for key, _ in items):
            write(_pack_head(len(items), 0x90, 16, b"", b"\xdc", b"\xdd"))
            for item in _list_items(items) if items else ():
                _pack(item, write)
        else:
            write(_pack_head(len(items), 0x80, 16, b"", b"\xde", b"\xdf"))
            for key, item in items:
                _pack(key, write)
                _pack(item, write)
    else:
        write(b"\xc0")


def _pack_head(size: int, fixed: int, fixed_sizes: int, one: bytes, two: bytes, four: bytes) -> bytes:
    """Return the beginning of a string, array or map of that size."""
    if size < fixed_sizes:
        return bytes((fixed + size,))
    if size < 256 and one:
        return one + bytes((size,))
    return two + struct.pack(">H", size) if size < 65536 else four + struct.pack(">I", size)


def _pack_number(number: float) -> bytes:
    if number != int(number) if abs(number) < 2**63 else True:
        single = struct.pack(">f", number) if abs(number) < 3e38 else b""
        if single and struct.unpack(">f", single)[0] == number:
            return b"\xca" + single
        return b"\xcb" + struct.pack(">d", number)
    whole = int(number)
    if whole >= 0:
        if whole < 128:
            return bytes((whole,))
        for most, mark, form in ((2**8, b"\xcc", ">B"), (2**16, b"\xcd", ">H"), (2**32, b"\xce", ">I")):
            if whole < most:
                return mark + struct.pack(form, whole)
        return b"\xcf" + struct.pack(">Q", whole)
    if whole >= -32:
        return struct.pack(">b", whole)
    for most, mark, form in ((2**7, b"\xd0", ">b"), (2**15, b"\xd1", ">h"), (2**31, b"\xd2", ">i")):
        if whole >= -most:
            return mark + struct.pack(form, whole)
    return b"\xd3" + struct.pack(">q", whole)


class MessageReader:
    """Reads MessagePack as values of Lua.

    Args:
        data: What is read.
        to_table: Makes a Lua table of a list or dict.
    """

    def __init__(self, data: bytes, to_table: ToTable) -> None:
        self._data = data
        self._at = 0
        self._to_table = to_table
        self._sized: tuple[tuple[dict[int, str], Callable[[int], Any]], ...] = (
            ({0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}, self._take),
            ({0xDC: ">H", 0xDD: ">I"}, self._read_array),
            ({0xDE: ">H", 0xDF: ">I"}, self._read_map),
        )

    def read_all(self) -> tuple[Any, ...]:
        """Return all values. Raises ValueError."""
        values = list[Any]()
        while self._at < len(self._data):
            values.append(self._read())
        return tuple(values)

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise ValueError("Missing bytes in input.")
        self._at += count
        return piece

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _read(self) -> Any:
        mark = self._take(1)[0]
        if mark < 0x80:
            return mark
        if mark >= 0xE0:
            return mark - 256
        if mark < 0x90:
            return self._read_map(mark - 0x80)
        if mark < 0xA0:
            return self._read_array(mark - 0x90)
        if mark < 0xC0:
            return self._take(mark - 0xA0)
        if mark in _NUMBERS:
            number = self._unpack(_NUMBERS[mark])
            return float(number) if abs(number) > _EXACT else number
        for marks, read in self._sized:
            if mark in marks:
                return read(self._unpack(marks[mark]))
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        raise ValueError("Bad data format in input.")

    def _read_array(self, size: int) -> Any:
        return self._to_table([self._read() for _ in range(size)])

    def _read_map(self, size: int) -> Any:
        pairs = [(self._read(), self._read()) for _ in range(size)]
        return self._to_table(dict(pairs))


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
