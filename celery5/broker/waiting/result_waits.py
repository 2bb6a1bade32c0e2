"""Which callers wait for which result documents, and the protocol of the one connection they share: without any I/O.

A document is stored under a key and announced on the channel of the same name. The first caller subscribes, then reads
the key, then listens: so no announcement is missed. A document may arrive twice.

The connection speaks RESP3, so it can read keys while it is subscribed. It reads a few at a time: the server treats
it as a subscriber, and closes a subscriber with more than 32 MB of pending output.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import msgspec

from celery5.broker.call import Call, Word
from celery5.broker.connection.exchange import PushNotification, ReplyError, pack_commands
from celery5.broker.driver import StopCondition
from celery5.broker.timing import Timing
from celery5.protocol.hash_slots import get_key_slot, group_by_slot

READ_AT_ONCE = 25
SUBSCRIBE_AT_ONCE = 1000

# Seconds after which missing documents are read again: a safety net, which also shows that the connection works.
REREAD_INTERVAL = 5.0

# Channels that will announce nothing more. They are unsubscribed together with the next other command: a separate write
# would be every third one of a single caller.
UNSUBSCRIBE_BATCH = 25


def get_reread_interval(timing: Timing) -> float:
    """Return the seconds after which connections with this timing read missing documents again."""
    return min(REREAD_INTERVAL, timing.idle_ping)


class ResultWait:
    """The documents that one caller waits for."""

    __slots__ = ("enough", "error", "finished", "found", "missing", "wake")

    def __init__(
        self, keys: Iterable[str], *, enough: StopCondition | None, wake: Callable[[], None]
    ) -> None:
        # Keys whose documents have not arrived: as sent to Redis, and as the caller passed them.
        self.missing = {key.encode(): key for key in keys}
        # The documents that have arrived, by key.
        self.found: dict[str, bytes] = {}
        # Returns whether these documents end the wait.
        self.enough = enough
        # Called once, when the wait is finished.
        self.wake = wake
        # The error that ended the wait.
        self.error: BaseException | None = None
        # Whether all documents have arrived, `enough` has returned true, or there is an `error`.
        self.finished = not self.missing

    def get_documents(self, outage: BaseException | None) -> dict[str, bytes]:
        """Return the documents, or raise the error that ended the wait. An unfinished wait raises `outage`, if any."""
        if not self.finished and outage is not None:
            raise outage
        if self.error is not None:
            raise self.error
        return self.found


class ResultWaits:
    """All waits on one connection."""

    def __init__(self) -> None:
        self._waits: dict[bytes, list[ResultWait]] = {}
        self._touched: dict[ResultWait, None] = {}

    def add(self, wait: ResultWait) -> list[bytes]:
        """Add a wait; return its keys that no earlier wait has."""
        new_keys: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key)
            if waits is None:
                self._waits[key] = [wait]
                new_keys.append(key)
            else:
                waits.append(wait)
        return new_keys

    def remove(self, wait: ResultWait) -> list[bytes]:
        """Remove a wait, however it ended; return its keys that no remaining wait has."""
        unused_keys: list[bytes] = []
        for key in wait.missing:
            waits = self._waits.get(key, [])
            if wait in waits:
                waits.remove(wait)
                if not waits:
                    del self._waits[key]
                    unused_keys.append(key)
        self._touched.pop(wait, None)
        return unused_keys

    def add_document(self, key: bytes, document: bytes) -> bool:
        """Add a document to the waits for it. Return False when there are none, or it had arrived before."""
        waits = self._waits.get(key)
        if waits is None:
            return False
        for wait in waits:
            # In this order, with the key last: if this is interrupted, the call can be repeated.
            self._touched[wait] = None
            if key in wait.missing:
                wait.found[wait.missing[key]] = document
                del wait.missing[key]
        del self._waits[key]
        return True

    def wake_finished(self) -> bool:
        """Finish and wake the waits that have enough documents; return whether there were any.

        Called once for all documents of one read: `enough` may be slow when there are many.
        """
        touched, self._touched = self._touched, {}
        has_finished = False
        for wait in touched:
            if wait.finished:
                continue
            try:
                wait.finished = not wait.missing or (wait.enough is not None and wait.enough(wait.found))
            except Exception as error:
                wait.error = error
                wait.finished = True
            if wait.finished:
                has_finished = True
                wait.wake()
        return has_finished

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`."""
        for wait in {wait: None for waits in self._waits.values() for wait in waits}:
            if not wait.finished:
                wait.error = error
                wait.finished = True
                wait.wake()

    @property
    def keys(self) -> list[bytes]:
        """All keys that are waited for."""
        return list(self._waits)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waits

    def __bool__(self) -> bool:
        return bool(self._waits)


