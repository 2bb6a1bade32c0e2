"""What a queue's flow is measured by: attempts are counted where they are settled, and looks at that are kept."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import redis
import trio

from celery5 import App, RetryPolicy
from celery5.broker.call import Call
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.queues import MEASURE
from celery5.broker.driver import AsyncDriver
from celery5.logs.log import Log
from celery5.protocol.observability.queue_flow import FlowReading
from celery5.services.health.vitals import ProcessStatus
from celery5.services.observability.ended_counter import EndedCounter
from celery5.services.observability.history_rollup import HistoryRollup
from tests.redis.worker.workers import until_async, working


async def look(app: App, queue: str = "mixed") -> FlowReading:
    """Look at the counters of a queue."""
    redis = await app.connections.get_async_driver()
    return await redis.perform(queue_calls.look_at_queue(app.queue(queue)))


def declare(app: App) -> None:
    """Tasks of each kind on one queue."""
    again = RetryPolicy(max_retries=1, backoff=0.01, jitter=False)

    @app.task(name="good", queue="mixed")
    async def good() -> None: ...

    @app.task(name="plain", queue="mixed")
    def plain() -> None: ...

    @app.task(name="other-loop", queue="mixed", loop="asyncio")
    async def other_loop() -> None: ...

    @app.task(name="limited", queue="mixed", limit=1)
    async def limited() -> None: ...

    @app.task(name="dies", queue="mixed", retry_policy=again)
    async def dies() -> None:
        raise ValueError("no")

    @app.task(name="dies-limited", queue="mixed", limit=1, retry_policy=again)
    async def dies_limited() -> None:
        raise ValueError("no")

    @app.task(name="long", queue="mixed")
    async def run_long() -> None:
        await trio.sleep_forever()


@pytest.mark.parametrize(
    ("task", "attempts"),
    [("good", 1), ("plain", 1), ("other-loop", 1), ("limited", 1), ("dies", 2), ("dies-limited", 2)],
)
async def test_each_attempt_that_ends_counts_once_whatever_became_of_it(
    app: App, task: str, attempts: int
) -> None:
    declare(app)
    await app.asend_many([app.tasks[task].s() for _ in range(7)])
    assert (await look(app)).look.ended == 0
    async with working(app, queues=("mixed",)):

        async def has_ended() -> bool:
            return (await app.ainfo()).unfinished == 0

        await until_async(has_ended)
    reading = await look(app)
    assert reading.look.ended == 7 * attempts
    assert reading.idle is not None
    assert reading.idle < 60


async def test_a_job_that_a_worker_gives_back_has_not_ended(app: App) -> None:
    app.configure(grace_period=0.05)
    declare(app)
    result = await app.tasks["long"].adelay()
    async with working(app, queues=("mixed",)):

        async def runs() -> bool:
            return (await look(app)).look.running == 1

        await until_async(runs)
    reading = await look(app)
    assert (reading.look.ended, reading.idle) == (0, None)
    await result.arevoke()


async def test_a_queue_drained_by_a_worker_has_the_rate_at_which_it_is_drained(app: App) -> None:
    app.configure(metrics_interval=0.1)
    declare(app)
    async with working(app, queues=("mixed",)):
        # Looks are kept before anything has ended: the window begins there.
        async def has_looks() -> bool:
            return bool((await look(app)).looks)

        await app.tasks["good"].adelay()
        await until_async(has_looks)
        await app.asend_many([app.tasks["good"].s() for _ in range(500)])

        async def has_flow() -> bool:
            reading = await look(app)
            return reading.look.ended == 501 and reading.flow is not None

        await until_async(has_flow)
        state = (await app.ainfo("mixed")).queues["mixed"]
    assert state.flow is not None
    assert state.flow.outgoing * state.flow.seconds == pytest.approx(state.flow.incoming * state.flow.seconds)
    assert 400 < state.flow.outgoing * state.flow.seconds <= 501.5
    shown = await app.metrics.aoverview()
    assert shown.totals.ended_per_second > 0


async def test_attempts_are_counted_where_another_incarnation_reports_the_metrics(app: App) -> None:
    status, log = ProcessStatus(app=app.name), Log(worker="second", app=app.name)
    redis = await app.connections.get_async_driver()
    counter = EndedCounter(
        redis=redis, consumed=[app.queue("mixed")], process_status=status, metrics_interval=0.0, log=log
    )

    async def has_ended() -> bool:
        return (await look(app)).look.ended == 3

    async with trio.open_nursery() as nursery:
        await nursery.start(counter.run)
        status.jobs.count_unstarted("mixed", "good", "SUCCESS", 3)
        await until_async(has_ended)
        nursery.cancel_scope.cancel()
    log.finish()


def test_who_keeps_looks_does_not_begin_to_count(app: App, redis_client: "redis.Redis") -> None:
    keys = app.queue("mixed")
    app.perform(queue_calls.keep_looks(keys, [app.perform(queue_calls.look_at_queue(keys)).look]))
    assert app.perform(queue_calls.look_at_queue(keys)).counted_since is None
    app.perform(queue_calls.count_ended(keys, 0))
    assert app.perform(queue_calls.look_at_queue(keys)).counted_since is not None


@pytest.mark.parametrize("odd", [b"9" * 400, b"-1", b"nan", b"\xff", b"", b"[" * 3000, b"[[1e18,1,1,1]]"])
def test_queue_is_measured_whatever_is_in_its_keys(app: App, redis_client: "redis.Redis", odd: bytes) -> None:
    keys = app.queue("mixed")
    for field in ("ended", "at", "since", "looks"):
        redis_client.hset(keys.flow, field, odd)
        depth, state = (
            app.perform(queue_calls.get_queue_depth(keys)),
            app.perform(queue_calls.get_queue_state(keys)),
        )
        assert (depth.backlog, state.backlog) == (0, 0)
        redis_client.delete(keys.flow)
    for name in ("deaths", "poisoned", "last"):
        redis_client.hset(keys.worker_deaths, f"{name} task", odd)
    for score in (math.inf, 1e300, -1.0, 0.5):
        redis_client.zadd(keys.lost_workers, {odd: score})
        redis_client.hset(keys.lost_work, odd, odd)
        assert app.perform(queue_calls.get_queue_depth(keys)).lost_workers == {}
        assert app.perform(queue_calls.get_queue_state(keys)).lost == ()
    redis_client.delete(keys.worker_deaths, keys.lost_workers, keys.lost_work)


class CountingDriver:
    """A driver that counts how often it is asked for the counters of queues."""

    def __init__(self, redis: AsyncDriver) -> None:
        self._redis = redis
        self.measured = 0

    async def perform(self, call: Call[Any], /) -> Any:
        """Perform a call."""
        return await self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]:
        """Perform several calls."""
        self.measured += sum(call.script is not None and call.script.name == MEASURE.name for call in calls)
        return await self._redis.perform_all(calls)


async def test_queues_are_measured_once_for_flow_and_depth(app: App) -> None:
    redis, log = await app.connections.get_async_driver(), Log(worker="one", app=app.name)
    await redis.perform(queue_calls.register_queue(app.keys, "mixed"))
    driver = CountingDriver(redis)
    rollup = HistoryRollup(
        default_redis=redis,
        all_brokers={"default": driver},
        keys=app.keys,
        worker="one",
        metrics_interval=0.02,
        log=log,
    )
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(rollup.run)
        with trio.fail_after(30):
            for _ in range(20):
                await rollup.counted.receive()
        nursery.cancel_scope.cancel()
    # One look a second, the first one at once; a new minute may have begun.
    assert 1 <= driver.measured <= 3 + (trio.current_time() - began)
    log.finish()
