"""HTTP check: a real endpoint in each of the proposal's states, asked over plain and TLS sockets (C35, C36)."""

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from celery5 import App, Misconfigured
from celery5.health import BreakerPolicy
from celery5.health.checks import HttpEndpoint
from celery5.health.http_requests import request_options
from celery5.observability import WebhookRefused, webhook
from celery5.observability.webhook import AlertWebhook
from tests.redis.worker.workers import until, until_async, working


class Endpoint(ThreadingHTTPServer):
    """What the tests' server answers, and what it was asked."""

    daemon_threads = True
    status = 204
    headers: dict[str, str]
    slow = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.headers = {}
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/orders?open=1"

    def handle_error(self, *_args: Any) -> None:
        """A client that went away is no matter."""


class Answers(BaseHTTPRequestHandler):
    """Answers as its server says."""

    def do_OPTIONS(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path))
        time.sleep(server.slow)
        self.send_response(server.status)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join(30)


async def state_of(check: HttpEndpoint) -> str:
    """What one look says."""
    from celery5.protocol.health.readings import get_worst_state, parse_states

    ground: Any = None
    found = await check.run_check(None, ground)
    return get_worst_state(parse_states(found, check.states), check.states) or ""


@pytest.mark.parametrize(
    ("status", "headers", "state"),
    [
        (200, {}, "healthy"),
        (204, {"Allow": "GET, POST", "Accept": "application/json"}, "healthy"),
        (204, {"Allow": "*", "Accept": "application/*"}, "healthy"),
        (301, {}, "degraded"),
        (403, {}, "degraded"),
        (503, {}, "degraded"),
        (500, {}, "unhealthy"),
        (404, {}, "permanently-unavailable"),
        (200, {"Allow": "GET"}, "permanently-unavailable"),
        (200, {"Accept": "text/html"}, "permanently-unavailable"),
        (500, {"Allow": "GET"}, "permanently-unavailable"),  # which is the worse
    ],
)
async def test_an_endpoint_is_what_it_answers(
    endpoint: Endpoint, status: int, headers: dict[str, str], state: str
) -> None:
    endpoint.status, endpoint.headers = status, headers
    check = HttpEndpoint(endpoint.url, method="POST", content_type="application/json; charset=utf-8")
    assert await state_of(check) == state
    assert endpoint.asked == [("OPTIONS", "/orders?open=1")]


async def test_an_endpoint_that_is_almost_too_slow_is_degraded_and_one_that_is_unhealthy(
    endpoint: Endpoint,
) -> None:
    endpoint.slow = 0.82
    assert await state_of(HttpEndpoint(endpoint.url, limit=1.02)) == "degraded"
    endpoint.slow = 5
    with trio.fail_after(2):  # nobody waits for the answer
        assert await state_of(HttpEndpoint(endpoint.url, limit=0.2)) == "unhealthy"


async def test_an_endpoint_that_is_not_there_is_unhealthy(endpoint: Endpoint) -> None:
    gone = endpoint.url.replace(str(endpoint.server_port), "1")
    for url in (gone, "http://no-such-host.invalid/", "http://127.0.0.1:99999/"):
        check = HttpEndpoint(url, limit=5)
        assert await state_of(check) == "unhealthy"
        assert check.why


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"limit": 60, "dns_limit": 0.05}, r"0\.05"),
        # The lookup has as long as the whole, of which some has passed, and is named all the same.
        ({"limit": 0.05}, r"0\.0(5|4\d+)"),
        ({"limit": 0.5, "dns_limit": 60, "is_secure": lambda: True}, r"0\.\d+"),
    ],
    ids=["its-own", "default", "more-than-the-whole"],
)
async def test_a_name_server_that_does_not_answer_is_unhealthy_within_its_own_limit(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: str
) -> None:
    answered = threading.Event()

    def hang(*_args: Any, **_options: Any) -> Any:
        answered.wait(30)
        raise OSError

    check = HttpEndpoint(endpoint.url.replace("127.0.0.1", "shop.example"), **options)
    try:
        with monkeypatch.context() as patch, trio.fail_after(20):
            patch.setattr(socket, "getaddrinfo", hang)  # there is no name server here to stop
            assert await state_of(check) == "unhealthy"
    finally:
        answered.set()
    assert re.fullmatch(f"DNS: shop.example was not resolved within {limit} s", check.why), check.why


