"""Socket link: one blocking connection to the broker: bytes out, replies in, each within its time.

redis-py resolves, connects, encrypts and sets keep-alive; the words of the handshake and the reading are
ours. redis-py's own way of a command through `Redis.execute_command` costs about 100 us, this one a third of
it: one system call to send, one to receive, and the kernel keeps the time (SO_RCVTIMEO) instead of one more
`poll` for each.
"""

import socket
import ssl
import struct
import time
from select import POLLIN, poll
from typing import Any, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from celery5.broker.connection.exchange import (
    NEED_DATA,
    ProtocolError,
    PushNotification,
    ReplyParser,
    pack_commands,
)
from celery5.broker.connection.handshake import Resp, ServerHello, build_hello, parse_server_hello
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error

CHUNK = 65536

# A reply may come in pieces, each in time; all of them together have this many times the time of one.
SLOWEST = 6


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
        # Of the pool's: what this link takes up there, for as long as it lives.
        self.place: object = None

    def __del__(self) -> None:
        # A link that is dropped (an interpreter that ends, a thread that died) must not warn of an open
        # socket.
        self.close()

    def close(self) -> None:
        """Close our end without a word to the server: a child closes its copy, and the parent's lives on."""
        self._socket.close()

    def is_usable(self) -> bool:
        """Whether an idle link may be used:

        neither closed by the server nor with bytes that nobody asked for.
        """
        return not self._poll.poll(0)

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to `drain`, at most `seconds`."""
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
        """Send it all.

        When this raises, the last command at least did not reach the server whole, and will not run.
        """
        try:
            self._socket.sendall(packed)
        except BlockingIOError:
            raise TimeoutError from None

    def receive(self) -> Any:
        """The next reply that was asked for; errors are values.

        Raises TimeoutError when it does not come in time.
        """
        replies = self._replies
        reply = replies.next()
        if reply is not NEED_DATA and type(reply) is not PushNotification:
            return reply
        latest = 0.0
        while True:
            replies.feed(self._receive_some())
            reply = replies.next()
            while type(reply) is PushNotification:
                reply = replies.next()
            if reply is not NEED_DATA:
                return reply
            if not latest:
                latest = time.monotonic() + SLOWEST * self._timeout
            elif time.monotonic() > latest:
                raise TimeoutError

    def drain(self) -> list[Any]:
        """All replies and pushed frames that are here already, without waiting for more."""
        while self._feed_what_is_here():
            pass
        frames: list[Any] = []
        while (frame := self._replies.next()) is not NEED_DATA:
            frames.append(frame)
        return frames

    def _receive_some(self) -> bytes:
        try:
            some = self._socket.recv(CHUNK)
        except BlockingIOError:
            raise TimeoutError from None
        if not some:
            raise ConnectionResetError("the server closed the connection")
        return some

    def _feed_what_is_here(self) -> bool:
        """One read; true when there may be more at once."""
        try:
            if self._tls:
                # A TLS socket takes no flags, and what it has decrypted already no `poll` can see: read until
                # it is dry.
                self._socket.settimeout(0)
                some = self._socket.recv(CHUNK)
            else:
                some = self._socket.recv(CHUNK, socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            if self._tls:
                self._socket.settimeout(self._timeout)
        if not some:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(some)
        return self._tls


def dial(endpoint: Endpoint, timing: Timing, *, resp: Resp, name: str) -> SocketLink:
    """Connect and shake hands, within `timing.connect` for each step.

    Raises `BrokerUnavailable`, `BrokerDenied`, `BrokerTooOld`, `BadBrokerURL`.
    """
    endpoint.ssl_context()  # for its error when a certificate file cannot be read
    try:
        client = cast("Any", Redis)(
            **endpoint.client_options(),
            socket_timeout=timing.connect,
            socket_connect_timeout=timing.connect,
            retry=Retry(NoBackoff(), 0),
            # Connecting only: the handshake is ours, so that all drivers speak the same words.
            redis_connect_func=_connected,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            # Else it looks for its own version on disk, behind import locks that a fork can leave locked.
            driver_info=None,
        )
        connection = client.connection_pool.make_connection()
        connection.connect()
    except Exception as error:
        raise translate_error(error, maybe_done=False, where=endpoint.masked_url) from None
    # Taken over: redis-py's object is done, and must not shut the socket down when it goes.
    link = SocketLink(connection._sock)
    connection._sock = None
    try:
        link.set_timeout(timing.connect)
        commands = build_hello(endpoint, resp=resp, name=name)
        link.send(pack_commands(commands))
        link.greeting = parse_server_hello([link.receive() for _ in commands], where=endpoint.masked_url)
        link.set_timeout(timing.reply)
    except (OSError, ProtocolError) as error:
        link.close()
        raise translate_error(error, maybe_done=False, where=endpoint.masked_url) from None
    except BaseException:
        link.close()
        raise
    return link


def _connected(_connection: object) -> None:
    """Nothing to say yet."""
