"""The exchange of calls for replies, for every driver that uses a connection for one caller at a time.

An exchange is a generator that yields what is to be sent and receives the replies. The blocking and the asyncio
driver differ only in how they send and receive.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

import hiredis
import msgspec
from hiredis import ProtocolError, PushNotification, Reader, ReplyError

from celery5.broker.call import Call, Word
from celery5.broker.translate import (
    ASK_MEMORY,
    describe_memory_refusal,
    is_memory_refusal,
    translate_reply,
    unreadable_reply,
)
from celery5.errors import BrokerError

__all__ = [
    "NEED_DATA",
    "ProtocolError",
    "PushNotification",
    "ReplyError",
    "ReplyParser",
    "pack_command",
    "pack_commands",
]


class _Incomplete:
    def __repr__(self) -> str:
        return "NEED_DATA"


NEED_DATA: Final = _Incomplete()
"""What the parser returns when it needs more bytes."""

# hiredis declares its argument as a tuple of one element.
_pack_command = cast("Callable[[tuple[Word, ...]], bytes]", vars(hiredis)["pack_command"])


LARGE = 8192
"""Bytes of a word from which it is copied once. hiredis copies it three times, each time to new memory."""


def pack_command(words: tuple[Word, ...]) -> bytes:
    """Return one command as bytes to send. Raises TypeError for a word that is not str, bytes, int or float."""
    if [word for word in words if type(word) is bytes and len(word) >= LARGE]:
        return b"".join(_pack_parts(words))
    return _pack_command(words)


def pack_commands(commands: Sequence[tuple[Word, ...]]) -> bytes:
    """Return several commands as bytes to send in one write."""
    return b"".join(map(pack_command, commands))


def _pack_parts(words: tuple[Word, ...]) -> Iterator[bytes]:
    """Yield the parts of a command: each large word as it is, and the words between them as hiredis packs them."""
    yield b"*%d\r\n" % len(words)
    start = 0
    for at, word in enumerate(words):
        if type(word) is bytes and len(word) >= LARGE:
            yield _pack_words(words[start:at])
            yield b"$%d\r\n" % len(word)
            yield word
            yield b"\r\n"
            start = at + 1
    yield _pack_words(words[start:])


def _pack_words(words: tuple[Word, ...]) -> bytes:
    """Return words as they stand in a command, without its beginning."""
    return _pack_command(words).partition(b"\r\n")[2] if words else b""


class ReplyParser:
    """Parses what one connection has received: `feed` bytes, then call `next` until it returns NEED_DATA.

    `next` raises ProtocolError if the bytes are not RESP; the connection cannot be used after that.
    """

    __slots__ = ("feed", "next")

    def __init__(self) -> None:
        reader = Reader(notEnoughData=NEED_DATA, replyError=ReplyError, protocolError=ProtocolError)
        # Looked up once: these two are called for every chunk and every reply.
        self.feed = reader.feed
        self.next: Any = reader.gets


T = TypeVar("T")


class WireRequest(msgspec.Struct, frozen=True):
    """One write of an exchange."""

    packed: bytes
    timeouts: Sequence[float]  # seconds that each of the replies may take
    repeatable: bool  # as in `Call`
    partly_done: bool = False  # an earlier request of the same exchange has done a part of it


def exchange_one(call: Call[T], *, reply_within: float, where: str) -> Generator[WireRequest, list[Any], T]:
    """Perform one call. Returns its decoded reply. Raises BrokerError for an error reply."""
    timeouts = (reply_within + call.blocks,)
    (raw,) = yield WireRequest(pack_command(call.words), timeouts, call.repeatable)
    if type(raw) is ReplyError:
        if is_script_missing(call, raw):
            # It did not run, so this does not repeat it.
            (raw,) = yield WireRequest(pack_command(call.with_script_text), timeouts, call.repeatable)
        if type(raw) is ReplyError:
            raise (yield from _make_error(call, raw, reply_within=reply_within, where=where))
    return read_reply(call, raw, where=where)


def exchange_all(
    calls: Sequence[Call[T]], *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], list[T]]:
    """Perform several calls in one write.

    All of them run. If some are refused, the first error is raised at the end, with `maybe_done` if others ran.
    """
    raws = yield from _exchange_raws(calls, reply_within=reply_within)
    return (yield from _read_replies(calls, raws, reply_within=reply_within, where=where))


def exchange_replicated(
    calls: Sequence[Call[T]], waits: Sequence[Call[int]], *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], tuple[list[T], int | BrokerError]]:
    """Perform calls as `exchange_all` does, and wait until replicas have what they have written.

    All in one exchange, and so on one connection: WAIT knows only what its own connection has written, and after a
    failover another connection may lead to a server that has none of it. If this one is lost, all is sent again.

    Args:
        calls: The calls. Each may be repeated.
        waits: A write, and the call of WAIT.

    Returns:
        The decoded replies to `calls`, and how many replicas have all, or why that is not known.
    """
    raws = yield from _exchange_raws([*calls, *waits], reply_within=reply_within)
    values = yield from _read_replies(calls, raws[: len(calls)], reply_within=reply_within, where=where)
    count: int | BrokerError = 0
    for wait, raw in zip(waits, raws[len(calls) :], strict=True):
        if type(raw) is ReplyError:
            return values, translate_reply(str(raw), where=where)
        count = read_reply(wait, raw, where=where)
    return values, count


def _read_replies(
    calls: Sequence[Call[T]], raws: Sequence[Any], *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], list[T]]:
    """Return the decoded replies. Raises the first error, with `maybe_done` if other calls have run."""
    for call, raw in zip(calls, raws, strict=True):
        if type(raw) is ReplyError:
            error = yield from _make_error(call, raw, reply_within=reply_within, where=where)
            if any_succeeded(raws):
                error.mark_maybe_done()
            raise error
    return [read_reply(call, raw, where=where) for call, raw in zip(calls, raws, strict=True)]


def exchange_each(
    calls: Sequence[Call[T]], *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], list[T | BrokerError]]:
    """Perform the calls of several callers in one write; return for each its decoded reply, or its error."""
    raws = yield from _exchange_raws(calls, reply_within=reply_within)
    replies: list[T | BrokerError] = []
    for call, raw in zip(calls, raws, strict=True):
        if type(raw) is ReplyError:
            replies.append((yield from _make_error(call, raw, reply_within=reply_within, where=where)))
            continue
        try:
            replies.append(read_reply(call, raw, where=where))
        except BrokerError as error:
            replies.append(error)
    return replies


def _exchange_raws(
    calls: Sequence[Call[Any]], *, reply_within: float
) -> Generator[WireRequest, list[Any], list[Any]]:
    """Send calls in one write, and those again whose script the server does not know; return the raw replies.

    If the last call waits for replicas, that is done again, too: it has not waited for what comes after it.
    """
    raws = yield WireRequest(
        pack_commands([call.words for call in calls]),
        [reply_within + call.blocks for call in calls],
        all(call.repeatable for call in calls),
    )
    missing = [at for at, raw in enumerate(raws) if is_script_missing(calls[at], raw)]
    if missing:
        again = {at for at in range(missing[0], len(calls)) if calls[-1].blocks and calls[at].script is None}
        missing = sorted(again.union(missing))
        resent = [calls[at] for at in missing]
        answers = yield WireRequest(
            pack_commands([call.with_script_text for call in resent]),
            [reply_within + call.blocks for call in resent],
            all(call.repeatable for call in resent),
            partly_done=any_succeeded(raws),
        )
        for at, raw in zip(missing, answers, strict=True):
            raws[at] = raw
    return raws


def _make_error(
    call: Call[Any], raw: ReplyError, *, reply_within: float, where: str
) -> Generator[WireRequest, list[Any], BrokerError]:
    """Return the error for an error reply. A server that is full is asked how full it is."""
    error = translate_reply(str(raw), where=where, script=call.script)
    if not is_memory_refusal(error):
        return error
    (info,) = yield WireRequest(pack_command(ASK_MEMORY), (reply_within,), repeatable=True)
    return describe_memory_refusal(error, info)


def read_reply(call: Call[T], raw: Any, *, where: str) -> T:
    """Return the value of a reply. Raises UnreadableReply for every error of the call's decoder."""
    try:
        return call.decode(raw)
    except Exception as error:
        raise unreadable_reply(call, error, where=where) from error


def is_script_missing(call: Call[Any], raw: object) -> bool:
    """Whether the server does not know the script of a call."""
    return type(raw) is ReplyError and call.script is not None and str(raw).startswith("NOSCRIPT")


def any_succeeded(raws: Sequence[Any]) -> bool:
    """Return whether one of these replies is not an error, so that its command has run."""
    return any(type(raw) is not ReplyError for raw in raws)


class ResendAllowed(Exception):
    """Raised inside a driver: the attempt failed, and a second one on a new connection is allowed.

    With `maybe_done` the failed attempt may have run: every later error of the exchange has `maybe_done` then.
    """

    def __init__(self, *, maybe_done: bool) -> None:
        self.maybe_done = maybe_done
        super().__init__()


def may_resend(request: WireRequest, *, sent: bool, last: bool) -> bool:
    """Whether a failed request may be sent once more: it is repeatable, or has certainly not run."""
    return not last and (request.repeatable or not maybe_done(request, sent=sent))


def maybe_done(request: WireRequest, *, sent: bool) -> bool:
    """Whether a failed request may have run: a single command that was not sent whole has not; of several, some may."""
    return sent or len(request.timeouts) > 1
