"""Wire: commands to bytes and bytes to replies, without any input or output (sans-IO, over hiredis).

Floor: broker. Reads: nothing. Writes: nothing.

Replies are raw: bytes, int, None and lists of them. Errors are values of type `ReplyError`, also inside
lists. Frames that the server pushes unasked (RESP3) are of type `PushNotification`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import hiredis
from hiredis import ProtocolError, PushNotification, Reader, ReplyError

from celery5.broker.call import Word

__all__ = [
    "NEED_DATA",
    "ProtocolError",
    "PushNotification",
    "ReplyParser",
    "ReplyError",
    "pack_command",
    "pack_commands",
]


class _NotYet:
    def __repr__(self) -> str:
        return "NOT_YET"


NEED_DATA: Final = _NotYet()

# hiredis declares a tuple of one element.
_pack_command = cast("Callable[[tuple[Word, ...]], bytes]", vars(hiredis)["pack_command"])


def pack_command(words: tuple[Word, ...]) -> bytes:
    """One command as the bytes to send. Raises TypeError for a word that is not str, bytes, int or float."""
    return _pack_command(words)


def pack_commands(commands: Sequence[tuple[Word, ...]]) -> bytes:
    """Several commands as the bytes to send in one go."""
    return b"".join(map(_pack_command, commands))


class ReplyParser:
    """The replies in what one connection has received: `feed` bytes, then call `next` until it gives
    `NOT_YET`.

    `next` raises `ProtocolError` when the bytes are no RESP; the connection cannot be used after that.
    """

    __slots__ = ("feed", "next")

    def __init__(self) -> None:
        reader = Reader(notEnoughData=NEED_DATA, replyError=ReplyError, protocolError=ProtocolError)
        # Bound once: these two are called for every chunk and every reply.
        self.feed = reader.feed
        self.next: Any = reader.gets
