"""A failover loses outcomes: the jobs run again, and the worker says how many."""

import time
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.keys import GROUP
from celery5.services.worker.consumer import Consumer
from tests.redis.worker.workers import LEASE, Lines, until, working


def restore(client: "redis.Redis", saved: dict[str, Any], result: str) -> None:
    """Do as if another server had taken over that does not have the last writes."""
    client.delete(result)
    for key, value in saved.items():
        if value is not None:
            client.restore(key, 0, value, replace=True)
    for connection in client.client_list():
        if connection["name"].startswith("celery5:"):
            client.client_kill_filter(_id=connection["id"])


async def test_a_job_whose_outcome_redis_has_lost_runs_again_and_is_counted(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, go, consumers = list[int](), trio.Event(), list[Consumer]()
    fetch = Consumer.fetch

    async def note(consumer: Consumer) -> int:
        consumers[:] = [consumer]
        return await fetch(consumer)

    monkeypatch.setattr(Consumer, "fetch", note)

    @app.task
    async def work(n: int) -> int:
        runs.append(n)
        await go.wait()
        return n

    keys = app.queue("default")
    with Lines() as lines:
        async with working(app):
            sent = await work.adelay(7)
            await until(lambda: runs == [7])
            saved: dict[str, Any] = {key: redis_client.dump(key) for key in (keys.stream, keys.jobs)}
            go.set()
            assert await sent.aget() == 7
            await until(lambda: not redis_client.xlen(keys.stream))
            restore(redis_client, saved, keys.result(sent.id))
            await until(lambda: runs == [7, 7])
            await until(lambda: redis_client.exists(keys.result(sent.id)) == 1)
            await until(lambda: bool(lines.of("consumer:settlements-lost")))
            (event,) = lines.of("consumer:settlements-lost")
            assert (event["count"], event["level"]) == (1, "warning")
            assert not lines.of("consumer:jobs-recovered")
            (consumer,) = consumers
            (lost,) = consumer.metric_families()
            assert (lost.name, [sample.value for sample in lost.samples]) == (
                "celery5_settlements_lost_total",
                [1],
            )


@pytest.mark.parametrize("number", [0, 1])
async def test_a_limited_job_whose_outcome_is_lost_runs_again_and_frees_its_slot(
    app_name: str, url: str, redis_client: "redis.Redis", number: int
) -> None:
    """The first job has its slot from the start, the second one waited for it and came on the lane `handed`."""
    app = App(app_name, broker=url, lease=LEASE, read_block=0.5)
    runs, gates = list[int](), [trio.Event(), trio.Event(), trio.Event()]
    deliveries = list[Any]()

    @app.task(limit=1)
    async def work(n: int) -> int:
        runs.append(n)
        for stream in (keys.stream, keys.handed):
            entries: Any = redis_client.xrange(stream)
            deliveries.extend(fields.get(b"deliveries") for _, fields in entries)
        await gates[n].wait()
        return n

    keys = app.queue("default")
    names = (*keys.streams, keys.jobs, keys.slots, keys.slot_counts)
    async with working(app):
        sent = [await work.adelay(n) for n in range(number + 1)]
        for n in range(number):
            await until(lambda n=n: runs == list(range(n + 1)))  # type: ignore[misc]
            gates[n].set()
        await until(lambda: runs == list(range(number + 1)))
        saved: dict[str, Any] = {name: redis_client.dump(name) for name in names}
        deliveries.clear()
        gates[number].set()
        assert await sent[number].aget() == number
        await until(lambda: not redis_client.exists(keys.slots))
        restore(redis_client, saved, keys.result(sent[number].id))
        await until(lambda: runs == [*range(number + 1), number])
        assert deliveries == [b"1"], "one more, and not as many as there are milliseconds in its time to live"
        await until(lambda: redis_client.exists(keys.result(sent[number].id)) == 1)
        gates[2].set()
        assert await (await work.adelay(2)).aget(timeout=20) == 2, "the slot is free"
    app.close()


async def test_a_job_with_a_slot_that_its_task_needs_no_more_frees_it(
    app: App, redis_client: "redis.Redis"
) -> None:
    """A job without a limit has a slot while its kind is saturated. It may be found after that."""
    begun, gate, runs = trio.Event(), trio.Event(), list[int]()

    @app.task(name="limited", limit=1)
    async def limited() -> None:
        begun.set()
        await gate.wait()

    @app.task(name="plain")
    async def plain(n: int) -> int:
        runs.append(n)
        return n

    keys = app.queue("default")
    client: Any = redis_client
    async with working(app):
        first = await limited.adelay()
        await begun.wait()
        ((_, slot),) = client.hgetall(keys.slots).items()
        taken = client.hgetall(keys.slot_counts)
        worker = slot.split()[-1].decode()
        # What a server has after a failover: a job of this worker with a slot, and nothing of its end.
        job, entry = plain.job(7), f"{time.time_ns() // 1_000_000}-77"
        with client.pipeline() as pipe:
            pipe.xadd(keys.stream, {"job": job.message}, id=entry)
            pipe.xgroup_setid(keys.stream, GROUP, entry)
            pipe.xclaim(keys.stream, GROUP, worker, 0, [entry], force=True)
            pipe.hset(keys.jobs, job.id, f"S{entry}")
            pipe.hset(keys.slots, entry, slot.replace(b"limited", b"plain"))
            for field in taken:
                pipe.hset(keys.slot_counts, field.replace(b"limited", b"plain"), 1)
            pipe.execute()
        restore(redis_client, {}, keys.result(job.id))
        assert await app.result(job.id, task=plain).aget(timeout=20) == 7
        assert client.hgetall(keys.slot_counts) == taken
        gate.set()
        await first.aget(timeout=20)
    assert runs == [7]
