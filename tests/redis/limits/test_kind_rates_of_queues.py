"""The rate of a kind holds for all queues, workers and brokers together, and is used by all of them in turn."""

import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App, agather
from celery5.broker.calls import limits
from celery5.broker.calls.limits import TakenStarts
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.limits import Rate
from tests.redis.worker.workers import until, working

COUNT = 4
"""Jobs of a kind that may begin in a period."""
QUEUES = ("a", "b", "c")


class Begun:
    """When jobs began, and on which queue."""

    def __init__(self) -> None:
        self.jobs: list[tuple[float, str]] = []
        self.queues: defaultdict[str, list[str]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, kind: str, queue: str) -> None:
        with self._lock:
            self.jobs.append((time.time(), queue))
            self.queues[kind].append(queue)

    def list_early(self, began: float) -> list[float]:
        """When jobs began that began earlier than COUNT in each second since `began` allow, in seconds since then.

        On a busy machine a job that may begin does so later, and so together with those that may begin then.
        """
        times = sorted(at - began for at, _ in self.jobs)
        return [at for number, at in enumerate(times) if at < number // COUNT]


MakeApp = Callable[..., App]


@pytest.fixture
def make_app(url: str, app_name: str) -> Iterator[MakeApp]:
    """Makes the application, and closes it at the end."""
    made: list[App] = []

    def make(begun: Begun, **settings: Any) -> App:
        made.append(add_tasks(App(app_name, broker=url, lease=5.0, grace_period=1.0, **settings), begun))
        return made[-1]

    yield make
    for app in made:
        app.close()


def add_tasks(app: App, begun: Begun) -> App:
    """Add a task of each kind for each queue."""

    def add_task(queue: str) -> None:
        @app.task(name=f"thread.{queue}", queue=queue)
        def in_thread() -> None:
            begun.add("thread", queue)

        @app.task(name=f"trio.{queue}", queue=queue)
        async def on_trio() -> None:
            begun.add("trio", queue)

        @app.task(name=f"asyncio.{queue}", queue=queue, loop="asyncio")
        async def on_asyncio() -> None:
            begun.add("asyncio", queue)

    for queue in QUEUES:
        add_task(queue)
    return app


@pytest.mark.parametrize("kind", ["thread", "trio", "asyncio"])
async def test_a_rate_of_a_kind_holds_for_all_queues_together(make_app: MakeApp, kind: str) -> None:
    begun = Begun()
    app = make_app(begun, rate_limits=f"{kind}={COUNT}/s")
    sent = await app.asend_many([app.tasks[f"{kind}.{queue}"].s() for queue in QUEUES for _ in range(6)])
    began = time.time()
    async with working(app, name="one"), working(app, name="two"):
        await agather(sent, timeout=60)
    assert begun.list_early(began) == []
    times = sorted(at for at, _ in begun.jobs)
    assert times[-1] - times[0] < 10, "18 jobs, 4 in a second: it is used to the full, but for a busy machine"


async def test_queues_take_turns_at_the_rate_of_a_kind_and_others_do_not_wait(
    make_app: MakeApp,
) -> None:
    begun = Begun()
    app = make_app(begun, rate_limits="thread=5/s")
    tasks = [app.tasks[f"thread.{queue}"].s() for queue in QUEUES for _ in range(10)]
    async with working(app):
        sent = await app.asend_many(tasks)
        began = time.time()
        await agather(await app.asend_many([app.tasks["trio.a"].s() for _ in range(20)]), timeout=10)
        assert time.time() - began < 2
        await agather(sent, timeout=60)
    limited = begun.queues["thread"]
    assert len(limited) == 30
    assert min(limited[:20].count(queue) for queue in QUEUES) >= 3, limited


async def test_a_rate_of_a_kind_holds_for_the_queues_of_several_brokers(
    make_app: MakeApp, own_server: EmbeddedServer
) -> None:
    begun = Begun()
    app = make_app(
        begun,
        brokers={"second": own_server.url},
        routes={"b": "second"},
        rate_limits=f"thread={COUNT}/s",
    )
    sent = await app.asend_many([app.tasks[f"thread.{queue}"].s() for queue in QUEUES for _ in range(5)])
    began = time.time()
    async with working(app):
        await agather(sent, timeout=60)
    assert begun.list_early(began) == []


async def test_starts_that_are_not_used_are_returned(url: str, make_app: MakeApp) -> None:
    begun = Begun()
    app = make_app(begun, rate_limits="thread=2/h")
    key = app.keys.kind_starts("thread")
    with redis.Redis.from_url(url) as client:
        async with working(app):
            sent = await app.asend_many([app.tasks["thread.a"].s() for _ in range(5)])
            await until(lambda: len(begun.jobs) == 2)
            await trio.sleep(0.5)
            assert len(begun.jobs) == 2
            assert client.llen(key) == 2
            for job in sent:
                await job.arevoke()
            await app.limits.aset_kind_rate("thread", "3/h")
            last = await app.tasks["thread.b"].adelay()
            await last.aget(timeout=20)
        assert client.llen(key) == 3
        assert 0 < client.ttl(key) <= 3700
        assert await app.limits.alift_kind_rate("thread")


class Starts:
    """Calls of the two scripts, as a worker makes them."""

    def __init__(self, app: App, rate: Rate) -> None:
        self.app, self.rate = app, rate

    def take(self, want: int) -> TakenStarts:
        return self.app.perform(limits.take_starts(self.app.keys, "thread", want, self.rate))

    def give_back(self, taken: TakenStarts, count: int) -> int:
        return self.app.perform(limits.return_starts(self.app.keys, "thread", [(taken.noted_at, count)]))


def test_no_more_starts_are_taken_than_the_rate_has(make_app: MakeApp) -> None:
    starts = Starts(make_app(Begun()), Rate("5/h"))
    first = starts.take(3)
    assert (first.count, first.delay) == (3, 0)
    second = starts.take(10)
    assert second.count == 2
    assert 3600 < second.delay <= 3601 + 1
    assert starts.take(1).count == 0
    assert starts.give_back(first, 2) == 2
    assert starts.give_back(second, 1) == 1
    assert starts.take(10).count == 3
    starts.rate = Rate("2/h")
    assert starts.take(1).count == 0
    starts.rate = Rate("4/h")
    assert starts.take(9).count == 2
    assert starts.give_back(TakenStarts(1, 1, 0.0), 1) == 0, "what is not noted is not returned"


@pytest.mark.parametrize("seed", range(3))
def test_starts_at_random_never_exceed_the_rate_in_any_period(make_app: MakeApp, seed: int) -> None:
    short = cast("Rate", SimpleNamespace(count=6, window=250))
    dice, starts = random.Random(seed), Starts(make_app(Begun()), short)
    used: list[int] = []
    for _ in range(150):
        taken = starts.take(dice.randint(1, 9))
        back = dice.randint(0, taken.count)
        if back:
            assert starts.give_back(taken, back) == back
        used += [taken.noted_at] * (taken.count - back)
        if not taken.count:
            time.sleep(min(taken.delay, 0.05))
    for first, seventh in zip(used, used[6:], strict=False):
        assert seventh - first >= 250
    assert len(used) > 12
    assert all(later >= earlier for earlier, later in itertools.pairwise(used))
