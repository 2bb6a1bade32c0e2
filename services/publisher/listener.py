"""Listener: accept jobs from producers over a socket, and acknowledge them once they are stored.

What a client may use is bounded: connections, the size and contents of a frame, the time from a frame's first
byte to its last, the time for reading an answer, and the bytes of unfinished frames of all clients together. A
client that exceeds a limit loses its connection; others do not notice. A connection that has not yet sent
hello, and its certificate if one is required, is unidentified. Unidentified connections have separate places,
so that they cannot keep producers out. When all places are taken, the connection that was idle for longest is
closed; its client reconnects when it has something to send.
"""

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any

import trio

from celery5.errors import BacklogFull, CeleryError, Corrupt
from celery5.logs.log import Log
from celery5.protocol.health.metrics import MetricFamily, make_counter, make_gauge
from celery5.protocol.publisher.frames import (
    MAX_HELLO_BYTES,
    VERSION,
    ClientHello,
    ConnectionRefusal,
    DaemonMessage,
    FrameReader,
    FrameTooLarge,
    GroupReply,
    JobMessage,
    PublishReply,
    PublishRequest,
    Welcome,
    decode_client_message,
    encode_frame,
    find_fault,
    get_frame_limit,
)
from celery5.services.publisher.messages_store import MessagesStore
from celery5.services.publisher.sockets import PublisherSockets

RETRY_DELAY = 0.1
"""Seconds before accepting is tried again."""


async def accept_connection(listener: trio.SocketListener) -> trio.SocketStream:
    """Return the next connection. Wait and try again after transient errors, such as too many open files."""
    while True:
        try:
            return await listener.accept()
        except OSError:
            await trio.sleep(RETRY_DELAY)


MAX_CLIENTS = 512
"""The most clients at once: connections that have sent hello."""
MAX_UNIDENTIFIED = 64
"""The most unidentified connections at once, for TCP and for unix sockets each."""
MESSAGES_PER_TURN = 500
"""Messages that are read before other connections have their turn."""
LOG_PERIOD = 10.0
"""Seconds between two log lines about connections that were closed to make space."""
HELLO_LIMIT = 5.0
"""Seconds from the start of a connection to the end of its first message, TLS included."""
FRAME_LIMIT = 10.0
"""Seconds from a frame's first byte to its last."""
ANSWER_LIMIT = 10.0
"""Seconds that a client has to read an answer."""
STORE_LIMIT = 30.0
"""Seconds from a complete frame to the end of the answer; then the client is left without one."""
MAX_UNFINISHED_BYTES = 128 * 1024 * 1024
"""The most bytes of unfinished frames, of all clients together."""
CHUNK_BYTES = 65536

CONNECTION_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class _Left(Exception):
    """The connection is over."""


class _Places:
    """The open connections.

    Each begins unidentified, of a `kind` (unix or TCP) and from a `host`, and becomes a client when it has sent
    hello. `dropped` counts connections that were closed to make space.
    """

    def __init__(self, clients: int, strangers: int) -> None:
        self._most = clients
        self._most_strangers = strangers
        self._clients: set[_Conversation] = set()
        self._idle: dict[_Conversation, None] = {}  # longest idle first
        self._strangers: dict[str, dict[str, dict[_Conversation, None]]] = {}
        self.dropped = 0

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    @property
    def strangers(self) -> int:
        """Return the number of connections that have not sent hello yet."""
        return sum(len(held) for hosts in self._strangers.values() for held in hosts.values())

    @property
    def is_crowded(self) -> bool:
        """Return whether there is no place for another client: all are taken, and none is idle."""
        return len(self._clients) >= self._most and not self._idle

    def came(self, who: "_Conversation") -> None:
        """Add a new, unidentified connection.

        When there is no place, close the oldest unidentified connection of the host that has most of them: so a
        host can only displace its own.
        """
        hosts = self._strangers.setdefault(who.kind, {})
        if sum(map(len, hosts.values())) >= self._most_strangers:
            most = max(hosts.values(), key=lambda held: len(held))
            self._drop(next(iter(most)))
        hosts.setdefault(who.host, {})[who] = None

    def greeted(self, who: "_Conversation") -> bool:
        """Make an unidentified connection a client; return False when there is no place."""
        if self.is_crowded:
            return False
        if len(self._clients) >= self._most:
            self._drop(next(iter(self._idle)))
        self.left(who)
        self._clients.add(who)
        return True

    def rests(self, who: "_Conversation") -> None:
        """Mark a client as idle: it may be closed to make space."""
        if who in self._clients:
            self._idle[who] = None

    def works(self, who: "_Conversation") -> None:
        """Mark a client as busy: it sends something or waits for an answer."""
        self._idle.pop(who, None)

    def left(self, who: "_Conversation") -> None:
        """Remove a connection."""
        self._clients.discard(who)
        self._idle.pop(who, None)
        hosts = self._strangers.get(who.kind, {})
        if who in hosts.get(who.host, ()):
            del hosts[who.host][who]
            if not hosts[who.host]:
                del hosts[who.host]

    def _drop(self, who: "_Conversation") -> None:
        self.dropped += 1
        self.left(who)
        who.scope.cancel()


