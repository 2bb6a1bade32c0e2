"""Answer probes over HTTP on a local port: /livez, /readyz, /metrics, /metrics/cluster and /wanted-workers.

A small and strict subset of HTTP/1.1: one request for each connection, a bounded head, a time limit, few connections at
once. The event loop answers; while it is blocked, the thread that watches it does, and reports that. Of several worker
processes each opens the first free port of a range, so a new process takes over the port of the one that it replaces.
"""

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Generic, TypeVar
from urllib.parse import unquote

import msgspec
import trio

from celery5.errors import CeleryError
from celery5.health.event_loop import measure_lateness
from celery5.logs.log import Log
from celery5.protocol.health.http import (
    HEAD_END,
    MAX_HEAD_SIZE,
    BadRequest,
    HttpRequest,
    HttpResponse,
    is_name_of_other_site,
    parse_request,
)
from celery5.protocol.observability.exposition import (
    CONTENT_TYPE,
    OPENMETRICS_TYPE,
    accepts_openmetrics,
    format_exposition,
)
from celery5.protocol.observability.families import MetricFamily
from celery5.services.health.vitals import ProbeReport, ProcessStatus
from celery5.services.process.client_connections import (
    BACKLOG,
    RETRY_DELAY,
    ClientConnections,
    ClientPlace,
    ClientPlaces,
    limit_places,
)


async def read_head(stream: trio.abc.ReceiveStream, *, timeout: float) -> tuple[bytes, bytes]:
    """Return the head of a request, with its empty line, and the bytes received after it.

    Raises BadRequest if it is too large or incomplete, or takes longer than `timeout` seconds.
    """
    head = bytearray()
    with trio.move_on_after(timeout):
        while HEAD_END not in head:
            if len(head) >= MAX_HEAD_SIZE:
                raise BadRequest(431, f"the head of a request has at most {MAX_HEAD_SIZE} bytes")
            received = await stream.receive_some(MAX_HEAD_SIZE - len(head))
            if not received:
                raise BadRequest(400, "the request is not whole")
            head += received
        before, end, rest = bytes(head).partition(HEAD_END)
        return before + end, rest
    raise BadRequest(408, "the request took too long")


async def read_body(stream: trio.abc.ReceiveStream, received: bytes, length: int, *, timeout: float) -> bytes:
    """Return the body of `length` bytes, which begins with `received`. Raises BadRequest."""
    body = bytearray(received[:length])
    with trio.move_on_after(timeout):
        while len(body) < length:
            chunk = await stream.receive_some(length - len(body))
            if not chunk:
                raise BadRequest(400, "the request is not whole")
            body += chunk
        return bytes(body)
    raise BadRequest(408, "the request took too long")


async def drain_request(stream: trio.abc.ReceiveStream) -> None:
    """Read what the client still sends, for a moment: if it were unread at the close, the response might be lost."""
    with trio.move_on_after(0.5):
        for _ in range(16):
            if not await stream.receive_some(MAX_HEAD_SIZE):
                return


MAX_CONNECTIONS = 16
"""The most connections at once; for another one, the oldest is closed."""
SHARE_OF_FILES = 0.1
"""The part of the files which the process may open that connections may take."""
CONNECTION_TIMEOUT = 5.0
"""Seconds that one connection may take, from the first byte to the last."""
BLOCKED_TIMEOUT = 0.5
"""Seconds that one connection may take while the event loop is blocked."""
MAX_BLOCKED_CLIENTS = 16
"""The most connections at once while the event loop is blocked; for another one, the oldest is answered."""
LAG_PERIOD = 1.0
"""Seconds between two measurements of the lag of the event loop."""
LAG_SAMPLES = 10
"""The number of measurements of which the largest is reported."""
REOPEN_DELAY = 5.0
"""Seconds until a port that was taken, or has failed, is tried again."""
CLUSTER_PATH = "/metrics/cluster"
"""The path of the metrics of the whole cluster, which are read from Redis."""
CLUSTER_AGE = 5.0
"""Seconds for which one reading of them serves all clients."""
CLUSTER_TIMEOUT = 3.0
"""Seconds that the reading may take."""
WANTED_PATH = "/wanted-workers"
"""The path of the number of workers that there should be; queues may follow, as in `/wanted-workers/mail,bulk`."""
WANTED_AGE = 1.0
"""Seconds for which one reading of it serves all clients."""
PATHS = ("/livez", "/readyz", "/metrics", CLUSTER_PATH, WANTED_PATH)
ReadMetrics = Callable[[], Awaitable[Sequence[MetricFamily]]]
CountWorkers = Callable[[Sequence[str]], int]
"""Returns how many workers of these queues there should be; without queues, of the application. Raises CeleryError."""
ReadWanted = Callable[[], Awaitable[CountWorkers]]


