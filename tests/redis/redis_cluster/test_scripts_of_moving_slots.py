"""Scripts whose slot is moved key by key: none stops half way, and none writes beside a key that is still elsewhere."""

import asyncio
from collections.abc import Callable

import pytest
import trio

from celery5 import App
from celery5.broker.call import Call, Script, parse_int, script_call
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.drivers.cluster_on_asyncio import AsyncioCluster
from celery5.broker.drivers.cluster_on_trio import ClusterRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.routing import cluster_router
from celery5.errors import BrokerError, BrokerUnavailable
from tests.cluster_servers import TestCluster

COUNT = Script.of(
    "count",
    "return 100 * redis.call('INCR', KEYS[1]) + 10 * redis.call('INCR', KEYS[1] .. '-computed') + #KEYS",
)
"""It writes a key that it declares, then one that it computes. It returns both counters, and how many keys it sees."""

Perform = Callable[[Endpoint, Call[int]], int]


def perform_blocking(endpoint: Endpoint, call: Call[int]) -> int:
    redis = BlockingCluster(endpoint)
    try:
        return redis.perform(call)
    finally:
        redis.close()


def perform_on_asyncio(endpoint: Endpoint, call: Call[int]) -> int:
    async def perform() -> int:
        redis = AsyncioCluster(endpoint)
        try:
            return (await redis.perform_all([call]))[0]
        finally:
            await redis.aclose()

    return asyncio.run(perform())


def perform_on_trio(endpoint: Endpoint, call: Call[int]) -> int:
    async def perform() -> int | BrokerError:
        redis = ClusterRedis(endpoint=endpoint)
        reply: int | BrokerError
        async with trio.open_nursery() as nursery:
            await nursery.start(redis.run)
            try:
                await redis.perform(Call(("EXISTS", call.words[3]), parse_int))  # connects to the node
                request = redis.begin(call)
                reply = await (redis.perform(call) if request is None else redis.finish(call, request))
            except BrokerError as error:
                reply = error
            nursery.cancel_scope.cancel()
        return reply

    reply = trio.run(perform)
    if isinstance(reply, BrokerError):
        raise reply
    return reply


@pytest.mark.parametrize("perform", [perform_blocking, perform_on_asyncio, perform_on_trio])
@pytest.mark.parametrize(
    ("present", "moved"),
    [
        pytest.param(("declared",), (), id="the-computed-key-is-missing"),
        pytest.param(("declared", "computed"), ("declared",), id="the-computed-key-is-at-the-source"),
        pytest.param(("computed",), (), id="the-declared-key-is-missing"),
        pytest.param(("declared", "computed"), ("computed",), id="the-computed-key-is-at-the-target"),
    ],
)
def test_a_script_does_nothing_while_its_slot_moves_key_by_key(
    redis_cluster: TestCluster,
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    perform: Perform,
    present: tuple[str, ...],
    moved: tuple[str, ...],
) -> None:
    monkeypatch.setattr(cluster_router, "RETRY_FOR", 0.05)
    endpoint, key = app.connections.endpoint, app.queue("mails").due
    names = {"declared": key, "computed": f"{key}-computed"}
    call = script_call(COUNT, (key,), (), parse_int)
    source = redis_cluster.find_owner(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    for name in present:
        source.client.set(names[name], 4)
    redis_cluster.begin_migration(key, target)
    for name in moved:
        redis_cluster.migrate_keys([names[name]], source, target)
    try:
        with pytest.raises(BrokerUnavailable):
            perform(endpoint, call)
    finally:
        redis_cluster.migrate(key, target)
    declared, computed = (5 if name in present else 1 for name in names)
    assert perform(endpoint, call) == 100 * declared + 10 * computed + 1
    target.client.delete(*names.values())
