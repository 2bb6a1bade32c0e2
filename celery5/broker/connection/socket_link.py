"""One blocking connection to the broker, with a time limit for each step.

A command through `Redis.execute_command` of redis-py costs about 100 us, one through this link a third of that: one
system call to send, one to receive, and the kernel limits the time (SO_RCVTIMEO) instead of one more `poll` for each.
"""

import socket
import ssl
import struct
import time
import weakref
from contextlib import closing
from select import POLLIN, poll
from typing import Any

from celery5.broker.colour import run_blocking
from celery5.broker.connection.exchange import (
    NEED_DATA,
    ProtocolError,
    PushNotification,
    ReplyParser,
    pack_commands,
)
from celery5.broker.connection.handshake import Resp, ServerHello, build_hello, parse_server_hello
from celery5.broker.connection.sentinel import AskSentinel, ConnectServer, open_connection
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error

CHUNK = 65536
"""Bytes that are read at once."""

KEEPALIVE = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
}
"""Seconds of silence before the kernel asks whether the server is there, between two questions, and how many: as
redis-py has them."""
CLOSED_BY_SERVER = "the server closed the connection"
MAX_REPLY_PERIODS = 6
"""A reply that comes in pieces may take this many times the time of one piece."""


class SocketLink:
    """One connected socket. Not thread safe: whoever took it from the pool has it alone.

    Its methods raise what the operating system and hiredis raise (`OSError`, `ProtocolError`); after any of
    these, and after an interruption, the link must be closed: request and reply could be out of step.
    """

    __slots__ = ("__weakref__", "_poll", "_replies", "_socket", "_timeout", "_tls", "greeting", "place")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._tls = isinstance(connected, ssl.SSLSocket)
        self._replies = ReplyParser()
        self._timeout = -1.0
        self._poll = poll()
        self._poll.register(connected, POLLIN)
        self.greeting: ServerHello | None = None
        # The place in the pool that this link takes, as long as it exists.
        self.place: object = None
        # A link that is dropped (a thread or the interpreter ends) must not cause a ResourceWarning. No `__del__`: in a
        # cycle the collector may call that of the socket first.
        weakref.finalize(self, connected.close)

    def close(self) -> None:
        """Close our end, with no message to the server: a forked child closes its copy, the parent's stays open."""
        self._socket.close()

    def is_usable(self) -> bool:
        """Whether an idle link may be used: the server has neither closed it nor sent unexpected bytes."""
        return not self._poll.poll(0)

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to `drain`, for at most this many seconds; return whether there is."""
        return bool(self._poll.poll(max(0.0, seconds) * 1000))

    def set_timeout(self, timeout: float) -> None:
        """Set the time, in seconds, that each single send and receive may take."""
        if timeout == self._timeout:
            return
        self._timeout = timeout
        if self._tls:
            self._socket.settimeout(timeout)
            return
        period = struct.pack("@ll", int(timeout), int(timeout % 1 * 1_000_000))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, period)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, period)

    def send(self, packed: bytes) -> None:
        """Send all of it. If this raises, the last command has not reached the server whole and will not run."""
        try:
            self._socket.sendall(packed)
        except BlockingIOError:
            raise TimeoutError from None

    def receive(self) -> Any:
        """Return the next reply, skipping pushed frames; errors are values. Raises TimeoutError."""
        replies = self._replies
        reply = replies.next()
        if reply is not NEED_DATA and type(reply) is not PushNotification:
            return reply
        deadline = 0.0
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except BlockingIOError:
                raise TimeoutError from None
            if not data:
                raise ConnectionResetError(CLOSED_BY_SERVER)
            replies.feed(data)
            reply = replies.next()
            while type(reply) is PushNotification:
                reply = replies.next()
            if reply is not NEED_DATA:
                return reply
            if not deadline:
                deadline = time.monotonic() + MAX_REPLY_PERIODS * self._timeout
            elif time.monotonic() > deadline:
                raise TimeoutError

    def drain(self) -> list[Any]:
        """Return all replies and pushed frames that have arrived already, without waiting for more."""
        while self._feed_available():
            pass
        frames: list[Any] = []
        while (frame := self._replies.next()) is not NEED_DATA:
            frames.append(frame)
        return frames

    def _feed_available(self) -> bool:
        """Read once; return whether there may be more at once."""
        try:
            if self._tls:
                # A TLS socket takes no flags, and `poll` does not see what it has decrypted already: read until
                # nothing is left.
                self._socket.settimeout(0)
                data = self._socket.recv(CHUNK)
            else:
                data = self._socket.recv(CHUNK, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            if self._tls:
                self._socket.settimeout(self._timeout)
        if not data:
            raise ConnectionResetError(CLOSED_BY_SERVER)
        self._replies.feed(data)
        return self._tls


def dial(endpoint: Endpoint, timing: Timing, *, resp: Resp, name: str) -> SocketLink:
    """Connect and shake hands, within `timing.connect` for each step.

    Raises `BrokerUnavailable`, `BrokerDenied`, `BrokerUnsupported`, `BadBrokerURL`.
    """

    async def ask(step: AskSentinel) -> list[Any]:
        return ask_sentinel(step, name=name)

    async def connect(step: ConnectServer) -> SocketLink:
        return _dial_server(step.endpoint, step.within, resp=resp, name=name)

    link = run_blocking(open_connection(endpoint, timing.connect, ask=ask, connect=connect))
    link.set_timeout(timing.reply)
    return link


def ask_sentinel(step: AskSentinel, *, name: str) -> list[Any]:
    """Send commands to a sentinel, over a connection of their own, and return its replies. Raises BrokerError."""
    with closing(_dial_server(step.endpoint, step.within, resp=2, name=name)) as link:
        try:
            link.send(pack_commands(step.commands))
            return [link.receive() for _ in step.commands]
        except (OSError, ProtocolError) as error:
            raise translate_error(error, maybe_done=False, where=step.endpoint.masked_url) from None


def _dial_server(endpoint: Endpoint, within: float, *, resp: Resp, name: str) -> SocketLink:
    """Connect to one server and shake hands."""
    where = endpoint.masked_url
    try:
        link = SocketLink(_connect(endpoint, within))
    except OSError as error:
        raise translate_error(error, maybe_done=False, where=where) from None
    try:
        link.set_timeout(within)
        commands = build_hello(endpoint, resp=resp, name=name)
        link.send(pack_commands(commands))
        answers = [link.receive() for _ in commands]
        link.greeting = parse_server_hello(answers, endpoint)
    except (OSError, ProtocolError) as error:
        link.close()
        raise translate_error(error, maybe_done=False, where=where) from None
    except BaseException:
        link.close()
        raise
    return link


def _connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Return a connected socket. Each step may take `timeout` seconds. Raises OSError, `BadBrokerURL`."""
    context = endpoint.ssl_context()
    if endpoint.kind == "unix":
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(timeout)
            connected.connect(endpoint.path)
        except BaseException:
            connected.close()
            raise
        return connected
    connected = socket.create_connection((endpoint.host, endpoint.port), timeout)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connected)
        return context.wrap_socket(connected, server_hostname=endpoint.host) if context else connected
    except BaseException:
        connected.close()
        raise


def keep_alive(connected: socket.socket) -> None:
    """Have the kernel notice when the other end is gone, although nothing is sent."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