class _OpenRequest(msgspec.Struct):
    """A request that comes while the event loop is blocked: its connection, when it is given up, and what has come."""

    stream: socket.socket
    deadline: float
    head: bytes = b""

    def read(self) -> bool:
        """Read what is there. Return whether no more is to come."""
        try:
            received = self.stream.recv(MAX_HEAD_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        self.head += received
        return not received or HEAD_END in self.head or len(self.head) >= MAX_HEAD_SIZE


class StatusPort:
    """Serves probes on `host`, at the first free one of `ports` ports from `port` on; does nothing without a `port`."""

    def __init__(
        self,
        *,
        process_status: ProcessStatus,
        log: Log,
        port: int | None,
        host: str,
        ports: int = 1,
        read_cluster: ReadMetrics | None = None,
        read_wanted: ReadWanted | None = None,
    ) -> None:
        self._process_status = process_status
        self._log = log
        self._port = port
        self._host = host
        self._is_local = _is_loopback(host)
        self._ports = ports
        self._connections = ClientPlaces(limit_places(MAX_CONNECTIONS, SHARE_OF_FILES))
        self._listener: socket.socket | None = None
        self._polled: socket.socket | None = None
        self._guard = threading.Lock()
        self._cluster = SharedReading(read_cluster, CLUSTER_AGE)
        self._wanted = SharedReading(read_wanted, WANTED_AGE)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer until cancelled. If no port is free, the worker runs without, and this is logged and tried again."""
        if self._port is None:
            task_status.started()
            await self._measure_lag()  # for the reports on metrics
            return
        listener = await self._try_to_listen(self._port)
        task_status.started()
        was_logged = False
        while listener is None:
            if not was_logged:
                self._log.event(
                    "status:open-failed", "error", host=self._host, port=self._port, hint=_NO_PORT
                )
            was_logged = True
            await trio.sleep(REOPEN_DELAY)
            listener = await self._try_to_listen(self._port)
        self._listener = socket.socket(fileno=os.dup(listener.socket.fileno()))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._measure_lag)
                await self._accept(listener, nursery)
        finally:
            self._close()

    def _close(self) -> None:
        """Stop listening. A thread that polls the socket closes it: its descriptor must not be reused before."""
        with self._guard:
            listener, self._listener = self._listener, None
            polled = self._polled is not None
        if listener is not None:
            with suppress(OSError):  # wakes the thread
                listener.shutdown(socket.SHUT_RDWR)
            if not polled:
                listener.close()

    def serve_while_blocked(self, seconds: float) -> bool:
        """Answer for this many seconds in another thread, while the event loop is blocked.

        Return False when no port is open.
        """
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
        """Answer until `end`, or until the port is closed, several clients at once: a silent one delays no other.

        What was accepted by then is answered, too: a probe that was cut off would look like a process that is dead.
        """
        open_requests: dict[int, _OpenRequest] = {}
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        accepts = True
        try:
            while accepts or open_requests:
                now = time.monotonic()
                if accepts and (now >= end or self._listener is not listener):
                    accepts = False
                    poll.unregister(listener)
                for number in [fd for fd, request in open_requests.items() if now >= request.deadline]:
                    poll.unregister(number)
                    self._answer_blocked(open_requests.pop(number))
                times = [request.deadline for request in open_requests.values()] + ([end] if accepts else [])
                due = min(times) if times else now
                for number, _ in poll.poll(max(0.0, due - now) * 1000):
                    if number == listener.fileno():
                        self._accept_blocked(listener, poll, open_requests)
                    elif number in open_requests and open_requests[number].read():
                        poll.unregister(number)
                        self._answer_blocked(open_requests.pop(number))
        finally:
            for open_request in open_requests.values():
                open_request.stream.close()

    def _accept_blocked(
        self, listener: socket.socket, poll: select.poll, open_requests: "dict[int, _OpenRequest]"
    ) -> None:
        """Accept one connection. When there are too many, the oldest is answered as it is."""
        try:
            stream, _ = listener.accept()
        except BlockingIOError:  # the event loop accepted it first
            return
        except OSError:  # too many open files, for example: then it is still there to be accepted
            time.sleep(RETRY_DELAY)
            return
        stream.setblocking(False)
        if len(open_requests) >= MAX_BLOCKED_CLIENTS:
            oldest = next(iter(open_requests))
            poll.unregister(oldest)
            self._answer_blocked(open_requests.pop(oldest))
        open_requests[stream.fileno()] = _OpenRequest(stream, time.monotonic() + BLOCKED_TIMEOUT)
        poll.register(stream, select.POLLIN)

    def _answer_blocked(self, open_request: "_OpenRequest") -> None:
        """Respond to what has come of a request, in another thread than the event loop's, and close its connection."""
        try:
            request = parse_request(open_request.head.partition(HEAD_END)[0] + HEAD_END)
            response = self.respond(request, blocked=True).to_bytes(head_only=request.method == "HEAD")
        except BadRequest as bad:
            response = _refused(bad.status, bad.why).to_bytes()
        with suppress(OSError), open_request.stream as stream:  # the client has disconnected
            stream.send(response)  # it is small, so the kernel takes it at once
            stream.shutdown(socket.SHUT_WR)

    async def _try_to_listen(self, first: int) -> trio.SocketListener | None:
        """Return a listener at the first port that can be opened; None if there is none."""
        for port in range(first, min(first + self._ports, 65536)):
            try:
                listeners = await trio.open_tcp_listeners(port, host=self._host, backlog=BACKLOG)
            except OSError as error:
                self._log.event("status:port-taken", "debug", port=port, why=str(error))
                continue
            for listener in listeners[1:]:  # a name with several addresses: the first is enough
                await listener.aclose()
            self._log.event("status:opened", host=self._host, port=port)
            return listeners[0]
        return None

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Serve connections. When there are too many, the oldest is closed.

        So a client that holds connections open cannot block a probe, after which the worker would be restarted.
        """
        connections = ClientConnections(
            self._connections,
            self._serve,
            on_error=self._log_failure,
            on_shortage=lambda error: self._log.event(
                "status:accept-failed", "warning", port=self._port, why=error.strerror
            ),
        )
        async with listener:
            await connections.accept([listener], nursery)

    async def _serve(self, stream: trio.SocketStream, place: ClientPlace) -> None:
        """Serve one connection; its place is idle until it is closed."""
        del place
        with trio.move_on_after(CONNECTION_TIMEOUT):
            await stream.send_all(await self._answer(stream))
            await stream.send_eof()
            await drain_request(stream)

    def _log_failure(self, error: Exception) -> None:
        self._log.event(
            "status:request-failed", "error", port=self._port, error=f"{type(error).__name__}: {error}"
        )

    async def _answer(self, stream: trio.SocketStream) -> bytes:
        try:
            request = parse_request((await read_head(stream, timeout=CONNECTION_TIMEOUT / 2))[0])
        except BadRequest as bad:
            return _refused(bad.status, bad.why).to_bytes()
        if _is_for_cluster(request) and not self._is_misdirected(request):
            response = await self._respond_for_cluster(request)
        else:
            response = self.respond(request)
        return response.to_bytes(head_only=request.method == "HEAD")

    async def _respond_for_cluster(self, request: HttpRequest) -> HttpResponse:
        """Return what is read from Redis; 503 while that is unreachable."""
        try:
            if request.path == CLUSTER_PATH:
                return make_metrics_response(request, await self._cluster.get())
            words = unquote(request.path.removeprefix(WANTED_PATH)).strip("/").split(",")
            wanted = (await self._wanted.get())([word for word in words if word])
        except BadRequest as bad:
            return _refused(bad.status, bad.why)
        except (CeleryError, trio.TooSlowError) as error:
            return _refused(503, str(error) or "Redis takes too long: ask again later")
        return HttpResponse(200, msgspec.json.encode({"wanted_workers": wanted}) + b"\n")

    def respond(self, request: HttpRequest, *, blocked: bool = False) -> HttpResponse:
        """Return the response to one request. While the event loop is `blocked`, another thread calls this."""
        if self._is_misdirected(request):
            return _refused(421, "this port is for this host: ask it by localhost or an address")
        make_response = {
            "/livez": lambda: _reported(self._process_status.get_liveness()),
            "/readyz": lambda: self._report_readiness(blocked=blocked),
            "/metrics": lambda: make_metrics_response(
                request, self._process_status.metric_families(blocked=blocked)
            ),
        }.get(request.path)
        if make_response is None:
            if _is_for_cluster(request):
                return _refused(
                    503, "the event loop is blocked: ask /livez, which says for how long and by what"
                )
            return _refused(404, f"there is no such path: ask for {', '.join(PATHS)}")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "ask by GET or HEAD", ("Allow", "GET, HEAD"))
        try:
            return make_response()
        except Exception as error:  # of a source: the probe gets an answer, and the worker runs on
            return _refused(500, f"{type(error).__name__}: {error}")

    def _report_readiness(self, *, blocked: bool) -> HttpResponse:
        """Return the answer to /readyz, with the status line, which belongs to the event loop."""
        report = self._process_status.get_readiness(blocked=blocked)
        status = "" if blocked else self._process_status.format_summary()
        return _reported(msgspec.structs.replace(report, status=status))

    def _is_misdirected(self, request: HttpRequest) -> bool:
        """Return whether a page of a web site may have made a request, where only this host is to be answered."""
        return self._is_local and is_name_of_other_site(request.headers.get("host", ""))

    async def _measure_lag(self) -> None:
        samples: deque[float] = deque([0.0], maxlen=LAG_SAMPLES)
        while True:
            samples.append(await measure_lateness(LAG_PERIOD))
            self._process_status.set_lag(max(samples))


T = TypeVar("T")


class SharedReading(Generic[T]):
    """What is read of a cluster, once in `age` seconds, however many ask."""

    def __init__(self, read: Callable[[], Awaitable[T]] | None, age: float) -> None:
        self._read = read
        self._age = age
        self._found: T | None = None
        self._read_at = -math.inf
        self._lock = trio.Lock()

    async def get(self) -> T:
        """Return it. Raises BadRequest if nothing can be read here, CeleryError and TooSlowError."""
        if self._read is None:
            raise BadRequest(
                404, "this process reads nothing of a cluster: ask a worker, a Router or a Scheduler"
            )
        with trio.fail_after(CLUSTER_TIMEOUT):
            async with self._lock:
                if self._found is None or trio.current_time() - self._read_at >= self._age:
                    self._found = await self._read()
                    self._read_at = trio.current_time()
                return self._found


def _is_for_cluster(request: HttpRequest) -> bool:
    """Return whether a request is for what is read from Redis."""
    is_path = request.path == CLUSTER_PATH or f"{request.path}/".startswith(f"{WANTED_PATH}/")
    return is_path and request.method in ("GET", "HEAD")


def make_metrics_response(request: HttpRequest, metric_families: Iterable[MetricFamily]) -> HttpResponse:
    """Return metrics in the format that the client asks for."""
    openmetrics = accepts_openmetrics(request.headers.get("accept", ""))
    text = format_exposition(metric_families, openmetrics=openmetrics)
    return HttpResponse(200, text, OPENMETRICS_TYPE if openmetrics else CONTENT_TYPE)


def _is_loopback(host: str) -> bool:
    """Return whether only this host can connect to an address."""
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _reported(report: ProbeReport) -> HttpResponse:
    return HttpResponse(200 if report.ok else 503, msgspec.json.encode(report) + b"\n")


def _refused(status: int, why: str, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode({"error": why}) + b"\n", headers=headers)


_NO_PORT = "it is taken or not permitted: probes get no answer until it is free; choose another --status-port"
