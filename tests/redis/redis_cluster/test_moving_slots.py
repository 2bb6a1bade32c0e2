"""Slots that move, and primaries that die, while jobs are sent and run: nothing is lost, and nothing runs twice."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import trio

from celery5 import App, AsyncResult
from celery5.broker.calls.jobs import try_write
from celery5.broker.drivers.cluster_on_trio import ClusterRedis
from celery5.errors import BrokerUnavailable, NotReplicated
from tests.cluster_servers import TestCluster, running_cluster
from tests.redis.worker.workers import LEASE, start, until

LIMIT = 60.0
"""Seconds for everything: the machine may be busy."""


class Load:
    """Sends jobs one after the other until it is stopped, and counts what runs."""

    def __init__(self, app: App, queue: str) -> None:
        self.runs: Counter[int] = Counter()
        self.is_over = False

        @app.task(name=f"count-{queue}", queue=queue)
        async def count(number: int) -> int:
            self.runs[number] += 1
            return number

        self._count = count

    async def send(self) -> None:
        """Send until it is over, and wait for all results. What may have been sent runs, and nobody waits for it."""
        results: dict[int, AsyncResult[int]] = {}
        for number in itertools.count():
            if self.is_over:
                break
            try:
                results[number] = await self._count.adelay(number)
            except BrokerUnavailable:
                await trio.sleep(0.05)
            await trio.sleep(0.002)
        for number, result in results.items():
            assert await result.aget(timeout=LIMIT) == number
        assert set(results) <= set(self.runs)

    async def advance(self, jobs: int) -> None:
        """Wait until so many more jobs have run."""
        goal = sum(self.runs.values()) + jobs
        while sum(self.runs.values()) < goal:
            await trio.sleep(0.01)


async def test_slot_migration_both_ways_under_load_loses_and_doubles_no_job(
    redis_cluster: TestCluster, app: App
) -> None:
    load = Load(app, "mails")
    key = app.queue("mails").stream
    source = redis_cluster.find_owner(key)
    target = next(node for node in redis_cluster.primaries if node is not source)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            await start(nursery, app)
            async with trio.open_nursery() as sending:
                sending.start_soon(load.send)
                for node in (target, source):
                    await load.advance(50)
                    await trio.to_thread.run_sync(redis_cluster.migrate, key, node)
                    await load.advance(50)
                load.is_over = True
            nursery.cancel_scope.cancel()
    assert set(load.runs.values()) == {1}


async def test_jobs_that_end_while_half_of_their_slot_has_moved_end_once(
    redis_cluster: TestCluster, app: App
) -> None:
    runs: Counter[int] = Counter()
    gate = trio.Event()

    @app.task(name="wait", queue="mails")
    async def wait(number: int) -> int:
        runs[number] += 1
        await gate.wait()
        return number

    keys = app.queue("mails")
    source = redis_cluster.find_owner(keys.stream)
    target = next(node for node in redis_cluster.primaries if node is not source)

    def move_half() -> None:
        redis_cluster.begin_migration(keys.stream, target)
        slot = redis_cluster.find_slot(keys.stream)
        names = sorted(source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100))
        redis_cluster.migrate_keys(names[::2], source, target)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            await start(nursery, app)
            results = [await wait.adelay(number) for number in range(10)]
            await until(lambda: len(runs) == 10)
            await trio.to_thread.run_sync(move_half)
            gate.set()
            results.append(await wait.adelay(10))  # into the backlog, after a second
            await trio.to_thread.run_sync(redis_cluster.migrate, keys.stream, target)
            assert [await result.aget(timeout=LIMIT) for result in results] == list(range(11))
            nursery.cancel_scope.cancel()
    assert runs == dict.fromkeys(range(11), 1)


@pytest.fixture
def mortal_cluster(server_binary: str | None) -> Iterator[TestCluster]:
    """A cluster of the test's own."""
    with running_cluster(server_binary, node_timeout_ms=500) as cluster:
        yield cluster


async def test_jobs_that_a_replica_has_survive_the_death_of_their_primary(
    mortal_cluster: TestCluster, app_name: str
) -> None:
    app = App(app_name, broker=mortal_cluster.url, lease=LEASE, replicas=1)
    later = App(app_name, broker=mortal_cluster.url)  # there is no replica any more

    @app.task(name="double", queue="mails")
    async def double(number: int) -> int:
        return 2 * number

    primary = mortal_cluster.find_owner(app.queue("mails").stream)
    names = (f"queue-{number}" for number in itertools.count())
    other = next(name for name in names if mortal_cluster.find_owner(app.queue(name).stream) is not primary)
    redis = ClusterRedis(endpoint=app.connections.endpoint)
    with trio.fail_after(LIMIT):
        await trio.to_thread.run_sync(mortal_cluster.add_replica, primary)
        results = [await double.adelay(number) for number in range(30)]
        with pytest.raises(NotReplicated, match="is published, but after 1 s 0 of 1 replica ") as caught:
            await app.asend_many([double.s(1), double.options(queue=other).s(1)])
        assert len(caught.value.ids) == 1, "the node of the other queue has no replica"
        async with trio.open_nursery() as nursery:
            await start(nursery, app)
            await nursery.start(redis.run)
            await redis.perform(try_write(app.queue("mails")))
            await results[5].aget(timeout=LIMIT)
            await trio.to_thread.run_sync(primary.kill)
            assert [await result.aget(timeout=LIMIT) for result in results] == [
                2 * number for number in range(30)
            ]
            await redis.perform(try_write(app.queue("mails")))
            assert redis.connected, "the node that is gone does not count"
            again = await later.task(name="double", queue="mails")(double.function).adelay(21)
            assert await again.aget(timeout=LIMIT) == 42
            nursery.cancel_scope.cancel()
    app.close()
    later.close()
