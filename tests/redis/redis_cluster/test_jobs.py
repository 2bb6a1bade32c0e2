"""Jobs and results on a Redis Cluster, whose queues are on different nodes."""

import asyncio

import pytest
import trio

from celery5 import App, gather
from celery5.broker.drivers.cluster_on_trio import MAX_PARKED
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
    assert len({redis_cluster.find_owner(app.queue(queue).stream).port for queue in QUEUES}) > 1


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
