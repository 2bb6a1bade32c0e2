"""Jobs and results on a Redis Cluster, whose queues are on different nodes."""

import asyncio
from typing import Any

import pytest
import trio

from celery5 import App, gather
from celery5.broker.call import Call, parse_int
from celery5.broker.drivers.cluster_blocking import BlockingCluster
from celery5.broker.drivers.cluster_on_trio import MAX_PARKED, TURN, ClusterParked, ClusterRedis
from celery5.broker.permissions import make_user
from celery5.errors import TaskFailed
from tests.cluster_servers import TestCluster
from tests.redis.worker.workers import LEASE, start

QUEUES = ("mails", "images", "reports", "default")


def declare(app: App) -> None:
    for queue in QUEUES:

        @app.task(name=f"add-{queue}", queue=queue)
        async def add(one: int, other: int) -> int:
            return one + other


def test_the_queues_are_on_several_nodes(redis_cluster: TestCluster, app: App) -> None:
    queues = [
        f"queue-{number}" for number in range(20)
    ]  # the slots differ from run to run, as the app's name does
    assert len({redis_cluster.find_owner(app.queue(queue).stream).port for queue in queues}) > 1


async def test_jobs_sent_on_trio_run_and_their_results_come(app: App) -> None:
    declare(app)
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        results = [await app.tasks[f"add-{queue}"].adelay(3, 4) for queue in QUEUES for _ in range(5)]
        with trio.fail_after(20):
            assert [await result.aget() for result in results] == [7] * len(results)
        nursery.cancel_scope.cancel()


async def test_jobs_sent_in_plain_python_run_and_their_results_come(app: App) -> None:
    declare(app)

    def produce() -> list[object]:
        results = [app.tasks[f"add-{queue}"].delay(3, 4) for queue in QUEUES for _ in range(5)]
        return [result.get(timeout=20) for result in results] + list(gather(results, timeout=20))

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        assert await trio.to_thread.run_sync(produce) == [7] * 40
        nursery.cancel_scope.cancel()


async def test_jobs_sent_on_asyncio_run_and_their_results_come(app: App) -> None:
    declare(app)

    async def produce() -> list[object]:
        results = [await app.tasks[f"add-{queue}"].adelay(3, 4) for queue in QUEUES for _ in range(5)]
        return list(await asyncio.gather(*[result.aget(timeout=20) for result in results]))

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        assert await trio.to_thread.run_sync(asyncio.run, produce()) == [7] * 20
        nursery.cancel_scope.cancel()


async def test_many_jobs_of_several_queues_are_sent_at_once(app: App) -> None:
    declare(app)
    signatures = [app.tasks[f"add-{queue}"].s(number, 1) for number in range(50) for queue in QUEUES]
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        results = await app.asend_many(signatures)
        with trio.fail_after(20):
            found = [await result.aget() for result in results]
        assert found == [number + 1 for number in range(50) for _ in QUEUES]
        nursery.cancel_scope.cancel()


async def test_a_failed_job_is_retried_and_then_a_dead_letter(app: App) -> None:
    attempts = 0

    @app.task(queue="reports")
    async def fail() -> None:
        nonlocal attempts
        attempts += 1
        raise ValueError("not today")

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        result = await fail.adelay()
        with trio.fail_after(20), pytest.raises(TaskFailed, match="not today"):
            await result.aget()
        assert attempts == 3
        letters = [letter async for letter in app.dlq.aread(queue="reports")]
        assert [letter.task for letter in letters] == [fail.name]
        nursery.cancel_scope.cancel()


async def test_a_delayed_job_runs_when_it_is_due(app: App) -> None:
    declare(app)
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        result = await app.tasks["add-images"].options(countdown=0.2).adelay(1, 1)
        with trio.fail_after(20):
            assert await result.aget() == 2
        nursery.cancel_scope.cancel()


async def test_a_worker_of_more_queues_than_it_waits_on_at_once_reads_all_of_them(app: App) -> None:
    queues = [f"queue-{number}" for number in range(MAX_PARKED + 8)]

    @app.task
    async def add(one: int, other: int) -> int:
        return one + other

    async with trio.open_nursery() as nursery:
        await start(nursery, app, queues=tuple(queues))
        for queue in (queues[0], queues[-1], queues[MAX_PARKED]):
            result = await add.options(queue=queue).adelay(3, 4)
            with trio.fail_after(20):
                assert await result.aget() == 7
        nursery.cancel_scope.cancel()


async def test_a_read_of_more_slots_than_it_waits_on_looks_at_the_others_in_turns(app: App) -> None:
    streams = [app.queue(f"queue-{number}").stream for number in range(MAX_PARKED + 8)]
    words = ("XREAD", "STREAMS", *streams, *["0-0"] * len(streams))
    read: Call[Any] = Call(words, lambda reply: reply, repeatable=True, blocks=60.0)
    endpoint = app.connections.endpoint
    redis = ClusterRedis(endpoint=endpoint)
    parked = ClusterParked(endpoint=endpoint, control=redis)
    async with trio.open_nursery() as nursery:
        await nursery.start(redis.run)
        await nursery.start(parked.run)
        async with trio.open_nursery() as reading:
            with trio.fail_after(20):
                reading.start_soon(parked.perform, read)
                while len(parked._parks) < len(streams):
                    await trio.sleep(0.01)
                await trio.sleep(2 * TURN)
                add = Call(("XADD", streams[-1], "*", "field", "value"), lambda reply: reply)
                await redis.perform(add)
                while reading.child_tasks:
                    await trio.sleep(0.01)
        await redis.perform(Call(("DEL", streams[-1]), parse_int))
        nursery.cancel_scope.cancel()


def test_a_scan_in_portions_finds_the_keys_of_all_nodes(app: App) -> None:
    keys = {app.queue(f"queue-{number}").stream.encode() for number in range(60)}
    redis = BlockingCluster(app.connections.endpoint)
    for key in keys:
        redis.perform(Call(("SET", key, "1", "PX", 60_000), lambda reply: reply))
    found: set[bytes] = set()
    cursor = 0
    for _ in range(10_000):  # a cursor that goes in circles ends, too
        words = ("SCAN", cursor, "MATCH", f"*{app.name}*", "COUNT", 1)
        following, portion = redis.perform(Call(words, lambda reply: reply, repeatable=True))
        found.update(portion)
        cursor = int(following)
        if not cursor:
            break
    redis.perform(Call(("DEL", *keys), parse_int))
    redis.close()
    assert not cursor
    assert found == keys


async def test_a_user_of_celery5_acl_may_do_on_a_cluster_what_a_worker_does(
    redis_cluster: TestCluster, app_name: str
) -> None:
    user = make_user(app_name, "worker")
    for node in redis_cluster.primaries:
        node.client.execute_command("ACL", "SETUSER", user.user, ">secret", *user.rules)
    app = App(app_name, broker=redis_cluster.url.replace("//", f"//{user.user}:secret@"), lease=LEASE)
    declare(app)
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        for queue in QUEUES:
            with trio.fail_after(20):
                assert await (await app.tasks[f"add-{queue}"].adelay(3, 4)).aget() == 7
        nursery.cancel_scope.cancel()
    app.close()
    for node in redis_cluster.primaries:
        node.client.execute_command("ACL", "DELUSER", user.user)
