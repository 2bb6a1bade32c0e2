"""Receive webhooks over HTTP, and answer 200 when they are published: a Data Source.

Small and strict: one request for each connection, limits to bytes and time, and few connections at once. With a `tls`
context it speaks HTTPS. A sender that gets another answer than 200 sends the message again. That is safe, since
documents are identified by their ids.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import trio

from celery5 import BrokerError, CeleryError, Misconfigured
from celery5.events import Emit
from celery5.examples.webhooks.signature import Unsigned, key_of, verified
from celery5.protocol.health.http import BadRequest, HttpRequest, HttpResponse, parse_request
from celery5.services.health.status_port import drain_request, read_body, read_head
from celery5.services.process.client_connections import (
    BACKLOG,
    ClientConnections,
    ClientPlace,
    ClientPlaces,
    limit_places,
)

CONNECTIONS = 64
"""Connections at once; for another one, that of the busiest address is closed that has waited longest."""
SHARE_OF_FILES = 0.1
"""The part of the files which the process may open that connections may take."""
LIMIT = 10.0
"""Seconds that one connection may take, from the first byte to the last."""
NO_SECRET = (
    "there is no secret, so the port stays closed: "
    "export WEBHOOK_SECRETS=whsec_$(head -c 24 /dev/urandom | base64) and start again"
)
"""The error when there is no secret, so that no message could be verified."""


class Receiver:
    """Listens on `host` and `port` for messages to `path` that are signed with one of `secrets`.

    A body has at most `largest` bytes. `now` returns the seconds since 1970.
    """

    def __init__(
        self,
        secrets: Sequence[str],
        *,
        host: str = "127.0.0.1",
        port: int = 8400,
        path: str = "/webhooks",
        largest: int = 256 * 1024,
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keys = [key_of(secret) for secret in secrets]
        self._host = host
        self._port = port
        self._path = path
        self._largest = largest
        self._tls = tls
        self._now = now
        self.port: int | None = None

    async def run(self, emit: Emit) -> None:
        """Receive until cancelled.

        Raises OSError when the port is in use: then the source is tried again. Raises Misconfigured, which is logged,
        when there is no secret, since no message could be verified.
        """
        if not self._keys:
            raise Misconfigured(NO_SECRET)
        listener, *others = await trio.open_tcp_listeners(self._port, host=self._host, backlog=BACKLOG)
        for other in others:
            await other.aclose()
        self.port = listener.socket.getsockname()[1]
        connections = ClientConnections(
            ClientPlaces(limit_places(CONNECTIONS, SHARE_OF_FILES)),
            partial(self._serve, emit),
            on_error=lambda error: None,  # TLS that was not finished, for example
            on_shortage=lambda error: None,
        )
        async with listener, trio.open_nursery() as nursery:
            await connections.accept([listener], nursery)

    async def _serve(self, emit: Emit, bare: trio.SocketStream, place: ClientPlace) -> None:
        """Serve one connection."""
        del place  # it may be closed for another one at any time: the sender sends the message again
        stream = (
            trio.SSLStream(bare, self._tls, server_side=True, https_compatible=True) if self._tls else bare
        )
        with trio.move_on_after(LIMIT), suppress(ssl.SSLError):
            await stream.send_all((await self._response(stream, emit)).to_bytes())
            if stream is bare:
                await bare.send_eof()
            await drain_request(stream)

    async def _response(self, stream: trio.abc.ReceiveStream, emit: Emit) -> HttpResponse:
        try:
            head, begun = await read_head(stream, timeout=LIMIT / 4)
            request = parse_request(head, max_body_size=self._largest)
            if request.path != self._path or request.method != "POST":
                status = 404 if request.path != self._path else 405
                return _refused(status, f"POST to {self._path}")
            body = await read_body(stream, begun, request.content_length, timeout=LIMIT / 4)
        except BadRequest as bad:
            return _refused(bad.status, bad.why)
        return await self._taken(request, body, emit)

    async def _taken(self, request: HttpRequest, body: bytes, emit: Emit) -> HttpResponse:
        """Verify and publish a message, and return the response."""
        try:
            name = verified(request.headers, body, self._keys, now=self._now())
        except Unsigned:
            return _refused(401, "it is not signed as it must be")
        content_type = request.headers.get("content-type", "")
        try:
            with trio.fail_after(LIMIT / 4):
                await emit(body, id=name, attributes={"content-type": content_type} if content_type else {})
        except (BrokerError, trio.TooSlowError):
            return _refused(503, "it could not be published: send it again", ("Retry-After", "5"))
        except CeleryError as error:  # sending it again would fail, too
            return _refused(400, str(error))
        return HttpResponse(200, msgspec.json.encode({"id": name}) + b"\n")


def _refused(status: int, why: str, *more: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode({"error": why}) + b"\n", headers=more)