class Listener:
    """Serves the producers of one application.

    Args:
        sockets: what to listen on.
        stores: the message store of each broker.
        broker_of: returns the broker of a queue.
    """

    def __init__(
        self,
        *,
        app_name: str,
        sockets: PublisherSockets,
        stores: Mapping[str, MessagesStore],
        broker_of: Callable[[str], str],
        message_limit: int,
        log: Log,
        max_clients: int = MAX_CLIENTS,
        max_unidentified: int = MAX_UNIDENTIFIED,
    ) -> None:
        self._app = app_name
        self._doors = sockets
        self._stores = stores
        self._broker_of = broker_of
        self._message_limit = message_limit
        self._frame_limit = get_frame_limit(message_limit)
        self._log = log
        self._places = _Places(max_clients, max_unidentified)
        self._told_at = -LOG_PERIOD
        self._told = 0
        self._unfinished = 0
        self._refused = 0
        self._groups = 0
        self._looked = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Complete frames are then still stored and answered."""
        listeners = await self._doors.open_listeners()
        try:
            context = self._doors.make_tls_context()
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
            nursery.start_soon(self._serve, await accept_connection(listener), context)

    # ---- one connection

    async def _serve(self, raw: trio.SocketStream, context: ssl.SSLContext | None) -> None:
        """Serve one connection; never raises because of the client."""
        stream: trio.abc.Stream = raw
        kind = "unix" if raw.socket.family == trio.socket.AF_UNIX else "tcp"
        if context is not None and kind == "tcp":
            stream = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        one = _Conversation(
            self, stream, self._places, kind=kind, host=_host_of(raw) if kind == "tcp" else ""
        )
        self._places.came(one)
        self._tell_dropped()
        try:
            with one.scope, suppress(_Left, *CONNECTION_ERRORS):
                await one.go_on()
        finally:
            self._places.left(one)
            await trio.aclose_forcefully(stream)

    def _tell_dropped(self) -> None:
        """Log at intervals that connections were closed to make space: clients can cause that at any rate."""
        new, now = self._places.dropped - self._told, trio.current_time()
        if new and now >= self._told_at + LOG_PERIOD:
            self._log.event("listener:overloaded", "warning", dropped=new, clients=self._places.clients)
            self._told, self._told_at = self._places.dropped, now

    def check_hello(self, word: ClientHello) -> ConnectionRefusal | None:
        """Return why a client is refused; None to accept it."""
        if word.version != VERSION:
            return ConnectionRefusal(
                "unfit", f"it speaks version {VERSION} of the words, and the client {word.version}"
            )
        if word.app != self._app:
            return ConnectionRefusal(
                "unfit", f"it publishes for the application {self._app!r}, and not for {word.app[:200]!r}"
            )
        return None

    def make_welcome(self) -> Welcome:
        """Return the first message to an accepted client."""
        waiting = sum(each.size for each in self._stores.values())
        return Welcome(waiting=waiting, trouble="; ".join(_troubles(self._stores)))

    @property
    def frame_limit(self) -> int:
        """Return the most bytes of a client's frame."""
        return self._frame_limit

    def add_unfinished_bytes(self, more: int) -> bool:
        """Add to the bytes of unfinished frames, or subtract; return whether they are within the limit."""
        self._unfinished += more
        return self._unfinished <= MAX_UNFINISHED_BYTES

    def count_refusal(self, why: str) -> None:
        """Count a refused client."""
        self._refused += 1
        self._log.event("listener:connection-refused", "warning", why=why)

    # ---- storing jobs

    async def store_groups(self, word: PublishRequest) -> PublishReply:
        """Store the groups in their order, together where possible, so that they share one write to the disk."""
        self._groups += len(word.groups)
        answers: list[GroupReply | None] = [await self._fault(group) for group in word.groups]
        fit = [n for n, answer in enumerate(answers) if answer is None]
        together = await self._stored([each for n in fit for each in word.groups[n]]) if fit else GroupReply()
        for n in fit:
            # where all do not fit, some may
            alone = together.code and len(fit) > 1
            answers[n] = await self._stored(word.groups[n]) if alone else together
        return PublishReply(tuple(answer or GroupReply() for answer in answers))

    async def _fault(self, group: Sequence[JobMessage]) -> GroupReply | None:
        """Return why a group cannot be accepted; None if it can."""
        for start in range(0, len(group), MESSAGES_PER_TURN):
            part = group[start : start + MESSAGES_PER_TURN]
            await self._yield_after(len(part))
            if wrong := next(
                (wrong for each in part if (wrong := find_fault(each, self._message_limit))), None
            ):
                return wrong
            try:
                for each in part:
                    self._broker_of(each.queue)
            except CeleryError as error:  # its messages contradict each other about their queue
                return GroupReply("unfit", str(error))
        return None

    async def _yield_after(self, messages: int) -> None:
        """Let other connections have their turn after every MESSAGES_PER_TURN messages."""
        self._looked += messages
        if self._looked >= MESSAGES_PER_TURN:
            self._looked = 0
            await trio.lowlevel.checkpoint()

    async def _stored(self, parcels: Sequence[JobMessage]) -> GroupReply:
        """Store these messages. Of several brokers, each stores all of its messages or none."""
        group_by_broker: dict[str, list[JobMessage]] = {}
        for start in range(0, len(parcels), MESSAGES_PER_TURN):
            part = parcels[start : start + MESSAGES_PER_TURN]
            await self._yield_after(len(part))
            for each in part:
                group_by_broker.setdefault(self._broker_of(each.queue), []).append(each)
        firmly, some = True, False
        for broker, own in group_by_broker.items():
            store = self._stores[broker]
            try:
                firmly = await store.put(own) and firmly
            except BacklogFull as error:
                return GroupReply("full", str(error), maybe=some)
            some = True
        return GroupReply(firmly=firmly, why="" if firmly else "; ".join(_troubles(self._stores)))

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if there is no place for clients."""
        return {"listener": "too many clients at once" if self._places.is_crowded else ""}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the metrics of clients and of their requests."""
        yield make_gauge(
            "celery5_publisher_clients", "Connections of producers.", float(self._places.clients)
        )
        yield make_gauge(
            "celery5_publisher_unidentified",
            "Connections that have not sent hello yet.",
            float(self._places.strangers),
        )
        yield make_counter("celery5_publisher_requests_total", "Calls of producers.", float(self._groups))
        yield make_counter(
            "celery5_publisher_refused_total", "Connections that were refused.", float(self._refused)
        )
        yield make_counter(
            "celery5_publisher_evicted_total",
            "Connections that made room for others.",
            float(self._places.dropped),
        )


