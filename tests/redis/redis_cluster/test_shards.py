"""A sharded queue on a Redis Cluster: its shards are on several nodes, and it is one queue."""

import json
from pathlib import Path

import pytest
import trio

from celery5 import App
from celery5.errors import TaskFailed
from celery5.protocol.shards import list_shards
from tests.cluster_servers import TestCluster
from tests.redis.sharding.declaring import QUEUE, declare
from tests.redis.worker.workers import working
from tests.story.cli.commands import celery5

SHARDS = list_shards(QUEUE, 6)


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of six shards."""
    app.configure(shards={QUEUE: 6})
    return app


def test_the_shards_of_a_queue_are_on_several_nodes(redis_cluster: TestCluster, sharded: App) -> None:
    assert len({redis_cluster.find_owner(sharded.queue(shard).stream).port for shard in SHARDS}) > 1


def test_each_shard_is_shown_with_its_node(redis_cluster: TestCluster, sharded: App, tmp_path: Path) -> None:
    async def push(n: int) -> None: ...

    sharded.send_many([declare(sharded, push).s(n) for n in range(60)])
    states = sharded.info(QUEUE, shards=True).queues
    assert {name: state.node for name, state in states.items()} == {
        shard: f"127.0.0.1:{redis_cluster.find_owner(sharded.queue(shard).stream).port}" for shard in SHARDS
    }
    env = {"CELERY5_BROKER": redis_cluster.url, "CELERY5_SHARDS": f"{QUEUE}={len(SHARDS)}"}
    command = ["--app-name", sharded.name, "queue", "list", "--shards"]
    rows = json.loads(celery5(*command, "--json", cwd=tmp_path, env=env).out)
    assert [(row["queue"], row["waiting"], row["running"], row["node"]) for row in rows] == [
        (name, state.waiting, 0, state.node) for name, state in states.items()
    ]
    table = celery5(*command, cwd=tmp_path, env={**env, "COLUMNS": "250"}).out.splitlines()
    assert [line.split()[-1] for line in table[: len(SHARDS) + 1]] == [
        "node",
        *(state.node for state in states.values()),
    ]
    assert sharded.empty(QUEUE) == 60


async def test_jobs_of_all_shards_run_and_are_found_by_id(sharded: App) -> None:
    running, most = 0, 0

    async def push(n: int) -> int:
        return n

    async def narrow(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.01)
        running -= 1
        return n

    async def fail(n: int) -> None:
        raise ValueError(n)

    pushed, narrowed = declare(sharded, push), declare(sharded, narrow, limit=2)
    failing = declare(sharded, fail, max_retries=0)
    sent = await sharded.asend_many([pushed.s(n) for n in range(60)] + [narrowed.s(n) for n in range(20)])
    dead = await sharded.asend_many([failing.s(n) for n in range(12)])
    keyed = [await pushed.options(key="nightly").adelay(n) for n in range(3)]
    assert [result.duplicate for result in keyed] == [False, True, True]
    async with working(sharded, queues=(QUEUE,)):
        with trio.fail_after(30):
            assert [await result.aget() for result in sent] == [*range(60), *range(20)]
            for result in dead:
                with pytest.raises(TaskFailed):
                    await result.aget()
        for result in sent[:6]:
            assert await sharded.result(result.id, queue=QUEUE).aget() == await result.aget()
        state = (await sharded.ainfo()).queues
    assert {name for name in state if name.startswith(QUEUE)} == {QUEUE}
    assert (state[QUEUE].dead, state[QUEUE].waiting) == (12, 0)
    assert {result.queue for result in (*sent, *dead)} == set(SHARDS)
    assert most == 2
