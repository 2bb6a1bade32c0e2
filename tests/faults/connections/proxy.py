"""Proxy: a TCP proxy in front of a real server that can do to a connection whatever a network or a server can
do.

It reads commands, so a fault can be tied to one: cut after so many bytes of its reply, or have it answered
with an error. For the latter the command is replaced by a script that returns that error, so that it keeps
its place among the other replies.
"""

import os
import socket
import ssl
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import hiredis
import trio

from celery5.broker.connection.exchange import NEED_DATA, ReplyParser, pack_command


@dataclass(frozen=True)
class Cut:
    """Cut the connection after so many bytes of what follows in return; 0 cuts when the server has answered at all."""

    word: bytes
    after: int


_PLAIN = frozenset(
    {b"HELLO", b"AUTH", b"SELECT", b"CLIENT", b"INFO", b"PING", b"SUBSCRIBE", b"UNSUBSCRIBE", b"PUBLISH"}
)
"""Commands that a server which refuses to write answers all the same."""


@dataclass
class Refusal:
    """Answer every command but plain ones with an `error`, after `spared` of them; `refused` counts those."""

    error: str
    spared: int = 0
    refused: int = 0

    def means(self, word: bytes) -> bool:
        """Whether a command is refused, now that it comes."""
        if word in _PLAIN:
            return False
        if self.spared > 0:
            self.spared -= 1
            return False
        self.refused += 1
        return True


@dataclass
class Loss:
    """Let so many commands pass, then lose the reply to the next one and refuse all connections."""

    passing: int


@dataclass(frozen=True)
class Answer:
    """Answer a command with an error; the server never sees the command."""

    word: bytes
    error: str


BEGUN_RECORD = b"\x17\x03\x03\x01\x00" + b"?" * 20
"""The head of a record of TLS with 256 bytes of data, and the first ones of these."""


