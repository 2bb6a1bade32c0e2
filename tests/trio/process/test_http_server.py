"""The server of the dashboard: what a client may take of connections, bytes and time, by raw requests."""

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio

from celery5.processes import http_server
from celery5.processes.http_server import HttpServer
from celery5.services.process.client_connections import ClientPlaces

LIMIT = 30.0
"""Seconds that anything here may take."""
GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
Message = MutableMapping[str, Any]


class Site:
    """An application that answers with the body of a request, and on /slow when it is told to."""

    def __init__(self) -> None:
        self.go_on = trio.Event()
        self.slow = 0
        self.errors: list[str] = []
        self.port = 0
        self.stop = trio.Event()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        if scope["path"] == "/slow":
            self.slow += 1
            await self.go_on.wait()
        body = b"x" * 20_000_000 if scope["path"] == "/large" else b"ok"
        while scope["method"] == "POST":
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/fails":
            raise ValueError("of a test")
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    async def open(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)


@asynccontextmanager
async def serving() -> AsyncGenerator[Site, None]:
    """Serve a site on a port while the block lasts."""
    site = Site()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    site.port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        server = HttpServer(site, on_error=site.errors.append)
        await nursery.start(partial(server.run, listener, stop=site.stop.wait))
        yield site
        nursery.cancel_scope.cancel()


async def read_all(stream: trio.SocketStream) -> bytes:
    """What is sent until the server ends the connection."""
    received = bytearray()
    with trio.fail_after(LIMIT), suppress(trio.BrokenResourceError):
        while part := await stream.receive_some():
            received += part
    return bytes(received)


async def ask(site: Site, request: bytes) -> bytes:
    """All that is answered to these bytes until the connection ends."""
    async with await site.open() as stream:
        await stream.send_all(request)
        return await read_all(stream)


async def is_served(site: Site) -> bool:
    answer = await ask(site, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % b"")
    return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok")


@pytest.mark.parametrize(
    ("limit", "request_", "answer"),
    [
        ("HEAD_LIMIT", b"", b""),
        ("HEAD_LIMIT", b"GET / HTTP/1.1\r\nHost:", b"HTTP/1.1 408 "),
        ("IDLE_LIMIT", GET % b"", b"HTTP/1.1 200 "),
        ("BODY_LIMIT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx", b"HTTP/1.1 408 "),
        (
            "BODY_LIMIT",
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
            b"HTTP/1.1 408 ",
        ),
        ("REQUEST_LIMIT", GET % b"slow", b"HTTP/1.1 503 "),
    ],
    ids=["silent", "head", "idle", "body", "chunks", "application"],
)
async def test_whatever_takes_too_long_is_ended(
    monkeypatch: pytest.MonkeyPatch, limit: str, request_: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(http_server, limit, 0.3)
    async with serving() as site:
        received = await ask(site, request_)
        assert received.startswith(answer)
        assert bool(received) == bool(answer)
        assert await is_served(site)


async def test_bytes_that_trickle_do_not_move_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_LIMIT", 0.5)
    monkeypatch.setattr(http_server, "BODY_LIMIT", 0.5)
    async with serving() as site:
        for begin in (
            b"GET / HTTP/1.1\r\nX: ",
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n",
        ):
            async with await site.open() as stream:
                await stream.send_all(begin)

                async def trickle(stream: trio.SocketStream = stream) -> None:
                    with suppress(trio.BrokenResourceError):
                        while True:
                            await stream.send_all(b"x")
                            await trio.sleep(0.02)

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trickle)
                    assert (await read_all(stream)).startswith(b"HTTP/1.1 408 ")
                    nursery.cancel_scope.cancel()


