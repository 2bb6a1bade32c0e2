"""When workers took a job: the time of a take does not change, and each take is shown."""

import time

from celery5 import App
from celery5.broker.calls import queues as queue_calls
from celery5.broker.keys import GROUP
from celery5.protocol.job.story import list_takes
from tests.redis.observability.surfaces import Surfaces
from tests.redis.observability.surfaces_app import SETTINGS, declare
from tests.redis.worker.one_queue import Queue


def take(queue: Queue, worker: str, ago: float) -> bytes:
    """Let a worker take the only job of the queue, `ago` seconds before now. Return the id of its entry."""
    queue.join(worker)
    (entry,) = queue.read(worker)
    queue.client.xclaim(queue.keys.stream, GROUP, worker, 0, [entry.id], idle=int(ago * 1000))
    return entry.id


async def test_reading_pending_jobs_keeps_the_time_when_a_worker_took_a_job(
    url: str, app_name: str, queue: Queue
) -> None:
    app = declare(App(app_name, broker=url, **SETTINGS))
    await app.aperform(queue_calls.register_queue(app.keys, queue.keys.queue))
    queue.publish("a")
    take(queue, "w", ago=60)
    assert [entry.id for entry in queue.mine("w")] == [entry.id for entry in queue.mine("w")] != []
    assert queue.mine("nobody") == []
    details = await app.afind("a")
    assert details is not None
    assert 59 < time.time() - details.taken < 90
    assert [(taken.label, taken.worker) for taken in list_takes(details)] == [("taken", "w")]


async def test_every_surface_shows_each_worker_that_took_a_job(url: str, app_name: str, queue: Queue) -> None:
    app = declare(App(app_name, broker=url, **SETTINGS))
    await app.aperform(queue_calls.register_queue(app.keys, queue.keys.queue))
    queue.publish("a")
    entry = take(queue, "one:1:a", ago=1800)
    assert queue.recover("one:1:a", begun=[entry]).requeued == 1
    take(queue, "two:2:b", ago=300)
    details = await app.afind("a")
    assert details is not None
    (first, again) = list_takes(details)
    assert (first.label, first.worker, first.is_past) == ("first taken", "one:1:a", True)
    assert (again.label, again.worker, again.is_past) == ("taken again", "two:2:b", False)
    assert 1799 < time.time() - first.at < 1830
    assert 299 < time.time() - again.at < 330
    surfaces = Surfaces(app)
    lines = dict(
        line.split("  ", 1) for line in (await surfaces.run("task", "show", "a")).splitlines() if "  " in line
    )
    assert lines["first taken"].endswith("(30 min ago) by one:1:a")
    assert lines["taken again"].endswith("(5 min ago) by two:2:b")
    page = await surfaces.look("jobs/a")
    assert "first taken by one:1:a" in page
    assert "taken again: attempt 1 runs on two:2:b" in page
    (death,) = (await surfaces.run_json("task", "show", "a"))["deaths"]
    assert death["taken"] == first.at
