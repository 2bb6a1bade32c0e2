"""Serve an ASGI application over HTTP/1.1 on one listening socket, within bounds of connections, bytes and time.

A client can make this server neither end nor stop answering others: each connection has a place (`ClientPlaces`), and a
time for its head, for its body, and for reading the answer. It speaks no HTTP/2, no WebSocket and no TLS: a reverse
proxy does, where that is needed.

Source: RFC 9112; ASGI 3.0; h11 parses, strictly.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from functools import partial
from typing import Any, NoReturn, cast
from urllib.parse import unquote_to_bytes, urlsplit

import h11
import trio

from celery5.services.process.client_connections import (
    ClientConnections,
    ClientPlace,
    ClientPlaces,
    limit_places,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

MAX_CONNECTIONS = 256
"""Connections at once, where the process may open enough files; half of them from one address."""
SHARE_OF_FILES = 0.25
"""The part of the files which the process may open that connections may take."""
MAX_HEAD = 16 * 1024
"""Bytes of a request's head."""
MAX_BODY = 1024 * 1024
"""Bytes of a request's body."""
MAX_REQUESTS = 1000
"""Requests of one connection."""
HEAD_LIMIT = 10.0
"""Seconds from the start of a connection, or from the first byte of a further request, to the end of its head."""
IDLE_LIMIT = 15.0
"""Seconds that a connection may be silent between two requests."""
BODY_LIMIT = 20.0
"""Seconds from the end of a head to the end of its body."""
WRITE_LIMIT = 10.0
"""Seconds in which a client takes what is sent to it; `WRITE_RATE` adds to it."""
WRITE_RATE = 50_000.0
"""Bytes that a client takes in a further second."""
REQUEST_LIMIT = 90.0
"""Seconds that one request may take in all. An operation has 30, and a page asks several."""
GRACE_PERIOD = 2.0
"""Seconds that requests have to end when the server stops."""
DRAIN_LIMIT = 1.0
"""Seconds for which what a client still sends is read after the last answer."""
CHUNK = 65536


