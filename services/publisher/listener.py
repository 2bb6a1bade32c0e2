"""Listener: accept jobs from producers over a socket, and acknowledge them once they are stored.

What a client may use is bounded: connections, the size and contents of a frame, the time from a frame's first
byte to its last, the time for reading an answer, and the bytes of unfinished frames of all clients together. A
client that exceeds a limit loses its connection; others do not notice. Where all together exceed one, the client with
the largest unfinished frame does. A connection that has not yet sent
hello, and its certificate if one is required, is unidentified. Unidentified connections have separate places,
so that they cannot keep producers out. When all places are taken, the connection that was idle for longest is
closed, or else the one that has kept the daemon waiting for the rest of a frame for longest, if that is a while; its
client reconnects.
"""

import math
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import trio

from celery5.errors import BacklogFull, CeleryError, Corrupt
from celery5.logs.log import Log
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge
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
from celery5.services.process.client_connections import accept_connections, get_host, limit_places
from celery5.services.publisher.message_publisher import MessagePublisher
from celery5.services.publisher.messages_store import MessagesStore
from celery5.services.publisher.sockets import PublisherSockets

MAX_CLIENTS = 512
"""The most clients at once: connections that have sent hello."""
CLIENTS_SHARE = 0.5
"""The part of the files which the process may open that clients may take."""
MAX_UNIDENTIFIED = 64
"""The most unidentified connections at once, for TCP and for unix sockets each."""
UNIDENTIFIED_SHARE = 0.06
"""The part of the files that they may take, of each kind."""
MESSAGES_PER_TURN = 500
"""Messages that are read before other connections have their turn."""
LOG_PERIOD = 10.0
"""Seconds between two log lines about connections that were closed to make space."""
MAX_LOGGED_REFUSALS = 10
"""Refused connections that are logged in a second; more are only counted."""
HELLO_LIMIT = 5.0
"""Seconds from the start of a connection to the end of its first message, TLS included."""
FRAME_LIMIT = 10.0
"""Seconds from a frame's first byte to its last."""
STALLED_AFTER = 3.0
"""Seconds after which a client that has not finished a frame may be closed to make space for another one."""
ANSWER_LIMIT = 10.0
"""Seconds that a client has to read an answer."""
STORE_LIMIT = 30.0
"""Seconds from a complete frame to the end of the answer; then the client is left without one."""
MAX_UNFINISHED_BYTES = 128 * 1024 * 1024
"""The most bytes of unfinished frames, of all clients together."""
CHUNK_BYTES = 65536

CONNECTION_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class _Ended(Exception):
    """The connection is over."""


