"""Inbox leaving: what a worker has begun when it ends is done and answered, and what it has not waits for the next
one."""

import redis
import trio

from celery5 import App
from tests.redis.commands.forging import INBOX, answer, order, put, signed
from tests.redis.worker.workers import until, working


async def test_what_was_begun_when_a_worker_ends_is_done_and_answered(
    app: App, redis_client: "redis.Redis"
) -> None:
    one = order(app, "stats")  # which takes a while
    async with working(app, name=INBOX):
        put(redis_client, app, one, signed(app, one))
        await until(lambda: redis_client.get(app.keys.nonce(one.id)) is not None)
    assert (await answer(redis_client, app, one)).ok


async def test_no_command_is_lost_between_one_worker_and_the_next(
    app: App, redis_client: "redis.Redis"
) -> None:
    many = [order(app, "stats") for _ in range(30)]
    for start in range(0, 30, 5):
        async with working(app, name=INBOX):
            for answer_id in many[start : start + 5]:
                put(redis_client, app, answer_id, signed(app, answer_id))
            await trio.sleep(start / 500)  # each time it ends at another moment
    async with working(app, name=INBOX):
        for answer_id in many:
            assert (await answer(redis_client, app, answer_id)).ok
