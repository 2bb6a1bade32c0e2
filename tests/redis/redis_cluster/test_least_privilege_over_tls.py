"""A Redis Cluster that speaks TLS alone, with users who may no more than `celery5 acl` prints."""

from collections.abc import Callable, Iterator

import pytest
import trio

from celery5 import App
from celery5.broker.permissions import ROLES
from celery5.broker.topologies import forget_clusters
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from tests.access import Access, list_denied
from tests.cluster_servers import TestCluster, running_cluster
from tests.redis.permissions.test_roles import Shop, follow_all, look, operate, send_jobs
from tests.redis.redis_cluster.test_found_by_itself import SENDERS
from tests.redis.redis_cluster.test_jobs import QUEUES, declare
from tests.redis.worker.workers import start
from tests.tls_files import find_tls_binary


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """The users of all roles."""
    return Access(tmp_path_factory.mktemp("tls"), "shop", ROLES)


@pytest.fixture(scope="module")
def cluster(server_binary: str | None, access: Access) -> Iterator[TestCluster]:
    """The cluster of these tests."""
    with running_cluster(find_tls_binary(server_binary), access=access) as cluster:
        yield cluster


@pytest.fixture
def users(cluster: TestCluster, access: Access) -> Iterator[Callable[[str], str]]:
    """Returns the URL of a role of the application `shop`; afterwards nothing was denied to any of them."""
    yield lambda role: access.make_url(cluster.url, role)
    denied = list_denied(node.client for node in cluster.primaries)
    for node in cluster.primaries:
        node.client.execute_command("ACL", "LOG", "RESET")
    assert denied == []


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


@pytest.mark.parametrize("colour", SENDERS)
async def test_a_url_of_one_node_leads_to_the_cluster_over_tls(
    cluster: TestCluster, users: Callable[[str], str], access: Access, colour: str
) -> None:
    url = f"rediss://127.0.0.1:{cluster.primaries[1].port}/0"
    worker, sender = (App("shop", broker=access.make_url(url, role)) for role in ("worker", "sender"))
    for app in (worker, sender):
        declare(app)
    async with trio.open_nursery() as nursery:
        forget_clusters()
        await start(nursery, worker, queues=QUEUES)
        forget_clusters()  # so that the sender finds it, too
        assert set(await SENDERS[colour](sender)) == {7}
        nursery.cancel_scope.cancel()
    for app in (worker, sender):
        app.close()
