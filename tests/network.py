"""A network between servers on this machine, from which some can be cut off while clients still reach them.

Each server has an address of its own (127.0.1.x), by which the others connect to it and which is the source of its own
connections (`bind-source-addr`). A relay listens there and passes bytes on. Clients connect to 127.0.0.1 directly.
"""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from itertools import count

import trio

CHECK_INTERVAL = 0.02
"""Seconds between two looks whether a connection that is cut off may go on."""


class Network:
    """Relays before servers. Bytes to and from a server that is cut off wait, and connections stay open: as where a
    switch has failed, nobody is told.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._cut_off: frozenset[str] = frozenset()
        self._started = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    def add(self, *ports: int) -> str:
        """Relay to the ports of a server. Return its address for other servers."""
        host = f"127.0.1.{next(self._numbers)}"
        assert self._token is not None
        for port in ports:
            listener = socket.create_server((host, port))
            trio.from_thread.run_sync(self._listen, host, port, listener, trio_token=self._token)
        return host

    def cut_off(self, *hosts: str) -> None:
        """Cut servers off from all others, and from each other."""
        self._cut_off |= set(hosts)

    def join_all(self) -> None:
        """Let all servers reach each other again."""
        self._cut_off = frozenset()

    @contextmanager
    def running(self) -> Generator["Network", None, None]:
        """Run the relays in a thread during the block."""
        thread = threading.Thread(target=trio.run, args=(self._run,), name="network")
        thread.start()
        self._started.wait()
        assert self._token is not None
        try:
            yield self
        finally:
            trio.from_thread.run_sync(self._stop, trio_token=self._token)
            thread.join()

    async def _run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._started.set()
            await trio.sleep_forever()

    def _stop(self) -> None:
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()

    def _listen(self, host: str, port: int, listener: socket.socket) -> None:
        assert self._nursery is not None
        stream = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        self._nursery.start_soon(trio.serve_listeners, partial(self._relay, host, port), [stream])

    async def _relay(self, host: str, port: int, source: trio.SocketStream) -> None:
        async with source:
            try:
                peers = {host, str(source.socket.getpeername()[0])}
                await self._wait_until_joined(peers)
                async with (
                    await trio.open_tcp_stream("127.0.0.1", port) as target,
                    trio.open_nursery() as both,
                ):
                    both.start_soon(self._pass_on, source, target, peers, both.cancel_scope)
                    both.start_soon(self._pass_on, target, source, peers, both.cancel_scope)
            except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # one of them has ended

    async def _pass_on(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        peers: set[str],
        scope: trio.CancelScope,
    ) -> None:
        while data := await source.receive_some():
            await self._wait_until_joined(peers)
            await target.send_all(data)
        scope.cancel()

    async def _wait_until_joined(self, peers: set[str]) -> None:
        while self._cut_off & peers:
            await trio.sleep(CHECK_INTERVAL)
