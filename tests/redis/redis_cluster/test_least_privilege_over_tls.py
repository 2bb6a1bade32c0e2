"""A Redis Cluster that speaks TLS alone, with users who may no more than `celery5 acl` prints."""

from collections.abc import Callable, Iterator

import pytest
import trio

from celery5.broker.permissions import ROLES, make_user
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from tests.cluster_servers import TestCluster, running_cluster
from tests.redis.permissions.test_roles import PASSWORD, SPARED, Shop, follow_all, look, operate, send_jobs
from tests.redis.worker.workers import start
from tests.tls_files import find_tls_binary, write_certificates


@pytest.fixture(scope="module")
def cluster(server_binary: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    """The cluster of these tests."""
    certificates = write_certificates(tmp_path_factory.mktemp("tls"))
    with running_cluster(find_tls_binary(server_binary), certificates=certificates) as cluster:
        yield cluster


@pytest.fixture
def users(cluster: TestCluster) -> Iterator[Callable[[str], str]]:
    """Returns the URL of a role of the application `shop`; afterwards nothing was denied to any of them."""

    def make(role: str) -> str:
        user = make_user("shop", role, on_cluster=cluster.primaries[0].has_sharded_channels)
        for node in cluster.primaries:
            node.client.execute_command("ACL", "SETUSER", user.user, f">{PASSWORD}", *user.rules)
        return cluster.url.replace("://", f"://{user.user}:{PASSWORD}@")

    yield make
    denied = {entry["object"].encode() for node in cluster.primaries for entry in node.client.acl_log()}
    for node in cluster.primaries:
        node.client.execute_command("ACL", "LOG", "RESET")
    assert denied <= SPARED, "something was denied that it cannot do without"


async def test_every_role_does_its_work_over_tls_while_a_slot_moves(
    cluster: TestCluster, users: Callable[[str], str]
) -> None:
    shops = {role: Shop(users(role)) for role in ROLES}
    key = shops["worker"].app.queue("default").stream
    source = cluster.find_owner(key)
    target = next(node for node in cluster.primaries if node is not source)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            parts = [
                await start(nursery, shops["worker"].app, name="w"),
                await start(nursery, shops["router"].app, page=ROUTER, name="r"),
                await start(nursery, shops["scheduler"].app, page=SCHEDULER, name="s"),
            ]
            await send_jobs(shops["sender"])
            await trio.to_thread.run_sync(cluster.migrate, key, target)
            await send_jobs(shops["producer"])
            await follow_all(shops["producer"])
            await look(shops["viewer"].app)
            await operate(shops["operator"].app)
            for part in parts:
                await part.stop()
    for shop in shops.values():
        shop.app.close()


def test_plain_python_sends_and_waits_over_tls(users: Callable[[str], str]) -> None:
    sender, worker = Shop(users("sender")), Shop(users("worker"))

    async def work() -> object:
        async with trio.open_nursery() as nursery:
            part = await start(nursery, worker.app, name="w")
            value = await trio.to_thread.run_sync(lambda: sender.one.delay(7).get(timeout=20))
            await part.stop()
        return value

    assert trio.run(work) == 7
    for shop in (sender, worker):
        shop.app.close()
