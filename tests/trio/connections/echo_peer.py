"""Echo peer: the other end of a memory stream, which speaks just enough RESP to tell replies apart.

No stand-in for Redis: it answers HELLO and PING, and to everything else repeats the last word. What it adds
is mischief: replies in pieces of any size, pauses, and connections that end after this many bytes.
"""

from collections import Counter
from random import Random

import trio
import trio.testing

from celery5.broker.connection.exchange import NEED_DATA, ReplyParser
from celery5.broker.connection.transport import StreamTransport, Transport
from celery5.broker.endpoint import Endpoint

GREETING = b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$2\r\nid\r\n:1\r\n"


class EchoPeer:
    """Accepts connections over memory streams; `connect` is what a link connects with.

    `cuts`: one number for each connection: after this many bytes of replies it ends (none: it lasts). `seen`
    counts each word that was to be echoed, over all connections.
    """

    def __init__(self, nursery: trio.Nursery, random: Random, *, cuts: list[int] | None = None) -> None:
        self._nursery = nursery
        self._random = random
        self._cuts = cuts or []
        self.connections = 0
        self.seen: Counter[bytes] = Counter()

    async def connect(self, _endpoint: Endpoint) -> Transport:
        """A new connection to this peer."""
        self.connections += 1
        ours, theirs = trio.testing.memory_stream_pair()
        self._nursery.start_soon(self._serve, theirs, self._cuts.pop(0) if self._cuts else None)
        return StreamTransport(ours)

    async def _serve(self, stream: trio.abc.Stream, left: int | None) -> None:
        commands = ReplyParser()
        try:
            async with stream:
                while data := await stream.receive_some():
                    commands.feed(bytes(data))
                    replies = b""
                    while (command := commands.next()) is not NEED_DATA:
                        replies += self._answer(command)
                    if left is not None and len(replies) >= left:
                        await self._dribble(stream, replies[:left])
                        return
                    left = left if left is None else left - len(replies)
                    await self._dribble(stream, replies)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    def _answer(self, command: list[bytes]) -> bytes:
        if command[0] == b"HELLO":
            return GREETING
        if command[0] == b"PING":
            return b"+PONG\r\n"
        self.seen[command[-1]] += 1
        return b"$%d\r\n%b\r\n" % (len(command[-1]), command[-1])

    async def _dribble(self, stream: trio.abc.Stream, data: bytes) -> None:
        while data:
            size = self._random.choice((1, 3, 17, 1000))
            await stream.send_all(data[:size])
            data = data[size:]
            if self._random.random() < 0.2:
                await trio.sleep(self._random.random())