class FaultyProxy:
    """Passes bytes between clients and the server at `path`, until told otherwise.

    `run` runs it; `url` is where it listens.
    """

    def __init__(self, path: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._path = path
        self._tls = tls
        self.port = 0
        self.delay = 0.0
        self.connections = 0
        self.seen: Counter[bytes] = Counter()
        self.rules: list[Cut | Answer] = []
        self.refusal: Refusal | None = None
        self.loss: Loss | None = None
        self._flowing = trio.Event()
        self._flowing.set()
        self._nursery: trio.Nursery | None = None
        # What accepts connections and what ends that and all that came of it; None while connections are refused.
        self._accepting: tuple[trio.SocketListener, trio.CancelScope] | None = None
        self._live: dict[trio.CancelScope, trio.SocketStream] = {}

    @property
    def url(self) -> str:
        """The broker URL of the proxy."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    # ---- what a test does to it

    def stall(self) -> None:
        """Let no byte through any more, in neither direction, and keep the connections open."""
        self._flowing = trio.Event()

    def resume(self) -> None:
        """Let bytes through again."""
        self._flowing.set()

    def cut_all(self) -> None:
        """End all connections now: one with TLS in the middle of a record."""
        for scope, plain in self._live.items():
            if self._tls is not None:
                with suppress(OSError):  # it is full, or has ended
                    os.write(plain.socket.fileno(), BEGUN_RECORD)
            scope.cancel()

    def refuse(self) -> None:
        """End all connections and refuse new ones, from this moment on."""
        self.cut_all()
        if self._accepting is not None:
            (listener, serving), self._accepting = self._accepting, None
            serving.cancel()
            listener.socket.close()

    def accept(self) -> None:
        """Accept connections again, on the same port, from this moment on.

        At once and not in a task of the proxy: a test that goes on from here may dial before that task runs, and be
        refused.
        """
        if self._accepting is None and self._nursery is not None:
            bound = _bind(self.port)
            bound.listen(1024)
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
            self._accepting = listener, trio.CancelScope()
            self._nursery.start_soon(self._listen, *self._accepting)

    def cut_reply(self, word: str, *, after: int) -> None:
        """Let the next command of this name through to the server, and of what comes back only `after` bytes."""
        self.rules.append(Cut(word.encode(), after))

    def lose_reply(self, *, passing: int = 0) -> None:
        """Let the next command through to the server, or the one after `passing` others; then cut all connections
        before its reply, and listen no more until `accept`."""
        self.loss = Loss(passing)

    def answer(self, word: str, error: str) -> None:
        """Answer the next command of this name with this error, such as `LOADING Redis is loading`."""
        self.rules.append(Answer(word.encode(), error))

    # ---- how it works

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled."""
        # This socket keeps the port while nothing listens there: else another process might take it.
        with _bind(0) as reserved:
            self.port = reserved.getsockname()[1]
            async with trio.open_nursery() as self._nursery:
                self.accept()
                task_status.started()
                await trio.sleep_forever()

    async def _listen(self, listener: trio.SocketListener, serving: trio.CancelScope) -> None:
        with listener.socket, serving:
            await trio.serve_listeners(self._serve, [listener])

    async def _serve(self, plain: trio.SocketStream) -> None:
        self.connections += 1
        client: trio.abc.Stream = plain
        if self._tls is not None:
            await self._flowing.wait()  # for the handshake of TLS, too
            client = trio.SSLStream(plain, self._tls, server_side=True, https_compatible=True)
        with trio.CancelScope() as scope:
            self._live[scope] = plain
            try:
                async with client, await trio.open_unix_socket(self._path) as server:
                    await _Connection(self, client, server, scope).run()
            except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                pass
            finally:
                del self._live[scope]


class _Connection:
    def __init__(
        self, proxy: FaultyProxy, client: trio.abc.Stream, server: trio.abc.Stream, scope: trio.CancelScope
    ) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._scope = scope
        # Bytes that may still go back before the cut, when a cut is due; -1 when a reply is to be lost.
        self._left: int | None = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commands)
            nursery.start_soon(self._replies)

    async def _commands(self) -> None:
        commands = ReplyParser()
        while data := await self._client.receive_some():
            commands.feed(bytes(data))
            while (command := commands.next()) is not NEED_DATA:
                await self._proxy._flowing.wait()
                await self._server.send_all(self._through(command))
        self._scope.cancel()

    def _through(self, command: list[Any]) -> bytes:
        word = command[0].upper()
        self._proxy.seen[word] += 1
        if self._proxy.refusal is not None and self._proxy.refusal.means(word):
            return _failing(self._proxy.refusal.error)
        if self._loses():
            self._left = -1
        for rule in self._proxy.rules:
            if rule.word == word:
                self._proxy.rules.remove(rule)
                if isinstance(rule, Answer):
                    return _failing(rule.error)
                self._left = rule.after
                break
        return bytes(hiredis.pack_command(tuple(command)))

    def _loses(self) -> bool:
        """Whether this command is the one whose reply is to be lost."""
        loss = self._proxy.loss
        if loss is None:
            return False
        loss.passing -= 1
        if loss.passing >= 0:
            return False
        self._proxy.loss = None
        return True

    async def _replies(self) -> None:
        while data := await self._server.receive_some():
            if self._left == -1:
                self._proxy.refuse()
                await trio.sleep_forever()
            if self._proxy.delay:
                await trio.sleep(self._proxy.delay)
            await self._proxy._flowing.wait()
            if self._left is not None and len(data) >= self._left:
                if self._left:
                    await self._client.send_all(data[: self._left])
                self._scope.cancel()
                await trio.sleep_forever()
            if self._left is not None:
                self._left -= len(data)
            await self._client.send_all(data)
        self._scope.cancel()


def _bind(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _failing(error: str) -> bytes:
    """A command that the server answers with this error."""
    return pack_command(("EVAL", "return redis.error_reply(ARGV[1])", 0, error))
