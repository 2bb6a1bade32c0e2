"""A worker's reads of several queues, where one of them has shards."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio

from celery5.broker.call import Call
from celery5.broker.calls.jobs import Entry
from celery5.broker.keys import Keys
from celery5.logs.log import NullLog
from celery5.protocol.commands.definitions import PreferParameters
from celery5.protocol.shards import list_shards
from celery5.services.job.reading_state import ReadingState
from celery5.services.scaling.preferences import Preferences
from celery5.services.worker.reading import PassCapacity, QueueLanes, ReadOrder

SHARDS = list_shards("mails", 4)


def read_full_queues(
    queue_order: str, passes: int, preferred: dict[str, float] | None = None
) -> Counter[str]:
    """Return how often each queue is read in so many passes, where all have more jobs than there is capacity for."""
    consumed = [Keys("shop").for_queue(name) for name in (*SHARDS, "reports")]
    preferences = Preferences(log=NullLog())
    order = ReadOrder(
        consumed=consumed,
        lanes=QueueLanes(consumed=consumed, reading=ReadingState()),
        preferences=preferences,
        worker="w",
        priorities="strict",
        queue_order=queue_order,
    )
    counts = Counter[str]()

    async def receive(call: Call[list[Entry]]) -> Sequence[Any]:
        await trio.lowlevel.checkpoint()
        (queue,) = [keys.queue for keys in consumed if keys.stream in call.words]
        counts[queue] += 1
        return [None]

    async def read() -> None:
        if preferred:
            await preferences.handle_command(PreferParameters(seconds=60, queues=preferred))
        for _ in range(passes):
            queues = list(order.queues)
            capacity = PassCapacity(
                {keys.queue: 1 for keys in queues}, {keys.queue: {"trio"} for keys in queues}
            )
            assert await order.read_nonblocking(queues, capacity, receive) == 1

    trio.run(read)
    return counts


def test_shards_of_a_queue_take_turns_in_an_order_of_queues() -> None:
    assert read_full_queues("mails > reports", 40) == dict.fromkeys(SHARDS, 10)
    assert read_full_queues("reports > mails", 40) == {"reports": 40}


def test_the_weight_of_a_queue_is_divided_among_its_shards() -> None:
    assert read_full_queues("mails=4 reports=1", 40) == {**dict.fromkeys(SHARDS, 8), "reports": 8}
    assert read_full_queues("", 40) == {**dict.fromkeys(SHARDS, 5), "reports": 20}


def test_what_a_scheduler_prefers_holds_for_all_shards() -> None:
    counts = read_full_queues("", 100, {"mails": 0.25})
    assert counts == {**dict.fromkeys(SHARDS, 5), "reports": 80}
