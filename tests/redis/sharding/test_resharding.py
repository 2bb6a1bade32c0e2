"""Changes of the number of shards while all runs, and deaths of workers: nothing is lost, and limits hold."""

import itertools
import signal
import time
from collections import Counter
from typing import Any

import pytest
import trio

from celery5 import App, gather
from celery5.broker.calls.queues import get_queue_depth
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.limits.test_limits import assert_in_time
from tests.redis.limits.test_limits_deaths import MOST, crowd
from tests.redis.sharding.declaring import QUEUE, declare
from tests.redis.worker.workers import start, until, working


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


class Load:
    """One version of an application: so many shards of its queue, and tasks that note what ran, when, and how many."""

    def __init__(self, name: str, url: str, shards: int, ran: "Ran") -> None:
        self.app, self.push = make(name, url, shards)
        self.app.configure(concurrency=8, priorities="strict", lease=10)  # none is lost on a busy machine
        self._ran = ran

        async def narrow(n: int) -> None:
            await ran.enter("narrow", n, 0.005)

        async def rated(n: int) -> None:
            await ran.enter("rated", n, 0.0)

        async def late(n: int, due: float) -> None:
            assert time.time() >= due
            await ran.enter("late", n, 0.0)

        async def prior(n: int) -> None:
            await ran.enter("prior", n, 0.001)

        self.narrow = declare(self.app, narrow, limit=2)
        self.rated = declare(self.app, rated, rate_limit="200/s")
        self.late = declare(self.app, late)
        self.prior = declare(self.app, prior)

    async def send(self, n: int) -> list[Any]:
        """Send a job of each task, with this number."""
        due = time.time() + 0.2 * (n % 4)
        jobs = [
            self.narrow.s(n),
            self.rated.s(n),
            self.late.options(countdown=0.2 * (n % 4)).s(n, due),
            self.prior.options(priority=PRIORITIES[n % 3]).s(n),
        ]
        return await self.app.asend_many(jobs)


PRIORITIES = ("high", "normal", "low")


class Ran:
    """What has run to its end, and how many jobs of each task at most at once."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, int]] = []
        self.begun: list[float] = []
        self.most = Counter[str]()
        self._running = Counter[str]()

    async def enter(self, task: str, n: int, seconds: float) -> None:
        if task == "rated":
            self.begun.append(time.time())
        self._running[task] += 1
        self.most[task] = max(self.most[task], self._running[task])
        try:
            await trio.sleep(seconds)
        finally:
            self._running[task] -= 1
        self.jobs.append((task, n))  # not one that a worker has returned to its queue at its stop


async def test_resharding_under_load_runs_each_job_once_within_limits_and_not_early(
    url: str, app_name: str
) -> None:
    ran = Ran()
    two, four = Load(app_name, url, 2, ran), Load(app_name, url, 4, ran)
    sent: list[Any] = []
    is_done = trio.Event()

    async def send(load: Load, first: int) -> None:
        for n in itertools.count(first, 2):
            sent.extend(await load.send(n))
            if is_done.is_set() and n > 100:
                break
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        began = time.time()
        old = await start(nursery, two.app)
        async with trio.open_nursery() as sending:
            sending.start_soon(send, two, 0)  # both versions send all the time
            sending.start_soon(send, four, 1)
            new = await start(nursery, four.app)
            await until(lambda: len(ran.jobs) > 100)
            await old.stop()
            await until(lambda: len(ran.jobs) > 200)
            again = await start(nursery, two.app)
            await new.stop()
            is_done.set()
        with trio.fail_after(30):
            for result in sent:
                await result.aget(None)
        await again.stop()
    assert sorted(Counter(ran.jobs).values()) == [1] * len(sent)
    assert len({result.queue for result in sent}) == 4
    assert ran.most["narrow"] == 2
    assert_in_time(ran.begun, most=200, since=began)
    state = (await two.app.ainfo(QUEUE)).queues[QUEUE]
    assert (state.count_unbegun(), state.running, state.dead) == (0, 0, 0)
    two.app.close()
    four.app.close()


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
