"""Roles: the users that the guide gives to producers and workers can do their work, and nothing beyond it."""

import re
from pathlib import Path

import pytest
import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.worker.workers import working

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "trust.md"
ROLES = re.findall(r"(?m)^ACL SETUSER (shop-\w+) (.*)$", PAGE.read_text())


def _as_user(url: str, user: str) -> str:
    return url.replace("unix://", f"unix://{user}:CHANGE-ME@", 1)


async def test_each_role_of_the_guide_does_its_work_and_no_more(own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        for user, rules in ROLES:
            admin.execute_command("ACL", "SETUSER", user, *rules.split())
    assert [user for user, _ in ROLES] == ["shop-producer", "shop-worker"]
    worker = App("shop", broker=_as_user(own_server.url, "shop-worker"), lease=1.0)

    async def add(a: int, b: int) -> int:
        return a + b

    worker.task(name="add")(add)
    producer = App("shop", broker=_as_user(own_server.url, "shop-producer"))
    task = producer.task(name="add")(add)
    async with working(worker):
        sent = [
            task.options(**how).s(2, 3)
            for how in ({}, {"countdown": 0.05}, {"key": "k"}, {"priority": "high"})
        ]
        assert [await each.aget(30) for each in await producer.asend_many(sent)] == [5] * 4
    for user, _ in ROLES:
        with redis.Redis.from_url(_as_user(own_server.url, user)) as client:
            for command in (
                "FLUSHALL",
                "KEYS *",
                "CONFIG GET *",
                "SCRIPT FLUSH",
                "SET other 1",
                "GET celery5:{shop2}:queues",
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command.split())
    stream = producer.queue("default").stream
    with redis.Redis.from_url(_as_user(own_server.url, "shop-producer")) as client:
        for command in (
            f"XRANGE {stream} - +",
            f"XREADGROUP GROUP workers x STREAMS {stream} >",
            f"DEL {stream}",
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
    worker.close()
    producer.close()
