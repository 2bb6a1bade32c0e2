"""Runs of workflows on sharded queues: each on one shard, and together on all."""

from collections import Counter
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured, current_job
from tests.redis.sharding.declaring import QUEUE, SHARDS, chain, declare
from tests.redis.worker.workers import working


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of four shards."""
    app.configure(shards={QUEUE: 4})
    return app


async def double(n: int) -> int:
    return 2 * n


async def total(numbers: list[int]) -> int:
    return sum(numbers)


async def test_runs_are_spread_and_each_is_on_one_shard(sharded: App) -> None:
    step, last = declare(sharded, double), declare(sharded, total)
    workflow = chain(step.map(range(20)), last.partial())
    runs: list[Any] = [await workflow.astart(id=f"run-{n}") for n in range(16)]
    assert {run.queue for run in runs} == set(SHARDS)
    async with working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs] == [380] * 16
    found = await sharded.workflows.afind(runs[0].id)
    assert found is not None
    assert found.queue == runs[0].queue


async def test_declared_runs_are_spread_over_the_shards(sharded: App) -> None:
    step = declare(sharded, double)

    @sharded.workflow
    def twice(flow: Any, n: int) -> Any:
        return flow.call(step, flow.call(step, n))

    runs: list[Any] = [await twice.options(id=f"run-{n}").astart(n) for n in range(16)]
    assert {run.queue for run in runs} == set(SHARDS)
    async with working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs] == [4 * n for n in range(16)]


async def test_a_limited_step_and_steps_of_other_queues_are_where_they_belong(sharded: App) -> None:
    running = most = 0

    async def narrow(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.01)
        running -= 1
        return n

    async def report(n: int) -> int:
        return n + 1

    workflow = chain(
        declare(sharded, double).s(1),
        declare(sharded, narrow, limit=2).partial(),
        declare(sharded, report, queue="reports").partial(),
    )
    runs: list[Any] = [await workflow.astart() for _ in range(12)]
    async with working(sharded), working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs] == [3] * 12
    assert most == 2


async def test_a_run_that_a_job_has_returned_is_part_of_its_run(sharded: App) -> None:
    step = declare(sharded, double)

    async def grow(n: int) -> Any:
        return chain(step.s(n), step.partial())

    dynamic = declare(sharded, grow, dynamic=True)
    runs: list[Any] = [await chain(dynamic.s(n), step.partial()).astart() for n in range(8)]
    async with working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs] == [8 * n for n in range(8)]


async def test_a_run_with_an_id_stays_where_it_began_when_the_number_changes(sharded: App) -> None:
    workflow = chain((step := declare(sharded, double)).s(1), step.partial())
    runs: dict[str, Any] = {f"run-{n}": await workflow.astart(id=f"run-{n}") for n in range(8)}
    sharded.configure(shards={QUEUE: 2})
    again: dict[str, Any] = {name: await workflow.astart(id=name) for name in runs}
    assert {name: run.queue for name, run in again.items()} == {name: run.queue for name, run in runs.items()}
    assert not any(run.is_new for run in again.values())
    async with working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs.values()] == [4] * 8


async def test_steps_whose_shard_cannot_be_known_are_refused(sharded: App) -> None:
    async def keyed(customer: str) -> None: ...

    by_key = declare(sharded, keyed, limit=1, concurrency_key="customer")
    step = declare(sharded, double)
    with pytest.raises(Misconfigured, match="counted by concurrency key"):
        await chain(step.s(1), by_key.partial()).astart()
    with pytest.raises(Misconfigured, match="has no key"):
        await chain(step.options(key="nightly").s(1), step.partial()).astart()
    with pytest.raises(Misconfigured, match="counted by concurrency key"):
        by_key.make_template()


async def test_a_step_with_a_countdown_is_on_the_shard_of_its_run(sharded: App) -> None:
    async def note(_last: Any) -> str:
        job = current_job()
        assert job is not None
        return job.queue

    step = declare(sharded, note)
    workflow = chain(step.s(1), step.options(countdown=0.01).partial())
    runs: list[Any] = [await workflow.astart(id=f"run-{n}") for n in range(8)]
    async with working(sharded):
        with trio.fail_after(30):
            assert [await run.aget() for run in runs] == [run.queue for run in runs]


async def test_runs_are_spread_over_the_shards_of_each_queue_alike(app: App) -> None:
    app.configure(shards={QUEUE: 4, "reports": 2})

    steps = [declare(app, double, name=queue, queue=queue) for queue in (QUEUE, "reports")]
    for step, most in zip(steps, (16, 26), strict=True):
        runs: list[Any] = [await chain(step.s(1)).astart(id=f"{step.name}-{n}") for n in range(40)]
        counts = Counter(run.queue for run in runs)
        assert len(counts) == app.brokers.shards[step.name]
        assert max(counts.values()) <= most
