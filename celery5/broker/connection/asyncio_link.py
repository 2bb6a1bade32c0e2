"""One connection to the broker on asyncio streams, with a time limit for each step.

The counterpart of `socket_link.py`. asyncio resolves, connects and encrypts; the handshake and the reading are our own.
"""

import asyncio
from typing import Any

from celery5.broker.connection.exchange import (
    NEED_DATA,
    ProtocolError,
    PushNotification,
    ReplyParser,
    pack_commands,
)
from celery5.broker.connection.handshake import Resp, ServerHello, build_hello, parse_server_hello
from celery5.broker.connection.sentinel import AskSentinel, ConnectServer, open_connection
from celery5.broker.connection.socket_link import keep_alive
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error

CHUNK = 65536
"""Bytes that are read at once."""
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
        """Close at once; what was not sent yet is lost."""
        self._writer.transport.abort()

    def is_usable(self) -> bool:
        """Whether an idle link may be used: the server has not closed it."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    def write(self, packed: bytes) -> None:
        """Begin to send."""
        self._writer.write(packed)

    async def send(self, packed: bytes, within: float) -> None:
        """Send all of it, except for at most 64 KB that the loop still buffers."""
        self._writer.write(packed)
        if not self._writer.transport.get_write_buffer_size():
            return  # all of it was sent at once: no time limit is set up
        async with asyncio.timeout(within):
            await self._writer.drain()

    async def receive(self, within: float) -> Any:
        """Return the next reply, skipping pushed frames; errors are values. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while True:
                reply = self._replies.next()
                if reply is NEED_DATA:
                    await self._fill()
                elif type(reply) is not PushNotification:
                    return reply

    async def receive_frames(self, within: float) -> list[Any]:
        """Return the replies and pushed frames that have arrived together; none if nothing arrives in time."""
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
        data = await self._reader.read(CHUNK)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._replies.feed(data)


async def dial(endpoint: Endpoint, timing: Timing, *, resp: Resp) -> AsyncioLink:
    """Connect and shake hands within `timing.connect`.

    Raises `BrokerUnavailable`, `BrokerDenied`, `BrokerUnsupported`, `BadBrokerURL`.
    """

    async def ask(step: AskSentinel) -> list[Any]:
        link = await _dial_server(step.endpoint, step.within, resp=2)
        try:
            await link.send(pack_commands(step.commands), step.within)
            return [await link.receive(step.within) for _ in step.commands]
        except (OSError, ProtocolError) as error:
            raise translate_error(error, maybe_done=False, where=step.endpoint.masked_url) from error
        finally:
            link.close()

    async def connect(step: ConnectServer) -> AsyncioLink:
        return await _dial_server(step.endpoint, step.within, resp=resp)

    return await open_connection(endpoint, timing.connect, ask=ask, connect=connect)


async def _dial_server(endpoint: Endpoint, within: float, *, resp: Resp) -> AsyncioLink:
    """Connect to one server and shake hands."""
    where = endpoint.masked_url
    link: AsyncioLink | None = None
    try:
        async with asyncio.timeout(within):
            link = await _connect(endpoint)
            commands = build_hello(endpoint, resp=resp, name=NAME)
            await link.send(pack_commands(commands), within)
            answers = [await link.receive(within) for _ in commands]
        link.greeting = parse_server_hello(answers, endpoint)
    except BaseException as error:
        if link is not None:
            link.close()
        if isinstance(error, Exception):
            raise translate_error(error, maybe_done=False, where=where) from error
        raise
    return link


async def _connect(endpoint: Endpoint) -> AsyncioLink:
    if endpoint.kind == "unix":
        return AsyncioLink(*await asyncio.open_unix_connection(endpoint.path))
    context = endpoint.ssl_context()
    name = endpoint.host if context else None
    reader, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=context, server_hostname=name
    )
    link = AsyncioLink(reader, writer)
    try:
        keep_alive(writer.get_extra_info("socket"))
    except OSError:
        link.close()
        raise
    return link
