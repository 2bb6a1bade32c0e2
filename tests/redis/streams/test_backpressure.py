"""Backpressure: a target that takes nothing holds up its processor, and no outbox grows without bound."""

from typing import Any

import redis
import trio

from celery5 import App
from celery5.services.streams import outbox_relay
from celery5.streams import Keep, StreamEvents
from tests.redis.worker.workers import Lines, until, working


async def test_a_processor_waits_for_a_target_that_is_full_and_nothing_is_lost_or_doubled(
    app: App, redis_client: "redis.Redis"
) -> None:
    numbers = app.stream("numbers", int, by=str, partitions=1)
    squares = app.stream("squares", int, by=str, partitions=1, keep=Keep(records=300))
    await squares.asend(*[0] * 300)
    redis_client.hset(squares.keys.groups, "slow", "0-0")  # a group that has read nothing
    sent = 3 * outbox_relay.MAX_UNDELIVERED

    @app.processor(numbers, into=squares, commit_every=500)
    async def square(events: StreamEvents[int]) -> None:
        async for number in events.records():
            events.send(number * number)

    def outbox() -> int:
        length: Any = redis_client.xlen(numbers.keys.outbox("square", 0))
        return int(length)

    await numbers.asend(*range(sent))
    with Lines() as lines:
        async with working(app):
            await until(lambda: outbox() > outbox_relay.MAX_UNDELIVERED)
            held = redis_client.hget(numbers.keys.partition("square", 0), "cursor")
            await until(lambda: len(lines.of("processor:delivery-failed")) == 1)
            await trio.sleep(0.3)  # several tries of the delivery
            assert outbox() <= outbox_relay.MAX_UNDELIVERED + 500
            assert redis_client.hget(numbers.keys.partition("square", 0), "cursor") == held
            redis_client.hdel(squares.keys.groups, "slow")
            redis_client.delete(squares.keys.log(0))  # only what comes now is looked at
            await until(lambda: outbox() == 0 and redis_client.xlen(squares.keys.log(0)) > 0)
            await until(lambda: last_square(redis_client, squares) == (sent - 1) ** 2)
    found: Any = redis_client.xrange(squares.keys.log(0))
    kept = [int(fields[b"=json"]) for _, fields in found]
    assert kept == [number * number for number in range(sent - len(kept), sent)]


def last_square(client: "redis.Redis", squares: Any) -> int:
    """Return the last output."""
    found: Any = client.xrevrange(squares.keys.log(0), count=1)
    return int(found[0][1][b"=json"]) if found else -1
