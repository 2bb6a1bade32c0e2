"""A change that fails in every process that was asked: nobody is told that it is done."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.dashboard.site import browsing, press, read_text
from tests.redis.worker.workers import working


@contextmanager
def full(server: EmbeddedServer) -> Iterator[None]:
    """Have a server refuse writes during the block."""
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1_000_000)
        try:
            yield
        finally:
            client.config_set("maxmemory", 0)


async def test_a_pause_that_no_worker_could_carry_out_is_not_said_to_be_done(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    async with working(app, name="one"), working(app, name="two"), browsing(app) as client:
        with full(own_server):
            headers = {"authorization": "Bearer t", "x-test-script": "1"}
            path = f"/api/v1/{app.name}/queue/pause"
            answer = await client.post(path, json={"queue": "default"}, headers=headers)
            page = read_text((await press(client, app, "queue:pause", {"queue": "default"})).text)
        assert answer.status_code == 409
        assert answer.json()["detail"].startswith("nothing was done: 0 of 2 processes; one, two: ")
        assert "nothing was done: 0 of 2 processes" in page
        assert "is paused" not in page
        assert "Redis is full" in page
        assert not any(queue.paused for queue in (await app.ainfo()).queues.values())
    app.close()
