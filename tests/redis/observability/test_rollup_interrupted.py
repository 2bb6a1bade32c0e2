"""A rollup that is interrupted after any of its calls: each report counts once, and readers see whole queues."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import observability as calls
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerUnavailable
from celery5.logs.log import NullLog
from celery5.protocol.observability.report import Measurements, MetricsReport, Series
from celery5.services.observability import history_rollup
from celery5.services.observability.history_rollup import HistoryRollup

QUEUES = ("one", "two", "three")
MAX_CALLS = 40
"""More calls than a rollup of these queues makes."""


class Interrupted:
    """Performs so many calls, and none after them."""

    def __init__(self, driver: AsyncDriver, after: int) -> None:
        self._driver = driver
        self._left = after
        self.is_over = trio.Event()

    async def perform(self, call: Call[Any]) -> Any:
        """Perform a call, as long as any is left."""
        if not self._left:
            self.is_over.set()
            raise BrokerUnavailable("interrupted")
        self._left -= 1
        return await self._driver.perform(call)

    async def perform_all(self, several: Sequence[Call[Any]]) -> list[Any]:
        """Perform calls one by one."""
        return [await self.perform(call) for call in several]


async def count(app: App) -> dict[str, float]:
    """How many jobs each queue has in the totals of the cluster."""
    return {
        sample.labels["queue"]: sample.value
        for family in await app.metrics.atotals()
        if family.name == "celery5_jobs_total"
        for sample in family.samples
    }


def make_rollup(app: App, driver: Any) -> HistoryRollup:
    """The rollup of one process."""
    return HistoryRollup(
        default_redis=driver,
        all_brokers={"default": driver},
        keys=app.keys,
        worker="rollup",
        metrics_interval=0.01,
        log=NullLog(),
    )


async def test_whatever_call_is_the_last_one_each_report_counts_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_rollup, "SAVED_WORDS", 1)  # a call for each queue
    driver = await app.connections.get_async_driver()
    for after in range(MAX_CALLS):
        counters: dict[Series, float] = {
            ("celery5_jobs_total", "queue", queue, "state", "SUCCESS", "task", "pay"): 1.0 for queue in QUEUES
        }
        report = MetricsReport("host:1", "worker", after + 1, Measurements(counters=counters))
        await driver.perform(calls.send_report(app.keys, "host:1", report.number, report.pack()))
        interrupted = Interrupted(driver, after)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                await nursery.start(make_rollup(app, interrupted).run)
                await interrupted.is_over.wait()
                nursery.cancel_scope.cancel()
        assert all(number <= after + 1 for number in (await count(app)).values())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(make_rollup(app, driver).run)
            while await count(app) != dict.fromkeys(QUEUES, float(MAX_CALLS)):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    history = await app.metrics.ahistory("one")
    assert sum(task.counts["SUCCESS"] for point in history for task in point.tasks) == MAX_CALLS
