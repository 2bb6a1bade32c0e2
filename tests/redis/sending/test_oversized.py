"""Oversized: what is larger in Redis than any message may be becomes a dead letter before it is decoded, and nothing
else is late."""

from collections.abc import Iterator

import pytest
import redis
import trio

from celery5 import App, AsyncResult, TaskFailed
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.keys import EVENTS
from celery5.errors import Corrupt
from celery5.processes.router import ROUTER
from celery5.protocol.job.messages import SIZE_MARGIN
from tests.redis.events.sinking import Kept, delivering
from tests.redis.worker.workers import entries, start, until, working

PADDING = b"x" * (SIZE_MARGIN + 1024)


@pytest.fixture
def tight(url: str, app_name: str) -> Iterator[App]:
    """An application with the smallest limit that there is."""
    app = App(app_name, broker=url, message_limit=1024)
    yield app
    app.close()


def large(job_id: str, task: str) -> bytes:
    """A message that is read by whoever looks at no size."""
    return b'{"v":1,"id":"%s","task":"%s","kwargs":{"text":"%s"}}' % (job_id.encode(), task.encode(), PADDING)


async def test_oversized_message_becomes_a_dead_letter_of_its_id(
    tight: App, redis_client: "redis.Redis"
) -> None:
    had = list[int]()

    @tight.task
    async def measure(text: str) -> int:
        had.append(len(text))
        return len(text)

    queue = tight.queue("default")
    redis_client.xadd(queue.stream, {"job": large("big-1", measure.name)})
    async with working(tight):
        assert await (await measure.adelay("four")).aget(timeout=30) == 4
        with pytest.raises(TaskFailed, match="message_limit is 1024 here: raise it") as caught:
            await tight.result("big-1", queue="default").aget(timeout=30)
    assert caught.value.reason == "corrupt"
    assert had == [4]
    (dead,) = [dead_job async for dead_job in tight.dlq.aread()]
    assert (dead.reason, dead.id, dead.raw) == ("corrupt", "big-1", large("big-1", measure.name))
    assert (await tight.dlq.areplay()).left == {"corrupt": 1}


async def test_oversized_event_becomes_a_dead_letter(tight: App, redis_client: "redis.Redis") -> None:
    queue = tight.queue(EVENTS)
    event = b'{"v":1,"id":"e-1","event":"Large","fields":{"text":"%s"}}' % PADDING
    async with trio.open_nursery() as nursery:
        router = await start(nursery, tight, page=ROUTER)
        redis_client.xadd(queue.stream, {"job": event})
        await until(lambda: redis_client.xlen(queue.dead) == 1)
        await router.stop()
    (dead_letter,) = entries(redis_client, queue.dead)
    assert dead_letter[b"job"] == event
    assert b"message_limit is 1024 here" in dead_letter[b"document"]


async def test_a_sink_is_not_given_an_oversized_document(tight: App, redis_client: "redis.Redis") -> None:
    kept = Kept()

    @tight.task(sinks=[kept])
    async def nothing() -> None: ...

    queue = tight.queue("default")
    document = b'{"v":1,"id":"d-1","task":"t","state":"SUCCESS","value":"%s"}' % PADDING
    redis_client.xadd(queue.documents_for(kept.name), {"document": document})
    redis_client.sadd(tight.keys.queues, "default")
    async with delivering(tight):
        await until(lambda: redis_client.xlen(queue.dead) == 1)
    assert kept.documents == []
    (dead_letter,) = entries(redis_client, queue.dead)
    assert b"message_limit is 1024 here" in dead_letter[b"failure"]


async def test_whoever_waits_does_not_decode_an_oversized_document(
    tight: App, redis_client: "redis.Redis"
) -> None:
    result: AsyncResult[str] = tight.result("r-1", queue="default")
    redis_client.set(
        result.key, b'{"v":1,"id":"r-1","task":"t","state":"SUCCESS","value":"%s"}' % PADDING, ex=60
    )
    for ask in (result.aget, result.astatus):
        with pytest.raises(Corrupt, match="message_limit is 1024 here"):
            await ask()


async def test_an_oversized_schedule_is_left_alone(tight: App, redis_client: "redis.Redis") -> None:
    @tight.task
    async def tick() -> None: ...

    await tight.schedule.aadd(tick.s(), 3600, name="good")
    records: dict[str, bytes] = await tight.aperform(scheduling_calls.list_schedules(tight.keys, "default"))
    record = records["good"]
    key = tight.keys.schedules("default")
    redis_client.hset(key, "bad", record.replace(b'"good"', b'"bad"', 1) + b" " * (len(PADDING) + 1024))
    assert [schedule.name for schedule in await tight.schedule.alist()] == ["good"]
