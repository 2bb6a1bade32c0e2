"""Groups of dead jobs on a server: found page by page, and replayed or purged by their id."""

from typing import Any

import redis
import trio

from celery5 import App
from celery5.broker.calls import queues
from celery5.protocol.job.messages import Command, Document, Failure, encode
from tests.redis.dead_letters.many_dead_letters import QUEUE, numbered, sent

LONGEST_CALL = 2000  # µs


def dead_letter_with(app: App, client: "redis.Redis", messages: dict[str, str], queue: str = QUEUE) -> None:
    """Dead jobs by their ids, each with the message of its error."""
    keys = app.queue(queue)
    app.perform(queues.register_queue(app.keys, queue))
    pipe = client.pipeline(transaction=False)
    for job_id, message in messages.items():
        failure = Failure(type="ValueError", message=message, traceback="Traceback\n" * 40)
        command = Command(v=1, id=job_id, task="shop.t", failures=(failure,))
        document = Document(v=1, id=job_id, task="shop.t", state="DEAD", reason="exhausted", failure=failure)
        pipe.xadd(keys.dead, {"job": encode(command), "document": encode(document)})
    entries: list[bytes] = pipe.execute()
    pipe.hset(
        keys.jobs, mapping={job_id: b"X" + entry for job_id, entry in zip(messages, entries, strict=True)}
    )
    pipe.execute()


async def test_dead_jobs_are_grouped_and_a_group_is_replayed_and_purged(
    app: App, redis_client: "redis.Redis"
) -> None:
    orders = {f"o{number}": f"no such order {number}" for number in range(30)}
    await trio.to_thread.run_sync(dead_letter_with, app, redis_client, {**orders, "b": "the bank is closed"})
    await trio.to_thread.run_sync(dead_letter_with, app, redis_client, {"s": "no such order 77"}, "slow")
    found = await app.dlq.agroups()
    of_orders, of_bank = found.groups
    assert (of_orders.count, of_orders.queues, of_bank.ids) == (31, ("default", "slow"), ("b",))
    assert (found.looked_at, found.matched, found.total, found.next) == (32, 32, 32, "")
    assert [job.id async for job in app.dlq.aread(group=of_bank.id)] == ["b"]
    assert await app.dlq.acount(group=of_orders.id, queue="slow") == {"exhausted": 1}
    tally = await app.dlq.areplay(group=of_orders.id)
    assert tally.done == 31
    assert (await app.dlq.apurge(group=[of_orders.id, of_bank.id])).done == 1
    assert (await app.dlq.agroups()).groups == ()


def test_groups_are_found_in_pages_that_say_what_was_not_looked_at(
    app: App, redis_client: "redis.Redis"
) -> None:
    dead_letter_with(app, redis_client, {job_id: f"no {job_id}" for job_id in numbered(250)})
    counts: list[int] = []
    after = None
    for _ in range(4):
        found = app.dlq.groups(limit=75, after=after)
        counts.append(found.groups[0].count)
        after = found.next
        assert (found.looked_at, found.total) == (counts[-1], 250)
    assert (counts, after) == ([75, 75, 75, 25], "")
    assert app.dlq.groups(limit=250).next == ""
    newest = app.dlq.groups(limit=1, newest_first=True)
    assert newest.groups[0].ids == ("j249",)
    assert app.dlq.groups(limit=1, newest_first=True, after=newest.next).groups[0].ids == ("j248",)
    assert sent(redis_client, app) == []


def test_no_call_is_long_however_many_are_dead(app: App, redis_client: "redis.Redis") -> None:
    for start in range(0, 20_000, 1000):
        ids = range(start, start + 1000)
        dead_letter_with(
            app, redis_client, {f"j{number}": f"no order {number} in {number % 7}" for number in ids}
        )
    redis_client.config_resetstat()
    found = app.dlq.groups()
    stats: Any = redis_client.info("commandstats")
    read = stats["cmdstat_xrange"]
    assert (found.matched, len(found.groups)) == (20_000, 1)
    assert read["usec_per_call"] < LONGEST_CALL
