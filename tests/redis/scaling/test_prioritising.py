"""Prioritising: a Scheduler says which tasks and queues come first, and workers do what it says (C99, C100)."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.processes import scheduler
from celery5.protocol.scaling.snapshot import ClusterSnapshot
from celery5.services.scaling import autoscaler, reporter, scaling_commands
from tests.redis.worker.workers import start, until, until_async, working


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reports follow each other soon."""
    monkeypatch.setattr(autoscaler, "LOOK", 0.1)
    monkeypatch.setattr(autoscaler, "A_SECOND", 1000)
    monkeypatch.setattr(reporter, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(scaling_commands, "MIN_COMMAND_INTERVAL", 0.2)


def invoices_first(snapshot: ClusterSnapshot) -> Mapping[str, float]:
    """A strategy of one's own."""
    return {line.task: 4.0 if line.task == "quick" else 1.0 for line in snapshot.task_loads}


class Shop:
    """An application with two tasks on queues of their own, and one slot of each kind, which `hold` and `compute` take
    until they are let go."""

    def __init__(self, url: str, name: str, strategy: str, concurrency: int = 1) -> None:
        self.app = App(name, broker=url, concurrency=concurrency, cpu_slots=1, prioritise=strategy)
        self.ran: list[str] = []
        self.go, self.computed = trio.Event(), threading.Event()
        self.began: list[str] = []

        @self.app.task(name="quick", queue="a", ignore_result=True)
        async def quick() -> None:
            self.ran.append("quick")
            await trio.sleep(0.001)

        @self.app.task(name="slow", queue="b", ignore_result=True)
        async def slow() -> None:
            self.ran.append("slow")
            await trio.sleep(0.1)  # far from the other one on a busy machine, too

        @self.app.task(name="compute", queue="c")
        def compute() -> None:
            self.began.append("compute")
            self.computed.wait(30)

        @self.app.task(name="hold")
        async def hold() -> None:
            self.began.append("hold")
            await self.go.wait()

    async def send(self, **counts: int) -> None:
        """So many jobs of each task."""
        for name, count in counts.items():
            await self.app.asend_many([self.app.tasks[name].s() for _ in range(count)])

    async def preferred(self) -> Any:
        """What the worker prefers now."""
        (reply,) = await self.app.control.asend("stats", to="w")
        return reply.answer["preferred"]


async def lighter(shop: Shop, task: str, queue: str, other: str) -> bool:
    """Whether the worker has heard that a task and its queue are not preferred, and that another task is."""
    told = await shop.preferred()
    return task in told["tasks"] and queue in told["queues"] and other not in told["tasks"]


@pytest.mark.parametrize(
    ("strategy", "task", "queue", "other"),
    [
        ("shortest", "slow", "b", "quick"),
        ("longest", "quick", "a", "slow"),
        (f"{__name__}:invoices_first", "slow", "b", "quick"),
    ],
)
async def test_workers_hear_what_a_strategy_makes_of_what_they_reported(
    url: str, app_name: str, strategy: str, task: str, queue: str, other: str
) -> None:
    shop = Shop(url, app_name, strategy)
    async with working(shop.app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=scheduler.SCHEDULER)
        await shop.send(quick=20, slow=8)
        await until(lambda: len(shop.ran) == 28)
        await shop.send(hold=1)
        await until(lambda: shop.began == ["hold"])
        await shop.send(quick=50, slow=20)
        await until_async(lambda: lighter(shop, task, queue, other), within=30)
        shop.go.set()
        await until(lambda: len(shop.ran) == 98, within=30)
        await one.stop()


async def test_what_few_jobs_wait_of_is_run_soon_when_the_rarest_come_first(url: str, app_name: str) -> None:
    shop = Shop(url, app_name, "rarest")
    async with working(shop.app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=scheduler.SCHEDULER)
        await shop.send(hold=1)
        await until(lambda: shop.began == ["hold"])
        await shop.send(quick=400, slow=40)
        await until_async(lambda: lighter(shop, "quick", "a", "slow"), within=30)
        shop.go.set()
        await until(lambda: len(shop.ran) > 100, within=30)
        assert shop.ran[:100].count("slow") >= 30  # of 9 that would be its share
        await until(lambda: len(shop.ran) == 440, within=30)
        await one.stop()


async def test_waiting_tasks_come_first_while_cpu_slots_are_taken(url: str, app_name: str) -> None:
    shop = Shop(url, app_name, "saturation", concurrency=2)
    async with working(shop.app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=scheduler.SCHEDULER)
        await shop.send(compute=1)
        await until(lambda: shop.began == ["compute"])
        here = {"queue": "a", "here": True}
        await shop.app.control.asend("pause-queue", here, to="w")  # so that some wait
        await shop.send(compute=20, quick=20)
        await until_async(lambda: lighter(shop, "compute", "c", "quick"), within=30)
        await shop.send(hold=2)  # now all slots of both kinds are taken
        await until_async(lambda: neutral(shop), within=30)
        shop.computed.set()
        shop.go.set()
        await shop.app.control.asend("resume-queue", here, to="w")
        await until(lambda: shop.began.count("compute") == 21 and len(shop.ran) == 20, within=30)
        await one.stop()


async def neutral(shop: Shop) -> bool:
    """Whether the worker prefers nothing."""
    return bool(await shop.preferred() == {"tasks": {}, "queues": {}})
