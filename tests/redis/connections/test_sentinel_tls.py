"""Sentinels and servers that speak TLS alone, with users who may no more than `celery5 acl` prints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import App
from celery5.broker.permissions import make_user
from celery5.errors import BrokerUnavailable
from tests.redis.connections.test_sentinel import refused
from tests.redis.worker.workers import LEASE, until, working
from tests.sentinel_servers import WatchedServers, watched_servers
from tests.tls_files import find_tls_binary, make_tls_options, write_certificates

USER_DENIED = {"config|get", "config"}


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with an authority, and a certificate for this machine."""
    return write_certificates(tmp_path)


@pytest.fixture
def servers(server_binary: str | None, certificates: Path) -> Iterator[WatchedServers]:
    """A primary with a replica, and three sentinels, without a port for plain connections."""
    lines = [f"{name} {value}" for name, value in make_tls_options(certificates).items()]
    client = {"ssl": True, "ssl_ca_certs": str(certificates / "ca.pem")}
    with watched_servers(find_tls_binary(server_binary), tls=(lines, client)) as servers:
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
