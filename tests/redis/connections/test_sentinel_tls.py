"""Sentinels and servers that speak TLS alone, with users who may no more than `celery5 acl` prints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from celery5 import App
from celery5.broker.permissions import make_user
from celery5.broker.servers.embedded import find_binary
from celery5.errors import BrokerUnavailable
from tests.redis.connections.test_sentinel import refused
from tests.redis.worker.workers import LEASE, until, working
from tests.sentinel_servers import WatchedServers, watched_servers

DEBIAN = Path("/usr/bin/redis-server")
USER_DENIED = {"config|get", "config"}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with an authority, and a certificate for this machine."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    leaf.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    return tmp_path


@pytest.fixture
def servers(server_binary: str | None, certificates: Path) -> Iterator[WatchedServers]:
    """A primary with a replica, and three sentinels, without a port for plain connections."""
    binaries = [path for path in (find_binary(server_binary), DEBIAN) if path.exists()]
    binary = next((path for path in binaries if b"SSL_CTX_new" in path.read_bytes()), None)
    if binary is None:
        pytest.skip("no server here is built with TLS")
    lines = [
        f"tls-cert-file {certificates / 'own.pem'}",
        f"tls-key-file {certificates / 'own.pem'}",
        f"tls-ca-cert-file {certificates / 'ca.pem'}",
        "tls-auth-clients no",
        "tls-replication yes",
    ]
    client = {"ssl": True, "ssl_ca_certs": str(certificates / "ca.pem")}
    with watched_servers(str(binary), tls=(lines, client)) as servers:
        yield servers


async def test_workers_and_producers_of_least_privilege_follow_a_failover_over_tls(
    servers: WatchedServers, certificates: Path, app_name: str
) -> None:
    def make_app(role: str) -> App:
        user = make_user(app_name, role)
        for server in servers.servers:
            server.client.execute_command("ACL", "SETUSER", user.user, ">open-sesame", *user.rules)
        login = f"rediss+sentinel://{user.user}:open-sesame@"
        url = servers.url.replace("redis+sentinel://", login) + f"?ssl_ca_certs={certificates / 'ca.pem'}"
        return App(app_name, broker=url, lease=LEASE, inbox=False)

    worker, producer = make_app("worker"), make_app("producer")
    runs: list[int] = []

    @worker.task(name="add")
    async def add(number: int) -> int:
        runs.append(number)
        return number + 1

    add_elsewhere = producer.task(name="add")(add.function)
    async with working(worker):
        assert await (await add_elsewhere.adelay(1)).aget(timeout=20) == 2
        servers.fail_over()
        await add_elsewhere.adelay(2)
        await until(lambda: 2 in runs or servers.primary.role != "master")
        assert await (await add_elsewhere.adelay(3)).aget(timeout=20) == 4
    denied = {entry["object"] for server in servers.servers for entry in server.client.acl_log()}
    assert denied <= USER_DENIED
    assert isinstance(refused(servers.url), BrokerUnavailable), "without TLS"
    for app in (worker, producer):
        app.close()