class _Refused(Exception):
    """A request that the application does not see: the status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def _too_large() -> _Refused:
    return _Refused(413, f"this request has more than {MAX_BODY} bytes")


class _NoRequest(Exception):
    """The client has gone, or is silent for too long."""


class HttpServer:
    """Serves one application.

    Args:
        app: The ASGI application.
        on_error: Called with a line for whoever has started the server.
    """

    def __init__(self, app: AsgiApp, *, on_error: Callable[[str], object]) -> None:
        self._app = app
        self._say = on_error
        self._waiting: set[trio.CancelScope] = set()
        """What waits for the next request of a connection: it ends at once when the server stops."""
        self._stopping = False

    async def run(
        self,
        listener: trio.SocketListener,
        *,
        stop: Callable[[], Awaitable[None]] = trio.sleep_forever,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled, or until `stop` returns: then what is being answered has `GRACE_PERIOD` to end."""
        most = limit_places(MAX_CONNECTIONS, SHARE_OF_FILES)
        has_addresses = listener.socket.family != trio.socket.AF_UNIX
        places = ClientPlaces(most, most // 2 if has_addresses else most)
        connections = ClientConnections(
            places,
            partial(self._serve, places),
            on_error=lambda error: self._say(f"a request failed: {type(error).__name__}: {error}"),
            on_shortage=lambda error: self._say(f"no connections can be accepted for now: {error.strerror}"),
        )
        async with _living(self._app), trio.open_nursery() as serving:
            async with listener, trio.open_nursery() as accepting:
                accepting.start_soon(connections.accept, [listener], serving)
                task_status.started()
                await stop()
                accepting.cancel_scope.cancel()
            self._stopping = True
            for scope in list(self._waiting):
                scope.cancel()
            serving.cancel_scope.deadline = trio.current_time() + GRACE_PERIOD

    async def _serve(self, places: ClientPlaces, stream: trio.SocketStream, place: ClientPlace) -> None:
        """Answer the requests of one connection, one after the other."""
        connection = _HttpConnection(stream, self._app, places, place)
        for number in range(MAX_REQUESTS):
            request: Scope | None = None
            with trio.CancelScope() as waiting, suppress(_NoRequest):
                self._waiting.add(waiting)
                try:
                    request = await connection.read_head(is_first=not number)
                finally:
                    self._waiting.discard(waiting)
            if request is None:
                break
            if not await connection.answer(request, is_last=number == MAX_REQUESTS - 1) or self._stopping:
                break
        await _end_connection(stream)


async def _end_connection(stream: trio.SocketStream) -> None:
    """Say that nothing follows, and read what the client still sends: if it were unread, the answer might be lost."""
    with trio.move_on_after(DRAIN_LIMIT), suppress(trio.BrokenResourceError):
        await stream.send_eof()
        for _ in range(2 * MAX_BODY // CHUNK):
            if not await stream.receive_some(CHUNK):
                return


@asynccontextmanager
async def _living(app: AsgiApp) -> AsyncGenerator[None, None]:
    """Keep the application alive while the block lasts, by the lifespan protocol of ASGI."""
    started, ending = trio.Event(), trio.Event()
    phases = iter(("lifespan.startup", "lifespan.shutdown"))

    async def receive() -> Message:
        phase = next(phases)
        if phase == "lifespan.shutdown":
            await ending.wait()
        return {"type": phase}

    async def send(message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            started.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(app, {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        await started.wait()
        yield
        ending.set()


class _HttpConnection:
    """One connection, and its requests, one after the other."""

    def __init__(
        self, stream: trio.SocketStream, app: AsgiApp, places: ClientPlaces, place: ClientPlace
    ) -> None:
        self._stream = stream
        self._app = app
        self._places = places
        self._place = place
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._client = _get_address(stream.socket.getpeername)
        self._server = _get_address(stream.socket.getsockname)
        self._answering = trio.CancelScope()
        self._refusal: _Refused | None = None
        self._body_deadline = 0.0
        self._body_bytes = 0
        self._body_ended = False
        self._method = ""

    async def answer(self, scope: Scope, *, is_last: bool) -> bool:
        """Answer one request; return whether another one may follow.

        None follows a body in chunks: a proxy may see its end elsewhere than h11 does, which takes LF alone there.
        """
        is_last = is_last or any(name == b"transfer-encoding" for name, _ in scope["headers"])
        self._method = scope["method"]
        self._body_deadline = trio.current_time() + BODY_LIMIT
        self._body_bytes, self._body_ended = 0, False
        self._places.mark_busy(self._place)
        try:
            with trio.move_on_after(REQUEST_LIMIT) as self._answering:
                await self._app(scope, self._receive, self._make_send(is_last=is_last))
        finally:
            self._places.mark_idle(self._place)
        if self._parser.our_state is h11.SEND_RESPONSE:
            await self._refuse(self._refusal or _Refused(503, "this took too long"))
        if self._parser.our_state is not h11.DONE or not self._skip_body():
            return False
        self._parser.start_next_cycle()
        return True

    # ---- reading

    async def read_head(self, *, is_first: bool) -> Scope | None:
        """Return the next request; None for one that was refused. Raises _NoRequest when the client sends none."""
        self._method = ""
        try:
            scope = make_scope(
                await self._read_request(is_first=is_first), client=self._client, server=self._server
            )
            _check_length(scope["headers"])
        except h11.RemoteProtocolError as error:
            await self._refuse(_Refused(error.error_status_hint, str(error)))
            return None
        except _Refused as refused:
            await self._refuse(refused)
            return None
        return scope

    async def _read_request(self, *, is_first: bool) -> h11.Request:
        if not (is_first or self._parser.trailing_data[0]):
            with trio.move_on_after(IDLE_LIMIT) as idle:
                await self._feed()
            if idle.cancelled_caught:
                raise _NoRequest
        with trio.move_on_after(HEAD_LIMIT):
            while True:
                received = self._parser.trailing_data[0]
                event = self._parser.next_event()
                if isinstance(event, h11.Request):
                    rest = self._parser.trailing_data[0]
                    _check_head(event, received[: len(received) - len(rest)])
                    return event
                if event is not h11.NEED_DATA:
                    raise _NoRequest
                await self._feed()
        if not self._parser.trailing_data[0]:
            raise _NoRequest  # it has sent nothing at all
        raise _Refused(408, "the head of this request took too long")

    async def _feed(self) -> None:
        received = bytes(await self._stream.receive_some(CHUNK))
        if not received and self._parser.their_state is h11.IDLE and not self._parser.trailing_data[0]:
            raise _NoRequest
        self._parser.receive_data(received)

    async def _receive(self) -> Message:
        """Return the next part of the body; when there is no more, wait until the request is over."""
        if self._body_ended:
            await trio.sleep_forever()
        if self._parser.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        self._places.mark_idle(self._place)
        try:
            with trio.move_on_at(self._body_deadline):
                return await self._receive_part()
        except h11.RemoteProtocolError as error:
            return await self._give_up(_Refused(error.error_status_hint, str(error)))
        finally:
            self._places.mark_busy(self._place)
        return await self._give_up(_Refused(408, "the body of this request took too long"))

    async def _receive_part(self) -> Message:
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Data):
                self._body_bytes += len(event.data)
                if self._body_bytes > MAX_BODY:
                    await self._give_up(_too_large())
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            if event is not h11.NEED_DATA:
                self._body_ended = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._feed()

    def _skip_body(self) -> bool:
        """Skip what the application has not read; return False when that has not been received yet."""
        with suppress(h11.RemoteProtocolError):
            while (
                self._parser.their_state is h11.SEND_BODY and self._parser.next_event() is not h11.NEED_DATA
            ):
                pass
        return self._parser.their_state is h11.DONE

    async def _give_up(self, refusal: _Refused) -> NoReturn:
        """Cancel the application: it can do nothing for this request."""
        self._refusal = refusal
        self._answering.cancel()
        await trio.sleep_forever()

    # ---- writing

    def _make_send(self, *, is_last: bool) -> Callable[[Message], Awaitable[None]]:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
                headers.append((b"date", formatdate(usegmt=True).encode()))
                if is_last:
                    headers.append((b"connection", b"close"))
                await self._send(h11.Response(status_code=message["status"], headers=headers))
            elif message["type"] == "http.response.body":
                body = bytes(message.get("body", b""))
                if body and self._method != "HEAD":
                    await self._send(h11.Data(data=body))
                if not message.get("more_body", False):
                    await self._send(h11.EndOfMessage())

        return send

    async def _send(self, event: Any) -> None:
        """Send a part of an answer. A client that has gone, or takes too long to read it, loses the connection."""
        data = cast("bytes | None", self._parser.send(event))
        if not data:
            return
        was_busy = not self._place.is_idle
        self._places.mark_idle(self._place)
        try:
            with trio.move_on_after(WRITE_LIMIT + len(data) / WRITE_RATE):
                await self._stream.send_all(data)
                return
        except trio.BrokenResourceError:
            pass
        finally:
            if was_busy:
                self._places.mark_busy(self._place)
        self._place.scope.cancel()
        await trio.sleep_forever()

    async def _refuse(self, refused: _Refused) -> None:
        """Answer with a line of text, and end the connection."""
        if self._parser.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"{refused}\n".encode()
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("content-length", str(len(body))),
            ("cache-control", "no-store"),
            ("connection", "close"),
        ]
        await self._send(h11.Response(status_code=refused.status, headers=headers))
        if self._method != "HEAD":
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())


def make_scope(
    request: h11.Request, *, client: tuple[str, int] | None, server: tuple[str, int] | None
) -> Scope:
    """Return a request as ASGI describes it. Raises _Refused.

    The name in a target of the absolute form counts for the name in `Host`, so both must be the same (RFC 9112, 3.2.2).
    """
    target, _, query = request.target.partition(b"?")
    headers = [(name.lower(), value) for name, value in request.headers]
    if not target.startswith(b"/"):
        try:
            parts = urlsplit(request.target.decode("ascii"))
        except ValueError:
            raise _Refused(400, "the target of this request is no path") from None
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if parts.scheme not in ("http", "https") or hosts != [parts.netloc.lower()]:
            raise _Refused(400, "the target of this request is no path of this host")
        target = parts.path.encode() or b"/"
    try:
        path = unquote_to_bytes(target).decode()
    except UnicodeDecodeError:
        raise _Refused(400, "the path of this request is not in UTF-8") from None
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode("ascii"),
        "method": request.method.decode("ascii").upper(),
        "scheme": "http",
        "path": path,
        "raw_path": target,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": client,
        "server": server,
        "state": {},
    }


def _check_head(request: h11.Request, head: bytes) -> None:
    """Raise _Refused for a head that is too large, or that a proxy may have read as another one.

    h11 sees to the size only while a head is incomplete, and takes what a recipient may take (RFC 9112, 2.2 and 6.1).
    What a proxy and this server read as different requests carries a second one past the proxy's rules (request
    smuggling), and its headers with the user's name too.
    """
    if len(head) > MAX_HEAD:
        raise _Refused(431, f"the head of a request has at most {MAX_HEAD} bytes")
    if not request.http_version.startswith(b"1."):
        raise _Refused(505, "this server speaks HTTP/1.1 and HTTP/1.0")
    if _BARE_LINE_END.search(head):
        raise _Refused(400, "the lines of a head end with CR LF")
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise _Refused(400, "the length of this request can be read in two ways")


_BARE_LINE_END = re.compile(rb"(?<!\r)\n")


def _check_length(headers: list[tuple[bytes, bytes]]) -> None:
    lengths = [int(value) for name, value in headers if name == b"content-length"]  # h11 has seen to digits
    if lengths and lengths[0] > MAX_BODY:
        raise _too_large()


def _get_address(get: Callable[[], Any]) -> tuple[str, int] | None:
    """Return an address as ASGI has it; None for a unix socket."""
    try:
        address = cast("tuple[str, int] | str", get())
    except OSError:  # the client has gone
        return None
    return (address[0], address[1]) if isinstance(address, tuple) else None
