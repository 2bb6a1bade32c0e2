"""A primary of a cluster that is cut off from the other nodes, and that clients still reach: it is a minority."""

import time
from collections import Counter
from collections.abc import Iterator

import pytest
import trio

from celery5 import App, AsyncResult
from celery5.errors import BrokerUnavailable, NotReplicated
from celery5.tasks import Task
from tests.cluster_servers import TestCluster, running_cluster
from tests.network import Network
from tests.night import with_clusters
from tests.redis.worker.workers import LEASE, start, until

pytestmark = with_clusters("ten seconds")

LIMIT = 60.0
NODE_TIMEOUT = 1.0
VOTE = 3.0
"""Seconds after the node timeout within which the replica takes jobs."""


@pytest.fixture
def cluster(server_binary: str | None) -> Iterator[TestCluster]:
    """A cluster with replicas, whose nodes can be cut off from each other."""
    with (
        Network().running() as network,
        running_cluster(
            server_binary, has_replicas=True, node_timeout_ms=round(1000 * NODE_TIMEOUT), network=network
        ) as cluster,
    ):
        yield cluster


async def test_a_primary_that_only_clients_reach_loses_no_job_that_its_replica_had(
    cluster: TestCluster, app_name: str, nursery: trio.Nursery
) -> None:
    app, runs = App(app_name, broker=cluster.url, lease=LEASE, backlog=0), Counter[int]()

    @app.task(name="note")
    async def note(number: int) -> int:
        runs[number] += 1
        return number

    replicated = note.options(replicas=1)
    old = cluster.find_owner(app.queue("default").stream)
    accepted = [await replicated.adelay(number) for number in range(20)]
    worker = await start(nursery, app)
    began = time.monotonic()
    cluster.cut_off(old)
    with pytest.raises(NotReplicated) as raised:
        await replicated.adelay(100)
    await until(lambda: runs[100] == 1)  # the old primary has it: it accepts writes for its node timeout
    await trio.to_thread.run_sync(cluster.wait_for_another_owner, app.queue("default").stream, old)
    await until(lambda: not old.knows_all_slots())  # it refuses writes by now
    with trio.fail_after(LIMIT):
        while not await is_accepted(note, accepted):
            await trio.sleep(0.05)
    assert time.monotonic() - began < NODE_TIMEOUT + VOTE
    with trio.fail_after(LIMIT):
        assert [await result.aget() for result in accepted] == [*range(20), 200]
    assert old.client.info("replication")["role"] == "master"
    await trio.to_thread.run_sync(cluster.revive)
    (lost,) = raised.value.ids
    assert str(await app.result(lost, task=note).astatus()) == "UNKNOWN"
    await worker.stop()
    app.close()


async def is_accepted(task: Task[[int], int], accepted: list[AsyncResult[int]]) -> bool:
    """Return whether a job is accepted. There is no replica that it could wait for any more."""
    try:
        accepted.append(await task.adelay(200))
    except BrokerUnavailable:
        return False
    return True