class _OpenConnections:
    """The open connections.

    Each begins unidentified, of a `kind` (unix or TCP) and from a `host`, and becomes a client when it has sent
    hello. `evicted` counts connections that were closed to make space.
    """

    def __init__(self, max_clients: int, max_unidentified: int) -> None:
        self._max_clients = max_clients
        self._max_unidentified = max_unidentified
        self._clients: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}  # longest idle first
        self._unfinished: dict[_Connection, float] = {}  # when their frames began, longest ago first
        self._unidentified: dict[str, dict[str, dict[_Connection, None]]] = {}
        self.evicted = 0

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    @property
    def unidentified(self) -> int:
        """Return the number of connections that have not sent hello yet."""
        return sum(len(of_host) for hosts in self._unidentified.values() for of_host in hosts.values())

    @property
    def is_crowded(self) -> bool:
        """Return whether there is no place for another client: all are taken, and none waits for its client."""
        return len(self._clients) >= self._max_clients and self._find_waited_for() is None

    def add(self, connection: "_Connection") -> None:
        """Add a new, unidentified connection.

        When there is no place, close the oldest unidentified connection of the host that has most of them: so a
        host can only displace its own.
        """
        hosts = self._unidentified.setdefault(connection.kind, {})
        if sum(map(len, hosts.values())) >= self._max_unidentified:
            of_busiest_host = max(hosts.values(), key=len)
            self.evict(next(iter(of_busiest_host)))
        hosts.setdefault(connection.host, {})[connection] = None

    def identify(self, connection: "_Connection") -> bool:
        """Make an unidentified connection a client; return False when there is no place."""
        if len(self._clients) >= self._max_clients:
            waited_for = self._find_waited_for()
            if waited_for is None:
                return False
            self.evict(waited_for)
        self.remove(connection)
        self._clients.add(connection)
        return True

    def mark_idle(self, connection: "_Connection") -> None:
        """Mark a client as idle: it may be closed to make space."""
        if connection in self._clients:
            self._idle[connection] = None

    def mark_unfinished(self, connection: "_Connection") -> None:
        """Mark a client as one that has begun a frame, and that is waited for."""
        if connection in self._clients:
            self._unfinished[connection] = trio.current_time()

    def mark_busy(self, connection: "_Connection") -> None:
        """Mark a client as busy: it waits for an answer."""
        self._idle.pop(connection, None)
        self._unfinished.pop(connection, None)

    def _find_waited_for(self) -> "_Connection | None":
        """Return the client that the daemon has waited for longest: idle, or else stalled within a frame."""
        if self._idle:
            return next(iter(self._idle))
        connection, begun = next(iter(self._unfinished.items()), (None, math.inf))
        return connection if trio.current_time() >= begun + STALLED_AFTER else None

    def find_largest(self) -> "_Connection | None":
        """Return the client with the largest unfinished frame; None without clients."""
        return max(self._clients, key=lambda connection: connection.unfinished_bytes, default=None)

    def evict(self, connection: "_Connection") -> None:
        """Close a connection to make space."""
        self.evicted += 1
        self.remove(connection)
        connection.end()

    def remove(self, connection: "_Connection") -> None:
        """Remove a connection."""
        self._clients.discard(connection)
        self.mark_busy(connection)
        hosts = self._unidentified.get(connection.kind, {})
        if connection in hosts.get(connection.host, ()):
            del hosts[connection.host][connection]
            if not hosts[connection.host]:
                del hosts[connection.host]


class ClientLimits(msgspec.Struct, frozen=True):
    """How many connections there may be at a time, as far as the process has descriptors for them."""

    clients: int = MAX_CLIENTS
    # Those that have not said who they are yet.
    unidentified: int = MAX_UNIDENTIFIED