async def test_a_client_that_does_not_read_its_answer_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "WRITE_LIMIT", 0.2)
    monkeypatch.setattr(http_server, "WRITE_RATE", 1e9)
    async with serving() as site:
        async with await site.open() as stream:
            await stream.send_all(GET % b"large")
            with trio.fail_after(LIMIT):
                while True:  # the server has gone when something sent to it is not taken
                    try:
                        await stream.send_all(b"x")
                    except trio.BrokenResourceError:
                        break
                    await trio.sleep(0.02)
        assert await is_served(site)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5_000 + b"\r\n", b"431"),
        (b"GET /" + b"y" * 20_000, b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 20 + b"\r\n\r\n", b"413"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"10000\r\n%b\r\n" % (b"x" * 65536) * 17,
            b"413",
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET x HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"505"),
    ],
)
async def test_what_is_too_large_or_no_request_is_refused(request_: bytes, status: bytes) -> None:
    async with serving() as site:
        assert (await ask(site, request_)).startswith(b"HTTP/1.1 " + status)
        assert not site.errors
        assert await is_served(site)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: y\nX-User: root\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\n",
    ],
)
async def test_a_request_that_a_proxy_may_read_otherwise_ends_the_connection(request_: bytes) -> None:
    async with serving() as site:
        for begin in (b"", GET % b"1"):
            received = await ask(site, begin + request_ + GET % b"smuggled")
            assert received.count(b"HTTP/1.1 200 ") == bool(begin)
            assert received.count(b"HTTP/1.1 ") == bool(begin) + 1
        assert await is_served(site)


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\n\n", b"0\r\nX: y\n\n", b"0\r\nX: y\r\n\r\n"])
async def test_nothing_follows_a_body_in_chunks_on_its_connection(end: bytes) -> None:
    post = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
    async with serving() as site:
        received = await ask(site, post + end + GET % b"smuggled")
        assert received.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" in received
        assert received.endswith(b"okabc")
        assert await is_served(site)


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with serving() as site:
        post = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
        last = b"HEAD / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: close, upgrade\r\n\r\n"
        received = await ask(site, GET % b"1" + post + GET % b"2" + last)
        assert received.count(b"HTTP/1.1 200 ") == 4
        assert received.count(b"okabc") == 1
        assert received.endswith(b"\r\n\r\n")


async def test_an_application_that_fails_costs_one_connection() -> None:
    async with serving() as site:
        await ask(site, GET % b"fails")
        assert site.errors == ["a request failed: ValueError: of a test"]
        assert await is_served(site)


async def test_connections_are_bounded_and_only_those_that_wait_are_closed_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)  # of which one address has 4
    async with serving() as site:
        busy = [await site.open() for _ in range(3)]
        for stream in busy:
            await stream.send_all(GET % b"slow")
        with trio.fail_after(LIMIT):
            while site.slow < 3:
                await trio.sleep(0.01)
        idle = [await site.open() for _ in range(20)]
        assert await is_served(site)
        for stream in idle[:-1]:
            assert await read_all(stream) == b""
        site.go_on.set()
        for stream in busy:
            with trio.fail_after(LIMIT):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        for stream in [*busy, *idle]:
            await stream.aclose()
        assert await is_served(site)


async def test_a_stop_lets_requests_end_and_closes_what_is_idle() -> None:
    async with serving() as site, await site.open() as idle, await site.open() as slow:
        await slow.send_all(GET % b"slow")
        with trio.fail_after(LIMIT):
            while not site.slow:
                await trio.sleep(0.01)
        site.stop.set()
        assert await read_all(idle) == b""
        site.go_on.set()
        assert (await read_all(slow)).startswith(b"HTTP/1.1 200 ")


async def test_an_address_displaces_its_own_connections_and_those_of_larger_ones() -> None:
    places = ClientPlaces(10, 6)
    others = [places.take("10.0.0.1") for _ in range(4)]
    flood = [places.take("10.0.0.2") for _ in range(20)]
    assert len(places) == 10
    assert places.evicted == 14
    assert all(place and not place.scope.cancel_called for place in (*others, *flood[-6:]))
    newcomer = places.take("10.0.0.3")
    assert newcomer is not None
    assert flood[-6] is not None
    assert flood[-6].scope.cancel_called
    for place in flood[-5:]:
        assert place is not None
        places.mark_busy(place)
    assert places.take("10.0.0.2") is None  # it has more than any other, and none of its own is idle
    assert places.refused == 1
    assert places.take("10.0.0.1") is not None
    assert others[0] is not None
    assert others[0].scope.cancel_called
    places.give_back(newcomer)
    assert len(places) == 9
    assert places.take("10.0.0.2") is not None
    assert len(places) == 10
