"""A failover loses outcomes: the jobs run again, and the worker says how many."""

from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.services.worker.consumer import Consumer
from tests.redis.worker.workers import Lines, until, working


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
            # As if another server had taken over that does not have the last writes.
            redis_client.delete(keys.result(sent.id))
            for key, value in saved.items():
                redis_client.restore(key, 0, value, replace=True)
            for client in redis_client.client_list():
                if app.name in client["name"] or client["name"].startswith("celery5:"):
                    redis_client.client_kill_filter(_id=client["id"])
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