class Listener:
    """Serves the producers of one application.

    Args:
        sockets: what to listen on.
        stores: the message store of each broker.
        publishers: what publishes to each broker.
        broker_of: returns the broker of a queue.
    """

    def __init__(
        self,
        *,
        app_name: str,
        sockets: PublisherSockets,
        stores: Mapping[str, MessagesStore],
        publishers: Mapping[str, MessagePublisher],
        broker_of: Callable[[str], str],
        message_limit: int,
        log: Log,
        limits: ClientLimits | None = None,
    ) -> None:
        self._app = app_name
        self._sockets = sockets
        self._stores = stores
        self._publishers = publishers
        self._broker_of = broker_of
        self._message_limit = message_limit
        self._frame_limit = get_frame_limit(message_limit)
        self._log = log
        limits = limits or ClientLimits()
        self._connections = _OpenConnections(
            limit_places(limits.clients, CLIENTS_SHARE),
            limit_places(limits.unidentified, UNIDENTIFIED_SHARE),
        )
        self._shortage_logged_at = -math.inf
        self._evicted_logged_at = -LOG_PERIOD
        self._evicted_logged = 0
        self._unfinished_bytes = 0
        self._refused = 0
        self._refusal_second = self._refusals_in_second = 0
        self._groups = 0
        self._messages_in_turn = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Complete frames are then still stored and answered."""
        listeners = await self._sockets.open_listeners()
        try:
            context = self._sockets.make_tls_context()
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, context, nursery)
                task_status.started()
        finally:
            for listener in listeners:
                with trio.CancelScope(shield=True):
                    await listener.aclose()
            self._sockets.close()

    async def _accept(
        self, listener: trio.SocketListener, context: ssl.SSLContext | None, nursery: trio.Nursery
    ) -> None:
        await accept_connections(
            listener,
            partial(self._serve, context),
            nursery=nursery,
            on_failure=self._log_shortage,
        )

    def _log_shortage(self, error: OSError) -> None:
        if (now := trio.current_time()) >= self._shortage_logged_at + LOG_PERIOD:
            self._shortage_logged_at = now
            self._log.event("listener:accept-failed", "warning", why=error.strerror)

    # ---- one connection

    async def _serve(self, context: ssl.SSLContext | None, raw: trio.SocketStream) -> None:
        """Serve one connection; never raises because of the client."""
        stream: trio.abc.Stream = raw
        kind = "unix" if raw.socket.family == trio.socket.AF_UNIX else "tcp"
        if context is not None and kind == "tcp":
            stream = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        connection = _Connection(self, stream, self._connections, kind=kind, host=get_host(raw))
        self._connections.add(connection)
        self._log_evicted()
        try:
            with connection.scope, suppress(_Ended, *CONNECTION_ERRORS):
                await connection.serve()
        finally:
            self._connections.remove(connection)
            await trio.aclose_forcefully(stream)

    def _log_evicted(self) -> None:
        """Log at intervals that connections were closed to make space: clients can cause that at any rate."""
        new, now = self._connections.evicted - self._evicted_logged, trio.current_time()
        if new and now >= self._evicted_logged_at + LOG_PERIOD:
            self._log.event("listener:overloaded", "warning", dropped=new, clients=self._connections.clients)
            self._evicted_logged, self._evicted_logged_at = self._connections.evicted, now

    def check_hello(self, hello: ClientHello) -> ConnectionRefusal | None:
        """Return why a client is refused; None to accept it."""
        if hello.version != VERSION:
            return ConnectionRefusal(
                "unfit", f"it speaks version {VERSION} of the protocol, and the client {hello.version}"
            )
        if hello.app != self._app:
            return ConnectionRefusal(
                "unfit", f"it publishes for the application {self._app!r}, and not for {hello.app[:200]!r}"
            )
        return None

    def make_welcome(self) -> Welcome:
        """Return the first message to an accepted client."""
        waiting = sum(store.size for store in self._stores.values())
        return Welcome(waiting=waiting, trouble=self._format_problems(), outage=self._format_outages())

    @property
    def frame_limit(self) -> int:
        """Return the most bytes of a client's frame."""
        return self._frame_limit

    def add_unfinished_bytes(self, more: int) -> bool:
        """Add to the bytes of unfinished frames, or subtract; return whether they are within the limit."""
        self._unfinished_bytes += more
        return self._unfinished_bytes <= MAX_UNFINISHED_BYTES

    def count_refusal(self, why: str) -> None:
        """Count a refused client. Not all are logged: clients can cause that at any rate."""
        self._refused += 1
        if (now := int(trio.current_time())) != self._refusal_second:
            self._refusal_second, self._refusals_in_second = now, 0
        self._refusals_in_second += 1
        if self._refusals_in_second <= MAX_LOGGED_REFUSALS:
            self._log.event("listener:connection-refused", "warning", why=why)

    # ---- storing jobs

    async def store_groups(self, request: PublishRequest) -> PublishReply:
        """Store the groups in their order, together where possible, so that they share one write to the disk."""
        groups = request.groups
        self._groups += len(groups)
        replies: list[GroupReply | None] = [await self._find_fault(group) for group in groups]
        valid = [n for n, reply in enumerate(replies) if reply is None]
        together = (
            await self._store([message for n in valid for message in groups[n]]) if valid else GroupReply()
        )
        for n in valid:
            # where all do not fit, some may
            alone = together.code and len(valid) > 1
            replies[n] = await self._store(groups[n]) if alone else together
        return PublishReply(tuple(reply or GroupReply() for reply in replies))

    async def _find_fault(self, group: Sequence[JobMessage]) -> GroupReply | None:
        """Return why a group cannot be accepted; None if it can."""
        for start in range(0, len(group), MESSAGES_PER_TURN):
            part = group[start : start + MESSAGES_PER_TURN]
            await self._yield_after(len(part))
            for message in part:
                if fault := find_fault(message, self._message_limit):
                    return fault
            try:
                for message in part:
                    self._broker_of(message.queue)
            except CeleryError as error:  # its messages contradict each other about their queue
                return GroupReply("unfit", str(error))
        return None

    async def _yield_after(self, messages: int) -> None:
        """Let other connections have their turn after every MESSAGES_PER_TURN messages."""
        self._messages_in_turn += messages
        if self._messages_in_turn >= MESSAGES_PER_TURN:
            self._messages_in_turn = 0
            await trio.lowlevel.checkpoint()

    async def _store(self, messages: Sequence[JobMessage]) -> GroupReply:
        """Store these messages. Of several brokers, each stores all of its messages or none."""
        group_by_broker: dict[str, list[JobMessage]] = {}
        for start in range(0, len(messages), MESSAGES_PER_TURN):
            part = messages[start : start + MESSAGES_PER_TURN]
            await self._yield_after(len(part))
            for message in part:
                group_by_broker.setdefault(self._broker_of(message.queue), []).append(message)
        in_backlog, some_stored = True, False
        for broker, of_broker in group_by_broker.items():
            try:
                in_backlog = await self._stores[broker].put(of_broker) and in_backlog
            except BacklogFull as error:
                return GroupReply("full", str(error), maybe=some_stored)
            some_stored = True
        return GroupReply(firmly=in_backlog, why="" if in_backlog else self._format_problems())

    def _format_problems(self) -> str:
        """Return why the backlogs cannot be written; '' when they can."""
        return "; ".join(store.problem for store in self._stores.values() if store.problem)

    def _format_outages(self) -> str:
        """Return why nothing is published to a broker now; '' when all brokers accept messages."""
        problems = [
            why for publisher in self._publishers.values() for why in publisher.conditions().values() if why
        ]
        return "; ".join(dict.fromkeys(problems))

    # ---- health and metrics

    def conditions(self) -> Mapping[str, str]:
        """Return the problem, if there is no place for clients."""
        return {"listener": "too many clients at once" if self._connections.is_crowded else ""}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield the metrics of clients and of their requests."""
        yield make_gauge(
            "celery5_publisher_clients", "Connections of producers.", float(self._connections.clients)
        )
        yield make_gauge(
            "celery5_publisher_unidentified",
            "Connections that have not sent hello yet.",
            float(self._connections.unidentified),
        )
        yield make_counter(
            "celery5_publisher_requests_total",
            "Groups of jobs that producers have sent; one call sends one group.",
            float(self._groups),
        )
        yield make_counter(
            "celery5_publisher_refused_total", "Connections that were refused.", float(self._refused)
        )
        yield make_counter(
            "celery5_publisher_evicted_total",
            "Connections that were closed to make space for others.",
            float(self._connections.evicted),
        )


class _Connection:
    """One client connection, from its first byte to its last. Cancelling its `scope` ends it."""

    def __init__(
        self,
        listener: Listener,
        stream: trio.abc.Stream,
        connections: _OpenConnections,
        *,
        kind: str,
        host: str,
    ) -> None:
        self.scope = trio.CancelScope()
        self.kind = kind
        self.host = host
        self._listener = listener
        self._stream = stream
        self._connections = connections
        self._frames = FrameReader(MAX_HELLO_BYTES)  # until it has sent hello
        self.unfinished_bytes = 0

    def end(self) -> None:
        """End the connection, and give up what has come of a frame."""
        self._count_unfinished(0)
        self.scope.cancel()

    async def serve(self) -> None:
        """Serve until the client disconnects or is refused.

        Raises _Ended, and the errors of a broken connection.
        """
        try:
            with trio.move_on_after(HELLO_LIMIT) as hello_limit:
                await self._greet()
            if hello_limit.cancelled_caught:
                self._listener.count_refusal(f"a client took longer than {HELLO_LIMIT:g} s to say hello")
                raise _Ended
            while True:
                message = await self._receive_message()
                if isinstance(message, ClientHello):
                    await self._refuse(ConnectionRefusal("unfit", "it has sent hello already"))
                    continue
                with trio.move_on_after(STORE_LIMIT, shield=True):  # what was stored must be answered
                    await self._send(await self._listener.store_groups(message))
                    continue
                raise _Ended
        finally:
            self._count_unfinished(0)

    async def _greet(self) -> None:
        handshake: Any = getattr(self._stream, "do_handshake", None)
        if handshake is not None:  # a TLS stream
            await handshake()
        message = await self._receive_message()
        refusal = (
            self._listener.check_hello(message)
            if isinstance(message, ClientHello)
            else ConnectionRefusal("unfit", "it does not say hello")
        )
        if refusal is not None:
            await self._refuse(refusal)
        if not self._connections.identify(self):
            await self._refuse(ConnectionRefusal("unavailable", "there are too many clients at once"))
        self._frames.set_limit(self._listener.frame_limit)
        await self._send(self._listener.make_welcome())

    async def _receive_message(self) -> ClientHello | PublishRequest:
        """Return the next message. A client may be silent between two messages, but not within one."""
        try:
            body = self._frames.next_frame()
            if body is None and not len(self._frames):
                self._connections.mark_idle(self)
                try:
                    await self._receive()
                finally:
                    self._connections.mark_busy(self)
                body = self._frames.next_frame()
            if body is None:
                body = await self._receive_rest()
            if body is None:
                await self._refuse(ConnectionRefusal("unfit", f"a frame took longer than {FRAME_LIMIT:g} s"))
                raise _Ended
            self._count_unfinished(len(self._frames))
            return decode_client_message(body)
        except FrameTooLarge as error:
            await self._refuse(ConnectionRefusal("too-large", str(error)))
        except Corrupt as error:
            await self._refuse(ConnectionRefusal("unfit", str(error)))
        raise _Ended

    async def _receive_rest(self) -> bytes | None:
        """Return the frame that has begun; None when its rest takes too long."""
        self._connections.mark_unfinished(self)
        try:
            with trio.move_on_after(FRAME_LIMIT):
                while True:
                    await self._receive()
                    if (body := self._frames.next_frame()) is not None:
                        return body
            return None
        finally:
            self._connections.mark_busy(self)

    async def _receive(self) -> None:
        received = bytes(await self._stream.receive_some(CHUNK_BYTES))
        if not received:
            raise _Ended
        self._frames.feed(received)
        if self._count_unfinished(len(self._frames)):
            return
        # Not whoever comes last: one client alone could keep all others out.
        largest = self._connections.find_largest()
        if largest is None or largest is self:
            self._count_unfinished(0)
            await self._refuse(ConnectionRefusal("unavailable", "too much is on its way at once"))
        else:
            self._connections.evict(largest)

    def _count_unfinished(self, size: int) -> bool:
        more, self.unfinished_bytes = size - self.unfinished_bytes, size
        return self._listener.add_unfinished_bytes(more)

    async def _refuse(self, refusal: ConnectionRefusal) -> None:
        """Send the reason and close the connection."""
        self._listener.count_refusal(refusal.why)
        with trio.move_on_after(1.0), suppress(*CONNECTION_ERRORS):
            await self._send(refusal)
            if isinstance(self._stream, trio.SocketStream):
                await self._stream.send_eof()
                # Otherwise the client may never read the answer.
                while await self._stream.receive_some(CHUNK_BYTES):
                    pass
        raise _Ended

    async def _send(self, message: DaemonMessage) -> None:
        with trio.move_on_after(ANSWER_LIMIT) as limit:
            await self._stream.send_all(encode_frame(message))
        if limit.cancelled_caught:
            self._listener.count_refusal("a client does not read its answers")
            raise _Ended
