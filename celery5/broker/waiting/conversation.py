"""Waiting talk: what those who wait say on the one connection they share, and how they hear the answers.

The connection speaks RESP3, so it can read keys while it is subscribed. It reads a few at a time: the server
counts it as a subscriber, and closes a subscriber that lets more than 32 MB pile up.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

import msgspec

from celery5.broker.call import Call, Word
from celery5.broker.connection.exchange import PushNotification, ReplyError, pack_commands
from celery5.broker.timing import Timing
from celery5.broker.waiting.waits import ResultWait, ResultWaits

READ_AT_ONCE = 25
SUBSCRIBE_AT_ONCE = 1000

# Seconds after which whatever is still missing is read again: a safety net, and the connection's sign of life.
REREAD_INTERVAL = 5.0

# Channels on which all has been said that there will be. They are left in the next write for something else: one of
# its own would be every third of a lone waiter's.
UNSUBSCRIBE_BATCH = 25


def get_reread_interval(timing: Timing) -> float:
    """The same for connections with these limits."""
    return min(REREAD_INTERVAL, timing.idle_ping)


class ResultWaitProtocol:
    """The state of that conversation. Call `to_send` after each of the others."""

    def __init__(self) -> None:
        self._waiting = ResultWaits()
        # Dicts for their order: sets of strings have another one in each process.
        self._unsubscribed: dict[bytes, None] = {}
        self._unread: dict[bytes, None] = {}
        self._stale: dict[bytes, None] = {}
        self._reading: list[bytes] = []
        # Whether somebody left who has not all he wanted: what comes now would pile up, with nobody to read it.
        self._gave_up = False

    def add(self, wait: ResultWait) -> None:
        """`wait` begins."""
        for key in self._waiting.add(wait):
            self._unread[key] = None
            if key in self._stale:
                # Still subscribed on the server.
                del self._stale[key]
            else:
                self._unsubscribed[key] = None

    def remove(self, wait: ResultWait) -> None:
        """`wait` is over, however it ended."""
        missing = self._waiting.remove(wait)
        self._forget(missing)
        self._gave_up = self._gave_up or bool(missing)

    def receive(self, frames: Iterable[Any]) -> None:
        """Take what has been received, and wake whoever has all he wants.

        Raises `ReplyError` when the server refuses: the connection is of no use then.
        """
        for frame in frames:
            if type(frame) is PushNotification:
                pushed = cast("list[bytes]", frame)
                if pushed[0] == b"message":
                    self._arrive(pushed[1], pushed[2])
            elif type(frame) is ReplyError:
                raise frame
            else:
                keys, self._reading = self._reading, []
                for key, document in zip(keys, frame, strict=False):
                    if document is not None:
                        self._arrive(key, document)
        self._waiting.wake_finished()

    def data_to_send(self) -> bytes:
        """What is to be sent now; nothing most of the time."""
        commands: list[tuple[Word, ...]] = []
        if self._stale and (self._gave_up or self._unsubscribed or len(self._stale) >= self._most_stale):
            commands += _in_chunks("UNSUBSCRIBE", self._stale)
            self._stale = {}
        self._gave_up = False
        if self._unsubscribed:
            commands += _in_chunks("SUBSCRIBE", self._unsubscribed)
            self._unsubscribed = {}
        if self._unread and not self._reading:
            self._reading = list(islice(self._unread, READ_AT_ONCE))
            for key in self._reading:
                del self._unread[key]
            commands.append(("MGET", *self._reading))
        return pack_commands(commands) if commands else b""

    def recheck(self) -> None:
        """Read again whatever is missing."""
        self._unread = dict.fromkeys(self._waiting.keys)

    def reset(self) -> None:
        """There is a new connection: everything still waited for is to be subscribed and read."""
        self._unsubscribed = dict.fromkeys(self._waiting.keys)
        self._unread = dict(self._unsubscribed)
        self._stale = {}
        self._reading = []

    def fail(self, error: BaseException) -> None:
        """Nothing will come any more: everybody gets `error`."""
        self._waiting.fail(error)

    @property
    def is_reply_due(self) -> bool:
        """Whether the server owes an answer."""
        return bool(self._reading)

    @property
    def has_waits(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    @property
    def _most_stale(self) -> int:
        return SUBSCRIBE_AT_ONCE if self._waiting else UNSUBSCRIBE_BATCH

    def _arrive(self, key: bytes, document: bytes) -> None:
        if self._waiting.add_document(key, document):
            self._forget([key])

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._unread.pop(key, None)
            if key in self._unsubscribed:
                del self._unsubscribed[key]
            else:
                self._stale[key] = None


def _in_chunks(command: str, keys: Iterable[bytes]) -> list[tuple[Word, ...]]:
    every = list(keys)
    return [
        (command, *every[start : start + SUBSCRIBE_AT_ONCE])
        for start in range(0, len(every), SUBSCRIBE_AT_ONCE)
    ]


def read_documents(keys: Sequence[str]) -> Call[dict[str, bytes]]:
    """Read the documents that are there now.

    At most `READ_AT_ONCE` keys, or one answer could be very large.
    """

    def reply(raw: Any) -> dict[str, bytes]:
        found = msgspec.convert(raw, list[bytes | None])
        return {key: document for key, document in zip(keys, found, strict=True) if document is not None}

    return Call(("MGET", *keys), reply, repeatable=True)
