"""A task that sends jobs while Redis is down: as the pages on durability, Django and Celery say."""

import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.errors import BrokerUnavailable
from celery5.tasks import CurrentJob
from tests.faults.connections.proxy import FaultyProxy
from tests.faults.worker.calls import until
from tests.redis.worker.workers import start


@pytest.mark.parametrize(
    ("backlog", "returns_early", "expected"),
    [
        (None, True, {"runs": [1, 1], "writes": 1, "raised": 1, "invoices": 0}),
        (None, False, {"runs": [1, 1], "writes": 1, "raised": 1, "invoices": 1}),
        (100, True, {"runs": [1], "writes": 1, "raised": 0, "invoices": 1}),
    ],
)
async def test_sending_in_a_task_raises_while_redis_is_down_unless_backlog_is_set(
    proxy: FaultyProxy,
    nursery: trio.Nursery,
    app_name: str,
    backlog: int | None,
    returns_early: bool,
    expected: dict[str, object],
) -> None:
    app = App(app_name, broker=proxy.url, retry_policy=RetryPolicy(max_retries=0))
    if backlog is not None:
        app.configure(backlog=backlog)
    runs: list[int] = []
    invoices: list[int] = []
    raised: list[BrokerUnavailable] = []
    status: list[str] = []

    @app.task
    async def invoice(order: int) -> None:
        invoices.append(order)

    @app.task(bind=True, dont_autoretry_for=[Exception])
    async def assign(self: CurrentJob, order: int) -> str:
        runs.append(self.attempt)
        if status and returns_early:
            return "already assigned"
        if not status:
            status.append("assigned")
            proxy.refuse()
        try:
            await invoice.adelay(order)
        except BrokerUnavailable as error:
            raised.append(error)
            raise
        return "assigned"

    working = await start(nursery, app)
    job = await assign.adelay(7)
    await until(lambda: bool(status))
    await until(lambda: bool(raised) if backlog is None else app.backlog.size == 1)
    proxy.accept()
    assert await job.aget(timeout=30) == (
        "already assigned" if len(runs) > 1 and returns_early else "assigned"
    )
    await until(lambda: len(invoices) == expected["invoices"])
    counts = {"writes": len(status), "raised": len(raised), "invoices": len(invoices)}
    assert {"runs": runs, **counts} == expected
    await working.stop()
