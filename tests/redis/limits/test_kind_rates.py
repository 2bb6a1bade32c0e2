"""A rate for a kind of task: all its tasks together begin no more jobs than it says, on all workers."""

import threading
import time

import pytest
import trio

from celery5 import App, Misconfigured, agather
from celery5.config.settings import read_settings
from tests.redis.worker.workers import until, working

COUNT = 4
"""Jobs that may begin in a second."""


class Started:
    """When jobs of each task began."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"paint": [], "print": [], "ask": []}
        self._lock = threading.Lock()

    def add(self, task: str) -> None:
        with self._lock:
            self.times[task].append(time.time())

    def count_in_a_second(self, *tasks: str) -> int:
        times = sorted(at for task in tasks for at in self.times[task])
        return max(sum(first <= at < first + 1 for at in times) for first in times)


def application(url: str, name: str, started: Started, **settings: str) -> App:
    app = App(name, broker=url, lease=1.0, grace_period=1.0, **settings)  # type: ignore[arg-type]

    @app.task(name="shop.paint")
    def paint() -> None:
        started.add("paint")

    @app.task(name="shop.print", rate_limit="3/s")
    def print_() -> None:
        started.add("print")

    @app.task(name="shop.ask")
    async def ask() -> None:
        started.add("ask")

    return app


async def test_kind_rate_holds_for_all_its_tasks_on_all_workers(url: str, app_name: str) -> None:
    started = Started()
    app = application(url, app_name, started, rate_limits=f"thread={COUNT}/s")
    async with working(app, name="one"), working(app, name="two"):
        tasks = [app.tasks[f"shop.{name}"].s() for name in ("paint", "print") for _ in range(8)]
        slow = await app.asend_many(tasks)
        began = time.time()
        quick = await app.asend_many([app.tasks["shop.ask"].s() for _ in range(20)])
        assert not any(await agather(quick, timeout=10))
        assert time.time() - began < 2
        assert not any(await agather(slow, timeout=40))
    assert started.count_in_a_second("paint", "print") <= COUNT
    assert started.count_in_a_second("print") <= 3


async def test_a_rate_of_a_kind_is_set_and_lifted_while_workers_run(url: str, app_name: str) -> None:
    started = Started()
    app = application(url, app_name, started)
    async with working(app, name="one"):
        assert await app.limits.aset_kind_rate("thread", "1/h")
        listed = await app.limits.alist()
        assert listed["kind thread"].rate == "1/h"
        await trio.sleep(0.5)
        sent = await app.asend_many([app.tasks["shop.paint"].s() for _ in range(5)])
        await until(lambda: len(started.times["paint"]) == 1)
        await trio.sleep(0.5)
        assert len(started.times["paint"]) == 1
        assert await app.limits.alift_kind_rate("thread")
        assert not any(await agather(sent, timeout=20))
        assert not await app.limits.alist()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("threads=5/s", "'threads' is no kind of task: did you mean 'thread'?"),
        ("thread=5", "kind thread: rate '5': write a whole number and a period, such as 200/m"),
        ("thread", "'thread' is not understood: write thread=200/m"),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused_in_one_line(text: str, error: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        read_settings({}, {"CELERY5_RATE_LIMITS": text})
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)
