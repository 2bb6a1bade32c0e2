"""Replies of the server in memory, as values, and as bytes of RESP 2 and 3."""

import math
from typing import Any


class Status(str):
    """A simple string, such as OK."""

    __slots__ = ()


class CommandError(Exception):
    """An error reply. The first word of its text is the code."""


class Pairs(list[tuple[Any, Any]]):
    """Pairs of which RESP 3 makes a list each, and RESP 2 one flat list."""

    __slots__ = ()


class StreamEntries(dict[bytes, Any]):
    """Entries by the keys of their streams: RESP 2 has a list of pairs for them, RESP 3 a map."""

    __slots__ = ()

    def list_pairs(self) -> list[list[Any]]:
        """Return a list of pairs."""
        return [[key, entries] for key, entries in self.items()]


class Push(list[Any]):
    """What the server sends by itself: a message on a channel, or that a channel is subscribed."""

    __slots__ = ()


OK = Status("OK")


def format_number(value: float) -> bytes:
    """Return a number as Redis writes scores."""
    if math.isinf(value):
        return b"inf" if value > 0 else b"-inf"
    if value == int(value) and abs(value) < 1e17:
        return b"%d" % value
    return repr(value).encode()


def flatten(pairs: Any) -> list[Any]:
    """Return pairs as one list."""
    return [item for pair in pairs for item in pair]


def encode(value: Any, resp: int) -> bytes:
    """Return a reply as bytes.

    Args:
        value: bytes, int, float, None, Status, CommandError, Pairs, Push, or a list, dict or set of them.
        resp: The version of the protocol, 2 or 3.
    """
    parts: list[bytes] = []
    _encode(value, resp, parts.append)
    return b"".join(parts)


def _encode(value: Any, resp: int, write: Any) -> None:
    kind = value.__class__
    if kind is bytes:
        write(b"$%d\r\n%s\r\n" % (len(value), value))
    elif kind is int:
        write(b":%d\r\n" % value)
    elif value is None:
        write(b"_\r\n" if resp == 3 else b"$-1\r\n")
    elif kind is Status:
        write(b"+%s\r\n" % value.encode())
    elif kind is CommandError:
        write(b"-%s\r\n" % str(value).replace("\r", " ").replace("\n", " ").encode())
    elif kind is float:
        text = format_number(value)
        write(b",%s\r\n" % text if resp == 3 else b"$%d\r\n%s\r\n" % (len(text), text))
    else:
        _encode_many(value, kind, resp, write)


def _encode_many(value: Any, kind: type, resp: int, write: Any) -> None:
    if kind is StreamEntries and resp == 2:
        value, kind = value.list_pairs(), list
    if kind in {dict, StreamEntries}:
        write(b"%%%d\r\n" % len(value) if resp == 3 else b"*%d\r\n" % (2 * len(value)))
        items = flatten(value.items())
    elif kind is Pairs and resp == 2:
        items = flatten(value)
        write(b"*%d\r\n" % len(items))
    else:
        items = list(value)
        mark = b"*" if resp == 2 else b">" if kind is Push else b"~" if kind is set else b"*"
        write(b"%s%d\r\n" % (mark, len(items)))
    for item in items:
        _encode(item, resp, write)
