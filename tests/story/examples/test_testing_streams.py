"""Testing kit with streams: an application that was run for a test leaves no stream in the server.

What has a time to live goes by itself.
"""

import time

import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.streams import Record, StreamEvents
from celery5.testing import running_worker
from tests.redis.worker.workers import leftovers


def wait_for(seen: list[int], count: int) -> None:
    """Wait until `count` records have been seen, or 20 s."""
    end = time.monotonic() + 20
    while len(seen) < count and time.monotonic() < end:
        time.sleep(0.02)


def test_streams_go_with_the_application_that_a_test_ran(server: EmbeddedServer) -> None:
    app = App("streams-of-a-test", broker=server.url)
    seen: list[int] = []

    class Order(Record):
        id: int

    orders = app.stream("orders", Order, by="id", partitions=3)
    totals = app.stream("totals", Order, by="id", partitions=2)

    @app.processor(orders)
    async def count(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            events.state.set(str(order.id), order.id)
            events.send(order, to=totals)
            seen.append(order.id)

    with running_worker(app, broker=server.url), redis.Redis.from_url(server.url) as client:
        orders.send(*[Order(id=n) for n in range(10)])
        wait_for(seen, 10)
        assert sorted(seen) == list(range(10))
        assert leftovers(client, app)
    with redis.Redis.from_url(server.url) as client:
        assert [key for key in leftovers(client, app) if client.ttl(key) == -1] == []
