"""Listener: takes jobs from producers over a socket, and says that it has them once they are stored (C79, C81).

Floor: services. Reads: frames from clients. Writes: their jobs into the stores; answers.

What a client may take is bounded: connections, the size of a frame, the time from a frame's first byte to its last, the
time for reading an answer, and the bytes of unfinished frames of all clients together. Whoever keeps to that may keep
its connection for as long as it likes. A client that does not costs itself its connection, and nobody else anything.
"""

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio

from celery5.errors import BacklogFull, CeleryError, Corrupt
from celery5.log import Log
from celery5.protocol.metrics import Family, counter, gauge
from celery5.protocol.parcels import (
    VERSION,
    Answer,
    Frames,
    FromDaemon,
    Hand,
    Hello,
    Parcel,
    Refused,
    Told,
    TooLarge,
    Welcome,
    client_word,
    fault,
    frame,
    frame_limit,
)
from celery5.services.accepting import accepted
from celery5.services.doors import Doors
from celery5.services.messages_store import MessagesStore

CONNECTIONS = 512
"""Clients at once; others are told to come again."""
HELLO_LIMIT = 5.0
"""Seconds from a connection's beginning to the end of its first word, TLS included."""
FRAME_LIMIT = 10.0
"""Seconds from a frame's first byte to its last."""
ANSWER_LIMIT = 10.0
"""Seconds that a client has to read an answer."""
STORE_LIMIT = 30.0
"""Seconds from a whole frame to the end of the answer, after which the client is left without one."""
UNFINISHED = 128 * 1024 * 1024
"""Bytes of frames that are not there as a whole yet, of all clients together."""
CHUNK = 65536

Broken = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class _Left(Exception):
    """This connection is over."""


class Listener:
    """Serves producers of the application named `app` at the `doors`. `broker_of` says to which of the `stores`
    a queue's messages go."""

    def __init__(
        self,
        *,
        app_name: str,
        doors: Doors,
        stores: Mapping[str, MessagesStore],
        broker_of: Callable[[str], str],
        message_limit: int,
        log: Log,
        most_connections: int = CONNECTIONS,
    ) -> None:
        self._app = app_name
        self._doors = doors
        self._stores = stores
        self._broker_of = broker_of
        self._message_limit = message_limit
        self._frame_limit = frame_limit(message_limit)
        self._log = log
        self._most = most_connections
        self._clients = 0
        self._unfinished = 0
        self._refused = 0
        self._groups = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. What was read as a whole by then is stored and answered."""
        listeners = await self._doors.listeners()
        try:
            context = self._doors.context()
            async with trio.open_nursery() as nursery:
                for each in listeners:
                    nursery.start_soon(self._accept, each, context, nursery)
                task_status.started()
        finally:
            for each in listeners:
                with trio.CancelScope(shield=True):
                    await each.aclose()
            self._doors.close()

    async def _accept(
        self, listener: trio.SocketListener, context: ssl.SSLContext | None, nursery: trio.Nursery
    ) -> None:
        while True:
            nursery.start_soon(self._serve, await accepted(listener), context)

    # ---- one client

    async def _serve(self, raw: trio.SocketStream, context: ssl.SSLContext | None) -> None:
        """One connection, whatever comes on it."""
        self._clients += 1
        stream: trio.abc.Stream = raw
        try:
            if context is not None and raw.socket.family != trio.socket.AF_UNIX:
                stream = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
            with suppress(_Left, *Broken):
                await _Conversation(self, stream, secure=stream is not raw).go_on()
        finally:
            self._clients -= 1
            await trio.aclose_forcefully(stream)

    @property
    def is_crowded(self) -> bool:
        """Whether there are more clients than there is room for."""
        return self._clients > self._most

    def welcome(self, word: Hello) -> Refused | None:
        """Why a client is not taken, if it is not."""
        if word.version != VERSION:
            return Refused(
                "unfit", f"it speaks version {VERSION} of the words, and the client {word.version}"
            )
        if word.app != self._app:
            return Refused(
                "unfit", f"it publishes for the application {self._app!r}, and not for {word.app[:200]!r}"
            )
        return None

    def greeting(self) -> Welcome:
        """The first word to a client that is taken."""
        waiting = sum(each.size for each in self._stores.values())
        return Welcome(waiting=waiting, trouble="; ".join(_troubles(self._stores)))

    def frames(self) -> Frames:
        """What takes a client's bytes."""
        return Frames(self._frame_limit)

    def unfinished(self, more: int) -> bool:
        """So many bytes of frames more, or less, are kept; gives whether there is room for them."""
        self._unfinished += more
        return self._unfinished <= UNFINISHED

    def refused(self, why: str) -> None:
        """A client was sent away."""
        self._refused += 1
        self._log.event("listener:refused", "warning", why=why)

    # ---- what is handed over

    async def take(self, word: Hand) -> Told:
        """Store the groups, in their order: those that can be together, so that they share one wait for the disk."""
        self._groups += len(word.groups)
        answers: list[Answer | None] = [self._fault(group) for group in word.groups]
        fit = [n for n, answer in enumerate(answers) if answer is None]
        together = await self._stored([each for n in fit for each in word.groups[n]]) if fit else Answer()
        for n in fit:
            # Where there is no room for all, there may be for some.
            alone = together.code and len(fit) > 1
            answers[n] = await self._stored(word.groups[n]) if alone else together
        return Told(tuple(answer or Answer() for answer in answers))

    def _fault(self, group: Sequence[Parcel]) -> Answer | None:
        wrong = next((wrong for each in group if (wrong := fault(each, self._message_limit))), None)
        if wrong is None:
            try:
                for each in group:
                    self._broker_of(each.queue)
            except CeleryError as error:  # what is said of its queue contradicts itself
                return Answer("unfit", str(error))
        return wrong

    async def _stored(self, parcels: Sequence[Parcel]) -> Answer:
        """Store these: where they are for several brokers, what is for one of them is whole, or not there at all."""
        by_broker: dict[str, list[Parcel]] = {}
        for each in parcels:
            by_broker.setdefault(self._broker_of(each.queue), []).append(each)
        firmly, some = True, False
        for broker, own in by_broker.items():
            store = self._stores[broker]
            try:
                firmly = await store.put(own) and firmly
            except BacklogFull as error:
                return Answer("full", str(error), maybe=some)
            some = True
        return Answer(firmly=firmly, why="" if firmly else "; ".join(_troubles(self._stores)))

    # ---- how it does

    def conditions(self) -> Mapping[str, str]:
        """There is room for clients."""
        return {"listener": "too many clients at once" if self._clients > self._most else ""}

    def families(self) -> Iterable[Family]:
        """Clients, and what they did."""
        yield gauge("celery5_publisher_clients", "Connections of producers.", float(self._clients))
        yield counter("celery5_publisher_calls_total", "Calls of producers.", float(self._groups))
        yield counter(
            "celery5_publisher_sent_away_total", "Connections that were refused.", float(self._refused)
        )


