"""One test for each subject on a Redis Cluster. The nox session `cluster` runs many more of each."""

import pytest
import trio

from celery5 import App, every
from celery5.errors import WorkflowFailed
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.streams import StreamEvents
from tests.redis.worker.workers import start, until, until_async


async def test_a_workflow_over_queues_on_several_nodes_ends(app: App) -> None:
    @app.task(queue="mails")
    async def double(number: int) -> int:
        return 2 * number

    @app.task(queue="images")
    async def increase(number: int) -> int:
        return number + 1

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        run = await (double.s(20) | increase.s() | double.s()).astart()
        assert await run.aget(timeout=20) == 82
        nursery.cancel_scope.cancel()


async def test_a_retry_on_a_cluster_removes_the_dead_letter_from_a_queue_on_another_node(app: App) -> None:
    is_broken = True

    @app.task(queue="mails")
    async def double(number: int) -> int:
        return 2 * number

    @app.task(queue="images", max_retries=0)
    async def increase(number: int) -> int:
        if is_broken:
            raise ValueError(number)
        return number + 1

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        run = await (double.s(20) | increase.s()).astart()
        with pytest.raises(WorkflowFailed):
            await run.aget(timeout=20)
        assert await app.dlq.acount("queue") == {"images": 1}
        is_broken = False
        await run.aretry()
        assert await run.aget(timeout=20) == 41

        async def is_empty() -> bool:
            return await app.dlq.acount() == {}

        await until_async(is_empty)
        nursery.cancel_scope.cancel()


async def test_an_event_reaches_subscribers_on_several_nodes_once(app: App) -> None:
    received: list[str] = []

    @app.event
    class Ordered(Event):
        number: int

    for queue in ("mails", "images", "reports"):

        @Ordered.subscribe
        @app.task(name=f"note-{queue}", queue=queue)
        async def note(number: int, queue: str = queue) -> None:
            received.append(f"{queue} {number}")

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        await start(nursery, app, page=ROUTER)
        await Ordered.adelay(number=7)
        await until(lambda: len(received) == 3)
        assert sorted(received) == ["images 7", "mails 7", "reports 7"]
        nursery.cancel_scope.cancel()


async def test_a_limit_holds_on_a_cluster(app: App) -> None:
    running, most = 0, 0

    @app.task(queue="mails", limit=2)
    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.01)
        running -= 1

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        results = [await work.adelay() for _ in range(20)]
        for result in results:
            await result.aget(timeout=20)
        assert most == 2
        nursery.cancel_scope.cancel()


async def test_a_schedule_fires_on_a_cluster(app: App) -> None:
    fired: list[int] = []

    @app.task(queue="images", schedule=every(0.2))
    async def tick() -> None:
        fired.append(1)

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        await start(nursery, app, page=SCHEDULER)
        await until(lambda: len(fired) >= 2)
        nursery.cancel_scope.cancel()


async def test_records_of_a_stream_are_processed_in_order_on_a_cluster(app: App) -> None:
    processed: list[int] = []
    orders = app.stream("orders", int, partitions=1)

    @app.processor(orders)
    async def note(numbers: StreamEvents[int]) -> None:
        async for number in numbers.records():
            processed.append(number)  # noqa: PERF401  seen at once

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        for number in range(20):
            await orders.asend(number)
        await until(lambda: len(processed) == 20)
        assert processed == list(range(20))
        nursery.cancel_scope.cancel()


async def test_a_job_with_a_unique_key_is_not_sent_twice_on_a_cluster(app: App) -> None:
    @app.task(queue="mails", unique_for=60.0)
    async def once(number: int) -> int:
        return number

    first = await once.options(key="seven").adelay(7)
    second = await once.options(key="seven").adelay(7)
    assert second.id == first.id
