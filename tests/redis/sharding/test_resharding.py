"""Changes of the number of shards while all runs, and deaths of workers: nothing is lost, and limits hold."""

import signal
import time
from typing import Any

import pytest
import trio

from celery5 import App, gather
from celery5.broker.calls.queues import get_queue_depth
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.limits.test_limits_deaths import MOST, crowd
from tests.redis.sharding.declaring import QUEUE, declare
from tests.redis.worker.workers import start, working


def make(name: str, url: str, shards: int) -> tuple[App, Any]:
    """An application with so many shards, as one version of its code has it, and its task."""
    app = App(name, broker=url, lease=0.5, shards={QUEUE: shards})

    async def push(n: int) -> int:
        return n

    return app, declare(app, push)


async def test_resharding_up_and_down_while_running_loses_no_job(url: str, app_name: str) -> None:
    (two, push_two), (four, push_four) = make(app_name, url, 2), make(app_name, url, 4)
    sent: list[Any] = []
    async with trio.open_nursery() as nursery:
        old = await start(nursery, two)
        sent += await two.asend_many([push_two.s(n) for n in range(20)])
        sent += await four.asend_many(
            [push_four.s(n) for n in range(20)]
        )  # before any worker has their number
        new = await start(nursery, four)
        sent += await two.asend_many([push_two.s(n) for n in range(20)])
        await old.stop()
        sent += await four.asend_many([push_four.s(n) for n in range(20)])
        again = await start(nursery, two)
        await new.stop()
        # Only a worker of the lower number is left: it finds the other shards by itself.
        sent += await four.asend_many([push_four.s(n) for n in range(20)])
        with trio.fail_after(30):
            assert [await result.aget() for result in sent] == list(range(20)) * 5
        await again.stop()
    assert len({result.queue for result in sent}) == 4
    two.close()
    four.close()


async def test_a_queue_that_is_to_have_no_shards_any_more_loses_no_job(url: str, app_name: str) -> None:
    (two, push_two), (one, push_one) = make(app_name, url, 2), make(app_name, url, 1)
    async with working(one):  # it has looked for shards of an earlier number, and found none
        sent = await two.asend_many([push_two.s(n) for n in range(20)])
        sent += await one.asend_many([push_one.s(n) for n in range(20)])
        with trio.fail_after(30):
            assert [await result.aget() for result in sent] == list(range(20)) * 2
    assert [result.queue for result in sent[20:]] == [QUEUE] * 20
    for n, result in enumerate(sent):
        assert await one.result(result.id, queue=QUEUE).aget() == n % 20
    two.close()
    one.close()


async def test_a_limit_holds_when_a_queue_gets_its_first_shards(app: App) -> None:
    running = most = 0

    async def narrow() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.02)
        running -= 1

    narrow_task = declare(app, narrow, limit=2)
    sent = await app.asend_many([narrow_task.s() for _ in range(10)])
    async with working(app):
        app.configure(shards={QUEUE: 4})
        async with working(app):
            sent += await app.asend_many([narrow_task.s() for _ in range(10)])
            for result in sent:
                await result.aget()
    assert most == 2


@pytest.fixture
def sharded(staff: Staff) -> Staff:
    """Worker processes of an application whose queue has shards, and which itself knows the limits of its tasks."""
    staff.app.configure(shards={"default": 4})
    return staff


def test_jobs_of_a_killed_worker_are_put_back_on_all_shards(sharded: Staff) -> None:
    app = sharded.app
    first = sharded.start(lease=1.0, concurrency=40, shards="default=4")
    sent = app.send_many([app.signature("nap", 0.3) for _ in range(39)])
    key = app.tasks["nap"].options(key="nightly")
    unique = key.delay(0.3)
    wait_until(lambda: len(sharded.notes()) >= 12)
    first.signal(signal.SIGKILL)
    first.wait()
    assert {result.queue for result in sent} == {"default", "default#1", "default#2", "default#3"}
    assert key.delay(0.3).duplicate  # its job is alive while no worker is
    sharded.start(lease=1.0, concurrency=40, shards="default=4")
    gather([*sent, unique], timeout=30)
    depths = [app.perform(get_queue_depth(app.queue(name))) for name in {result.queue for result in sent}]
    assert sum(depth.unfinished for depth in depths) == 0
    state = app.info("default").queues["default"]
    assert (state.lost_count, len(state.lost)) == (1, 1)
    assert state.lost[0].put_back > 10


def test_a_limit_is_never_exceeded_over_shards_while_workers_are_killed(sharded: Staff) -> None:
    app = App(sharded.app.name, broker=sharded.app.settings.broker, shards="default=4")

    def narrow(seconds: float) -> None: ...

    narrow_task = declare(app, narrow, queue="default", limit=MOST)
    deaths: dict[int, float] = {}
    crew = [sharded.start(lease=1.0, concurrency=4, shards="default=4") for _ in range(2)]
    sent = app.send_many([narrow_task.s(0.05) for _ in range(30)])
    wait_until(lambda: len(sharded.notes()) >= 6)
    victim = crew.pop()
    deaths[victim.process.pid] = time.time()
    victim.signal(signal.SIGKILL)
    victim.wait()
    gather(sent, timeout=40)
    assert crowd(sharded, deaths) <= MOST
    app.close()