def _troubles(stores: Mapping[str, MessagesStore]) -> Iterable[str]:
    return (each.trouble for each in stores.values() if each.trouble)


class _Conversation:
    """One client, from its first byte to its last."""

    def __init__(self, listener: Listener, stream: trio.abc.Stream, *, secure: bool) -> None:
        self._listener = listener
        self._secure = secure
        self._stream = stream
        self._frames = listener.frames()
        self._counted = 0

    async def go_on(self) -> None:
        """Until the client has gone, or is sent away. Raises _Left, and what a broken connection raises."""
        try:
            with trio.move_on_after(HELLO_LIMIT) as greeting:
                await self._greet()
            if greeting.cancelled_caught:
                self._listener.refused(f"a client took longer than {HELLO_LIMIT:g} s to say hello")
                raise _Left
            while True:
                word = await self._word()
                if isinstance(word, Hello):
                    await self._send_away(Refused("unfit", "it has been greeted already"))
                    continue
                with trio.move_on_after(STORE_LIMIT, shield=True):  # what is stored is answered for
                    await self._say(await self._listener.take(word))
                    continue
                raise _Left
        finally:
            self._count(0)

    async def _greet(self) -> None:
        if self._secure:
            stream: Any = self._stream
            await stream.do_handshake()
        if self._listener.is_crowded:
            await self._send_away(Refused("unavailable", "there are too many clients at once"))
        word = await self._word()
        refusal = (
            self._listener.welcome(word)
            if isinstance(word, Hello)
            else Refused("unfit", "it does not say hello")
        )
        if refusal is not None:
            await self._send_away(refusal)
        await self._say(self._listener.greeting())

    async def _word(self) -> Hello | Hand:
        """The next word. Between two of them a client may be silent; within one it may not."""
        try:
            body = self._frames.next()
            if body is None and not len(self._frames):
                await self._receive()
                body = self._frames.next()
            with trio.move_on_after(FRAME_LIMIT):
                while body is None:
                    await self._receive()
                    body = self._frames.next()
            if body is None:
                await self._send_away(Refused("unfit", f"a frame took longer than {FRAME_LIMIT:g} s"))
                raise _Left
            self._count(len(self._frames))
            return client_word(body)
        except TooLarge as error:
            await self._send_away(Refused("too-large", str(error)))
        except Corrupt as error:
            await self._send_away(Refused("unfit", str(error)))
        raise _Left

    async def _receive(self) -> None:
        received = bytes(await self._stream.receive_some(CHUNK))
        if not received:
            raise _Left
        self._frames.feed(received)
        if not self._count(len(self._frames)):
            await self._send_away(Refused("unavailable", "too much is on its way at once"))

    def _count(self, size: int) -> bool:
        more, self._counted = size - self._counted, size
        return self._listener.unfinished(more)

    async def _send_away(self, refusal: Refused) -> None:
        """Say why, and end the connection."""
        self._listener.refused(refusal.why)
        with trio.move_on_after(1.0), suppress(*Broken):
            await self._say(refusal)
            if isinstance(self._stream, trio.SocketStream):
                await self._stream.send_eof()
                while await self._stream.receive_some(CHUNK):  # else the answer may be thrown away unread
                    pass
        raise _Left

    async def _say(self, word: FromDaemon) -> None:
        with trio.move_on_after(ANSWER_LIMIT) as limit:
            await self._stream.send_all(frame(word))
        if limit.cancelled_caught:
            self._listener.refused("a client does not read its answers")
            raise _Left
