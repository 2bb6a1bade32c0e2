"""Outgoing: tasks that workers of Celery run are sent by jobs, with the job's id, until they are sent."""

import json
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.contrib.celery import celery_task
from celery5.errors import BadArguments
from celery5.protocol.job.retry_policy import RetryPolicy
from tests.redis.worker.workers import until, until_async, working

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")


def read_messages(client: "redis.Redis", queue: str = "celery") -> list[dict[str, Any]]:
    """Return the messages of a queue of Celery, the oldest first."""
    items: Any = client.lrange(queue, 0, -1)
    return [json.loads(item) for item in reversed(items)]


async def test_a_call_becomes_a_message_of_celery_with_the_id_of_the_job(
    app: App, old: Any, celery_redis: "redis.Redis"
) -> None:
    @celery_task(app, old, name="warehouse.ship", celery_queue="ship")
    def ship(order: int, *, express: bool = False) -> None:
        raise AssertionError("a worker of Celery's runs it")

    async with working(app):
        result = await ship.adelay(7, express=True)
        assert await result.aget() == result.id
    (message,) = read_messages(celery_redis, "ship")
    assert message["headers"]["task"] == "warehouse.ship"
    assert message["headers"]["id"] == result.id
    assert message["headers"]["argsrepr"] == "(7,)"
    assert message["headers"]["kwargsrepr"] == "{'express': True}"


async def test_arguments_are_checked_where_it_is_called(app: App, old: Any) -> None:
    @celery_task(app, old)
    def ship(order: int) -> None: ...

    assert ship.name.endswith(".ship")
    with pytest.raises(BadArguments, match="order"):
        await ship.adelay("x")  # type: ignore[arg-type]


async def test_a_message_is_sent_when_the_broker_of_celery_is_back(
    app: App, celery_url: str, celery_redis: "redis.Redis"
) -> None:
    broken: Any = celery.Celery("old", broker="redis://127.0.0.1:1", set_as_current=False)
    again = RetryPolicy(max_retries=1000, backoff=0.02, cap=0.02)

    @celery_task(app, broken, name="warehouse.ship", retry_policy=again)
    def ship(order: int) -> None: ...

    async with working(app):
        result = await ship.adelay(7)
        attempts: list[int] = []

        async def has_failed() -> bool:
            details = await app.afind(result.id)
            attempts.append(details.attempt if details else 0)
            return attempts[-1] >= 3

        await until_async(has_failed)
        broken.conf.broker_write_url = celery_url
        await until(lambda: len(read_messages(celery_redis)) == 1)
        assert await result.aget() == result.id
