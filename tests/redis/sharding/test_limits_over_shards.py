"""Limits, rates and fairness hold over all shards of a queue and over several workers, and are used to the full."""

import time
from typing import Any

import pytest
import trio

from celery5 import App, agather
from tests.redis.limits.test_limits import assert_in_time
from tests.redis.sharding.declaring import QUEUE, SHARDS, declare
from tests.redis.worker.workers import working


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of four shards, and nobody who is let through by a beat."""
    app.configure(shards={QUEUE: 4}, lease=120.0)
    return app


async def test_a_rate_over_shards_is_never_exceeded_and_used_to_the_full(sharded: App) -> None:
    begun: list[float] = []

    async def mail(n: int) -> None:
        begun.append(time.time())
        await trio.sleep(0.02 * (n % 3))

    sent = time.time()
    task = declare(sharded, mail, rate_limit="20/s")
    results = await sharded.asend_many([task.s(n) for n in range(30)])
    async with working(sharded, name="one"), working(sharded, name="two"):
        await agather(results, timeout=30)
    assert_in_time(begun, most=20, since=sent)
    # One second and a tenth, and what a busy machine loses; a quarter for each shard would take six.
    assert max(begun) - min(begun) < 1 / 0.9 + 1.5


async def test_a_rate_of_a_kind_holds_over_all_shards(sharded: App) -> None:
    begun: list[float] = []

    async def push(n: int) -> None:
        begun.append(time.time())

    sharded.configure(rate_limits="trio=20/s")
    sent = time.time()
    task = declare(sharded, push)
    results = await sharded.asend_many([task.s(n) for n in range(30)])
    assert {result.queue for result in results} == set(SHARDS)
    async with working(sharded, name="one"), working(sharded, name="two"):
        await agather(results, timeout=30)
    assert_in_time(begun, most=20, since=sent)
    assert max(begun) - min(begun) < 1 / 0.9 + 1.5


@pytest.mark.parametrize("options", [{"limit": 4}, {"limit": 1, "concurrency_key": "customer"}])
async def test_a_limit_over_shards_is_used_to_the_full(sharded: App, options: dict[str, Any]) -> None:
    spans: list[tuple[float, float]] = []

    async def work(customer: str) -> None:
        begin = time.monotonic()
        await trio.sleep(0.3)
        spans.append((begin, time.monotonic()))

    task = declare(sharded, work, **options)
    async with working(sharded, name="one"), working(sharded, name="two"):
        # When both are up: the start of the second one, in the same event loop, would hold up the jobs of the first.
        results = await sharded.asend_many([task.s(f"customer {n % 4}") for n in range(12)])
        await agather(results, timeout=30)
    begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
    assert max(sum(begin <= at < end for begin, end in spans) for at in begins) == 4
    # Nine tenths, but for what a busy machine loses.
    assert sum(end - begin for begin, end in spans) / (max(ends) - min(begins)) >= 4 * 0.85


async def test_customers_of_a_limited_task_take_turns_on_a_sharded_queue(sharded: App) -> None:
    begun: list[str] = []

    async def serve(customer: str) -> None:
        begun.append(customer)
        await trio.sleep(0.002)

    task = declare(sharded, serve, limit=1, fair_key="customer")
    results = await sharded.asend_many([task.s("ann") for _ in range(20)] + [task.s("bo") for _ in range(10)])
    async with working(sharded, name="one"), working(sharded, name="two"):
        await agather(results, timeout=30)
    assert begun[:20].count("bo") >= 8, begun
