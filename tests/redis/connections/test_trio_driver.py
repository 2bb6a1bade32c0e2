"""Trio driver: every way in, every identity, and what is pushed, against a real server."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import redis as blocking
import trio
import trustme

from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.timing import Timing
from celery5.broker.transient_errors import is_connection_refused
from celery5.errors import BadBrokerURL, BrokerDenied, BrokerError, BrokerReplied, BrokerUnavailable
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import get, raw

QUICK = Timing(connect=1, reply=2, first_connect=0.2, backoff_start=0.01, backoff_cap=0.05)


async def opened(nursery: trio.Nursery, url: str) -> TrioRedis:
    """A running connection to `url`."""
    patient = msgspec.structs.replace(QUICK, first_connect=5)
    redis = TrioRedis(endpoint=Endpoint.from_url(url), timing=patient, name="a test of ours")
    await nursery.start(redis.run)
    return redis


async def refused(url: str, *, within: float = QUICK.first_connect) -> BrokerError:
    """The error with which a connection to `url` ends."""
    with pytest.raises((BrokerDenied, BrokerUnavailable, BrokerReplied, BadBrokerURL)) as caught:
        await TrioRedis(
            endpoint=Endpoint.from_url(url), timing=msgspec.structs.replace(QUICK, first_connect=within)
        ).run()
    return caught.value


@pytest.fixture
async def tcp(server: EmbeddedServer, nursery: trio.Nursery) -> FaultyProxy:
    """The shared server, reached over TCP."""
    one = FaultyProxy(str(server.socket))
    await nursery.start(one.run)
    return one


@pytest.fixture
def user(redis_client: blocking.Redis, app_name: str) -> Iterator[str]:
    """A user of the server's, with the password `pass/w@rd:` and a few permissions."""
    words = ("on", ">pass/w@rd:", f"~{app_name}*", "&*", "+@connection", "+get", "+set")
    redis_client.execute_command("ACL", "SETUSER", app_name, *words)  # type: ignore[no-untyped-call]
    yield app_name
    redis_client.execute_command("ACL", "DELUSER", app_name)  # type: ignore[no-untyped-call]


async def test_over_a_unix_socket_in_another_database(
    server: EmbeddedServer, nursery: trio.Nursery, app_name: str
) -> None:
    here = await opened(nursery, f"unix://{server.socket}?db=3")
    there = await opened(nursery, f"unix://{server.socket}?db=4")
    await here.perform(raw("SET", app_name, "three", "EX", 60))
    assert await here.perform(get(app_name)) == b"three"
    assert await there.perform(get(app_name)) is None


async def test_over_tcp_with_the_database_in_the_path(
    tcp: FaultyProxy, nursery: trio.Nursery, app_name: str
) -> None:
    redis = await opened(nursery, f"redis://127.0.0.1:{tcp.port}/5")
    listed = (await redis.perform(raw("CLIENT", "LIST", "ID", redis.client_id or 0))).decode()
    assert " db=5 " in listed
    assert "name=a-test-of-ours" in listed
    assert redis.server_version
    assert redis.server_version[0].isdigit()


async def test_as_a_user_with_a_password_that_needs_quoting(
    tcp: FaultyProxy, nursery: trio.Nursery, user: str
) -> None:
    redis = await opened(nursery, f"redis://{user}:pass%2Fw%40rd%3A@127.0.0.1:{tcp.port}/0")
    assert await redis.perform(raw("CLIENT", "GETNAME")) == b"a-test-of-ours"
    assert await redis.perform(get(f"{user}:x")) is None
    with pytest.raises(BrokerDenied, match="does not permit this to the user"):
        await redis.perform(raw("INCR", f"{user}:x"))
    with pytest.raises(BrokerDenied):
        await redis.perform(get("somebody-elses"))


async def test_a_wrong_password_is_refused_in_one_line_that_does_not_show_it(
    tcp: FaultyProxy, user: str
) -> None:
    error = await refused(f"redis://{user}:secret-but-wrong@127.0.0.1:{tcp.port}/0")
    assert isinstance(error, BrokerDenied)
    assert "check both in the broker URL" in str(error)
    assert "secret" not in str(error)
    assert "\n" not in str(error)


async def test_a_missing_password_is_asked_for(own_server: EmbeddedServer) -> None:
    with blocking.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "x")
    error = await refused(own_server.url)
    assert isinstance(error, BrokerDenied)
    assert "put user and password into the broker URL" in str(error)


async def test_a_database_that_does_not_exist_is_refused(tcp: FaultyProxy) -> None:
    error = await refused(f"redis://127.0.0.1:{tcp.port}/4711")
    assert isinstance(error, BrokerReplied)
    assert "DB index is out of range" in str(error)