class ResultWaitProtocol:
    """The state of the connection. Call `data_to_send` after each other method.

    Args:
        by_slot: Whether it is one to a node of a cluster, which reads keys of one slot at a time.
    """

    def __init__(self, *, by_slot: bool = False) -> None:
        self._by_slot = by_slot
        # Whether the server has sharded channels: SSUBSCRIBE in place of SUBSCRIBE.
        self._is_sharded = False
        self._waiting = ResultWaits()
        # Dicts for their order: the order of a set of strings differs from process to process.
        self._unsubscribed: dict[bytes, None] = {}
        self._unread: dict[bytes, None] = {}
        self._stale: dict[bytes, None] = {}
        self._reading: list[bytes] = []
        # Keys that are waited for again while still subscribed. What was announced in between may be old: a retried run
        # and a replayed dead letter end once more. So announcements count only when the document was read.
        self._doubted: set[bytes] = set()
        # Whether a caller left before its documents arrived: these would pile up unread.
        self._gave_up = False

    def add(self, wait: ResultWait) -> None:
        """Add a wait."""
        for key in self._waiting.add(wait):
            self._unread[key] = None
            if key in self._stale:
                # Still subscribed on the server.
                del self._stale[key]
                self._doubted.add(key)
            else:
                self._unsubscribed[key] = None

    def remove(self, wait: ResultWait) -> None:
        """Remove a wait, however it ended."""
        missing = self._waiting.remove(wait)
        self._forget(missing)
        self._gave_up = self._gave_up or bool(missing)

    def receive(self, frames: Iterable[Any]) -> None:
        """Take the frames that were received, and wake the callers that have enough documents.

        Raises:
            ReplyError: The server refuses. The connection cannot be used any more.
        """
        for frame in frames:
            if type(frame) is PushNotification:
                notification = cast("list[bytes]", frame)
                kind, channel = notification[0], notification[1]
                if kind in (b"message", b"smessage") and channel not in self._doubted:
                    self._arrive(channel, notification[2])
                elif kind == b"sunsubscribe":
                    self._note_unsubscribed(channel)
            elif type(frame) is ReplyError:
                raise frame
            else:
                keys, self._reading = self._reading, []
                self._doubted.difference_update(keys)
                for key, document in zip(keys, frame, strict=False):
                    if document is not None:
                        self._arrive(key, document)
        self._waiting.wake_finished()

    def data_to_send(self) -> bytes:
        """Return the bytes to send now; usually none."""
        commands: list[tuple[Word, ...]] = []
        if self._stale and (self._gave_up or self._unsubscribed or len(self._stale) >= self._most_stale):
            commands += self._in_chunks("UNSUBSCRIBE", self._stale)
            self._stale = {}
        self._gave_up = False
        if self._unsubscribed:
            commands += self._in_chunks("SUBSCRIBE", self._unsubscribed)
            self._unsubscribed = {}
        if self._unread and not self._reading:
            self._reading = list(islice(self._select_readable(), READ_AT_ONCE))
            for key in self._reading:
                del self._unread[key]
            commands.append(("MGET", *self._reading))
        return pack_commands(commands) if commands else b""

    def recheck(self) -> None:
        """Read all missing documents again."""
        self._unread = dict.fromkeys(self._waiting.keys)

    def reset(self, *, has_sharded_channels: bool = False) -> None:
        """Subscribe to and read all missing documents on a new connection. Its server may have sharded channels."""
        self._is_sharded = self._by_slot and has_sharded_channels
        self._unsubscribed = dict.fromkeys(self._waiting.keys)
        self._unread = dict(self._unsubscribed)
        self._stale = {}
        self._reading = []
        self._doubted = set()

    def fail(self, error: BaseException) -> None:
        """End all waits with `error`."""
        self._waiting.fail(error)

    @property
    def is_reply_due(self) -> bool:
        """Whether a reply of the server is outstanding."""
        return bool(self._reading)

    @property
    def has_waits(self) -> bool:
        """Whether there are any waits."""
        return bool(self._waiting)

    def split_for_reading(self, keys: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the keys that may be read together, in parts of at most `READ_AT_ONCE`."""
        for group in group_by_slot(keys).values() if self._by_slot else (keys,):
            for start in range(0, len(group), READ_AT_ONCE):
                yield group[start : start + READ_AT_ONCE]

    def _note_unsubscribed(self, key: bytes) -> None:
        """Subscribe again to a channel that somebody waits for: its slot has moved, and the reply names the new node.

        After an unsubscription of our own, with a new wait since, this does no harm.
        """
        if key in self._waiting:
            self._unsubscribed[key] = None
            self._unread[key] = None

    def _in_chunks(self, command: str, keys: Iterable[bytes]) -> list[tuple[Word, ...]]:
        if not self._is_sharded:
            return _in_chunks(command, list(keys))
        return [part for slot in group_by_slot(keys).values() for part in _in_chunks(f"S{command}", slot)]

    def _select_readable(self) -> Iterable[bytes]:
        """Return the keys that may be read together: in a cluster those of the first one's slot."""
        if not self._by_slot:
            return self._unread
        slot = get_key_slot(next(iter(self._unread)))
        return (key for key in self._unread if get_key_slot(key) == slot)

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


def _in_chunks(command: str, keys: Sequence[bytes]) -> list[tuple[Word, ...]]:
    return [
        (command, *keys[start : start + SUBSCRIBE_AT_ONCE])
        for start in range(0, len(keys), SUBSCRIBE_AT_ONCE)
    ]


def read_documents(keys: Sequence[str]) -> Call[dict[str, bytes]]:
    """Return a call that reads documents, of at most `READ_AT_ONCE` keys: a reply could be very large otherwise."""

    def reply(raw: Any) -> dict[str, bytes]:
        documents = msgspec.convert(raw, list[bytes | None])
        return {key: document for key, document in zip(keys, documents, strict=True) if document is not None}

    return Call(("MGET", *keys), reply, repeatable=True)