def _troubles(stores: Mapping[str, MessagesStore]) -> Iterable[str]:
    return (each.problem for each in stores.values() if each.problem)


def _host_of(raw: trio.SocketStream) -> str:
    """Return where a connection comes from, for counting: an address, or the IPv6 network that one host has."""
    try:
        peer = ip_address(raw.socket.getpeername()[0].partition("%")[0])
        return str(peer if peer.version == 4 else ip_network((peer, 64), strict=False))
    except (OSError, ValueError):  # the connection is already closed
        return ""


class _Conversation:
    """One client connection, from its first byte to its last. Cancelling its `scope` ends it."""

    def __init__(
        self, listener: Listener, stream: trio.abc.Stream, places: _Places, *, kind: str, host: str
    ) -> None:
        self.scope = trio.CancelScope()
        self.kind = kind
        self.host = host
        self._listener = listener
        self._stream = stream
        self._places = places
        self._frames = FrameReader(MAX_HELLO_BYTES)  # until it has sent hello
        self._counted = 0

    async def go_on(self) -> None:
        """Serve until the client disconnects or is refused.

        Raises _Left, and the errors of a broken connection.
        """
        try:
            with trio.move_on_after(HELLO_LIMIT) as greeting:
                await self._greet()
            if greeting.cancelled_caught:
                self._listener.count_refusal(f"a client took longer than {HELLO_LIMIT:g} s to say hello")
                raise _Left
            while True:
                word = await self._word()
                if isinstance(word, ClientHello):
                    await self._send_away(ConnectionRefusal("unfit", "it has been greeted already"))
                    continue
                with trio.move_on_after(STORE_LIMIT, shield=True):  # what was stored must be answered
                    await self._say(await self._listener.store_groups(word))
                    continue
                raise _Left
        finally:
            self._count(0)

    async def _greet(self) -> None:
        handshake: Any = getattr(self._stream, "do_handshake", None)
        if handshake is not None:  # a TLS stream
            await handshake()
        word = await self._word()
        refusal = (
            self._listener.check_hello(word)
            if isinstance(word, ClientHello)
            else ConnectionRefusal("unfit", "it does not say hello")
        )
        if refusal is not None:
            await self._send_away(refusal)
        if not self._places.greeted(self):
            await self._send_away(ConnectionRefusal("unavailable", "there are too many clients at once"))
        self._frames.limit = self._listener.frame_limit
        await self._say(self._listener.make_welcome())

    async def _word(self) -> ClientHello | PublishRequest:
        """Return the next message. A client may be silent between two messages, but not within one."""
        try:
            body = self._frames.next_frame()
            if body is None and not len(self._frames):
                self._places.rests(self)
                try:
                    await self._receive()
                finally:
                    self._places.works(self)
                body = self._frames.next_frame()
            with trio.move_on_after(FRAME_LIMIT):
                while body is None:
                    await self._receive()
                    body = self._frames.next_frame()
            if body is None:
                await self._send_away(
                    ConnectionRefusal("unfit", f"a frame took longer than {FRAME_LIMIT:g} s")
                )
                raise _Left
            self._count(len(self._frames))
            return decode_client_message(body)
        except FrameTooLarge as error:
            await self._send_away(ConnectionRefusal("too-large", str(error)))
        except Corrupt as error:
            await self._send_away(ConnectionRefusal("unfit", str(error)))
        raise _Left

    async def _receive(self) -> None:
        received = bytes(await self._stream.receive_some(CHUNK_BYTES))
        if not received:
            raise _Left
        self._frames.feed(received)
        if not self._count(len(self._frames)):
            await self._send_away(ConnectionRefusal("unavailable", "too much is on its way at once"))

    def _count(self, size: int) -> bool:
        more, self._counted = size - self._counted, size
        return self._listener.add_unfinished_bytes(more)

    async def _send_away(self, refusal: ConnectionRefusal) -> None:
        """Send the reason and close the connection."""
        self._listener.count_refusal(refusal.why)
        with trio.move_on_after(1.0), suppress(*CONNECTION_ERRORS):
            await self._say(refusal)
            if isinstance(self._stream, trio.SocketStream):
                await self._stream.send_eof()
                # Otherwise the client may never read the answer.
                while await self._stream.receive_some(CHUNK_BYTES):
                    pass
        raise _Left

    async def _say(self, word: DaemonMessage) -> None:
        with trio.move_on_after(ANSWER_LIMIT) as limit:
            await self._stream.send_all(encode_frame(word))
        if limit.cancelled_caught:
            self._listener.count_refusal("a client does not read its answers")
            raise _Left
