"""Waiting for results whose slots have moved, and connections to nodes that have no slots any more."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.broker.call import Call, parse_int
from celery5.broker.colour import run_blocking
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
from celery5.broker.drivers.cluster_on_trio import ClusterRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing.unreachable import skip_unreachable
from celery5.broker.waiting import cluster_blocking
from celery5.broker.waiting.cluster_blocking import PAUSE, BlockingClusterResultWaiter
from celery5.broker.waiting.cluster_on_asyncio import AsyncioClusterResultWaiter
from celery5.broker.waiting.result_waits import REREAD_INTERVAL
from celery5.errors import BrokerUnavailable
from celery5.protocol.hash_slots import NodeAddress, get_key_slot
from tests.cluster_servers import TestCluster, wait_until

Wait = Callable[[Endpoint, Sequence[str], Callable[[], None]], dict[str, bytes]]


def wait_blocking(endpoint: Endpoint, keys: Sequence[str], move: Callable[[], None]) -> dict[str, bytes]:
    redis = BlockingCluster(endpoint)
    waiter = BlockingClusterResultWaiter(redis)
    try:
        waiter.wait(keys, timeout=0)
        move()
        with skip_unreachable() as unreachable:
            documents = waiter.wait(keys, timeout=10)
    finally:
        waiter.close()
        redis.close()
    assert not unreachable
    return documents


def wait_on_asyncio(endpoint: Endpoint, keys: Sequence[str], move: Callable[[], None]) -> dict[str, bytes]:
    async def wait() -> dict[str, bytes]:
        redis = AsyncioCluster(endpoint)
        waiter = AsyncioClusterResultWaiter(redis)
        try:
            await waiter.wait(keys, timeout=0)
            await asyncio.to_thread(move)
            with skip_unreachable() as unreachable:
                documents = await waiter.wait(keys, timeout=10)
        finally:
            await waiter.aclose()
            await redis.aclose()
        assert not unreachable
        return documents

    return asyncio.run(wait())


@pytest.mark.parametrize("wait", [wait_blocking, wait_on_asyncio])
def test_a_result_whose_slot_has_moved_is_found_where_unreachable_brokers_are_skipped(
    redis_cluster: TestCluster, app: App, wait: Wait
) -> None:
    names = [app.queue(f"queue-{number}").result_prefix + "one" for number in range(12)]
    by_node = {redis_cluster.find_owner(key).port: key for key in names}
    keys = list(by_node.values())[:2]
    for key in keys:
        redis_cluster.find_owner(key).client.set(key, "document", ex=60)
    target = next(node for node in redis_cluster.primaries if node.port == list(by_node)[1])

    documents = wait(app.connections.endpoint, keys, lambda: redis_cluster.migrate(keys[0], target))

    assert documents == dict.fromkeys(keys, b"document")


def test_on_asyncio_a_node_without_slots_is_forgotten(app: App) -> None:
    async def read() -> None:
        redis = AsyncioCluster(app.connections.endpoint)
        gone = redis.get_node(NodeAddress("127.0.0.1", 1))
        await redis.router.map.read()
        assert redis.get_node(NodeAddress("127.0.0.1", 1)) is not gone
        await redis.aclose()

    asyncio.run(read())


def test_in_plain_python_a_node_without_slots_is_forgotten(app: App) -> None:
    redis = BlockingCluster(app.connections.endpoint)
    gone = redis.get_node(NodeAddress("127.0.0.1", 1))
    run_blocking(redis.router.map.read())
    assert redis.get_node(NodeAddress("127.0.0.1", 1)) is not gone
    redis.close()


async def test_on_trio_a_node_without_slots_is_forgotten_when_its_connection_is_lost(app: App) -> None:
    redis = ClusterRedis(endpoint=app.connections.endpoint)
    slot, nowhere = get_key_slot(app.queue("mails").stream), NodeAddress("127.0.0.1", 1)
    async with trio.open_nursery() as nursery:
        await nursery.start(redis.run)
        lost = await redis._get_node(nowhere)
        await redis.perform(Call(("EXISTS", app.queue("mails").stream), parse_int))
        kept = await redis.get_node(slot)
        redis._forget(())
        assert await redis.get_node(slot) is kept, "its calls are on their way"
        assert await redis._get_node(nowhere) is not lost
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("wait", [wait_blocking, wait_on_asyncio])
def test_a_wait_ends_as_in_an_outage_when_its_slot_moves_for_too_long(
    redis_cluster: TestCluster, app: App, wait: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_blocking, "OUTAGE_LIMIT", 0.2)
    key = app.queue("mails").result_prefix + "one"
    source = redis_cluster.find_owner(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    try:
        with pytest.raises(BrokerUnavailable, match="a slot of the keys is being moved"):
            wait(app.connections.endpoint, [key], lambda: redis_cluster.begin_migration(key, target))
    finally:
        redis_cluster.migrate(key, target)


@pytest.mark.parametrize("wait", [wait_blocking, wait_on_asyncio])
def test_a_wait_that_does_not_block_reads_several_slots_of_one_node(
    redis_cluster: TestCluster, app: App, wait: Wait
) -> None:
    node = redis_cluster.primaries[0]
    names = (app.queue(f"queue-{number}").result_prefix + "one" for number in range(1000))
    keys = list(islice((key for key in names if redis_cluster.find_owner(key) is node), 3))
    for key in keys:
        node.client.set(key, "document", ex=60)

    assert wait(app.connections.endpoint, keys, lambda: None) == dict.fromkeys(keys, b"document")


@pytest.mark.parametrize("wait", [wait_blocking, wait_on_asyncio])
def test_a_wait_outlasts_the_move_of_its_slot_and_asks_seldom_meanwhile(
    redis_cluster: TestCluster, app: App, wait: Wait
) -> None:
    key = app.queue("mails").result_prefix + "one"
    source = redis_cluster.find_owner(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    seconds: list[float] = []

    def count_asks() -> int:
        found: Any = source.client.info("errorstats").get("errorstat_ASK", {"count": 0})
        return int(found["count"])

    def finish(before: int) -> None:
        wait_until(lambda: count_asks() > before, "the first ASK")
        start = time.monotonic()
        wait_until(lambda: count_asks() > before + 2, "two more")
        seconds.append(time.monotonic() - start)
        redis_cluster.migrate(key, target)
        target.client.set(key, "document", ex=60)

    threads: list[threading.Thread] = []

    def begin() -> None:
        before = count_asks()
        redis_cluster.begin_migration(key, target)
        threads.append(threading.Thread(target=finish, args=(before,)))
        threads[0].start()

    assert wait(app.connections.endpoint, [key], begin) == {key: b"document"}
    threads[0].join()
    assert seconds[0] > PAUSE


@pytest.mark.parametrize("wait", [wait_blocking, wait_on_asyncio])
def test_a_wait_follows_its_slot_when_the_node_ends_its_subscription(
    redis_cluster: TestCluster, app: App, wait: Wait
) -> None:
    key = app.queue("mails").result_prefix + "one"
    source = redis_cluster.find_owner(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    if not source.has_sharded_channels:
        pytest.skip("Redis has sharded channels from 7.0")
    moved_at: list[float] = []

    def is_heard() -> bool:
        return bool(source.client.execute_command("PUBSUB", "SHARDNUMSUB", key)[1])

    def move() -> None:
        wait_until(is_heard, "the subscription")
        redis_cluster.migrate(key, target)
        target.client.set(key, "document", ex=60)
        target.client.execute_command("SPUBLISH", key, "document")
        moved_at.append(time.monotonic())

    threads: list[threading.Thread] = []

    def begin() -> None:
        threads.append(threading.Thread(target=move))
        threads[0].start()

    assert wait(app.connections.endpoint, [key], begin) == {key: b"document"}
    threads[0].join()
    assert time.monotonic() - moved_at[0] < REREAD_INTERVAL / 2, "it was not only read again"
