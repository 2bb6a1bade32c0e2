"""Sentinels and servers that speak TLS alone, with users who may no more than `celery5 acl` prints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import App
from celery5.errors import BrokerUnavailable
from tests.access import Access, list_denied
from tests.redis.connections.test_sentinel import refused
from tests.redis.worker.workers import LEASE, until, working
from tests.sentinel_servers import SERVICE, WatchedServers, watched_servers
from tests.tls_files import find_tls_binary


@pytest.fixture
def access(tmp_path: Path, app_name: str) -> Access:
    """The users of the application, and of its sentinels."""
    return Access(tmp_path, app_name, ["worker", "producer"])


@pytest.fixture
def servers(server_binary: str | None, access: Access) -> Iterator[WatchedServers]:
    """A primary with a replica, and three sentinels, without a port for plain connections."""
    with watched_servers(find_tls_binary(server_binary), **access.sentinel_options) as servers:
        yield servers


async def test_workers_and_producers_of_least_privilege_follow_a_failover_over_tls(
    servers: WatchedServers, access: Access, app_name: str
) -> None:
    def make_app(role: str) -> App:
        return App(app_name, broker=access.make_url(servers.url, role), lease=LEASE, inbox=False)

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
    assert list_denied(server.client for server in (*servers.servers, *servers.sentinels)) == []
    assert isinstance(refused(servers.url), BrokerUnavailable), "without TLS"
    misspelt = access.make_url(servers.url, "worker").replace(SERVICE, "shop-primry")
    assert "did you mean 'shop-primary'?" in str(refused(misspelt)), (
        "a user of the sentinels may list the services"
    )
    for app in (worker, producer):
        app.close()
