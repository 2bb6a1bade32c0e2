"""Asyncio link: one connection to the broker on asyncio streams: bytes out, replies in, each within its time.

The twin of `socket_link.py`: redis-py resolves, connects, encrypts; the words of the handshake and the
reading are ours.
"""

import asyncio
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from celery5.broker.connection.exchange import NEED_DATA, PushNotification, ReplyParser, pack_commands
from celery5.broker.connection.handshake import Resp, ServerHello, build_hello, parse_server_hello
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error

CHUNK = 65536
NAME = "celery5-producer"


class AsyncioLink:
    """One connection of one event loop, for one task at a time.

    Its methods raise what asyncio and hiredis raise (`OSError`, `ProtocolError`). After any of these, and
    when a task was cancelled between request and reply, the link must be closed: they could be out of step.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._replies = ReplyParser()
        self.greeting: ServerHello | None = None

    def close(self) -> None:
        """Close at once, without waiting for what was not sent yet."""
        self._writer.transport.abort()

    def is_usable(self) -> bool:
        """Whether an idle link may be used: the server has not closed it."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    def write(self, packed: bytes) -> None:
        """Begin to send."""
        self._writer.write(packed)

    async def send(self, packed: bytes, within: float) -> None:
        """Send it all but for what the loop holds for the kernel, at most 64 KB."""
        self._writer.write(packed)
        async with asyncio.timeout(within):
            await self._writer.drain()

    async def receive(self, within: float) -> Any:
        """The next reply that was asked for; errors are values. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while True:
                reply = self._replies.next()
                if reply is NEED_DATA:
                    await self._fill()
                elif type(reply) is not PushNotification:
                    return reply

    async def receive_frames(self, within: float) -> list[Any]:
        """Replies and pushed frames, as many as have come together; none when nothing comes in time."""
        try:
            async with asyncio.timeout(within):
                await self._fill()
        except TimeoutError:
            return []
        frames: list[Any] = []
        while (frame := self._replies.next()) is not NEED_DATA:
            frames.append(frame)
        return frames

    async def _fill(self) -> None:
        some = await self._reader.read(CHUNK)
        if not some:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(some)


async def dial(endpoint: Endpoint, timing: Timing, *, resp: Resp) -> AsyncioLink:
    """Connect and shake hands within `timing.connect`.

    Raises `BrokerUnavailable`, `BrokerDenied`, `BrokerTooOld`, `BadBrokerURL`.
    """
    endpoint.ssl_context()  # for its error when a certificate file cannot be read
    link: AsyncioLink | None = None
    try:
        async with asyncio.timeout(timing.connect):
            link = await _connect(endpoint, timing)
            commands = build_hello(endpoint, resp=resp, name=NAME)
            await link.send(pack_commands(commands), timing.connect)
            answers = [await link.receive(timing.connect) for _ in commands]
        link.greeting = parse_server_hello(answers, where=endpoint.masked_url)
    except BaseException as error:
        if link is not None:
            link.close()
        if isinstance(error, Exception):
            raise translate_error(error, maybe_done=False, where=endpoint.masked_url) from error
        raise
    return link


async def _connect(endpoint: Endpoint, timing: Timing) -> AsyncioLink:
    if endpoint.kind == "unix":
        # Here redis-py would shake hands in its own words before it comes to the hook.
        return AsyncioLink(*await asyncio.open_unix_connection(endpoint.path))
    client = cast("Any", redis.asyncio.Redis)(
        **endpoint.client_options(),
        socket_timeout=timing.connect,
        socket_connect_timeout=timing.connect,
        retry=Retry(NoBackoff(), 0),
        # Connecting only: the handshake is ours, so that all drivers speak the same words.
        redis_connect_func=_connected,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
        driver_info=None,
    )
    connection = client.connection_pool.make_connection()
    await connection.connect()
    # Taken over: redis-py's object is done, and must not close the streams when it goes.
    link = AsyncioLink(connection._reader, connection._writer)
    connection._reader = connection._writer = None
    return link


def _connected(_connection: object) -> None:
    """Nothing to say yet."""
