"""Routers and Schedulers send jobs to the shards of a queue."""

from typing import Any

import pytest
import trio

from celery5 import App, current_job
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.scheduling.declaration import every
from tests.redis.sharding.declaring import QUEUE, SHARDS, declare
from tests.redis.worker.workers import start, until


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of four shards."""
    app.configure(shards={QUEUE: 4})
    return app


class Notes:
    """What a task was called with, and the shards that its jobs were on."""

    def __init__(self, app: App) -> None:
        self.numbers: list[int] = []
        self.shards = set[str]()

        async def note(number: int) -> None:
            job = current_job()
            assert job is not None
            self.numbers.append(number)
            self.shards.add(job.queue)

        self.task: Any = declare(app, note)


async def test_jobs_of_events_are_spread_over_the_shards_and_run_once(sharded: App) -> None:
    notes = Notes(sharded)

    @sharded.event
    class Counted(Event):
        number: int

    Counted.subscribe(notes.task)
    events: list[Any] = [Counted(number=n) for n in range(60)]
    async with trio.open_nursery() as nursery:
        worker = await start(nursery, sharded, queues=(QUEUE,))
        router = await start(nursery, sharded, page=ROUTER)
        await sharded.events.asend(events)
        await until(lambda: len(notes.numbers) >= 60)
        await router.stop()
        await worker.stop()
    assert sorted(notes.numbers) == list(range(60))
    assert notes.shards == set(SHARDS)


async def test_schedules_fire_on_all_shards(sharded: App) -> None:
    notes = Notes(sharded)
    for n in range(16):
        await sharded.schedule.aadd(notes.task.s(n), every(0.05), name=f"schedule-{n}")
    async with trio.open_nursery() as nursery:
        worker = await start(nursery, sharded, queues=(QUEUE,))
        scheduler = await start(nursery, sharded, page=SCHEDULER)
        await until(lambda: set(notes.numbers) == set(range(16)))
        await scheduler.stop()
        await worker.stop()
    assert notes.shards == set(SHARDS)
