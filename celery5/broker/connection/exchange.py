"""Exchange: what calls send and what their replies come to, once for every driver that has a connection to itself.

A generator that yields what is to be sent and is sent back what was received. The blocking driver and the
asyncio one only differ in how they do that.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import hiredis
from hiredis import ProtocolError, PushNotification, Reader, ReplyError

from celery5.broker.call import Call, Word
from celery5.broker.translate import translate_reply, unreadable_reply

__all__ = [
    "NEED_DATA",
    "ProtocolError",
    "PushNotification",
    "ReplyError",
    "ReplyParser",
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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One write: the bytes, and for each of the replies how many seconds it may take.

    `repeatable` as in `Call`. `partly_done`: an earlier trip of the same exchange has done a part of it.
    """

    packed: bytes
    timeouts: Sequence[float]
    repeatable: bool
    partly_done: bool = False


def exchange_one(call: Call[T], *, reply_within: float, where: str) -> Generator[WireRequest, list[Any], T]:
    """Perform one call. Ends with its value, or raises the error that the server's refusal means."""
    timeouts = (reply_within + call.blocks,)
    (raw,) = yield WireRequest(pack_command(call.words), timeouts, call.repeatable)
    if type(raw) is ReplyError:
        if is_script_missing(call, raw):
            # It did not run, so this is no repetition.
            (raw,) = yield WireRequest(pack_command(call.with_script_text), timeouts, call.repeatable)
        if type(raw) is ReplyError:
            raise translate_reply(str(raw), where=where)
    return read_reply(call, raw, where=where)


def exchange_all(
    calls: Sequence[Call[T]], *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], list[T]]:
    """Perform several calls in one write.

    All of them run; when some are refused, the first refusal is raised at the end, with `maybe_done` when others ran.
    """
    raws = yield WireRequest(
        pack_commands([call.words for call in calls]),
        [reply_within + call.blocks for call in calls],
        all(call.repeatable for call in calls),
    )
    unknown = [at for at, raw in enumerate(raws) if is_script_missing(calls[at], raw)]
    if unknown:
        again = [calls[at] for at in unknown]
        answers = yield WireRequest(
            pack_commands([call.with_script_text for call in again]),
            [reply_within + call.blocks for call in again],
            all(call.repeatable for call in again),
            partly_done=any_succeeded(raws),
        )
        for at, raw in zip(unknown, answers, strict=True):
            raws[at] = raw
    for raw in raws:
        if type(raw) is ReplyError:
            error = translate_reply(str(raw), where=where)
            if any_succeeded(raws):
                error.mark_maybe_done()
            raise error
    return [read_reply(call, raw, where=where) for call, raw in zip(calls, raws, strict=True)]


def read_reply(call: Call[T], raw: Any, *, where: str) -> T:
    """Return the value of a reply. Raises UnreadableReply for every error of the call's decoder."""
    try:
        return call.decode(raw)
    except Exception as error:
        raise unreadable_reply(call, error, where=where) from error


def is_script_missing(call: Call[Any], raw: object) -> bool:
    """Whether the server wants the script in full."""
    return type(raw) is ReplyError and call.script is not None and str(raw).startswith("NOSCRIPT")


def any_succeeded(raws: Sequence[Any]) -> bool:
    """Return whether one of these replies is not an error, so that its command has run."""
    return any(type(raw) is not ReplyError for raw in raws)


class ResendAllowed(Exception):
    """Inside a driver: the attempt failed, and a second one on a new connection is allowed.

    `maybe_done`: the failed attempt may have run. Then every later error of the exchange has `maybe_done`, too.
    """

    def __init__(self, *, maybe_done: bool) -> None:
        self.maybe_done = maybe_done
        super().__init__()


def may_resend(trip: WireRequest, *, sent: bool, last: bool) -> bool:
    """Whether a trip that broke may be made once more: it may be repeated, or certainly did not run."""
    return not last and (trip.repeatable or not maybe_done(trip, sent=sent))


def maybe_done(trip: WireRequest, *, sent: bool) -> bool:
    """Whether a broken trip may have run:

    of a single command that did not leave whole nothing does; of several, some may.
    """
    return sent or len(trip.timeouts) > 1
