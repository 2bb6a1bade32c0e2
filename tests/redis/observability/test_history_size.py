"""What the history of a busy queue takes in Redis when it is full, and what is left when it is not refreshed."""

import random

import redis

from celery5 import App
from celery5.broker.calls import observability as calls
from celery5.protocol.observability.report import Measurements
from celery5.protocol.observability.rollup import (
    DAY,
    HOUR,
    HOURS,
    HOURS_KEPT,
    MINUTE,
    MINUTES,
    MINUTES_KEPT,
    pack_chunk,
    sum_points,
)
from celery5.protocol.observability.sketch import Sketch

BUDGET = 1_500_000
"""Bytes of a busy queue's history."""
TASKS = 3
NOW = 1_763_978_400


def busy_minute(rng: random.Random) -> Measurements:
    """A minute of a queue with some tasks: hundreds of jobs of each, some of which fail, with many durations."""
    point = Measurements()
    for number in range(TASKS):
        task = f"shop.orders.task_{number}"
        for state, share in (("SUCCESS", 400), ("RETRY", 20), ("DEAD", 3)):
            series = ("celery5_jobs_total", "state", state, "task", task)
            point.counters[series] = float(rng.randint(share // 2, share * 2))
        for name, mean, spread in (
            ("celery5_job_run_seconds", -3 + number, 0.8),
            ("celery5_job_wait_seconds", -4, 1.2),
        ):
            sketch = point.sketches.setdefault((name, "task", task), Sketch())
            for _ in range(400):
                sketch.add(rng.lognormvariate(mean, spread))
    for name in ("depth", "dead", "held"):
        point.gauges[(f"celery5_queue_{name}",)] = float(rng.randint(0, 500))
    point.gauges["celery5_queue_oldest_seconds",] = round(rng.uniform(0, 300), 3)
    return point


async def test_a_busy_queue_takes_at_most_its_budget(app: App, redis_client: "redis.Redis") -> None:
    rng = random.Random(7)
    hours = [[busy_minute(rng) for _ in range(60)] for _ in range(2)]
    minutes_of_hours = [minute for hour in hours for minute in hour]
    sums = [sum_points(rng.sample(minutes_of_hours, 60)) for _ in range(24)]
    redis_driver = await app.connections.get_async_driver()
    mark = ""
    for number in range(HOURS_KEPT // HOUR):
        at = NOW - HOURS_KEPT + number * HOUR
        minutes = hours[number % len(hours)]
        changes: list[calls.Change] = []
        if at % DAY == 0:
            day = [(at + HOUR * n, sums[n]) for n in range(24)]
            changes.append(("hours", "orders", str(at * 1000), pack_chunk(HOURS, day)))
        if at >= NOW - MINUTES_KEPT - HOUR:
            points = [(at + MINUTE * n, minute) for n, minute in enumerate(minutes)]
            changes.append(("minutes", "orders", str(at * 1000), pack_chunk(MINUTES, points)))
        saved = await redis_driver.perform(
            calls.save_rollup(app.keys, [calls.StateChange("group:orders", mark, f"{at}-0/1", changes)])
        )
        assert saved
        mark = f"{at}-0/1"
    streams = [app.keys.metrics_minutes_prefix + "orders", app.keys.metrics_hours_prefix + "orders"]
    sizes = [redis_client.memory_usage(stream, samples=0) or 0 for stream in streams]
    assert all(redis_client.pttl(stream) > 0 for stream in streams)
    assert sum(sizes) <= BUDGET, f"{sizes[0]:,} bytes of minutes, {sizes[1]:,} bytes of hours"
