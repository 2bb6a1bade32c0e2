"""Producers over TLS: what a `rediss://` URL means to the three drivers and to those who wait."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
import trustme

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.errors import BrokerUnavailable
from tests.redis.connections.colours import COLOURS, Here, live, raw
from tests.redis.process.onlookers import listeners, meanwhile, settle, until

in_every_colour = pytest.mark.parametrize("colour", COLOURS)


class TLSDoor:
    """Takes TLS connections on a port and passes what is inside them on to the server's socket."""

    def __init__(self, to: Path, context: ssl.SSLContext) -> None:
        self._to = str(to)
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listening]
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in self._open:
            # Wakes the thread that reads it, which then ends.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        self._open.append(accepted)
        try:
            outside = self._context.wrap_socket(accepted, server_side=True)
        except OSError:
            accepted.close()
            return
        inside = socket.socket(socket.AF_UNIX)
        self._open += [outside, inside]
        inside.connect(self._to)
        threading.Thread(target=_pump, args=(inside, outside), daemon=True).start()
        _pump(outside, inside)


def _pump(source: socket.socket, drain: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(16384):
            drain.sendall(some)
    with suppress(OSError):
        drain.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Who signs the door's certificate."""
    return trustme.CA()


@pytest.fixture
def door(server: EmbeddedServer, authority: trustme.CA) -> Iterator[TLSDoor]:
    """A TLS door to the shared server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    one = TLSDoor(server.socket, context)
    yield one
    one.close()


@pytest.fixture
def tls_url(door: TLSDoor, authority: trustme.CA, tmp_path: Path) -> str:
    """The door's URL, naming the authority."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return f"rediss://localhost:{door.port}/0?ssl_ca_certs={tmp_path}/ca.pem"


@in_every_colour
def test_calls_large_and_small_go_through(colour: str, tls_url: str, app_name: str) -> None:
    large = b"x" * 3_000_000

    async def story(here: Here) -> None:
        for number in range(20):
            assert await here.redis.perform(raw("ECHO", number)) == b"%d" % number
        await here.redis.perform(raw("SET", app_name, large, "PX", 60_000))
        assert await here.redis.perform(raw("GET", app_name)) == large
        echoes = await here.redis.perform_all([raw("ECHO", "y" * 1000) for _ in range(500)])
        assert echoes == [b"y" * 1000] * 500

    live(colour, tls_url, story)


@in_every_colour
def test_only_the_first_connection_reads_the_certificates(
    colour: str, tls_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    live(colour, tls_url, story)
    monkeypatch.delattr(ssl, "create_default_context")
    live(colour, tls_url, story)


@in_every_colour
def test_documents_large_and_small_arrive(
    colour: str, tls_url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    keys = [f"{app_name}:{number}" for number in range(200)]
    documents = {key: b"z" * (1 + 40_000 * (at % 5)) for at, key in enumerate(keys)}

    def settle_all() -> None:
        for key in keys[:50]:
            until(lambda key=key: listeners(redis_client, key))  # type: ignore[misc]
            settle(redis_client, key, documents[key])
        for key in keys[50:]:
            settle(redis_client, key, documents[key])

    async def story(here: Here) -> dict[str, bytes]:
        return await here.results.wait(keys, timeout=30)

    with meanwhile(settle_all):
        assert live(colour, tls_url, story) == documents


@in_every_colour
def test_a_certificate_of_a_stranger_is_refused(colour: str, door: TLSDoor) -> None:
    async def story(here: Here) -> None:
        await here.redis.perform(raw("PING"))

    with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
        live(colour, f"rediss://localhost:{door.port}/0", story, timing=Timing(first_connect=8))
