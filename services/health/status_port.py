"""Status Port: answers probes on a local port: /livez, /readyz and /metrics.

A small and strict HTTP/1.1: one request for each connection, a bounded head, a time limit, few connections at once.
The event loop answers; while it is blocked, the thread that watches it does, and the answer says so. Of several worker
processes each takes the first port that is free, from the first on: a process that replaces another takes its place.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec
import trio

from celery5.health.event_loop import measure_lateness
from celery5.logs.log import Log
from celery5.protocol.health.http import (
    HEAD_END,
    MAX_HEAD_SIZE,
    BadRequest,
    HttpRequest,
    HttpResponse,
    parse_request,
)
from celery5.protocol.health.metrics import CONTENT_TYPE, format_exposition
from celery5.services.health.vitals import ProbeReport, ProcessStatus
from celery5.services.publisher.listener import accept_connection


async def read_head(stream: trio.abc.ReceiveStream, *, timeout: float) -> tuple[bytes, bytes]:
    """The head of a request, with its empty line, and what has come after it. `within`: seconds. Raises BadRequest when
    it is too large, or ends before it is whole, or takes too long."""
    head = bytearray()
    with trio.move_on_after(timeout):
        while HEAD_END not in head:
            if len(head) >= MAX_HEAD_SIZE:
                raise BadRequest(431, f"the head of a request has at most {MAX_HEAD_SIZE} bytes")
            more = await stream.receive_some(MAX_HEAD_SIZE - len(head))
            if not more:
                raise BadRequest(400, "the request is not whole")
            head += more
        found, end, rest = bytes(head).partition(HEAD_END)
        return found + end, rest
    raise BadRequest(408, "the request took too long")


async def read_body(stream: trio.abc.ReceiveStream, received: bytes, length: int, *, timeout: float) -> bytes:
    """The body of `length` bytes, of which `begun` have come. Raises BadRequest."""
    body = bytearray(received[:length])
    with trio.move_on_after(timeout):
        while len(body) < length:
            more = await stream.receive_some(length - len(body))
            if not more:
                raise BadRequest(400, "the request is not whole")
            body += more
        return bytes(body)
    raise BadRequest(408, "the request took too long")


async def drain_request(stream: trio.abc.ReceiveStream) -> None:
    """Take what the other side still sends, for a moment: closing over it would take our response from them."""
    with trio.move_on_after(0.5):
        for _ in range(16):
            if not await stream.receive_some(MAX_HEAD_SIZE):
                return


MAX_CONNECTIONS = 16
"""Connections at once; others are told to come again."""
LIMIT = 5.0
"""Seconds that one connection may take, from the first byte to the last."""
BLOCKED_LIMIT = 0.5
"""Seconds that one connection may take while the loop is blocked: then they are served one after the other."""
TICK = 1.0
"""Seconds between two looks at how late the loop wakes up."""
REMEMBERED = 10
"""Ticks of which the latest is told."""
TRY_AGAIN = 5.0
"""Seconds until a port that was taken is tried again."""
PATHS = ("/livez", "/readyz", "/metrics")


class StatusPort:
    """Listens on `host`, at the first free one of `ports` ports from `port` on. Without a `port` it does nothing."""

    def __init__(
        self, *, process_status: ProcessStatus, log: Log, port: int | None, host: str, ports: int = 1
    ) -> None:
        self._vitals = process_status
        self._log = log
        self._port = port
        self._host = host
        self._ports = ports
        self._open = 0
        self._busy: dict[trio.CancelScope, None] = {}
        self._listener: socket.socket | None = None
        self._polled: socket.socket | None = None
        self._guard = threading.Lock()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled. A port that is taken keeps no worker from working: it is told of, and tried again."""
        if self._port is None:
            task_status.started()
            await trio.sleep_forever()
        listener = await self._listening(self._port)
        task_status.started()
        told = False
        while listener is None:
            if not told:
                self._log.event(
                    "status:open-failed", "error", host=self._host, port=self._port, hint=_NO_PORT
                )
            told = True
            await trio.sleep(TRY_AGAIN)
            listener = await self._listening(self._port)
        self._listener = socket.socket(fileno=os.dup(listener.socket.fileno()))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_the_loop)
                nursery.start_soon(self._accept, listener, nursery)
        finally:
            self._close()

    def _close(self) -> None:
        """Stop listening. A thread that polls the socket closes it: its number must not be used anew before."""
        with self._guard:
            listener, self._listener = self._listener, None
            polled = self._polled is not None
        if listener is not None:
            with suppress(OSError):  # wakes the thread
                listener.shutdown(socket.SHUT_RDWR)
            if not polled:
                listener.close()

    def serve_while_blocked(self, seconds: float) -> bool:
        """Answer for this time, in another thread than the loop's, which is blocked. Return False when no port is
        open."""
        with self._guard:
            listener = self._polled = self._listener
        if listener is None:
            return False
        try:
            self._answer_on(listener, time.monotonic() + seconds)
        finally:
            with self._guard:
                self._polled = None
                closed = self._listener is not listener
            if closed:
                listener.close()
        return True

    def _answer_on(self, listener: socket.socket, end: float) -> None:
        """Answer until the `end`, or until the port is closed."""
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        while (left := end - time.monotonic()) > 0 and waiting.poll(left * 1000):
            if self._listener is not listener:
                return
            with suppress(OSError):  # the loop accepted it first, or the client has gone
                stream, _ = listener.accept()
                with stream:
                    stream.settimeout(BLOCKED_LIMIT)
                    stream.sendall(self._answer_blocked(stream))
                    stream.shutdown(socket.SHUT_WR)

    def _answer_blocked(self, stream: socket.socket) -> bytes:
        """Read one request and return the answer to it, in another thread than the loop's."""
        head, end = b"", time.monotonic() + BLOCKED_LIMIT
        while HEAD_END not in head and len(head) < MAX_HEAD_SIZE and time.monotonic() < end:
            if not (some := stream.recv(MAX_HEAD_SIZE)):
                break
            head += some
        try:
            request = parse_request(head.partition(HEAD_END)[0] + HEAD_END)
        except BadRequest as bad:
            return _refused(bad.status, bad.why).to_bytes()
        return self.respond(request, blocked=True).to_bytes(head_only=request.method == "HEAD")

    async def _listening(self, first: int) -> trio.SocketListener | None:
        """A listener at the first port that is free and ours; None if there is none."""
        for port in range(first, min(first + self._ports, 65536)):
            try:
                listeners = await trio.open_tcp_listeners(port, host=self._host, backlog=MAX_CONNECTIONS)
            except OSError as error:
                self._log.event("status:port-taken", "debug", port=port, why=str(error))
                continue
            for each in listeners[1:]:  # a name with several addresses: the first is enough
                await each.aclose()
            self._log.event("status:opened", host=self._host, port=port)
            return listeners[0]
        return None

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        async with listener:
            while True:
                nursery.start_soon(self._serve, await accept_connection(listener))

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One connection, whatever comes on it. When there are too many, the oldest is closed: a client that holds
        connections open and sends nothing must not block a probe, or the worker would be restarted."""
        self._open += 1
        scope = trio.move_on_after(LIMIT)
        self._busy[scope] = None
        if len(self._busy) > MAX_CONNECTIONS:
            oldest = next(iter(self._busy))
            del self._busy[oldest]
            oldest.cancel()
        try:
            with scope, suppress(trio.BrokenResourceError, OSError):
                await stream.send_all(await self._answer(stream))
                await stream.send_eof()
                await drain_request(stream)
        finally:
            self._open -= 1
            self._busy.pop(scope, None)
            await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.SocketStream) -> bytes:
        try:
            request = parse_request((await read_head(stream, timeout=LIMIT / 2))[0])
        except BadRequest as bad:
            return _refused(bad.status, bad.why).to_bytes()
        return self.respond(request).to_bytes(head_only=request.method == "HEAD")

    def respond(self, request: HttpRequest, *, blocked: bool = False) -> HttpResponse:
        """The response to one request; while the loop is `blocked` another thread asks for it."""
        answer = {
            "/livez": lambda: _reported(self._vitals.get_liveness()),
            "/readyz": lambda: _reported(self._vitals.get_readiness(blocked=blocked)),
            "/metrics": lambda: HttpResponse(
                200, format_exposition(self._vitals.metric_families(blocked=blocked)), CONTENT_TYPE
            ),
        }.get(request.path)
        if answer is None:
            return _refused(404, f"there are {', '.join(PATHS)}")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "GET or HEAD", ("Allow", "GET, HEAD"))
        try:
            return answer()
        except Exception as error:
            # A source of somebody else's: the probe must be told, the worker must live.
            return _refused(500, f"{type(error).__name__}: {error}")

    async def _watch_the_loop(self) -> None:
        late: deque[float] = deque([0.0], maxlen=REMEMBERED)
        while True:
            late.append(await measure_lateness(TICK))
            self._vitals.lag = max(late)


def _reported(report: ProbeReport) -> HttpResponse:
    return HttpResponse(200 if report.ok else 503, msgspec.json.encode(report) + b"\n")


def _refused(status: int, why: str, *more: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode({"error": why}) + b"\n", headers=more)


_NO_PORT = (
    "it is taken, or not ours to take: probes get no answer until it is free; choose another --status-port"
)
