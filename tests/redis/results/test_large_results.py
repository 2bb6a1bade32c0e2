"""Large results: however much a worker's jobs return at once, each trip to Redis stays small enough to be answered."""

from typing import Any

import pytest

from celery5 import App, agather
from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.keys import QueueKeys
from celery5.protocol.job.delivery import Settlement
from celery5.services.worker import result_publisher
from tests.redis.worker.workers import working


async def test_large_results_are_settled_in_several_trips(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(app_name, broker=url, lease=1.0)
    trips: list[tuple[int, int]] = []
    settle = jobs.settle

    def noted(keys: QueueKeys, worker: str, outcomes: list[Settlement], documents: list[Any]) -> Call[int]:
        trips.append((len(outcomes), sum(len(words[3]) for words in outcomes)))
        return settle(keys, worker, outcomes, documents)

    monkeypatch.setattr(jobs, "settle", noted)
    monkeypatch.setattr(result_publisher, "BATCH_BYTES", 100_000)

    @app.task
    async def large(size: int) -> str:
        return "x" * size

    sizes = [30_000] * 40 + [150_000] + [10] * 50
    sent = await app.asend_many([large.s(size) for size in sizes])
    async with working(app):
        got: Any = await agather(sent, timeout=30)
    assert [len(value) for value in got] == sizes
    assert sum(count for count, _ in trips) == len(sizes)
    assert max(size for count, size in trips if count > 1) <= 100_000
    assert sorted(count for count, size in trips if size > 100_000) == [1]
    app.close()