async def test_a_name_is_resolved_once_and_only_to_the_addresses_that_it_may_have(endpoint: Endpoint) -> None:
    url = endpoint.url.replace("127.0.0.1", "localhost")
    assert await state_of(HttpEndpoint(url, addresses=["127.0.0.0/8", "::1"])) == "healthy"
    asked = len(endpoint.asked)
    elsewhere = HttpEndpoint(url, addresses=["10.0.0.0/8"])
    assert await state_of(elsewhere) == "unhealthy"
    assert "which is not among its addresses" in elsewhere.why
    assert len(endpoint.asked) == asked, "nothing is sent to a wrong address"
    unknown = HttpEndpoint("http://no-such-host.invalid/")
    assert await state_of(unknown) == "unhealthy"
    assert unknown.why.startswith("DNS: no-such-host.invalid cannot be resolved: ")
    with pytest.raises(
        Misconfigured, match=r"health check localhost\S*: addresses: .*give IP addresses or networks"
    ):
        HttpEndpoint(url, addresses=["here"])


async def test_what_is_no_http_is_unhealthy() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        await stream.send_all(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners: Any = await nursery.start(trio.serve_tcp, babble, 0)
        port = listeners[0].socket.getsockname()[1]
        assert await state_of(HttpEndpoint(f"http://127.0.0.1:{port}")) == "unhealthy"
        nursery.cancel_scope.cancel()


async def test_a_certificate_that_nobody_trusts_is_insecure_and_one_that_is_trusted_is_not(
    endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    endpoint.socket = context.wrap_socket(endpoint.socket, server_side=True)
    url, file = endpoint.url.replace("http:", "https:"), tmp_path_factory.mktemp("tls") / "ca.pem"
    ca.cert_pem.write_to_path(str(file))
    stranger = HttpEndpoint(url)
    assert await state_of(stranger) == "insecure"
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.why
    assert await state_of(HttpEndpoint(url, cafile=file)) == "healthy"


async def test_plain_text_where_tls_should_be_is_insecure(endpoint: Endpoint) -> None:
    assert await state_of(HttpEndpoint(endpoint.url.replace("http:", "https:"))) == "insecure"


async def test_an_intrusion_is_insecure_whatever_the_endpoint_answers(endpoint: Endpoint) -> None:
    is_secure, where = False, list[int]()

    def ask() -> bool:
        where.append(threading.get_ident())
        return is_secure

    check = HttpEndpoint(endpoint.url, is_secure=ask)
    assert await state_of(check) == "insecure"
    assert check.saw(status=200) == "insecure"  # the calls to come, too
    is_secure = True
    assert await state_of(check) == "healthy"
    assert threading.get_ident() not in where  # it may take its time


@pytest.mark.parametrize(
    ("call", "state"),
    [
        ({"status": 200, "seconds": 0.1}, "healthy"),
        ({"status": 201, "seconds": 4.1}, "degraded"),
        ({"status": 302}, "degraded"),
        ({"status": 500}, "unhealthy"),
        ({"status": 200, "seconds": 5.0}, "unhealthy"),
        ({"status": 0}, "unhealthy"),
        ({"status": 404}, "permanently-unavailable"),
        ({"status": 405}, "permanently-unavailable"),
        ({"status": 415}, "permanently-unavailable"),
        ({"status": 200, "is_insecure": True}, "insecure"),
    ],
    ids=str,
)
def test_a_call_of_a_task_must_stand_in_the_same_conditions(call: dict[str, Any], state: str) -> None:
    heard: list[tuple[str, str]] = []
    check = HttpEndpoint("https://example.test", limit=5)
    check.attach(lambda _check, said, why: heard.append((said, why)))
    assert check.saw(**call) == state
    assert [said for said, _ in heard] == [state]


async def test_a_worker_holds_the_jobs_of_a_task_whose_endpoint_is_gone(app: App, endpoint: Endpoint) -> None:
    endpoint.status = 500
    check = HttpEndpoint(endpoint.url, period=0.05, allowed={"unhealthy": 2})

    @app.task(checks=[check], breaker=BreakerPolicy(threshold=None, reset=0.1))
    async def call() -> str:
        return check.saw(status=200)

    async with working(app):
        await until(lambda: len(endpoint.asked) > 3)
        held = await call.adelay()
        await until_async(lambda: _is_held(held))
        endpoint.status = 200
        assert await held.aget(timeout=30) == "healthy"


async def _is_held(job: Any) -> bool:
    return bool((await job.astatus()) == "HELD")


@pytest.mark.parametrize(
    "url", ["example.test", "ftp://example.test", "http://", "http://a b", "http://a\r\nb"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match="give a URL that begins with"):
        HttpEndpoint(url)


def test_a_check_of_an_endpoint_is_named_by_its_host_without_passwords() -> None:
    assert HttpEndpoint("https://me:secret@bank.test:8443/api").name == "bank.test:8443"


def serve_drips(
    listener: socket.socket, context: ssl.SSLContext | None, part: bytes, stopped: threading.Event
) -> None:
    """Serve each client in a thread of its own: the next one must not wait until the last one is known to have gone."""
    with suppress(OSError):  # the end closes the listener
        while not stopped.is_set():
            line, _ = listener.accept()
            threading.Thread(target=drip, args=(line, context, part, stopped), daemon=True).start()


def drip(line: socket.socket, context: ssl.SSLContext | None, part: bytes, stopped: threading.Event) -> None:
    """Send a client an answer that does not end: a part every 50 ms, within each time limit of a read."""
    with (
        suppress(OSError),
        line if context is None else context.wrap_socket(line, server_side=True) as client,
    ):
        client.recv(4096)
        client.sendall(b"HTTP/1.1 200 OK\r\n" if part.endswith(b"\r\n") else b"")
        for _ in range(500):  # 25 s: whoever waits for the end is told from the others
            if stopped.wait(0.05):
                break
            client.sendall(part)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("part", [b"H", b"X-More: and more\r\n"], ids=["a line", "a head"])
def test_a_server_that_sends_without_end_keeps_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, part: bytes
) -> None:
    """A check of the endpoint, and a notification of an alert, which are both sent from threads."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setattr(webhook, "TIMEOUT", 1.0)
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tls = context if scheme == "https" else None
        serving = threading.Thread(target=serve_drips, args=(listener, tls, part, stopped), daemon=True)
        serving.start()
        url, begun = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/", time.monotonic()
        try:
            answer = request_options(url, 0.5, str(tmp_path / "ca.pem"))
            assert (answer.status, "within" in answer.why) == (0, True), answer
            # What has said that it takes a notification has taken it, whatever follows.
            is_taken = part.endswith(b"\r\n")
            with nullcontext() if is_taken else pytest.raises(WebhookRefused, match="within"):
                AlertWebhook(url, b"k" * 32).post("id", b"{}", time.time())
            assert time.monotonic() - begun < 20
        finally:
            stopped.set()
            listener.shutdown(socket.SHUT_RDWR)  # who waits for a client wakes up
            serving.join(10)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500 No\r\nX-More: and", b"HTTP/1.1 2"])
def test_a_notification_is_taken_by_its_status_although_the_connection_is_reset(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_and_reset() -> None:
            client, _ = listener.accept()
            with client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.recv(1)  # what is left unread makes the end of the connection a reset, too
                client.sendall(head)
                read.wait(30)

        read = threading.Event()
        serving = threading.Thread(target=answer_and_reset, daemon=True)
        serving.start()
        threading.Timer(0.1, read.set).start()
        hook = AlertWebhook(f"http://127.0.0.1:{listener.getsockname()[1]}/", b"k" * 32)
        try:
            if b"200" in head:
                hook.post("id", b"{}", time.time())
            else:
                with pytest.raises(WebhookRefused) as caught:
                    hook.post("id", b"{}", time.time())
                assert caught.value.status == (500 if b"500" in head else None)
        finally:
            read.set()
            serving.join(10)