async def test_a_socket_that_does_not_exist_is_named(short_path: Path) -> None:
    error = await refused(f"unix://{short_path}/none.sock")
    assert f"broker unix://{short_path}/none.sock?db=0 cannot be reached: No such file or directory" in str(
        error
    )


class TLS:
    """The shared server behind TLS, and the files of its clients."""

    def __init__(self, proxy: FaultyProxy, ca: Path, certificate: Path) -> None:
        self.ca = ca
        self.certificate = certificate
        self.port = proxy.port

    def url(self, options: str = "", *, host: str = "localhost") -> str:
        """A URL that trusts the authority."""
        return f"rediss://{host}:{self.port}/0?ssl_ca_certs={self.ca}{options}"


@pytest.fixture
async def tls(server: EmbeddedServer, nursery: trio.Nursery, tmp_path: Path) -> TLS:
    """A server that wants certificates of its clients."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "client.pem"))
    proxy = FaultyProxy(str(server.socket), tls=context)
    await nursery.start(proxy.run)
    return TLS(proxy, tmp_path / "ca.pem", tmp_path / "client.pem")


async def test_over_tls_with_certificates_on_both_sides(
    tls: TLS, nursery: trio.Nursery, app_name: str
) -> None:
    redis = await opened(nursery, tls.url(f"&ssl_certfile={tls.certificate}"))
    value = b"x" * 300_000
    assert await redis.perform(raw("SET", app_name, value, "EX", 60)) == b"OK"
    assert await redis.perform(get(app_name)) == value
    async with trio.open_nursery() as many:
        for n in range(50):
            many.start_soon(echo, redis, n)


async def echo(redis: TrioRedis, n: int) -> None:
    """Have the server say a number again."""
    for turn in range(10):
        assert await redis.perform(raw("ECHO", f"{n}:{turn}")) == f"{n}:{turn}".encode()


async def test_tls_options_decide_what_is_checked(tls: TLS, nursery: trio.Nursery) -> None:
    mine = f"&ssl_certfile={tls.certificate}"
    for url in (tls.url(mine, host="127.0.0.1"), f"rediss://localhost:{tls.port}/0"):
        error = await refused(url, within=1)
        assert "certificate verify failed" in str(error)
        assert is_connection_refused(error)
    assert "cut off" in str(await refused(tls.url(), within=1))
    assert not is_connection_refused(await refused("rediss://localhost:1/0", within=1))
    assert "No such file" in str(await refused(f"rediss://localhost:{tls.port}/0?ssl_ca_certs=/none.pem"))
    await opened(nursery, tls.url(f"{mine}&ssl_check_hostname=no", host="127.0.0.1"))
    await opened(nursery, f"rediss://127.0.0.1:{tls.port}/0?ssl_cert_reqs=none{mine}")


@pytest.mark.parametrize(
    "words",
    [
        ("BLPOP", "x", 0),
        ("blpop", "x", 0),
        (b"WATCH", "x"),
        ("SUBSCRIBE", "x"),
        ("MONITOR",),
        ("MULTI",),
        ("CLIENT", "REPLY", "OFF"),
    ],
    ids=lambda words: str(words[0]),
)
async def test_what_would_disturb_the_others_is_refused(
    tcp: FaultyProxy, nursery: trio.Nursery, words: tuple[str | bytes | int, ...]
) -> None:
    redis = await opened(nursery, tcp.url)
    with pytest.raises(ValueError, match="connection"):
        await redis.perform(raw(*words))
    with pytest.raises(ValueError, match="cannot share"):
        await redis.perform(raw("XREAD", "BLOCK", 1, "STREAMS", "x", "0", blocks=0.001))


async def test_a_transaction_is_sent_in_one_piece_among_the_calls_of_others(
    tcp: FaultyProxy, nursery: trio.Nursery, app_name: str
) -> None:
    redis = await opened(nursery, tcp.url)

    async def transact() -> None:
        for _ in range(20):
            calls = [raw("MULTI"), raw("INCR", app_name), raw("INCR", app_name), raw("EXEC")]
            first, second = (await redis.perform_all(calls))[-1]
            assert second == first + 1

    async with trio.open_nursery() as many:
        for n in range(10):
            many.start_soon(transact)
            many.start_soon(echo, redis, n)
    assert await redis.perform(raw("GETDEL", app_name)) == b"400"


async def test_a_word_of_another_type_is_refused_before_anything_is_sent(
    tcp: FaultyProxy, nursery: trio.Nursery, app_name: str
) -> None:
    redis = await opened(nursery, tcp.url)
    with pytest.raises(TypeError):
        await redis.perform(raw("SET", app_name, None))  # type: ignore[arg-type]
    assert tcp.seen[b"SET"] == 0
    assert await redis.perform(get(app_name)) is None
