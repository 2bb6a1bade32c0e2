"""Backpressure: a target that takes nothing holds up its processor, and no outbox grows without bound."""

from collections.abc import Sequence
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.errors import StreamFull
from celery5.services.streams import outbox_relay
from celery5.streams import Keep, StoredRecord, StreamEvents
from tests.redis.worker.workers import Lines, until, until_async, working


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

    async def stands_still() -> bool:
        """Return whether the processor reads no more, in the time of several tries of the delivery."""
        cursor = redis_client.hget(numbers.keys.partition("square", 0), "cursor")
        await trio.sleep(0.3)
        return redis_client.hget(numbers.keys.partition("square", 0), "cursor") == cursor

    await numbers.asend(*range(sent))
    with Lines() as lines:
        async with working(app):
            await until(lambda: outbox() > outbox_relay.MAX_UNDELIVERED)
            await until(lambda: len(lines.of("processor:delivery-failed")) == 1)
            await until_async(stands_still)
            assert outbox() <= outbox_relay.MAX_UNDELIVERED + 500
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


class Archived:
    """An archive in memory."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def __call__(self, _stream: str, _partition: int, entries: Sequence[StoredRecord]) -> None:
        await trio.lowlevel.checkpoint()
        self.numbers += [entry.record for entry in entries]


@pytest.mark.parametrize("full", ["refuse", "drop", "archive"])
@pytest.mark.parametrize("keep", [1, 2, 7, 60, 150])
async def test_outputs_arrive_in_a_stream_that_keeps_fewer_than_are_sent_at_once(
    app: App, redis_client: "redis.Redis", keep: int, full: Any
) -> None:
    archive = Archived()
    kept = Keep(records=keep, full=full, archive=archive if full == "archive" else None)
    numbers = app.stream("numbers", int, by=str, partitions=1)
    doubles = app.stream("doubles", int, by=lambda _: 1, partitions=1, keep=kept)
    gate, seen, sent = trio.Event(), list[int](), 2 * outbox_relay.RELAY_BATCH if keep > 2 else 40

    @app.processor(numbers, into=doubles, commit_every=500)
    async def double(events: StreamEvents[int]) -> None:
        async for number in events.records():
            events.send(2 * number)

    @app.processor(doubles, commit_every=keep)
    async def collect(events: StreamEvents[int]) -> None:
        await gate.wait()
        async for number in events.records():
            seen.append(number)

    async def has_group() -> bool:
        (state,) = await app.streams.ainfo("doubles")
        return bool(state.groups)

    async def is_delivered() -> bool:
        states = await app.streams.ainfo()
        return not redis_client.xlen(numbers.keys.outbox("double", 0)) and not any(
            group.lag for state in states for group in state.groups
        )

    expected = [2 * number for number in range(sent)]
    async with working(app):
        await until_async(has_group)
        with Lines() as lines:
            await numbers.asend(*range(sent))
            if full == "refuse":  # more wait in the outbox than the target keeps
                await until(lambda: bool(lines.of("processor:delivery-failed")))
            gate.set()
            await until_async(is_delivered)
        if full == "archive":  # what was archived while it was in hand is in both
            await until(lambda: {*seen, *archive.numbers} == set(expected))
    assert seen == sorted(seen)
    if full == "refuse":
        assert seen == expected
    else:
        assert set(seen) <= set(expected)


async def test_more_records_than_kept_are_refused_in_a_call_but_not_in_portions(
    app: App, redis_client: "redis.Redis"
) -> None:
    numbers = app.stream("numbers", int, by=lambda _: 1, partitions=1, keep=Keep(records=100))
    redis_client.hset(numbers.keys.groups, "slow", "0-0")  # a group that has read nothing
    with pytest.raises(
        StreamFull,
        match=r"^150 records at once for partition 0 of stream numbers, which keeps 100: .*at most 100",
    ):
        await numbers.asend(*range(150))
    assert redis_client.xlen(numbers.keys.log(0)) == 0
    with pytest.raises(
        StreamFull, match=r"^partition 0 of stream numbers is full: group slow has not read 100"
    ):
        await numbers.asend(*range(250))
    assert redis_client.xlen(numbers.keys.log(0)) == 100

    def send_many() -> int:
        """Return how many were sent before the stream was full."""
        count, ids = 0, numbers.send_many(range(250))
        try:
            for _ in ids:
                count += 1
        except StreamFull:
            return count
        raise AssertionError("more were sent than are kept")

    redis_client.delete(numbers.keys.log(0))
    assert await trio.to_thread.run_sync(send_many) == 100
